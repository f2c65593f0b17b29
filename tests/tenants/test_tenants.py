"""Who a key belongs to, and what a change of the keys file changes."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from service.api.access.auth import Access
from service.tenants.edit import add_key, revoke_key
from service.tenants.keys_file import SCOPES, KeysFile, KeysFileError, hash_of, read_keys
from service.tenants.tenants import DEFAULT, Caller, Tenants
from tests.support.limits import LIMIT_SECONDS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def look_up(tenants: Tenants, key: str) -> Caller | None:
    """As a request does."""

    async def ask() -> Caller | None:
        await tenants.refresh()
        return tenants.caller(key)

    return asyncio.run(ask())


def known(tenants: Tenants, key: str) -> Caller:
    caller = look_up(tenants, key)
    assert caller is not None
    return caller


def test_without_anything_everybody_may_do_everything() -> None:
    tenants = Tenants()
    assert not tenants.need_keys
    caller = tenants.anybody()
    assert (caller.tenant.name, caller.key_id, caller.scopes) == (DEFAULT, "", frozenset(SCOPES))
    assert all(caller.may(scope) for scope in SCOPES)


def test_keys_of_the_settings_are_the_default_tenant_s() -> None:
    tenants = Tenants(["reader", "both"], ["writer", "both"])
    for key, key_id, scopes in (
        ("reader", "key 1", {"infer"}),
        ("writer", "admin key 1", set(SCOPES)),
        ("both", "admin key 2", set(SCOPES)),
    ):
        caller = known(tenants, key)
        assert (caller.tenant.name, caller.key_id, set(caller.scopes)) == (DEFAULT, key_id, scopes)
    assert tenants.caller("nobody") is None
    assert tenants.caller("") is None
    assert tenants.caller("\udcff") is None


def test_admin_has_all_and_others_only_theirs(path: Path) -> None:
    upload, _ = add_key(path, "acme", ["upload"])
    admin, _ = add_key(path, "acme", ["admin"])
    tenants = Tenants(keys_file=path)
    for key, may in ((upload, {"upload"}), (admin, set(SCOPES))):
        caller = known(tenants, key)
        assert {scope for scope in SCOPES if caller.may(scope)} == may


def test_a_key_costs_one_look_up_however_many_there_are(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the event loop, and for whoever sends a wrong one."""
    hashes = [hash_of(f"key-{number}").hex() for number in range(5000)]
    entries = (f'[[keys]]\ntenant = "acme"\nsha256 = "{one}"\nscopes = ["infer"]\n' for one in hashes)
    path.write_text("[tenants.acme]\n" + "".join(entries))
    tenants, compared = Tenants(["key-17"], keys_file=path), list[bytes]()

    def compare(known: bytes, sent: bytes) -> bool:
        compared.append(known)
        return known == sent

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert known(tenants, "key-4999").tenant.name == "acme"
    assert known(tenants, "key-17").tenant.name == DEFAULT  # which the settings have too
    assert tenants.caller("key-5000") is None
    assert compared == [hash_of("key-4999"), hash_of("key-17"), hash_of("key-17")]


def test_a_key_counts_from_its_being_added_to_its_being_revoked(path: Path) -> None:
    path.write_text("")
    tenants = Tenants(keys_file=path)
    assert tenants.need_keys
    for _ in range(50):  # far more often than the clock of the file system ticks
        key, entry = add_key(path, "acme", ["infer"])
        caller = known(tenants, key)
        assert (caller.tenant.name, caller.key_id) == ("acme", entry.key_id)
        revoke_key(path, entry.key_id)
        assert look_up(tenants, key) is None


def test_a_broken_file_changes_nothing_and_is_told_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, _ = add_key(path, "acme", ["infer"])
    tenants = Tenants(keys_file=path)
    whole = path.read_text()
    for broken, words in (("[tenants.acme", "no TOML"), (whole + "what = 1", "not known here"), (None, "No such file")):
        caplog.clear()
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken)
        for _ in range(3):
            assert look_up(tenants, key) is not None
        (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert words in told.getMessage()
        assert "The keys that were there stay" in told.getMessage()
    path.write_text("[tenants.acme]\n")
    assert look_up(tenants, key) is None


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "directory", "device"],
)
def test_what_is_no_regular_file_holds_up_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    """Whoever opens a pipe waits for who writes to it."""
    key, _ = add_key(path, "acme", ["infer"])
    tenants = Tenants(keys_file=path)
    path.unlink()
    make(path)
    for _ in range(3):
        assert look_up(tenants, key) is not None
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "no regular file" in told.getMessage()
    with pytest.raises(KeysFileError, match="no regular file"):
        Tenants(keys_file=path)


