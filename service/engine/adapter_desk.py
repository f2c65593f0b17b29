"""Brings adapters to the device for the requests that name them, without ever blocking the step.

Disk -> host is read by one loader thread, the only one that touches the host tier. Host -> device is `RowPool.load`,
called by the scheduler between steps when a request is otherwise ready to run. The desk counts the users of each
adapter (requests that wait or run) and pins its rows while any of them runs; the row pool never evicts pinned rows.
What only a hint asked for evicts nobody: each upload is one, and a burst of them must not push out what is in demand.

Who frees: rows by the row pool when others need them, or by `evict` after the last user; host memory by the host
tier's own budget, or by `evict`. A killed engine leaves only the store on disk, which it never writes.

Cost per step: a queue look-up, and a few dictionary look-ups per waiting request.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

from adapters.errors import NotFound, RowsExceeded, Unsupported
from adapters.row_pool import PoolUsage
from service.engine.brief_thread import BriefThread
from service.engine.messages import AdapterState

log = logging.getLogger(__name__)

# What is wrong with the adapter itself, as an upload of it would be told; everything else is the server's fault.
_CLIENT_FAULTS = (RowsExceeded, Unsupported)


class HostSource(Protocol):
    """The host tier, as far as the desk needs it."""

    def get(self, digest: str) -> Any:
        """The adapter in host memory, read from the store if need be; its `rows` are what `rows_of` says."""

    def rows_of(self, digest: str) -> Mapping[str, int]:
        """The rows that it takes on the device, without reading its weights."""

    def drop(self, digest: str) -> None:
        """Forget it; unknown digests are ignored."""

    def resident(self) -> tuple[str, ...]:
        """Digests in host memory."""


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
    def resident(self) -> tuple[str, ...]: ...
    def usage(self) -> PoolUsage: ...
    def check_integrity(self) -> None: ...


class Turn(Enum):
    """Answer to "may a request of this adapter run now?"."""

    RUN = "its rows are on the device and now pinned once more"
    LOADING = "it is still being read from disk"
    NO_ROWS = "the rows in use leave no room for it"


class _Work(Enum):
    READ = 0
    MEASURE = 1
    DROP = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter cannot be served, one sentence, and whether the adapter itself is to blame."""

    error: str
    client_fault: bool = False


LORA_IS_OFF = "LoRA is off: this server was started with adapter_row_bytes = 0."


@dataclass(slots=True)
class _Entry:
    """An adapter that has users, or is being read.

    host  held from the end of reading to the copy to the device, or until somebody else needs its place more
    rows  that it takes on the device, once they are known
    """

    num_users: int = 0
    num_pins: int = 0
    is_loading: bool = False
    is_measured: bool = False
    is_read_again: bool = False
    host: Any = None
    rows: Mapping[str, int] | None = None
    evict_asked: bool = False

    @property
    def is_ahead(self) -> bool:
        """Takes up host memory outside the host tier, or will."""
        return self.is_loading or self.host is not None


