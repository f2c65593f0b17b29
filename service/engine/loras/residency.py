"""Residency of adapters, as one state machine; `prefetch.py` decides which one is read next.

    ABSENT   on disk alone, as far as the engine knows
    READING  the loader reads it
    HOST     in host memory: kept by the host tier, or held for requests that wait for it
    COPYING  on its way to rows that are its own, which no step uses yet
    DEVICE   steps may use its rows
    STALE    its files are gone or were replaced, and something of the old ones is still in use: requests run with its
             rows, or the loader has not ended. No new request gets it; then it is ABSENT

`_NEXT` has every step from one to another. Reads end in the loader's thread and copies on the device; both are taken
over by `settle`, in the thread of the steps, and everything else happens there.

A sum of adapters (`adapters.sums`) has a state of its own, but is in host memory by its parts: it is HOST while it is
held, and else ABSENT.

Who frees: rows are freed by the pool, for others, or here; host memory by the host tier, for others, and when the last
reference goes, of which COPYING and a held HOST have one. A copy of a score head stays in host memory with the rows.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from adapters.memory.slab import ScoreHead
from adapters.sums import is_sum, parts_of
from service.engine.ipc.messages import Loads, Tier
from service.engine.loras.interfaces import CopyEvent, HostSource, Loader, Rows
from service.engine.step_records import MAX_RECORDS


class AdapterState(Enum):
    """See the module's docstring."""

    ABSENT = "absent"
    READING = "reading"
    HOST = "host"
    COPYING = "copying"
    DEVICE = "device"
    STALE = "stale"


_NEXT = {
    AdapterState.ABSENT: (AdapterState.READING, AdapterState.HOST),
    AdapterState.READING: (AdapterState.HOST, AdapterState.ABSENT, AdapterState.STALE),
    AdapterState.HOST: (AdapterState.COPYING, AdapterState.ABSENT),
    AdapterState.COPYING: (AdapterState.DEVICE, AdapterState.ABSENT),
    AdapterState.DEVICE: (AdapterState.HOST, AdapterState.ABSENT, AdapterState.STALE),
    AdapterState.STALE: (AdapterState.ABSENT,),
}
_TIERS: dict[AdapterState, Tier] = {
    AdapterState.HOST: "host",
    AdapterState.COPYING: "host",
    AdapterState.DEVICE: "device",
}
_WITH_ROWS = (AdapterState.DEVICE, AdapterState.STALE)
# A copy that takes longer than so many steps is waited for by the device.
_MAX_STEPS_COPYING = 2


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """A read that has ended: the state is HOST; or ABSENT, with the error if there was one, because it was stale, or
    because it had no users when its read was due."""

    digest: str
    error: Exception | None
    was_stale: bool


@dataclass(slots=True)
class Copying:
    """A copy to the device that is under way."""

    mark: CopyEvent
    began_seconds: float = 0.0
    num_bytes: int = 0
    num_steps: int = 0

    def has_ended(self, *, is_idle: bool) -> bool:
        """Whether it can be published, asked once a step: where nothing else could run, or it takes long, the device
        waits for it."""
        self.num_steps += 1
        return is_idle or self.num_steps >= _MAX_STEPS_COPYING or self.mark.is_completed()