def test_a_file_that_is_emptied_revokes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is empty for a moment when an editor writes it in place, and a full disk leaves it so."""
    key, _ = add_key(path, "acme", ["infer"])
    tenants, text = Tenants(keys_file=path), path.read_text()
    for nothing in ("", "# nobody\n"):
        path.write_text(nothing)
        assert known(tenants, key).tenant.name == "acme"
        assert "is empty" in caplog.text
        caplog.clear()
    path.write_text(text[: text.index("[[keys]]")])
    assert look_up(tenants, key) is None


def test_a_file_that_is_being_written_in_place_is_read_when_it_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off between two keys it is a file that can be used, with fewer keys and limits."""
    keys = [add_key(path, tenant, ["infer"])[0] for tenant in ("acme", "zeta")]
    tenants, text, sleep = Tenants(keys_file=path), path.read_text(), asyncio.sleep
    half, rest = text[: text.rindex("[[keys]]")], [text]

    async def write_the_rest(seconds: float) -> None:
        if rest:
            path.write_text(rest.pop())
        await sleep(seconds)

    path.write_text(half)
    monkeypatch.setattr(asyncio, "sleep", write_the_rest)
    assert None not in [look_up(tenants, key) for key in keys]
    path.write_text(half)  # and left so
    assert [look_up(tenants, key) is None for key in keys] == [False, True]


def test_a_file_that_is_never_left_alone_is_read_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = add_key(path, "acme", ["infer"])
    tenants, sleep = Tenants(keys_file=path), asyncio.sleep

    async def change_meanwhile(seconds: float) -> None:
        path.write_text(path.read_text() + "#\n")
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", change_meanwhile)
    path.write_text("[tenants.acme]\n")
    assert look_up(tenants, key) is None


def test_a_file_that_is_put_in_the_place_of_another_is_not_waited_for(path: Path) -> None:
    key, _ = add_key(path, "acme", ["infer"])
    tenants = Tenants(keys_file=path, settle_seconds=10 * LIMIT_SECONDS)
    other, entry = add_key(path, "acme", ["infer"])

    async def ask() -> None:
        await asyncio.wait_for(tenants.refresh(), LIMIT_SECONDS)

    asyncio.run(ask())
    assert tenants.caller(other) is not None
    revoke_key(path, entry.key_id)
    asyncio.run(ask())
    assert tenants.caller(other) is None
    assert tenants.caller(key) is not None


def test_a_start_needs_a_file_that_can_be_used(path: Path) -> None:
    with pytest.raises(KeysFileError, match="No such file"):
        Tenants(keys_file=path)


