"""Names with versions: what moves them, what keeps their files, and what becomes of older stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.errors import (
    Conflict,
    InvalidName,
    Malformed,
    NotFound,
    QuotaExceeded,
    StagingFull,
    Stale,
    StorageFull,
    Unsupported,
)
from adapters.files.disk import StoreFiles
from adapters.files.manifest import Manifest
from adapters.files.name_versions import (
    Change,
    NameRecord,
    Quota,
    Version,
    if_absent,
    if_match,
    keep,
    move,
    or_made,
    pruned,
)
from adapters.store.store import AdapterStore, StoreLimits
from tests.support.adapter_files import (
    HIDDEN,
    config_bytes,
    lora_tensors,
    modules_ending,
    put_version,
    safetensors_bytes,
    small_layout,
    upload_bytes,
)
from tests.support.limits import LIMIT_SECONDS

LAYOUT = small_layout()


def opened(root: Path, **limits: Any) -> AdapterStore:
    return AdapterStore(root, LAYOUT, StoreLimits(free_disk_floor_bytes=0, **limits), base_name="base")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    one = opened(tmp_path)
    yield one
    one.check_integrity()
    one.close()


def numbers(store: AdapterStore, name: str) -> list[int]:
    return [version.number for version in store.versions(name).versions]


def test_a_name_moves_in_one_step_and_keeps_what_it_stood_for(store: AdapterStore) -> None:
    first, created = put_version(store, LAYOUT, "mine", 1, by="ann", note="first try")
    assert created
    second, created = put_version(store, LAYOUT, "mine", 2, by="ben")
    assert created
    assert (first.reference, second.reference) == ("mine@1", "mine@2")
    assert store.get("mine") == second
    history = store.versions("mine").versions
    assert [(one.number, one.digest, one.by, one.note) for one in history] == [
        (1, first.digest, "ann", "first try"),
        (2, second.digest, "ben", ""),
    ]
    for reference in ("mine@1", f"mine@{first.digest}", f"mine@sha256:{first.digest[:12]}"):
        assert store.get(reference) == first
        store.lease(reference).release()


@pytest.mark.parametrize("reference", ["mine@", "mine@0", "mine@3", "mine@x", "mine@" + "0" * 12, "mine@1@1", "@1"])
def test_a_version_that_is_not_there_is_not_found(store: AdapterStore, reference: str) -> None:
    put_version(store, LAYOUT, "mine", 1)
    with pytest.raises(NotFound):
        store.lease(reference)


def test_a_version_cannot_be_named_where_a_name_is_wanted(store: AdapterStore) -> None:
    put_version(store, LAYOUT, "mine", 1)
    for change in (store.delete, store.rollback, store.versions):
        with pytest.raises(NotFound):
            change("mine@1")
    with pytest.raises(InvalidName):
        put_version(store, LAYOUT, "mine@1", 2)


def test_the_content_that_a_name_has_makes_no_version_and_another_name_s_content_no_files(store: AdapterStore) -> None:
    first, _ = put_version(store, LAYOUT, "mine", 1)
    assert put_version(store, LAYOUT, "mine", 1) == (first, False)
    other, created = put_version(store, LAYOUT, "other", 1)
    assert (created, other.digest, store.num_on_disk()) == (True, first.digest, 1)


def test_a_rollback_is_a_new_version_of_older_content(store: AdapterStore) -> None:
    contents = [put_version(store, LAYOUT, "mine", seed)[0].digest for seed in (1, 2, 3)]
    back, created = store.rollback("mine", "1", Change(note="two is worse"))
    assert (back.reference, back.digest, created) == ("mine@4", contents[0], True)
    assert store.versions("mine").current.note == "two is worse"
    assert store.rollback("mine")[0].digest == contents[2]  # the newest other content
    assert store.rollback("mine", contents[2][:12])[1] is False
    assert numbers(store, "mine") == [1, 2, 3, 4, 5]
    with pytest.raises(NotFound, match="no version"):
        store.rollback("mine", "9")
    put_version(store, LAYOUT, "single", 7)
    with pytest.raises(NotFound, match="no earlier version"):
        store.rollback("single")


def test_conditions_are_asked_at_the_change(store: AdapterStore) -> None:
    first, _ = put_version(store, LAYOUT, "mine", 1, if_absent)
    for condition in (if_absent, if_match(["2", "0" * 64]), if_match([])):
        with pytest.raises(Stale):
            put_version(store, LAYOUT, "mine", 2, condition)
        with pytest.raises(Stale):
            store.check("mine", condition)
    with pytest.raises(Stale):
        put_version(store, LAYOUT, "new", 2, if_match(["*"]))
    with pytest.raises(Conflict, match="taken"):
        put_version(store, LAYOUT, "mine", 2, keep)
    assert (store.get("mine"), list(store.names()), store.num_on_disk()) == (first, ["mine"], 1)
    assert put_version(store, LAYOUT, "mine", 2, if_match(["1"]))[0].version.number == 2
    with pytest.raises(Stale):  # whoever read version 1 has lost
        store.rollback("mine", condition=if_match([first.digest]))
    assert put_version(store, LAYOUT, "mine", 3, if_match(["*"]))[0].version.number == 3


def test_a_change_that_was_made_already_meets_its_condition() -> None:
    first, second, third = (Version(number, f"{number}" * 64, 0.0) for number in (1, 2, 3))
    free, one, two = or_made(if_absent), or_made(if_match(["1"])), or_made(if_match(["2"]))
    for condition, record, digest in (
        (free, NameRecord((first,)), first.digest),
        (one, NameRecord((first, second)), second.digest),
        (one, NameRecord((first, second)), None),  # before the content is known
        (two, NameRecord((second, third)), third.digest),
    ):
        condition(record, digest)
    for condition, record, digest in (
        (free, NameRecord((first,)), second.digest),
        (free, NameRecord((second,)), second.digest),  # version 1 may be pruned, or stood for anything
        (free, NameRecord((first, second)), None),
        (one, NameRecord((first, second)), third.digest),
        (one, NameRecord((second, third)), third.digest),
        (one, NameRecord((second,)), second.digest),
    ):
        with pytest.raises(Stale):
            condition(record, digest)
    with pytest.raises(Stale):
        one(None, first.digest)


def test_requests_keep_the_version_they_began_with_when_it_is_pruned(tmp_path: Path) -> None:
    store, gone = opened(tmp_path, max_versions=2), list[str]()
    store.on_gone = gone.append
    contents = [put_version(store, LAYOUT, "mine", 1)[0].digest]
    lease = store.lease("mine")
    contents += [put_version(store, LAYOUT, "mine", seed)[0].digest for seed in (2, 3, 4)]
    assert numbers(store, "mine") == [3, 4]
    assert gone == [contents[1]]
    assert store.path_of(contents[0]).is_dir()
    lease.release()
    store.settle()
    assert gone == contents[1::-1]
    store.check_integrity()
    store.close()


def test_pruning_goes_by_the_bytes_of_other_contents_too() -> None:
    def record(*digests: str) -> NameRecord:
        return NameRecord(tuple(Version(number, digest, 0.0) for number, digest in enumerate(digests, start=1)))

    def left(digests: str, **limits: int) -> list[int]:
        return [one.number for one in pruned(record(*digests), lambda _: 10, **limits).versions]

    assert left("abcd", most=8, most_bytes=20) == [2, 3, 4]
    assert left("abcd", most=2, most_bytes=20) == [3, 4]
    assert left("abcd", most=8, most_bytes=0) == [4]
    assert left("aaaa", most=8, most_bytes=0) == [1, 2, 3, 4]  # one content, which is the current one
    assert left("abab", most=8, most_bytes=10) == [1, 2, 3, 4]  # each content counts once


def test_versions_outlast_a_restart_and_a_name_takes_them_along_when_it_is_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put_version(store, LAYOUT, "mine", 1, by="ann", note="ä")
    put_version(store, LAYOUT, "mine", 2)
    put_version(store, LAYOUT, "acme/mine", 3, owner="acme", visibility="private")
    store.change_settings("acme/mine", Change(visibility="shared"))
    names = store.names()
    store.close()
    store = opened(tmp_path)
    assert store.names() == names
    assert (names["acme/mine"].owner, names["acme/mine"].visibility) == ("acme", "shared")
    assert (names["mine"].owner, names["mine"].visibility) == ("", "public")
    assert store.delete("mine") == names["mine"].digest
    assert store.num_on_disk() == 1
    store.check_integrity()
    store.close()


def test_a_name_that_comes_back_goes_on_behind_its_numbers(tmp_path: Path) -> None:
    """Or a condition by number would hold for what nobody has seen."""
    store = opened(tmp_path)
    for name, owner in (("mine", ""), ("acme/mine", "acme")):
        first, _ = put_version(store, LAYOUT, name, 1, owner=owner)
        put_version(store, LAYOUT, name, 2, owner=owner)
        assert first.is_first
        store.delete(name)
    store.close()
    store = opened(tmp_path)
    for name, owner in (("mine", ""), ("acme/mine", "acme")):
        again, _ = put_version(store, LAYOUT, name, 3, or_made(if_absent), owner=owner)
        assert (again.version.number, again.is_first) == (3, True)
        assert not put_version(store, LAYOUT, name, 3, or_made(if_absent), owner=owner)[1], "its answer was lost"
        with pytest.raises(Stale):
            put_version(store, LAYOUT, name, 4, if_match(["1"]), owner=owner)
        with pytest.raises(NotFound):
            store.get(f"{name}@1")
        assert not put_version(store, LAYOUT, name, 4, if_match(["3"]), owner=owner)[0].is_first
    assert put_version(store, LAYOUT, "other", 1)[0].version.number == 1
    store.check_integrity()
    store.close()


def test_only_its_owner_s_names_may_have_an_owner_s_prefix(store: AdapterStore) -> None:
    for name, owner in (
        ("acme/mine", ""),
        ("acme/mine", "other"),
        ("a/a/c", "a"),
        ("acme/", "acme"),
        ("x", "a/b"),
        ("mine", "acme"),
        ("acme/history", "acme"),
        ("acme/pin", "acme"),
    ):
        with pytest.raises(InvalidName):
            put_version(store, LAYOUT, name, 1, owner=owner)
    put_version(store, LAYOUT, "acme/mine", 1, owner="acme")
    put_version(store, LAYOUT, "history", 1)


def test_a_version_whose_files_are_missing_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    first, second = (put_version(store, LAYOUT, "mine", seed)[0] for seed in (1, 2))
    (store.path_of(second.digest) / "manifest.json").unlink()
    store.close()
    store = opened(tmp_path)
    assert "versions [2] are missing" in caplog.text
    assert store.get("mine@1") == first
    assert store.rollback("mine")[0].digest == first.digest
    store.close()


@pytest.mark.parametrize(("wide", "narrow"), [("<f4", "<f2"), ("<f4", "<u2")])
def test_the_same_weights_in_another_float_type_are_told_only_if_all_values_are_the_same(
    store: AdapterStore, wide: str, narrow: str
) -> None:
    """`<u2` is bfloat16."""
    modules = modules_ending(LAYOUT, "q_proj")
    rounded = lora_tensors(LAYOUT, modules, 4, seed=1, dtype=narrow)
    exact = {name: widened(data) for name, data in rounded.items()}
    last = list(exact)[-1]
    other = {**exact, last: exact[last].copy()}
    other[last].flat[-1] = np.nextafter(other[last].flat[-1], 9, dtype=wide)  # one value, by one bit
    negative = {**exact, last: -exact[last]}
    uploads = [(config_bytes(), tensors) for tensors in (rounded, exact, other, negative)]
    uploads.append((config_bytes(lora_alpha=9), rounded))
    for config, tensors in uploads:
        upload_bytes(store, "mine", config, safetensors_bytes(tensors), condition=move)
    assert [version.same_as for version in store.versions("mine").versions] == [None, 1, None, None, None]


def test_vectors_of_other_tokens_are_not_the_same_weights(store: AdapterStore) -> None:
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    for ids, dtype in (([1, 2], "<f2"), ([1, 3], "<f4"), ([1, 2], "<f4")):
        tensors = {**lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4), name: np.ones((2, HIDDEN), dtype)}
        config = config_bytes(trainable_token_indices=ids)
        upload_bytes(store, "mine", config, safetensors_bytes(tensors), condition=move)
    assert [version.same_as for version in store.versions("mine").versions] == [None, None, 1]


def widened(data: np.ndarray) -> np.ndarray:
    if data.dtype == np.dtype("<u2"):
        return (data.astype("<u4") << 16).view("<f4")
    return data.astype("<f4")


def test_an_owner_s_names_differ_in_more_than_case(store: AdapterStore) -> None:
    put_version(store, LAYOUT, "acme/mine", 1, owner="acme")
    with pytest.raises(Conflict, match=r"'acme/MINE' differs in case alone from 'acme/mine'"):
        put_version(store, LAYOUT, "acme/MINE", 1, owner="acme")
    put_version(store, LAYOUT, "other/MINE", 1, owner="other")
    put_version(store, LAYOUT, "mine", 1)
    put_version(store, LAYOUT, "MINE", 1)


def test_a_quota_of_names_holds_however_many_come_at_once(store: AdapterStore) -> None:
    quota = Quota(max_names=3)

    def put(index: int) -> bool:
        try:
            return put_version(store, LAYOUT, f"acme/a{index}", index, owner="acme", quota=quota)[1]
        except QuotaExceeded:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(put, range(24))) == 3
    put_version(store, LAYOUT, "other/a", 1, owner="other", quota=quota)
    (first, *_) = (name for name in store.names() if name.startswith("acme/"))
    put_version(store, LAYOUT, first, 99, owner="acme", quota=quota, condition=move)  # a name that is there
    store.delete(first)
    assert put_version(store, LAYOUT, "acme/again", 1, owner="acme", quota=quota)[1]


def test_a_quota_of_bytes_counts_each_content_once_and_what_is_kept(store: AdapterStore) -> None:
    num_bytes = put_version(store, LAYOUT, "acme/a", 1, owner="acme")[0].manifest.num_bytes
    quota = Quota(max_bytes=2 * num_bytes)
    put_version(store, LAYOUT, "acme/b", 1, owner="acme", quota=quota)
    put_version(store, LAYOUT, "acme/a", 2, owner="acme", quota=quota, condition=move)
    num_on_disk = store.num_on_disk()
    for name in ("acme/a", "acme/c"):
        with pytest.raises(QuotaExceeded, match="delete some first") as caught:
            put_version(store, LAYOUT, name, 3, owner="acme", quota=quota, condition=move)
        assert (caught.value.limit, caught.value.used) == (2 * num_bytes, 2 * num_bytes)
    assert store.num_on_disk() == num_on_disk
    # One that was lowered refuses growth alone.
    put_version(store, LAYOUT, "acme/c", 2, owner="acme", quota=Quota(max_bytes=0))
    store.delete("acme/a")
    store.delete("acme/c")
    put_version(store, LAYOUT, "acme/c", 3, owner="acme", quota=quota)


def test_a_quota_reads_no_manifest_after_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading those of thousands of names took a second, in which nobody else's could change."""
    with closing(opened(tmp_path)) as store:
        records = [put_version(store, LAYOUT, f"acme/a{index}", index, owner="acme")[0] for index in range(3)]
    num_bytes = sum(record.manifest.num_bytes for record in records)
    with closing(opened(tmp_path)) as store:
        read, asked = StoreFiles.read_manifest, list[str]()

        def note(files: StoreFiles, digest: str) -> Manifest:
            asked.append(digest)
            return read(files, digest)

        monkeypatch.setattr(StoreFiles, "read_manifest", note)
        with pytest.raises(QuotaExceeded, match=f"have {num_bytes} bytes"):
            put_version(store, LAYOUT, "acme/b", 9, owner="acme", quota=Quota(max_bytes=num_bytes))
        assert not set(asked) & {record.digest for record in records}


