"""Brings adapters to the device for the requests that name them; no step ever waits for the disk.

Disk -> host is read by a loader, which has a thread of its own outside the engine's tests; what the host tier has needs
no loader, and waits behind no disk. Host -> device is
`RowPool.load`, between launches: when a request asks for the rows, or ahead of any request when what a hint asked for
has been read. The desk counts the users of each adapter (requests that wait or run) and pins its rows while any of them
runs; the row pool never evicts pinned rows. A hint takes no rows from others and is read when no request's adapter is:
each upload is one, and a burst of them must not push out of the device, or hold up, what is in demand.

Who frees: rows by the row pool when others need them, or by `evict` when nobody runs with them; host memory by the host
tier's own budget, or by `evict`. A killed engine leaves only the store on disk, which it never writes.

Cost per step: a queue look-up, and a few dictionary look-ups per waiting request; room is computed anew for an adapter
only when rows have come into use, or out of it, since it was last asked for.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from adapters.errors import AdapterError, NotFound, RowsExceeded, Unsupported
from adapters.row_pool import PoolUsage

log = logging.getLogger(__name__)

# What is wrong with the adapter itself, as an upload of it would be told; everything else is the server's fault.
_CLIENT_FAULTS = (RowsExceeded, Unsupported)

LORA_IS_OFF = "LoRA is off: this server was started with adapter_row_bytes = 0."


class HostSource(Protocol):
    """The host tier, as far as the desk needs it. `get` is called by the loader, the others in the step's thread."""

    def kept(self, digest: str) -> Any | None:
        """The adapter if it is in host memory; reads nothing."""

    def get(self, digest: str) -> Any:
        """The adapter in host memory, read from the store if need be; `rows` of it are those that it takes."""

    def drop(self, digest: str) -> None:
        """Forget it; unknown digests are ignored."""

    def resident(self) -> tuple[str, ...]:
        """Digests in host memory."""


class Loader(Protocol):
    """Does what is submitted, one after the other: in a thread (`BriefThread`), or when a test says so."""

    def submit(self, work: Callable[[], None]) -> None:
        """Do `work`, which handles its own errors, after what was submitted before it. Raises RuntimeError, and has not
        taken it, where it cannot be done."""

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""