class Residency:
    """See the module's docstring. `wake` is called when `settle` has something to take over.

    num_reads                 that have ended, one way or another
    evictions, loads, bytes   by the tier that was left or reached
    """

    def __init__(self, rows: Rows, host: HostSource, loader: Loader, wake: Callable[[], None]) -> None:
        self.rows = rows
        self.num_reads = 0
        self.evictions: Counter[Tier] = Counter()
        self.loaded_bytes: Counter[Tier] = Counter()
        self._load_seconds: deque[tuple[Tier, float]] = deque(maxlen=MAX_RECORDS)
        self._last_loads: dict[str, dict[Tier, tuple[float, float]]] = {}  # begin and end, of those not ABSENT
        self._moved: dict[str, Tier] = {}
        self._host = host
        self._loader = loader
        self._wake = wake
        self._states: dict[str, AdapterState] = {}  # without those that are ABSENT
        self._num_in: Counter[AdapterState] = Counter()
        self._held: dict[str, Any] = {}  # adapters of HOST held for users, and of COPYING
        self._copying: dict[str, Copying] = {}
        self._heads: dict[str, ScoreHead] = {}  # of adapters that have rows
        self._unended: set[str] = set()  # reads
        self._pinned: Counter[str] = Counter()
        self._operator_pins: frozenset[str] = frozenset()
        # (digest, copy, error, seconds); neither where it had no users when its read was due
        self._ended: queue.SimpleQueue[tuple[str, Any, Exception | None, float]] = queue.SimpleQueue()

    # ---- questions

    def state_of(self, digest: str) -> AdapterState:
        return self._states.get(digest, AdapterState.ABSENT)

    def tier_of(self, digest: str) -> Tier:
        """The fastest tier that has it."""
        state = self.state_of(digest)
        if state is AdapterState.ABSENT and self._host.is_kept(digest):
            return "host"
        return _TIERS.get(state, "disk")

    def known(self) -> Collection[str]:
        """All that are not ABSENT."""
        return self._states.keys()

    def num_in(self, state: AdapterState) -> int:
        """Adapters of a state other than ABSENT."""
        return self._num_in[state]

    def rows_of(self, digest: str) -> Mapping[str, int]:
        """Rows that an adapter in HOST takes, which is held."""
        rows: Mapping[str, int] = self._held[digest].rows
        return rows

    def head_of(self, digest: str) -> ScoreHead | None:
        """The score head of an adapter whose rows a step may use; None without one."""
        return self._heads.get(digest)

    def is_spare(self, digest: str) -> bool:
        """Whether it takes host memory that the tier does not count: it is being read, or held beside it."""
        return digest in self._unended or (digest in self._held and not self._host.is_kept(digest))

    def take_moved(self) -> dict[str, Tier]:
        """Digest to the fastest tier now, of those that have moved since the last call."""
        moved, self._moved = self._moved, {}
        return moved

    def take_load_seconds(self) -> tuple[tuple[Tier, float], ...]:
        """(tier reached, seconds) of each load since the last call."""
        seconds = tuple(self._load_seconds)
        self._load_seconds.clear()
        return seconds

    def loads_since(self, digest: str, came_seconds: float) -> Loads:
        """An adapter's loads that have ended since then."""
        last = self._last_loads.get(digest, {}).items()
        spans = ((tier, began - came_seconds, ended - came_seconds) for tier, (began, ended) in last)
        return tuple((tier, max(0.0, began), ended) for tier, began, ended in spans if ended > 0)

    # ---- disk -> host

    def read(self, digest: str, is_wanted: Callable[[], bool]) -> None:
        """ABSENT -> HOST, held, where the tier has it; else ABSENT -> READING.

        is_wanted  called when its read is due, in the loader's thread
        """
        kept = self._host.kept(digest)
        if kept is not None:
            self._to(digest, AdapterState.HOST)
            self._held[digest] = kept
            return
        self._to(digest, AdapterState.READING)
        self._unended.add(digest)
        try:
            self._loader.submit(partial(self._read, digest, is_wanted))
        except RuntimeError as error:  # no thread can be started
            self._ended.put((digest, None, error, 0.0))
            self._wake()

    def hold(self, digest: str) -> bool:
        """HOST: hold the copy for a user, whatever the tier does. False, and the state is ABSENT, if the tier has
        dropped it."""
        if digest not in self._held:
            kept = self._host.kept(digest)
            if kept is None:
                self._to(digest, AdapterState.ABSENT)
                return False
            self._held[digest] = kept
        return True

    def release(self, digest: str) -> None:
        """HOST: drop the hold of users. The adapter stays while the tier keeps it."""
        if self._held.pop(digest, None) is not None:
            self._after_host(digest)

    # ---- host -> device

    def copy(self, digest: str, *, may_evict: bool = True) -> bool:
        """HOST -> COPYING, and on to DEVICE where a copy takes no time. False if the rows in use leave no room; errors
        as `RowPool.load`."""
        began_seconds = time.perf_counter()
        host = self._held[digest]
        mark = self.rows.load(digest, host, may_evict=may_evict)
        self._take_evicted()
        if mark is None:
            return False
        self._to(digest, AdapterState.COPYING)
        self.rows.hold(digest, True)
        self._copying[digest] = Copying(mark, began_seconds, host.num_bytes)
        if mark.is_completed():
            self._publish(digest)
        else:
            self._wake()
        return True

    def pin(self, digest: str) -> None:
        """DEVICE: one more runs with it."""
        assert self.state_of(digest) is AdapterState.DEVICE, digest
        self._pinned[digest] += 1
        if self._pinned[digest] == 1:
            self.rows.pin(digest)

    def unpin(self, digest: str) -> bool:
        """One less; whether that was the last one."""
        self._pinned[digest] -= 1
        if self._pinned[digest]:
            return False
        del self._pinned[digest]
        self.rows.unpin(digest)
        self._end_stale(digest)
        return True

    def is_pinned(self, digest: str) -> bool:
        """Whether requests run with it."""
        return digest in self._pinned

    def fits_beside_operator_pins(self, rows: Mapping[str, int]) -> bool:
        """Whether the operator's adapters that are on the device would leave one of so many rows its room."""
        kept = [digest for digest in self._operator_pins if self.state_of(digest) is AdapterState.DEVICE]
        return self.rows.fits_beside(rows, kept, and_held=False)

    def set_operator_pins(self, digests: Collection[str]) -> None:
        """Keep the rows of these adapters, and of no others for an operator, from the time they are on the device."""
        before, self._operator_pins = self._operator_pins, frozenset(digests)
        for digest in before ^ self._operator_pins:
            if self.state_of(digest) is AdapterState.DEVICE:
                self.rows.hold(digest, digest in self._operator_pins)

    # ---- both, between steps

    def settle(self, *, is_idle: bool) -> list[ReadEnd]:
        """Take over the reads and copies that have ended. Never waits: where nothing else could run, or a copy takes
        long, the device does."""
        for digest, copying in list(self._copying.items()):
            if copying.has_ended(is_idle=is_idle):
                self._publish(digest)
        ends = []
        while not self._ended.empty():
            digest, host, error, seconds = self._ended.get()
            self.num_reads += 1
            ends.append(self._end_read(digest, host, error, seconds))
        self._take_evicted()
        return ends

    def evict(self, digest: str) -> None:
        """Forget an adapter whose files are gone or replaced: new requests use nothing of the old ones."""
        if self.state_of(digest) is AdapterState.READING:
            self._to(digest, AdapterState.STALE)
            return
        self._host.drop(digest)
        match self.state_of(digest):
            case AdapterState.HOST:
                self._held.pop(digest, None)
                self._to(digest, AdapterState.ABSENT)
            case AdapterState.COPYING:  # what comes late goes to rows that the next owner writes later
                del self._copying[digest], self._held[digest]
                self.rows.hold(digest, False)
                self.rows.drop(digest)
                self._to(digest, AdapterState.ABSENT)
            case AdapterState.DEVICE:
                self.rows.hold(digest, False)
                self._to(digest, AdapterState.STALE)
                self._end_stale(digest)

    def close(self) -> None:
        """End the loader after what it is reading now."""
        self._loader.close()

    def check_integrity(self) -> None:
        """States agree with rows, reads and copies; each lies where its state says. Notes first who has left the host
        tier, as `settle` does: the loader's reads put others out of it."""
        self._take_evicted()
        self.rows.check_integrity()
        counts = Counter(self._states.values())
        assert all(self._num_in[state] == counts[state] for state in AdapterState if state is not AdapterState.ABSENT)
        with_rows = set(self.rows.resident())
        for digest, state in self._states.items():
            has_rows = state in (AdapterState.COPYING, AdapterState.DEVICE) or (
                state is AdapterState.STALE and digest not in self._unended
            )
            assert has_rows == (digest in with_rows), f"{digest}: {state}, and rows are otherwise"
            assert (digest in self._copying) == (state is AdapterState.COPYING), f"{digest}: {state}, and copied"
            assert (digest in self._unended) == (
                state is AdapterState.READING or (state is AdapterState.STALE and not has_rows)
            )
            if state is AdapterState.HOST:
                assert digest in self._held or self._stays(digest), f"{digest}: in no host memory"
        assert self._heads.keys() <= with_rows, "heads of adapters without rows"
        assert with_rows <= self._states.keys(), "rows of adapters that are not there"
        assert all(self.state_of(digest) in (AdapterState.HOST, AdapterState.COPYING) for digest in self._held)
        assert all(self.state_of(digest) in (AdapterState.DEVICE, AdapterState.STALE) for digest in self._pinned)

    # ---- inner parts

    def _to(self, digest: str, state: AdapterState) -> None:
        before = self.state_of(digest)
        assert state in _NEXT[before], f"{digest}: {before} -> {state}"
        self._num_in[before] -= 1
        self._num_in[state] += 1
        if before in _WITH_ROWS and state not in _WITH_ROWS:
            self._heads.pop(digest, None)
        if state is AdapterState.ABSENT:
            del self._states[digest]
            self._last_loads.pop(digest, None)
        else:
            self._states[digest] = state
        tier = _TIERS.get(state, "disk")
        if tier != _TIERS.get(before, "disk"):
            self._moved[digest] = tier

    def _read(self, digest: str, is_wanted: Callable[[], bool]) -> None:
        """By the loader. Whatever goes wrong is this adapter's failure, never the engine's."""
        began_seconds = time.perf_counter()
        try:
            # Its users may have left while others were read.
            host = self._host.get(digest) if is_wanted() else None
            self._ended.put((digest, host, None, time.perf_counter() - began_seconds))
        except Exception as error:  # kept in no local that outlives this clause: its frames hold what was read so far
            self._ended.put((digest, None, error, 0.0))
        self._wake()

    def _end_read(self, digest: str, host: Any, error: Exception | None, seconds: float) -> ReadEnd:
        self._unended.remove(digest)
        if self.state_of(digest) is AdapterState.STALE:
            for part, _ in parts_of(digest):  # any of them may be the one whose files were replaced
                self._host.drop(part)
                if self.state_of(part) is AdapterState.HOST and part not in self._held:
                    self._after_host(part)
            self._to(digest, AdapterState.ABSENT)
            return ReadEnd(digest, error, was_stale=True)
        if host is None:
            self._to(digest, AdapterState.ABSENT)
        else:
            self._to(digest, AdapterState.HOST)
            self._held[digest] = host
            self._note_load(digest, "host", seconds)
            self.loaded_bytes["host"] += host.num_bytes
        return ReadEnd(digest, error, was_stale=False)

    def _publish(self, digest: str) -> None:
        """COPYING -> DEVICE"""
        copying = self._copying.pop(digest)
        self.rows.publish(copying.mark)
        self._to(digest, AdapterState.DEVICE)
        self.rows.hold(digest, digest in self._operator_pins)
        head = self._held.pop(digest).score_head
        if head is not None:
            self._heads[digest] = head
        self._note_load(digest, "device", time.perf_counter() - copying.began_seconds)
        self.loaded_bytes["device"] += copying.num_bytes

    def _note_load(self, digest: str, tier: Tier, seconds: float) -> None:
        """A load to this tier has ended now."""
        self._load_seconds.append((tier, seconds))
        now = time.perf_counter()
        self._last_loads.setdefault(digest, {})[tier] = now - seconds, now

    def _take_evicted(self) -> None:
        """Update the states of adapters that were evicted, on the device and in host memory."""
        for digest in self.rows.take_evicted():
            self.evictions["device"] += 1
            self._to(digest, AdapterState.HOST if self._stays(digest) else AdapterState.ABSENT)
        for digest in self._host.take_evicted():
            self.evictions["host"] += 1
            if self.state_of(digest) is AdapterState.HOST and digest not in self._held:
                self._after_host(digest)

    def _stays(self, digest: str) -> bool:
        """Whether the tier keeps it by itself."""
        return not is_sum(digest) and self._host.is_kept(digest)

    def _after_host(self, digest: str) -> None:
        if not self._stays(digest):
            self._to(digest, AdapterState.ABSENT)

    def _end_stale(self, digest: str) -> None:
        """STALE -> ABSENT, once no request runs with it and no read of it is under way."""
        if self.state_of(digest) is AdapterState.STALE and digest not in self._pinned and digest not in self._unended:
            self.rows.drop(digest)
            self._to(digest, AdapterState.ABSENT)