EPHEMERAL = 1 << 20


def put_ephemeral(store: AdapterStore, name: str, seed: int) -> tuple[Any, bool]:
    return put_version(store, LAYOUT, name, seed, is_ephemeral=True)


def tensors_of(seed: int) -> bytes:
    return safetensors_bytes(lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4, seed=seed))


def memory_files() -> int:
    """Files in memory that this process has open, beside those that threads are about to close."""
    for thread in threading.enumerate():
        if thread.name == "free-memory":
            thread.join()
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum("multilora-adapter" in str(link.readlink()) for link in links)


def test_an_ephemeral_name_is_in_memory_alone_and_ends_with_the_store(tmp_path: Path) -> None:
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:
        put_version(store, LAYOUT, "durable", 1)
        record, created = put_ephemeral(store, "policy", 2)
        assert created
        tensors = store.path_of(record.digest) / "adapter_model.safetensors"
        assert "memfd" in str(tensors.readlink().readlink())
        with closing(opened(tmp_path / "other")) as other:
            on_disk, _ = put_version(other, LAYOUT, "policy", 2)
            assert on_disk.digest == record.digest, "the digest says what computes, wherever it is"
            assert (other.path_of(on_disk.digest) / tensors.name).read_bytes() == tensors.read_bytes()
        assert store.get("policy").is_ephemeral
        assert not store.get("durable").is_ephemeral
        store.check_integrity()
    assert memory_files() == 0
    with closing(opened(tmp_path)) as again:
        assert list(again.names()) == ["durable"]
        again.check_integrity()