class Rows(Protocol):
    """The row pool, as far as the engine needs it."""

    def load(self, digest: str, host_adapter: Any, *, may_evict: bool = True) -> bool: ...
    def pin(self, digest: str) -> None: ...
    def unpin(self, digest: str) -> None: ...
    def drop(self, digest: str) -> None: ...
    def check_size(self, rows: Mapping[str, int]) -> None: ...
    def has_room(self, rows: Mapping[str, int]) -> bool: ...
    def fits_beside(self, rows: Mapping[str, int], digests: Collection[str]) -> bool: ...
    def place_of(self, digest: str) -> int | None: ...
    def first_rows(self, place: int) -> tuple[int, ...]: ...
    def rows_end(self, digests: Collection[str]) -> int: ...
    def resident(self) -> tuple[str, ...]: ...
    def usage(self) -> PoolUsage: ...
    def check_integrity(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter cannot be served, one sentence, and whether the adapter itself is to blame."""

    error: str
    client_fault: bool = False


_UNKNOWN = (-1, False)


@dataclass(slots=True)
class _Entry:
    """An adapter that has users, or is being read. The loader looks at `is_wanted`.

    rows      that it takes on the device, as its users say until it has been read; {} while there was only a hint
    host      held from the end of reading to the copy to the device, or until somebody else needs its place more
    was_read  its copy was lost once, or will be: it is read again only when it can be used
    is_stale  `evict` came while it was in use, or being read: what was read until then is not used for newcomers
    room      whether it has room, and the desk's `_num_pin_changes` at which that was found
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    num_users: int = 0
    num_pins: int = 0
    is_loading: bool = False
    is_hinted: bool = False
    was_read: bool = False
    is_read_again: bool = False
    host: Any = None
    is_stale: bool = False
    room: tuple[int, bool] = _UNKNOWN

    @property
    def is_ahead(self) -> bool:
        """Takes up host memory outside the host tier, or will."""
        return self.is_loading or self.host is not None

    @property
    def is_wanted(self) -> bool:
        """Somebody is still there for whom it is being read."""
        return self.num_users > 0 or self.is_hinted


class AdapterDesk:
    """See the module's docstring. `wake` is called when there is news for `settle_loads`, mostly by the loader, which
    the desk closes.

    rows and host are None where LoRA is off; the engine then refuses requests that name an adapter.
    """

    def __init__(
        self,
        rows: Rows | None,
        host: HostSource | None,
        loader: Loader,
        *,
        max_loads_ahead: int,
        wake: Callable[[], None],
    ) -> None:
        self.rows = rows
        self._host = host
        self._loader = loader
        self._max_loads_ahead = max_loads_ahead
        self._wake = wake
        self._entries: dict[str, _Entry] = {}
        self._hints: dict[str, None] = {}  # not begun yet, in the order of their arrival
        self._is_short_of_places = False  # who could run was left unread in this step
        self.num_reads = 0  # that have ended, one way or another
        self._num_pin_changes = 0
        # (digest, copy, error); both None where nobody wanted it any more when its turn came
        self._done: queue.SimpleQueue[tuple[str, Any, Exception | None]] = queue.SimpleQueue()
        self._failures: dict[str, Failure] = {}

    # ---- users

    def enter(self, digest: str, rows: Mapping[str, int]) -> None:
        """A request that names the adapter, which takes so many rows, has arrived."""
        entry = self._entries.setdefault(digest, _Entry())
        if not entry.rows:
            entry.rows = rows
        entry.num_users += 1

    def leave(self, digest: str) -> None:
        """It is over, and holds no pin any more."""
        entry = self._entries[digest]
        entry.num_users -= 1
        assert entry.num_pins <= entry.num_users, "a request left with its pin"
        self._settle_entry(digest, entry)

    def hint(self, digest: str) -> None:
        """Bring it to the host tier, and to the device if rows are free without an eviction, although no request has
        come yet; see `follow_hints`."""
        if self.rows is not None:
            self._hints[digest] = None

    def evict(self, digest: str) -> None:
        """Its files are gone, or new ones are in their place: forget it, on the device and in host memory, as soon as
        nobody runs with it. Who still waits for it waits until it has been read anew."""
        if self.rows is None:
            return
        self._hints.pop(digest, None)
        self._failures.pop(digest, None)  # of the old files; its users have not been told yet
        entry = self._entries.setdefault(digest, _Entry())
        entry.is_stale = True
        self._drop_stale(digest, entry)
        self._settle_entry(digest, entry)

    # ---- the scheduler's questions

    def prefetch(self, wanted: Mapping[str, bool], first: str | None) -> None:
        """Start reading, as far as `max_loads_ahead` allows, what requests wait for.

        wanted  adapters in the order in which requests are to have them, and whether one could join now with it
        first   the adapter that has waited too long: it is read whatever the others do, and its copy stays

        Who could run now does not wait behind those who cannot: the last of these gives up its host copy, and is read
        again when it could run. Who cannot is read once, if places are left, so that it need not wait for the disk too.
        """
        if self.rows is None or not wanted:
            return
        places = self._max_loads_ahead - sum(
            entry.num_users > 0 and entry.is_ahead for digest, entry in self._entries.items() if digest != first
        )
        useful, others, held = [], [], []
        for digest, could_join in wanted.items():
            entry = self._entries[digest]
            if entry.is_loading or self.rows.place_of(digest) is not None:
                continue
            is_useful = digest == first or could_join
            if entry.host is not None:
                if not is_useful:
                    held.append(entry)
            elif is_useful:
                useful.append(digest)
            elif not entry.was_read:
                others.append(digest)
        for digest in useful:
            if digest != first:
                while places <= 0 and held:
                    held.pop().host = None
                    places += 1
                if places <= 0:
                    self._is_short_of_places = True
                    continue
                places -= 1
            self._fetch(digest, self._entries[digest])
        for digest in others[: max(places, 0)]:
            self._fetch(digest, self._entries[digest])

    def acquire(self, digest: str) -> bool:
        """Pin the adapter's rows for one more running request, copying them to the device first if need be. False when
        it has not been read, or the rows in use leave no room for it."""
        assert self.rows is not None
        entry = self._entries[digest]
        if not self.can_acquire(digest) or (not self.is_on_device(digest) and not self._bring(digest, entry)):
            return False
        if entry.num_pins == 0:
            self.rows.pin(digest)
            self._num_pin_changes += 1
        entry.num_pins += 1
        return True

    def release(self, digest: str) -> None:
        """One running request less (ended or preempted)."""
        entry = self._entries[digest]
        entry.num_pins -= 1
        if entry.num_pins == 0:
            assert self.rows is not None
            self.rows.unpin(digest)
            self._num_pin_changes += 1
            self._drop_stale(digest, entry)

    def is_on_device(self, digest: str) -> bool:
        """Whether `acquire` has nothing to do but to pin."""
        assert self.rows is not None
        return self.rows.place_of(digest) is not None and not self._entries[digest].is_stale

    def is_read(self, digest: str) -> bool:
        """Whether nothing but rows can keep it from running."""
        return self._entries[digest].host is not None or self.is_on_device(digest)

    def is_in_use(self, digest: str) -> bool:
        """Whether requests run with it, so that its rows are pinned."""
        entry = self._entries.get(digest)
        return entry is not None and entry.num_pins > 0

    def can_acquire(self, digest: str) -> bool:
        """Whether it is on the device, or has been read and has room there."""
        entry = self._entries[digest]
        return self.is_on_device(digest) or (entry.host is not None and self._has_room(entry))

    def has_room(self, digest: str) -> bool:
        """Whether the rows in use leave it its own."""
        return self._has_room(self._entries[digest])

    def num_rows(self, digest: str) -> int:
        """That it takes on the device, in all groups together."""
        return sum(self._entries[digest].rows.values())

    def fits_beside(self, digest: str, others: Collection[str]) -> bool:
        """Whether it would have room if no other adapters than these, which are resident, were in use."""
        assert self.rows is not None
        return self.rows.fits_beside(self._entries[digest].rows, others)

    # ---- between steps

    def settle_loads(self) -> None:
        """Take over what the loader has finished. Never waits."""
        while not self._done.empty():
            digest, host, error = self._done.get()
            self.num_reads += 1
            self._settle_read(digest, self._entries[digest], host, error)

    def follow_hints(self) -> None:
        """Start reading the next one that nobody waits for, unless one is being read. Called after `prefetch`."""
        is_short, self._is_short_of_places = self._is_short_of_places, False
        while self._hints and not is_short and not any(entry.is_loading for entry in self._entries.values()):
            assert self.rows is not None
            digest = next(iter(self._hints))
            del self._hints[digest]
            entry = self._entries.setdefault(digest, _Entry())
            if entry.num_users > 0 or self.is_read(digest):
                self._settle_entry(digest, entry)
                continue
            entry.is_hinted = True
            self._start_reading(digest, entry)

    def take_failures(self) -> dict[str, Failure]:
        """Adapters whose users cannot be served, and why."""
        failures, self._failures = self._failures, {}
        return failures

    def check_integrity(self) -> None:
        """Pins never exceed users, pinned adapters are resident, nothing is held for nobody."""
        for digest, entry in self._entries.items():
            assert 0 <= entry.num_pins <= entry.num_users, f"{digest}: more pins than users"
            assert entry.num_users or entry.is_loading, f"{digest}: kept for nobody"
            assert not entry.is_stale or entry.num_pins or entry.is_loading, f"{digest}: evicted, and still there"
            assert (
                entry.room[0] != self._num_pin_changes
                or self.rows is None
                or (entry.room[1] == self.rows.has_room(entry.rows))
            ), f"{digest}: room is wrong"
            if entry.num_pins:
                assert self.rows is not None and self.rows.place_of(digest) is not None, f"{digest}: used, not resident"
        if self.rows is not None:
            self.rows.check_integrity()

    def close(self) -> None:
        """End the loader after what it is reading now."""
        self._loader.close()

    # ---- inner parts

    def _has_room(self, entry: _Entry) -> bool:
        """Whether the rows in use leave it its own."""
        assert self.rows is not None
        if entry.room[0] != self._num_pin_changes:
            entry.room = (self._num_pin_changes, self.rows.has_room(entry.rows))
        return entry.room[1]

    def _fetch(self, digest: str, entry: _Entry) -> None:
        """From host memory at once, else by the loader."""
        assert self._host is not None
        host = self._host.kept(digest)
        if host is None:
            self._start_reading(digest, entry)
        else:
            entry.was_read = True
            self._keep(digest, entry, host)

    def _start_reading(self, digest: str, entry: _Entry) -> None:
        entry.is_loading = entry.was_read = True
        try:
            self._loader.submit(partial(self._read, digest, entry))
        except RuntimeError as error:  # no thread can be started
            self._done.put((digest, None, error))
            self._wake()

    def _read(self, digest: str, entry: _Entry) -> None:
        """By the loader. Whatever goes wrong is this adapter's failure, never the engine's."""
        assert self._host is not None
        try:
            # Its users may have left while others were read.
            self._done.put((digest, self._host.get(digest) if entry.is_wanted else None, None))
        except Exception as error:  # kept in no local that outlives this clause: its frames hold what was read so far
            self._done.put((digest, None, error))
        self._wake()

    def _settle_read(self, digest: str, entry: _Entry, host: Any, error: Exception | None) -> None:
        is_stale, is_hinted = entry.is_stale, entry.is_hinted
        entry.is_loading = entry.is_hinted = False
        self._drop_stale(digest, entry)
        if isinstance(error, NotFound) and entry.num_users and not entry.is_read_again:
            # A user's lease keeps the files, so they are back since: deleted and uploaded again while nobody used them.
            entry.is_read_again = True
            self._start_reading(digest, entry)
            return
        if is_stale and entry.num_users:
            entry.was_read = False  # of the old files, whatever came of it
        elif error is not None:
            if entry.num_users == 0 and isinstance(error, NotFound):
                log.info("adapter %s has left the store, and nobody waits for it", digest)
            else:
                log.warning("adapter %s could not be read", digest, exc_info=error)
            self._fail(digest, entry, _unread(digest, error))
        elif host is None:
            entry.was_read = False
        elif not is_stale:
            self._keep(digest, entry, host)
            if is_hinted and entry.num_users == 0 and entry.host is not None:
                self._bring(digest, entry, may_evict=False)
        self._settle_entry(digest, entry)

    def _keep(self, digest: str, entry: _Entry, host: Any) -> None:
        """What was read waits for its rows, unless it is another adapter than its users were told and can have none."""
        assert self.rows is not None
        entry.is_read_again = False
        try:
            self.rows.check_size(host.rows)
        except RowsExceeded as error:
            self._fail(digest, entry, Failure(str(error), client_fault=True))
        else:
            entry.host, entry.rows, entry.room = host, host.rows, _UNKNOWN

    def _bring(self, digest: str, entry: _Entry, *, may_evict: bool = True) -> bool:
        """Host -> device."""
        assert self.rows is not None
        try:
            is_there = self.rows.load(digest, entry.host, may_evict=may_evict)
        except AdapterError as error:
            self._fail(digest, entry, Failure(str(error), isinstance(error, _CLIENT_FAULTS)))
            return False
        if is_there:
            entry.host = None
        return is_there

    def _fail(self, digest: str, entry: _Entry, failure: Failure) -> None:
        entry.host = None
        if entry.num_users:
            self._failures[digest] = failure
            self._wake()  # there may be no step to come that would answer them

    def _drop_stale(self, digest: str, entry: _Entry) -> None:
        """Forget what was read of an evicted adapter, once nobody runs with it and nothing more of it is being read."""
        if entry.is_stale and entry.num_pins == 0 and not entry.is_loading:
            assert self.rows is not None and self._host is not None
            entry.is_stale = entry.was_read = entry.is_read_again = False
            entry.host = None
            self.rows.drop(digest)
            self._host.drop(digest)

    def _settle_entry(self, digest: str, entry: _Entry) -> None:
        """Let go of what nobody needs, the host copy with it."""
        if entry.num_users == 0 and not entry.is_loading:
            del self._entries[digest]


def _unread(digest: str, error: Exception) -> Failure:
    """For the client: an operating system's error names a path of this machine, so only its reason is told."""
    reason = (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
    return Failure(f"Adapter {digest} could not be read: {reason}", isinstance(error, _CLIENT_FAULTS))