class AdapterDesk:
    """See the module's docstring. `wake` is called from the loader thread when there is news for `settle_loads`.

    rows and host are None where LoRA is off; the engine then refuses requests that name an adapter.
    """

    def __init__(
        self, rows: Rows | None, host: HostSource | None, *, max_loads_ahead: int, wake: Callable[[], None]
    ) -> None:
        self.rows = rows
        self._host = host
        self._max_loads_ahead = max_loads_ahead
        self._wake = wake
        self._entries: dict[str, _Entry] = {}
        self._loader = BriefThread("adapter-loader")
        self._done: queue.SimpleQueue[tuple[_Work, str, Any, Exception | None]] = queue.SimpleQueue()
        self._states: list[AdapterState] = []
        self._failures: dict[str, Failure] = {}

    # ---- users

    def enter(self, digest: str) -> None:
        """A request that names the adapter has arrived."""
        self._entry(digest).num_users += 1

    def leave(self, digest: str) -> None:
        """It is over, and holds no pin any more."""
        entry = self._entries[digest]
        entry.num_users -= 1
        assert entry.num_pins <= entry.num_users, "a request left with its pin"
        self._settle_entry(digest, entry)

    def hint(self, digest: str) -> None:
        """Bring it to the host tier, and to the device if rows are free without an eviction, although no request has
        come yet."""
        if self.rows is None:
            self._states.append(AdapterState(digest, "failed", LORA_IS_OFF))
            return
        self._start_reading(digest, self._entry(digest))

    def evict(self, digest: str) -> None:
        """Forget it as soon as its last user has left; AdapterState "gone" follows."""
        if self.rows is None:
            self._states.append(AdapterState(digest, "gone"))
            return
        entry = self._entry(digest)
        entry.evict_asked = True
        self._settle_entry(digest, entry)

    # ---- the scheduler's questions

    def prefetch(self, wanted: Mapping[str, bool], first: str | None) -> None:
        """Start reading, as far as `max_loads_ahead` allows, what requests wait for.

        wanted  adapters in the order of the requests' age, and whether one of these may join now; the others are read,
                once, if nobody else is left to read
        first   the adapter for which rows are being kept; what was read of it stays

        Who could run now does not wait behind those who cannot: the last of these gives up its host copy, and is read
        again once there is room for it. Who knows of no room is not read at all.
        """
        if self.rows is None:
            return
        num_ahead = sum(entry.num_users > 0 and entry.is_ahead for entry in self._entries.values())
        useful, others, held = [], [], []
        for digest, may_join in wanted.items():
            entry = self._entries[digest]
            has_room = entry.rows is None or self.rows.has_room(entry.rows)
            is_useful = digest == first or (may_join and has_room)
            if entry.host is not None:
                if not is_useful:
                    held.append(entry)
            elif not entry.is_loading and self.rows.place_of(digest) is None:
                if is_useful:
                    useful.append((digest, entry))
                elif entry.rows is None:
                    others.append((digest, entry))
        for digest, entry in (*useful, *others[: max(0, self._max_loads_ahead - num_ahead - len(useful))]):
            if num_ahead >= self._max_loads_ahead:
                if entry.rows is None:
                    self._measure(digest, entry)
                    continue
                if not held:
                    continue
                held.pop().host = None
                num_ahead -= 1
            self._start_reading(digest, entry)
            num_ahead += 1

    def acquire(self, digest: str) -> Turn:
        """Pin the adapter's rows for one more running request, copying them to the device first if they fit."""
        assert self.rows is not None
        entry = self._entries[digest]
        if self.rows.place_of(digest) is None:
            if entry.host is None:
                # Nobody needs its weights to know that there is no room for it.
                knows_of_none = entry.rows is not None and not entry.is_loading and not self.rows.has_room(entry.rows)
                return Turn.NO_ROWS if knows_of_none else Turn.LOADING
            if not self._bring(digest, entry):
                return Turn.NO_ROWS
        if entry.num_pins == 0:
            self.rows.pin(digest)
        entry.num_pins += 1
        return Turn.RUN

    def release(self, digest: str) -> None:
        """One running request less (ended or preempted)."""
        entry = self._entries[digest]
        entry.num_pins -= 1
        if entry.num_pins == 0:
            assert self.rows is not None
            self.rows.unpin(digest)

    def fits_beside(self, digest: str, others: Collection[str]) -> bool:
        """Whether rows of no other adapters than these, which are resident, could keep it from the device."""
        assert self.rows is not None
        needed = self._entries[digest].rows
        return needed is None or self.rows.fits_beside(needed, others)

    # ---- between steps

    def settle_loads(self) -> None:
        """Take over what the loader thread has finished. Never waits."""
        while not self._done.empty():
            work, digest, result, error = self._done.get()
            if work is _Work.DROP:
                self._states.append(AdapterState(digest, "gone"))
            elif work is _Work.MEASURE:
                if digest in self._entries:
                    self._settle_measure(digest, self._entries[digest], result)
            else:
                self._settle_read(digest, self._entries[digest], result, error)

    def take_states(self) -> list[AdapterState]:
        """What happened to adapters since the last call."""
        states, self._states = self._states, []
        return states

    def take_failures(self) -> dict[str, Failure]:
        """Adapters whose users cannot be served, and why."""
        failures, self._failures = self._failures, {}
        return failures

    def check_integrity(self) -> None:
        """Pins never exceed users, pinned adapters are resident, nothing is held for nobody."""
        for digest, entry in self._entries.items():
            assert 0 <= entry.num_pins <= entry.num_users, f"{digest}: more pins than users"
            assert entry.num_users or entry.is_loading, f"{digest}: kept for nobody"
            if entry.num_pins:
                assert self.rows is not None and self.rows.place_of(digest) is not None, f"{digest}: used, not resident"
        if self.rows is not None:
            self.rows.check_integrity()

    def close(self) -> None:
        """End the loader thread after what it is reading now."""
        self._loader.close()

    # ---- inner parts

    def _entry(self, digest: str) -> _Entry:
        return self._entries.setdefault(digest, _Entry())

    def _start_reading(self, digest: str, entry: _Entry) -> bool:
        assert self.rows is not None
        if entry.is_ahead or self.rows.place_of(digest) is not None:
            self._settle_entry(digest, entry)
            return False
        entry.is_loading = True
        self._loader.submit(partial(self._read, digest))
        return True

    def _measure(self, digest: str, entry: _Entry) -> None:
        """Find out how many rows it takes, once."""
        if not entry.is_measured:
            entry.is_measured = True
            self._loader.submit(partial(self._read_rows, digest))

    def _read_rows(self, digest: str) -> None:
        """In the loader thread. What goes wrong is told when the adapter itself is read, for which any size will do."""
        assert self._host is not None
        rows: Mapping[str, int] = {}
        try:
            rows = self._host.rows_of(digest)
        except Exception as error:
            log.debug("the size of adapter %s could not be read: %s", digest, error)
        self._done.put((_Work.MEASURE, digest, rows, None))
        self._wake()

    def _settle_measure(self, digest: str, entry: _Entry, rows: Mapping[str, int]) -> None:
        if entry.rows is None:
            self._note_rows(digest, entry, rows)

    def _note_rows(self, digest: str, entry: _Entry, rows: Mapping[str, int]) -> bool:
        """Now its size is known. False when it can never have room: whoever waits for it must not make others wait."""
        assert self.rows is not None
        entry.rows = rows
        try:
            self.rows.check_size(rows)
        except RowsExceeded as error:
            self._fail(digest, entry, Failure(str(error), client_fault=True))
            return False
        return True

    def _settle_read(self, digest: str, entry: _Entry, host: Any, error: Exception | None) -> None:
        entry.is_loading = False
        if isinstance(error, NotFound) and entry.num_users and not entry.is_read_again:
            # A user's lease keeps the files, so they are back since: deleted and uploaded again while nobody used them.
            entry.is_read_again = True
            self._start_reading(digest, entry)
            return
        if error is not None:
            if entry.num_users == 0 and isinstance(error, NotFound):
                log.info("adapter %s has left the store, and nobody waits for it", digest)
            else:
                log.warning("adapter %s could not be read", digest, exc_info=error)
            self._fail(digest, entry, _unread(digest, error))
        else:
            entry.host = host
            self._states.append(AdapterState(digest, "host"))
            is_servable = self._note_rows(digest, entry, host.rows)
            if is_servable and entry.num_users == 0 and not entry.evict_asked:
                self._bring(digest, entry, may_evict=False)
        self._settle_entry(digest, entry)

    def _read(self, digest: str) -> None:
        """In the loader thread. Whatever goes wrong is this adapter's failure, never the engine's."""
        assert self._host is not None
        try:
            self._done.put((_Work.READ, digest, self._host.get(digest), None))
        except Exception as error:
            self._done.put((_Work.READ, digest, None, error))
        self._wake()

    def _drop_from_host(self, digest: str) -> None:
        """In the loader thread."""
        assert self._host is not None
        self._host.drop(digest)
        self._done.put((_Work.DROP, digest, None, None))
        self._wake()

    def _bring(self, digest: str, entry: _Entry, *, may_evict: bool = True) -> bool:
        """Host -> device. What had to leave the device for it is reported."""
        assert self.rows is not None
        before = self.rows.resident()
        try:
            fits = self.rows.load(digest, entry.host, may_evict=may_evict)
        except ValueError as error:
            self._fail(digest, entry, Failure(str(error), isinstance(error, _CLIENT_FAULTS)))
            return False
        after = set(self.rows.resident())
        for evicted in before:
            if evicted not in after:
                self._states.append(AdapterState(evicted, "host"))
        if fits:
            entry.host = None
            self._states.append(AdapterState(digest, "device"))
        elif may_evict and not any(other.num_pins for other in self._entries.values()):
            sentence = f"Adapter {digest} is larger than the row budget; raise it or use smaller ranks."
            self._fail(digest, entry, Failure(sentence, client_fault=True))
        return fits

    def _fail(self, digest: str, entry: _Entry, failure: Failure) -> None:
        entry.host = None
        self._states.append(AdapterState(digest, "failed", failure.error))
        if entry.num_users:
            self._failures[digest] = failure
            self._wake()  # there may be no step to come that would answer them

    def _settle_entry(self, digest: str, entry: _Entry) -> None:
        """Let go of what nobody needs: the host copy, and after `evict` everything."""
        if entry.num_users > 0 or entry.is_loading:
            return
        del self._entries[digest]
        if entry.evict_asked:
            assert self.rows is not None
            self.rows.drop(digest)
            self._loader.submit(partial(self._drop_from_host, digest))


def _unread(digest: str, error: Exception) -> Failure:
    """For the client: an operating system's error names a path of this machine, so only its reason is told."""
    reason = (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
    return Failure(f"Adapter {digest} could not be read: {reason}", isinstance(error, _CLIENT_FAULTS))