def test_the_last_ephemeral_versions_stay_and_those_that_requests_use(tmp_path: Path) -> None:
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:
        leases = []
        for seed in range(1, 31):
            put_ephemeral(store, "policy", seed)
            if seed == 1:
                leases.append(store.lease("policy"))
        assert numbers(store, "policy") == [27, 28, 29, 30]
        assert memory_files() == 5, "four versions and the one that a request uses"
        leases[0].release()
        store.settle()
        assert (memory_files(), store.num_on_disk()) == (4, 4)
        record, _ = store.rollback("policy", "28")
        assert record.is_ephemeral
        store.check_integrity()
        store.delete("policy")
        assert memory_files() == store.num_on_disk() == 0
        assert store._ephemeral_bytes is not None
        assert store._ephemeral_bytes.num_bytes == 0


def test_no_upload_waits_until_the_memory_of_an_old_version_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, may_close = os.close, threading.Event()

    def close_late(descriptor: int) -> None:
        if "multilora-adapter" in os.readlink(f"/proc/self/fd/{descriptor}"):
            assert may_close.wait(LIMIT_SECONDS)
        close(descriptor)

    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store, ThreadPoolExecutor(1) as uploads:
        monkeypatch.setattr(os, "close", close_late)
        try:
            done = uploads.submit(lambda: [put_ephemeral(store, "policy", seed) for seed in range(1, 6)])
            wait([done], LIMIT_SECONDS / 2)
            assert done.done()
        finally:
            may_close.set()
        assert memory_files() == 4