def test_what_does_not_show_is_read_when_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same size, at the same time, in the same file: what SIGHUP is for."""
    key, _ = add_key(path, "acme", ["infer"])
    tenants, before, stat = Tenants(keys_file=path), os.stat(path), os.stat
    path.write_text(path.read_text().replace('"infer"', '"admin"'))
    assert os.stat(path).st_size == before.st_size
    # As if the clock had not ticked.
    monkeypatch.setattr(os, "stat", lambda of, **how: before if of == path else stat(of, **how))
    caller = known(tenants, key)
    assert not caller.may("admin")

    async def reread() -> None:
        tenants.reread()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(reread())
    caller = known(tenants, key)
    assert caller.may("admin")


def test_limits_change_and_counts_stay(path: Path) -> None:
    path.write_text("[tenants.acme]\nrequests_in_flight = 4\n")
    key, _ = add_key(path, "acme", ["infer"])
    tenants = Tenants(keys_file=path)
    before = known(tenants, key)
    before.tenant.enter(3)
    path.write_text(path.read_text().replace("= 4", "= 10"))
    after = known(tenants, key)
    assert after.tenant is before.tenant
    assert after.tenant.headers()["x-ratelimit-remaining-requests"] == "7"


def test_the_default_tenant_may_have_limits_too(path: Path) -> None:
    path.write_text("[tenants.default]\nrequests_in_flight = 4\n")
    caller = Tenants(["reader"], keys_file=path).caller("reader")
    assert caller.tenant.limits.requests_in_flight == 4


def test_each_change_of_a_key_is_a_line_without_the_key(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "multilora.audit")
    key, entry = add_key(path, "acme", ["infer"])
    tenants = Tenants(keys_file=path)
    assert not caplog.records, "what was there is no change"
    second, other = add_key(path, "zeta", ["infer", "upload"])
    look_up(tenants, second)
    revoke_key(path, entry.key_id)
    look_up(tenants, second)
    path.write_text(path.read_text() + "# a comment is none\n")
    look_up(tenants, second)
    lines = [record.fields for record in caplog.records if record.name == "multilora.audit"]  # type: ignore[attr-defined]
    assert lines == [
        {"event": "key added", "tenant": "zeta", "key": other.key_id, "scopes": "infer,upload"},
        {"event": "key revoked", "tenant": "acme", "key": entry.key_id, "scopes": "infer"},
    ]
    assert key not in caplog.text
    assert second not in caplog.text


def test_a_key_that_is_the_operator_s_is_nobody_else_s(path: Path) -> None:
    """A tenant gets no rights by an entry for a key of the settings."""
    key, _ = add_key(path, "acme", ["infer"])
    caller = known(Tenants([], [key], path), key)
    assert caller.tenant.name == DEFAULT


class SlowReads:
    """Readings of the keys file, each of which has read it and ends when it is let."""

    def __init__(self) -> None:
        self._begun, self._let = threading.Semaphore(0), threading.Semaphore(0)

    def read(self, path: Path) -> KeysFile:
        file = read_keys(path)
        self._begun.release()
        assert self._let.acquire(timeout=LIMIT_SECONDS)
        return file

    async def wait_for_one(self) -> None:
        assert await asyncio.to_thread(self._begun.acquire, timeout=LIMIT_SECONDS)

    def let(self, count: int) -> None:
        self._let.release(count)


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> SlowReads:
    slow = SlowReads()
    monkeypatch.setattr("service.tenants.tenants.read_keys", slow.read)
    return slow


def _put(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


def test_a_file_that_is_slow_to_read_holds_up_nothing(path: Path, slow_reads: SlowReads) -> None:
    """Until it has been read the keys of before are known, and whoever asked after the change is let in by what has
    changed."""
    key, _ = add_key(path, "acme", ["infer"])
    second, _ = add_key(path, "zeta", ["infer"])
    slow_reads.let(1)
    tenants, text = Tenants(keys_file=path), path.read_text()
    _put(path, "[tenants.acme]\n")

    async def change() -> None:
        await slow_reads.wait_for_one()  # of the start
        asked = [asyncio.create_task(tenants.refresh()) for _ in range(3)]
        await slow_reads.wait_for_one()
        assert tenants.caller(key) is not None
        assert not any(task.done() for task in asked)
        asked[0].cancel()  # its client has gone
        _put(path, text.replace("acme", "else"))
        slow_reads.let(2)
        await asyncio.gather(*asked[1:])
        found = tenants.caller(key), tenants.caller(second)
        assert [caller and caller.tenant.name for caller in found] == ["else", "zeta"]

    asyncio.run(change())


def test_what_needs_no_key_does_not_wait_for_the_file(path: Path, slow_reads: SlowReads) -> None:
    key, _ = add_key(path, "acme", ["infer"])
    slow_reads.let(1)
    tenants = Tenants(keys_file=path)
    access = Access(tenants, ["/version"])
    _put(path, path.read_text())

    async def change() -> None:
        asked = asyncio.create_task(access.refresh("GET", "/v1/models"))
        await asyncio.sleep(0)
        for open_path in ("/health", "/ready", "/version"):
            await access.refresh("GET", open_path)
            assert access.check("GET", open_path, Headers()) is None
        assert not asked.done()
        slow_reads.let(1)
        await asked
        assert tenants.caller(key) is not None

    asyncio.run(asyncio.wait_for(change(), LIMIT_SECONDS))
