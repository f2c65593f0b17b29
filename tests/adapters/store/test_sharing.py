"""Two stores on one directory: each change holds for the next look-up in the other, and no file goes that is used."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapters.errors import Conflict, NotFound, StoreBusy
from adapters.files.disk import StoreFiles
from adapters.files.name_versions import Change
from adapters.store import shared_log, transactions
from adapters.store.name_index import Query
from adapters.store.shared_log import SharedLog
from adapters.store.store import AdapterStore, StoreLimits
from tests.support.adapter_files import (
    config_bytes,
    lora_tensors,
    modules_ending,
    safetensors_bytes,
    small_layout,
    upload_small,
)
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[3]
LAYOUT = small_layout()
LIMITS = StoreLimits(max_upload_bytes=200_000, max_files=20, free_disk_floor_bytes=0)


def _open(root: Path, **options: object) -> AdapterStore:
    return AdapterStore(root, LAYOUT, LIMITS, base_name="base", **{"shared": True, **options})  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def stores(root: Path) -> Iterator[tuple[AdapterStore, AdapterStore]]:
    both = _open(root), _open(root)
    yield both
    for one in both:
        one.close()


Two = tuple[AdapterStore, AdapterStore]


def _move(store: AdapterStore, name: str, seed: int) -> int:
    """The number of the version that it became."""
    with store.begin() as upload:
        tensors = lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4, seed=seed)
        for part_name, data in (("adapter_config", config_bytes()), ("adapter_model", safetensors_bytes(tensors))):
            with upload.open_part(part_name) as part:
                part.write(data)
        return upload.finish(name, Change(), condition=lambda _record, _digest: None)[0].version.number


def test_uploads_moves_and_deletions_hold_on_the_other_at_once(stores: Two) -> None:
    one, other = stores
    record, _ = upload_small(one, LAYOUT, "mine", seed=1)
    assert other.get("mine") == record
    assert _move(other, "mine", 2) == 2
    assert one.get("mine").version.number == 2
    assert [row.number for row in one.page(Query(10))] == [2]
    one.rollback("mine")
    assert other.get("mine").digest == record.digest
    assert other.get("mine@2").digest != record.digest
    other.delete("mine")
    assert one.find("mine") is None
    assert one.page(Query(10)) == []
    with pytest.raises(NotFound):
        one.lease("mine")


def test_the_order_of_changes_is_one(stores: Two) -> None:
    """Versions count up through both, and of two uploads of one new name one loses."""
    upload_small(stores[0], LAYOUT, "mine", seed=100)
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda seed: _move(stores[seed % 2], "mine", seed), range(12)))
    assert sorted(numbers) == list(range(2, 14))
    assert stores[0].versions("mine") == stores[1].versions("mine")
    upload_small(stores[0], LAYOUT, "new", seed=1)
    with pytest.raises(Conflict):
        upload_small(stores[1], LAYOUT, "new", seed=2)


def test_files_stay_while_a_request_on_any_server_uses_them(stores: Two) -> None:
    one, other = stores
    record, _ = upload_small(one, LAYOUT, "mine", seed=1)
    lease = other.lease("mine")
    one.delete("mine")
    for store in (*stores, *stores):
        store.sweep()
    assert one.path_of(record.digest).is_dir()
    lease.release()
    for store in (*stores, *stores):
        store.settle()
        store.sweep()
    with pytest.raises(NotFound):
        one.path_of(record.digest)


def test_files_stay_until_every_server_knows_that_the_name_is_gone(stores: Two) -> None:
    one, other = stores
    record, _ = upload_small(one, LAYOUT, "mine", seed=1)
    other.get("mine")
    one.delete("mine")
    one.sweep()
    assert one.path_of(record.digest).is_dir()  # the other has not looked since
    other.sweep()
    one.sweep()
    with pytest.raises(NotFound):
        other.path_of(record.digest)


def test_a_name_that_comes_back_keeps_its_files(stores: Two) -> None:
    one, other = stores
    upload_small(one, LAYOUT, "mine", seed=1)
    one.delete("mine")
    record, _ = upload_small(other, LAYOUT, "again", seed=1)
    for store in (*stores, *stores):
        store.sweep()
    assert one.path_of(record.digest).is_dir()
    assert one.get("again") == record


# A server that is killed between the file of a name and its line in the log.
_KILLED_IN_A_CHANGE = """
import os, signal, sys
from pathlib import Path
from adapters.store.shared_log import SharedLog