@pytest.mark.parametrize("seed", [1, 2])
def test_a_durable_name_takes_no_ephemeral_version(tmp_path: Path, seed: int) -> None:
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:
        durable, _ = put_version(store, LAYOUT, "mine", 1)
        with pytest.raises(Conflict, match="on the disk"):
            put_ephemeral(store, "mine", seed)
        assert store.get("mine") == durable
        assert memory_files() == 0
        store.check_integrity()


@pytest.mark.parametrize(("name", "seed"), [("policy", 3), ("policy", 4), ("checkpoint", 3)])
def test_an_ephemeral_content_becomes_durable_by_an_upload(tmp_path: Path, name: str, seed: int) -> None:
    """The same weights or others, under its own name or another one."""
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:
        put_ephemeral(store, "policy", 3)
        record, created = put_version(store, LAYOUT, name, seed)
        assert (created, record.is_ephemeral) == (True, False)
        assert numbers(store, name) == ([2] if name == "policy" else [1])
        assert memory_files() == 0
        store.check_integrity()
        store.delete("policy" if name == "checkpoint" else put_ephemeral(store, "other", 5)[0].name)
    with closing(opened(tmp_path)) as again:
        assert list(again.names()) == [name]
        assert (again.path_of(record.digest) / "adapter_model.safetensors").stat().st_size > 0
        again.check_integrity()


