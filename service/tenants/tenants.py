"""The tenants of a server: who a key belongs to, as the settings and the keys file say it now."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from service.logs import LOGGER, audit
from service.tenants.keys_file import SCOPES, Key, KeysFile, KeysFileError, Limits, Scope, hash_of, read_keys
from service.tenants.limits import EXCHANGE_SECONDS, Exchange, Tenant, TenantUsage

# A file that is written in place is half there for a moment: it is read when it has stayed as it is for so long, or
# after so long however it changes.
SETTLE_SECONDS = 0.05
_SETTLE_LIMIT_SECONDS = 0.5

# Tenant that owns everything without a keys file; with one, it has the keys of the settings.
DEFAULT = "default"


@dataclass(frozen=True)
class Caller:
    """The request's sender and its key's scopes. `key_id` identifies the key in lists and logs; "" where no key was
    needed."""

    tenant: Tenant
    scopes: frozenset[Scope]
    key_id: str = ""

    @property
    def by(self) -> str:
        """How the history of adapters calls them."""
        return self.key_id if self.tenant.name == DEFAULT else f"{self.tenant.name} {self.key_id}"

    def may(self, scope: Scope) -> bool:
        """Whether the key has the scope; `admin` has all."""
        return scope in self.scopes or "admin" in self.scopes


@dataclass(frozen=True)
class _Known:
    """A key that is let in."""

    digest: bytes
    tenant: str
    scopes: frozenset[Scope]
    key_id: str


# In the order of settings and file, which says whose a key is that stands in several places.
_KnownByDigest = dict[bytes, list[_Known]]


def _by_digest(known: Iterable[_Known]) -> _KnownByDigest:
    found: _KnownByDigest = {}
    for one in known:
        found.setdefault(one.digest, []).append(one)
    return found


class Tenants:
    """Keys to callers. Everything happens in the event loop, but for reading the file, which takes a thread of its own
    0.3 s for the largest: until it has been read the keys that were there are known.

    inference_keys, admin_keys  of the settings: keys of the tenant DEFAULT
    keys_file                   read now, and again when it is another one than it was. KeysFileError if it cannot be
    clock                       seconds that never go back
    settle_seconds              how long a file that is written in place must stay as it is
    """

    def __init__(
        self,
        inference_keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        keys_file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._path = keys_file
        self._clock = clock
        self._settle_seconds = settle_seconds
        self._own = (
            # Named by their places: people choose these keys, and the hash of a word tells the word.
            *_numbered("key", inference_keys, frozenset({"infer"})),
            *_numbered("admin key", admin_keys, frozenset(SCOPES)),
        )
        self._tenants: dict[str, Tenant] = {}
        self._signature: tuple[int, ...] | None = None
        self._read_as: tuple[int, ...] = ()  # the file that was read last
        self._reading: asyncio.Task[None] | None = None
        # A thread of its own: all others may be busy for clients. It starts with the first change.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keys-file")
        file = KeysFile()
        if keys_file is not None:
            self._signature = self._read_as = _signature(keys_file)
            file = read_keys(keys_file)
        self._file, self._known = KeysFile(), _by_digest(self._own)
        self._apply(file, self._known_of(file))

    @property
    def has_file(self) -> bool:
        """Whether there may be tenants beside DEFAULT."""
        return self._path is not None

    @property
    def need_keys(self) -> bool:
        """Whether a key is asked for at all."""
        return self.has_file or bool(self._own)

    @property
    def default(self) -> Tenant:
        """The tenant of the operator's own adapters."""
        return self._tenants[DEFAULT]

    def limits_of(self, name: str) -> Limits | None:
        """The limits of the tenant of this name, None if there is none."""
        tenant = self._tenants.get(name)
        return None if tenant is None else tenant.limits

    def anybody(self) -> Caller:
        """The caller where no key is asked for."""
        assert not self.need_keys, "a key is asked for"
        return Caller(self.default, frozenset(SCOPES))

    def caller(self, key: str) -> Caller | None:
        """The caller with this key, None if there is none, as of the last `refresh`.

        However many keys there are, one look-up by the key's hash: where it leads follows from a secret of the process
        that Python mixes into it, so that its time tells nothing of a key that is nearly one. What it finds is compared
        in constant time.
        """
        digest = hash_of(key)
        found = [known for known in self._known.get(digest, ()) if hmac.compare_digest(known.digest, digest)]
        if not found:
            return None
        # The same key may stand in both settings, and in the file too: then it is the operator's.
        tenant = found[0].tenant
        same = [known for known in found if known.tenant == tenant]
        return Caller(self._tenants[tenant], frozenset[Scope]().union(*(one.scopes for one in same)), same[-1].key_id)

    async def refresh(self) -> None:
        """Read the keys file if it is another one than it was. On return `caller` knows it as it was at the call, or as
        it has become since. One reading serves all who wait for it."""
        if self._path is None or _signature(self._path) == self._signature:
            return
        await asyncio.shield(self._read_soon())
        # The running read may have begun before the change. The next has not.
        if _signature(self._path) != self._signature:
            await asyncio.shield(self._read_soon())

    def usage(self) -> dict[str, TenantUsage]:
        """The use on this server, for tenants that have any."""
        return {name: usage for name, one in self._tenants.items() if (usage := one.usage()) != TenantUsage()}

    def learn(self, elsewhere: Mapping[str, TenantUsage]) -> None:
        """Set the tenants' use on other servers."""
        for name, one in self._tenants.items():
            one.learn(elsewhere.get(name, TenantUsage()))

    def reread(self) -> None:
        """Have the keys file read, whether it looks like another one or not."""
        self._signature = None
        self._read_soon()

    def _read_soon(self) -> asyncio.Task[None]:
        """The reading that is under way, or a new one."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read(), name="keys file")
        return self._reading

    async def _read(self) -> None:
        """Read the file again. A file that cannot be used is logged once and changes nothing."""
        assert self._path is not None, "keys without a file do not change"
        signature, before, loop = await self._settled(self._path), self._file, asyncio.get_running_loop()
        try:
            file, known = await loop.run_in_executor(self._thread, self._read_other, self._path, before)
        except KeysFileError as error:
            LOGGER.error("%s The keys that were there stay.", error)
        else:
            self._apply(file, known)
            await loop.run_in_executor(self._thread, _tell_changes, before, file)
        self._signature = self._read_as = signature

    async def _settled(self, path: Path) -> tuple[int, ...]:
        """The file's signature, once nobody seems to write it any more. What was put in its place, as `multilora keys`
        does it, was whole before and counts at once."""
        signature = _signature(path)
        num_looks = round(_SETTLE_LIMIT_SECONDS / SETTLE_SECONDS)
        while num_looks and signature != self._read_as and signature[:2] == self._read_as[:2]:
            await asyncio.sleep(self._settle_seconds)
            before, signature = signature, _signature(path)
            if signature == before:
                break
            num_looks -= 1
        return signature

    def _read_other(self, path: Path, before: KeysFile) -> tuple[KeysFile, _KnownByDigest]:
        """Read a changed file, and the keys as of then. KeysFileError. Any thread."""
        file = read_keys(path)
        if file == KeysFile() != before:  # as it is for a moment when it is written in place
            raise KeysFileError(f"The keys file {path} is empty; to revoke all keys, leave a tenant's table.")
        return file, self._known_of(file)

    def _known_of(self, file: KeysFile) -> _KnownByDigest:
        known = (_Known(bytes.fromhex(key.sha256), key.tenant, frozenset(key.scopes), key.key_id) for key in file.keys)
        return _by_digest((*self._own, *known))

    def _apply(self, file: KeysFile, known: _KnownByDigest) -> None:
        """From now on this is so, all of it at once."""
        # Tenants that are gone stay in memory: requests of theirs may run, and they may come back within the minute.
        for name, limits in ({DEFAULT: Limits()} | file.tenants).items():
            tenant = self._tenants.setdefault(name, Tenant(name, limits, self._clock))
            tenant.limits = limits
        self._file, self._known = file, known


def _tell_changes(before: KeysFile, now: KeysFile) -> None:
    """A line for each key that was added or revoked. Any thread."""
    for change, keys in (("added", _missing(now, before)), ("revoked", _missing(before, now))):
        for key in keys:
            audit(f"key {change}", tenant=key.tenant, key=key.key_id, scopes=",".join(key.scopes))
    LOGGER.info("keys file read", extra={"fields": {"tenants": len(now.tenants), "keys": len(now.keys)}})


def _numbered(what: str, keys: Iterable[str], scopes: frozenset[Scope]) -> Iterator[_Known]:
    return (_Known(hash_of(key), DEFAULT, scopes, f"{what} {number}") for number, key in enumerate(keys, start=1))


def _missing(there: KeysFile, here: KeysFile) -> list[Key]:
    """Keys that are there and not here, or here for another tenant or other scopes."""
    known = {(key.sha256, key.tenant, frozenset(key.scopes)) for key in here.keys}
    return [key for key in there.keys if (key.sha256, key.tenant, frozenset(key.scopes)) not in known]


def _signature(path: Path) -> tuple[int, ...]:
    """Changes when the file does; of links, what they lead to. () where there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


async def follow_usage(tenants: Tenants, directory: Path) -> None:
    """Exchange the tenants' usage with the other servers of the directory, without end.

    While the directory cannot be used, the last known usage counts and expires.
    """
    exchange, failed = Exchange(directory), ""
    while True:
        try:
            tenants.learn(await asyncio.to_thread(exchange.say_and_hear, tenants.usage()))
            failed = ""
        except OSError as error:
            if str(error) != failed:
                LOGGER.error("The counts of other servers' tenants cannot be read: %s", error)
            failed = str(error)
        await asyncio.sleep(EXCHANGE_SECONDS)