store_dir = Path(sys.argv[1])
sharing = SharedLog(store_dir)
with sharing.change_lock():
    sharing.begin_log()
    with sharing.announced("mine"):
        (store_dir / "names" / "mine").unlink()
        sharing.report_alive(("0" * 64,))
        print(sharing.member, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_that_died_keeps_nothing_and_leaves_no_name_untold(root: Path, stores: Two) -> None:
    one, other = stores
    upload_small(one, LAYOUT, "mine", seed=1)
    assert one.get("mine") == other.get("mine")
    store_dir = next(root.iterdir())
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED_IN_A_CHANGE, str(store_dir)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    dead = killed.stdout.strip()
    with (store_dir / "changes").open("r+b") as log:  # and in the middle of a line
        written = log.read().rstrip(b"\0")
        log.seek(len(written))
        log.write(b"+torn line without an end")
    upload_small(other, LAYOUT, "next", seed=2)
    assert one.find("mine") is None
    assert one.get("next") == other.get("next")
    members = store_dir / "members"
    long_ago = (members / dead).stat().st_mtime - 2 * shared_log.DEAD_SECONDS
    os.utime(members / dead, (long_ago, long_ago))
    link = store_dir / "staging" / "link"  # one that leads nowhere goes as well
    link.symlink_to(root / "nowhere")
    os.utime(link, (long_ago, long_ago), follow_symlinks=False)
    one.sweep()
    living = {path.name for path in (store_dir / "staging").iterdir()}  # each has one, called as it is
    assert len(living) == len(stores)
    assert {path.name for path in members.iterdir()} == living


def test_files_of_deleted_adapters_go_on_a_full_disk(stores: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = stores
    record, _ = upload_small(one, LAYOUT, "mine", seed=1)
    for store in stores:
        store.sweep()  # each has said something before

    def full(path: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    other.delete("mine")
    for store in (one, other, one):
        store.sweep()
    with pytest.raises(NotFound):
        one.path_of(record.digest)


def test_a_disk_that_refuses_signs_of_life_is_told_of_once(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    say, attempts, is_full = SharedLog.report_alive, threading.Semaphore(0), threading.Event()

    def say_on_that_disk(self: SharedLog, held: Iterable[str]) -> None:
        attempts.release()
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device", "members")
        say(self, held)

    def wait_for_attempts() -> None:
        for _ in range(4):
            assert attempts.acquire(timeout=LIMIT_SECONDS)

    monkeypatch.setattr(SharedLog, "report_alive", say_on_that_disk)
    monkeypatch.setattr(transactions, "SIGN_OF_LIFE_SECONDS", 0.001)
    caplog.set_level(logging.INFO, logger=transactions.log.name)
    store = _open(root)
    for change in (is_full.set, is_full.clear):
        change()
        while attempts.acquire(blocking=False):
            pass
        wait_for_attempts()
    store.close()
    refused, again = (record for record in caplog.records if record.name == transactions.log.name)
    assert "No space left on device" in refused.getMessage()
    assert refused.exc_info is None
    assert "again" in again.getMessage()


def test_a_server_that_stands_still_in_its_turn_blocks_changes_and_no_look_up(
    root: Path, stores: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_log, "CHANGE_LOCK_SECONDS", 0.05)
    one, other = stores
    upload_small(one, LAYOUT, "mine", seed=1)
    standing = SharedLog(next(root.iterdir()))
    with standing.change_lock():
        assert other.get("mine").name == "mine"
        with pytest.raises(StoreBusy, match="try again"):
            other.delete("mine")
    other.delete("mine")


def test_a_log_that_begins_anew_loses_nothing(stores: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_log, "LOG_BYTES", 400)
    one, other = stores
    for seed in range(12):
        store, reader = (one, other) if seed % 3 else (other, one)
        record, _ = upload_small(store, LAYOUT, f"name-{seed}", seed=seed)
        if seed % 2:
            assert reader.get(record.name) == record
    assert one.names() == other.names()
    assert len(one.names()) == 12


def _end_of(log: Path) -> int:
    return len(log.read_bytes().rstrip(b"\0"))


def _add(log: Path, data: bytes) -> None:
    with log.open("r+b") as file:
        file.seek(_end_of(log))
        file.write(data)


def _without_lines(log: Path) -> None:
    length = log.stat().st_size
    os.truncate(log, 17)
    os.truncate(log, length)


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda log: os.truncate(log, 0),
    "another file": lambda log: log.write_bytes(b"hello\n"),
    "cut off": lambda log: os.truncate(log, _end_of(log) - 4),
    "cut off behind its number": lambda log: os.truncate(log, 17),
    "zeros behind its number": _without_lines,
    "without its number": lambda log: log.write_bytes(b"\0" * 17 + log.read_bytes()[17:]),
    "an empty line": lambda log: _add(log, b"\n"),
    "a line that is no text": lambda log: _add(log, b"\xff\xfe\n"),
    "an announcement that is no text": lambda log: _add(log, b"-\xff\xfe\n"),
    "a name that is too long": lambda log: _add(log, b"+" + b"x" * 5000 + b"\n"),
}


@pytest.mark.parametrize("damage", _DAMAGE.values(), ids=_DAMAGE.keys())
def test_a_damaged_log_loses_no_change_and_keeps_nobody_from_the_next(
    root: Path, stores: Two, damage: Callable[[Path], object]
) -> None:
    """What it told of is in the names' files."""
    one, other = stores
    upload_small(one, LAYOUT, "mine", seed=1)
    assert other.get("mine").version.number == 1
    assert _move(one, "mine", 2) == 2
    damage(next(root.iterdir()) / "changes")
    assert [store.get("mine").version.number for store in stores] == [2, 2]
    for number, (writer, reader) in enumerate(((one, other), (other, one), (one, other)), 3):
        assert _move(writer, "mine", number) == number
        assert reader.get("mine").version.number == number
    third = _open(root)
    assert third.versions("mine") == one.versions("mine")
    third.close()


def test_all_names_are_read_again_when_they_could_not_be(stores: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log began anew, which was read; then the file server failed."""
    monkeypatch.setattr(shared_log, "LOG_BYTES", 100)
    one, other = stores
    upload_small(one, LAYOUT, "mine", seed=1)
    assert other.has("mine")
    for seed in range(2, 6):
        upload_small(one, LAYOUT, f"name-{seed}", seed=seed)

    def fails(_files: StoreFiles) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as away:
        away.setattr(StoreFiles, "names", fails)
        assert not other.has("name-2")
    assert other.has("name-2")


def test_who_shares_and_who_does_not_keep_each_other_out(root: Path) -> None:
    shared = _open(root)
    with pytest.raises(StoreBusy, match="--store-shared"):
        _open(root, shared=False)
    upload_small(shared, LAYOUT, "mine", seed=1)
    shared.close()
    alone = _open(root, shared=False)
    alone.check_integrity()
    assert alone.has("mine")
    with pytest.raises(StoreBusy):
        _open(root)
    alone.close()


def test_others_are_told_what_changed_and_what_is_gone(root: Path) -> None:
    changed: list[str] = []
    gone: list[str] = []
    one, other = _open(root), _open(root, on_change=changed.append, on_gone=gone.append)
    record, _ = upload_small(one, LAYOUT, "mine", seed=1)
    assert other.has("mine") and changed == ["mine"]
    (one.path_of(record.digest) / "manifest.json").write_bytes(b"damaged")
    upload_small(one, LAYOUT, "mine", seed=1)
    assert other.get("mine") == record and gone == [record.digest]
    one.delete("mine")
    assert not other.has("mine")
    assert (changed, gone) == (["mine", "mine"], [record.digest] * 2)
    one.close()
    other.close()


def test_look_ups_go_on_while_names_change(stores: Two) -> None:
    """A name that is moved all the while is always there, in both, and never goes back."""
    one, other = stores
    upload_small(one, LAYOUT, "mine", seed=0)
    is_over = threading.Event()

    def look(store: AdapterStore) -> int:
        seen, looks = 0, 0
        while not is_over.is_set():
            with store.lease("mine") as lease:
                assert lease.record.version.number >= seen
                seen = lease.record.version.number
                looks += 1
        return looks

    with ThreadPoolExecutor(4) as pool:
        looks = [pool.submit(look, store) for store in (one, other, other)]
        try:
            for seed in range(1, 20):
                number = _move(stores[seed % 2], "mine", seed)
                assert [store.get("mine").version.number for store in stores] == [number, number]
        finally:
            is_over.set()
        assert all(one.result(LIMIT_SECONDS) > 0 for one in looks)