def test_memory_of_ephemeral_versions_has_a_bound_and_refused_ones_leave_nothing(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4)
    size = len(safetensors_bytes(tensors))
    # Half is one client's, and an upload that is not in the stored form takes twice its size meanwhile.
    with closing(opened(tmp_path, max_ephemeral_bytes=9 * size)) as store:
        for seed, name in enumerate("abc"):
            put_ephemeral(store, name, seed)
        with pytest.raises(StagingFull, match="Ephemeral versions hold"):
            put_ephemeral(store, "d", 3)
        assert memory_files() == 3
        store.delete("a")
        put_ephemeral(store, "d", 3)
        store.delete("c")
        bad = {name: np.full_like(value, np.nan) for name, value in tensors.items()}
        for data in (safetensors_bytes(bad), b"\x00" * 100):
            with pytest.raises(Malformed):
                upload_bytes(store, "e", config_bytes(), data, is_ephemeral=True)
        assert memory_files() == 2
        store.check_integrity()
    with closing(opened(tmp_path / "none")) as store, pytest.raises(Unsupported, match="max-ephemeral-bytes"):
        put_ephemeral(store, "a", 1)


def test_ephemeral_versions_count_for_their_owner(tmp_path: Path) -> None:
    """Names and bytes, as durable ones do."""
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:
        owned: dict[str, Any] = {"owner": "ann", "is_ephemeral": True}
        put_version(store, LAYOUT, "ann/one", 1, **owned)
        for quota in (Quota(max_names=1), Quota(max_bytes=1)):
            with pytest.raises(QuotaExceeded):
                put_version(store, LAYOUT, "ann/two", 2, quota=quota, **owned)
        assert (list(store.names()), memory_files()) == (["ann/one"], 1)
        put_version(store, LAYOUT, "ben/one", 1, owner="ben", is_ephemeral=True, quota=Quota(max_names=1))
        assert store.versions("ann/one").owner == "ann"


def test_one_owner_has_half_of_the_files_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that is not in the stored form has two files until it ends."""
    monkeypatch.setattr("adapters.files.memory_files.MAX_FILES", 8)
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:

        def put(owner: str, name: str, seed: int) -> None:
            with store.begin(owner=owner, is_ephemeral=True) as upload:
                for part_name, data in (("adapter_config", config_bytes()), ("adapter_model", tensors_of(seed))):
                    with upload.open_part(part_name) as part:
                        part.write(data)
                upload.finish(f"{owner}/{name}", Change(owner=owner))

        for seed, name in enumerate(("one", "two", "three")):
            put("ann", name, seed)
        with pytest.raises(StagingFull, match="of which you have 4"):
            put("ann", "four", 3)
        put("ben", "one", 4)
        store.delete("ann/one")
        store.delete("ann/two")
        put("ann", "four", 3)
        assert memory_files() == 3
        store.check_integrity()


def test_ephemeral_versions_need_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:
        filled = [*os.statvfs(tmp_path)]
        filled[1], filled[4] = 1, 1000  # bytes of a block, and blocks that are free
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(filled))
        with pytest.raises(StorageFull):
            put_version(store, LAYOUT, "durable", 1)
        put_ephemeral(store, "policy", 1)
        assert list(store.names()) == ["policy"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_durable_version_is_on_the_disk_whoever_has_its_content_in_memory(tmp_path: Path, is_damaged: bool) -> None:
    """Its upload is probed before it has its name; or its files were damaged, and an ephemeral upload mends them."""
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:
        if is_damaged:
            record, _ = put_version(store, LAYOUT, "checkpoint", 3)
            (store.path_of(record.digest) / "adapter_model.safetensors").write_bytes(b"damaged")
            put_ephemeral(store, "policy", 3)
        else:
            put_ephemeral(store, "policy", 3)
            with store.begin() as upload:
                for part_name, data in (("adapter_config", config_bytes()), ("adapter_model", tensors_of(3))):
                    with upload.open_part(part_name) as part:
                        part.write(data)
                with upload.hold():
                    record, _ = upload.finish("checkpoint")
        tensors = store.path_of(record.digest) / "adapter_model.safetensors"
        whole = tensors.read_bytes()
        assert memory_files() == 0
        store.check_integrity()
    with closing(opened(tmp_path)) as again:
        assert list(again.names()) == ["checkpoint"]
        assert tensors.read_bytes() == whole
        again.check_integrity()


def test_numbers_of_a_deleted_ephemeral_name_are_not_used_again(tmp_path: Path) -> None:
    with closing(opened(tmp_path, max_ephemeral_bytes=EPHEMERAL)) as store:
        for seed in (1, 2):
            put_ephemeral(store, "policy", seed)
        store.delete("policy")
        put_ephemeral(store, "policy", 3)
        assert numbers(store, "policy") == [3]
        store.check_integrity()
