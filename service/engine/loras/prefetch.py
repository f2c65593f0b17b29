"""Prefetch of adapters from disk and host memory for the requests that name them; no step waits for the disk.

At most `max_loads_ahead` adapters are read ahead. A read begins when its request arrives, for all but the last of them;
the last one, and those that become free, go to requests in the order of `fair_queue.py`. An adapter in the host tier is
not read, does not count, and is copied to the device in the next step. Without a request an adapter is read after a
hint, or because an operator pinned it. A hint evicts no rows and is read when no request's adapter is: each upload is
one, and a burst of uploads must not evict or delay adapters in demand.

`residency.py` knows where adapters are, `demand.py` their users and the operator's pins. This module holds
the hints, and the errors of reads that failed.

Cost per step: a queue look-up, and a few dictionary look-ups per waiting request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from adapters.errors import AdapterError, NotFound, RowsExceeded, Unsupported
from adapters.memory.slab import ScoreHead
from adapters.sums import parts_of
from service.engine.ipc.messages import Loads, Tier
from service.engine.loras.demand import AdapterUsers, OperatorPins, Wanted
from service.engine.loras.interfaces import HostSource, Loader, Rows
from service.engine.loras.residency import AdapterState, ReadEnd, Residency

log = logging.getLogger(__name__)

# Errors of the adapter itself, as an upload of it would report; all others are the server's fault.
_CLIENT_FAULTS = (RowsExceeded, Unsupported)
# A read that finds no files is tried again: a user's lease keeps them, so they are back since, deleted and uploaded
# again while nobody used them.
_MOST_MISSES = 2

LORA_IS_OFF = "LoRA is off: this server was started with adapter_row_bytes = 0."


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter cannot be served, one sentence, and whether the adapter itself is to blame."""

    error: str
    client_fault: bool = False


class AdapterLoads:
    """See the module's docstring. `wake` is called when there is news for `settle_loads`, mostly by the loader, which
    this closes.

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
        self.residency = None if rows is None or host is None else Residency(rows, host, loader, wake)
        self.num_hits: Counter[Tier] = Counter()  # requests, by where their adapter was when they came
        self._loader = loader
        self._max_loads_ahead = max_loads_ahead
        self._wake = wake
        self._users = AdapterUsers(rows)
        self._hints: dict[str, None] = {}  # not begun yet, in the order of their arrival
        self._hinted: str | None = None  # being read ahead of any request
        self._pins = OperatorPins(self.residency, self._users)
        self._is_short_of_loads = False  # a request that could run was left unread in this step
        self._failures: dict[str, Failure] = {}

    @property
    def num_wanted(self) -> int:
        """Adapters that have users, or are being read."""
        reading = 0 if self.residency is None else self.residency.num_in(AdapterState.READING)
        return len(self._users) + reading

    @property
    def num_reads(self) -> int:
        """Reads from disk that have ended, well or not."""
        return 0 if self.residency is None else self.residency.num_reads

    def head_of(self, digest: str) -> ScoreHead | None:
        """The score head of an adapter that runs; None without one."""
        return None if self.residency is None else self.residency.head_of(digest)

    def loads_since(self, digest: str, came_seconds: float) -> Loads:
        """See `Residency.loads_since`; none where LoRA is off."""
        return () if self.residency is None else self.residency.loads_since(digest, came_seconds)

    # ---- users

    def enter(self, digest: str, rows: Mapping[str, int]) -> Tier:
        """Add a request for the adapter, which takes so many rows, and begin to read it if allowed. Returns the tier
        that held it."""
        wanted = self._users.enter(digest, rows)
        residency = self.residency
        if residency is None:
            return "disk"
        tier = residency.tier_of(digest)
        self.num_hits[tier] += 1
        if residency.state_of(digest) is AdapterState.HOST:
            if residency.hold(digest):
                self._check_size(digest, wanted)
                return tier
            tier = "disk"
        if residency.state_of(digest) is AdapterState.ABSENT and (tier == "host" or self._num_loads_left(None) > 1):
            self._read(digest, wanted)
        return tier

    def leave(self, digest: str) -> None:
        """Remove a request that is over and holds no pin."""
        if self._users.leave(digest):
            self._pins.users_left(digest)
            if self.residency is not None and self.residency.state_of(digest) is AdapterState.HOST:
                self.residency.release(digest)

    def hint(self, digest: str) -> None:
        """Bring it to the host tier, and to the device if rows are free without an eviction, although no request has
        come yet; see `follow_hints`."""
        if self.residency is not None:
            self._hints[digest] = None

    def pin(self, digests: Collection[str]) -> None:
        """See `OperatorPins.pin`."""
        self._pins.pin(digests)

    def evict(self, digest: str) -> None:
        """Forget an adapter whose files are gone or replaced, and sums with it, on the device and in host memory, as
        soon as no request runs with it. Requests that still wait for it wait until it has been read again."""
        if self.residency is None:
            return
        self._hints.pop(digest, None)
        known = (*self._users, *self.residency.known())
        for one in {digest, *(one for one in known if digest in dict(parts_of(one)))}:
            self._failures.pop(one, None)  # of the old files; its users have not been failed yet
            self.residency.evict(one)
            wanted = self._users.get(one)
            if wanted is not None:
                wanted.forget_reads()
        self._users.num_pin_changes += 1

    # ---- the scheduler's questions

    def prefetch(self, wanted: Mapping[str, bool], first: str | None) -> None:
        """Start reading, as far as `max_loads_ahead` allows, what requests wait for.

        wanted  adapters in the order in which requests are to have them, and whether one could join now with it
        first   the adapter that has waited too long: it is read whatever the others do, and its copy stays

        A request that could run now does not wait behind those that cannot: the last of these loses its host copy, and
        is read again when it could run. Adapters of those that cannot are read once, within `max_loads_ahead`, so that
        they need not wait for the disk later.
        """
        residency = self.residency
        if residency is None or not wanted:
            return
        self._pins.yield_to_some(wanted)
        loads_left = self._num_loads_left(first)
        useful, others, spare = [], [], []
        for digest, could_join in wanted.items():
            is_useful = digest == first or could_join
            state = residency.state_of(digest)
            if state is AdapterState.HOST and residency.hold(digest):
                if not is_useful and residency.is_spare(digest):
                    spare.append(digest)
            elif residency.state_of(digest) is AdapterState.ABSENT:
                if residency.tier_of(digest) == "host":
                    self._read(digest, self._users[digest])
                elif is_useful:
                    useful.append(digest)
                elif not self._users[digest].num_reads:
                    others.append(digest)
        for digest in useful:
            if digest != first:
                while loads_left <= 0 and spare:
                    residency.release(spare.pop())
                    loads_left += 1
                if loads_left <= 0:
                    self._is_short_of_loads = True
                    continue
                loads_left -= 1
            self._read(digest, self._users[digest])
        for digest in others[: max(loads_left, 0)]:
            self._read(digest, self._users[digest])

    def bring(self, digest: str) -> bool:
        """Whether it is on the device, or has come there now; else its copy may have begun, which a later step will
        find there."""
        assert self.residency is not None
        if self.residency.state_of(digest) is AdapterState.HOST:
            self._copy(digest)
        return self.is_on_device(digest)

    def acquire(self, digest: str) -> None:
        """Pin the rows of an adapter on the device for one more running request."""
        assert self.residency is not None
        wanted = self._users[digest]
        self._users.num_pin_changes += not self.residency.is_pinned(digest)
        self.residency.pin(digest)
        wanted.num_pins += 1

    def release(self, digest: str) -> None:
        """One running request less (ended or preempted)."""
        assert self.residency is not None
        self._users[digest].num_pins -= 1
        self._users.num_pin_changes += self.residency.unpin(digest)

    def is_on_device(self, digest: str) -> bool:
        """Whether `acquire` may be called."""
        return self.residency is not None and self.residency.state_of(digest) is AdapterState.DEVICE

    def is_read(self, digest: str) -> bool:
        """Whether nothing but rows can keep it from running."""
        assert self.residency is not None
        return self.residency.state_of(digest) in (AdapterState.HOST, AdapterState.DEVICE)

    def is_in_use(self, digest: str) -> bool:
        """Whether requests run with it, so that its rows are pinned."""
        return self._users.is_in_use(digest)

    def can_bring(self, digest: str) -> bool:
        """Whether it is on the device or on its way there, or has been read and has room there."""
        assert self.residency is not None
        state = self.residency.state_of(digest)
        return state in (AdapterState.DEVICE, AdapterState.COPYING) or (
            state is AdapterState.HOST and self.has_room(digest)
        )

    def has_room(self, digest: str) -> bool:
        """Whether the rows in use leave it its own."""
        return self._users.has_room(digest)

    def num_rows(self, digest: str) -> int:
        """Rows that an adapter takes on the device, in all groups together."""
        return self._users.num_rows(digest)

    def fits_beside(self, digest: str, others: Collection[str]) -> bool:
        """Whether it would have room if no other adapters than these, which are resident, were in use."""
        return self._users.fits_beside(digest, others)

    # ---- between steps

    def settle_loads(self, *, is_idle: bool) -> None:
        """Take over what the loader and the device have finished. Never waits.

        is_idle  nothing runs that could go on meanwhile
        """
        if self.residency is None:
            return
        num_copying = self.residency.num_in(AdapterState.COPYING)
        for end in self.residency.settle(is_idle=is_idle):
            self._settle_read(end)
        self._users.num_pin_changes += num_copying > 0  # what is on its way counts as in use

    def follow_hints(self) -> None:
        """Start reading the next hinted adapter, unless one is being read. Called after `prefetch`."""
        is_short, self._is_short_of_loads = self._is_short_of_loads, False
        residency = self.residency
        if residency is None:
            return
        for digest in self._pins.due():
            self._hints.setdefault(digest)
        while self._hints and not is_short and not residency.num_in(AdapterState.READING):
            digest = next(iter(self._hints))
            del self._hints[digest]
            if digest in self._users or residency.state_of(digest) not in (AdapterState.ABSENT, AdapterState.HOST):
                continue
            if residency.state_of(digest) is AdapterState.HOST and digest not in self._pins:
                continue
            self._hinted = digest
            if residency.state_of(digest) is AdapterState.ABSENT:
                residency.read(digest, lambda: True)
            if residency.state_of(digest) is AdapterState.HOST:
                self._bring_hinted(digest)
                return

    def take_failures(self) -> dict[str, Failure]:
        """Adapters whose users cannot be served, and why."""
        failures, self._failures = self._failures, {}
        return failures

    def check_integrity(self) -> None:
        """Pins never exceed users, pinned adapters are resident, nothing is held without a user."""
        self._users.check_integrity()
        for digest in self._users:
            if self._users.is_in_use(digest):
                assert self.residency is not None
                assert self.residency.is_pinned(digest), f"{digest}: a running sequence has lost its rows"
        if self.residency is not None:
            self.residency.check_integrity()

    def close(self) -> None:
        """End the loader after what it is reading now."""
        self._loader.close()

    # ---- inner parts

    def _num_loads_left(self, first: str | None) -> int:
        """Adapters that may be read for requests beside those that are, or that wait in memory beside the tier."""
        residency = self.residency
        assert residency is not None
        return self._max_loads_ahead - sum(residency.is_spare(digest) for digest in self._users if digest != first)

    def _read(self, digest: str, wanted: Wanted) -> None:
        """ABSENT -> HOST or READING."""
        assert self.residency is not None
        wanted.num_reads += 1
        self.residency.read(digest, lambda: digest in self._users or self._hinted == digest)
        if self.residency.state_of(digest) is AdapterState.HOST:
            self._check_size(digest, wanted)

    def _settle_read(self, end: ReadEnd) -> None:
        assert self.residency is not None
        digest, error, wanted = end.digest, end.error, self._users.get(end.digest)
        was_hinted = self._hinted == digest
        if was_hinted:
            self._hinted = None
        if end.was_stale and wanted is not None:
            wanted.num_reads = 0  # of the old files, whatever came of it
            return
        if isinstance(error, NotFound) and wanted is not None:
            wanted.num_misses += 1
            if wanted.num_misses < _MOST_MISSES:
                self._read(digest, wanted)
                return
        if error is not None:
            if wanted is None and isinstance(error, NotFound):
                log.info("adapter %s has left the store, and nobody waits for it", digest)
            else:
                log.warning("adapter %s could not be read", digest, exc_info=error)
            self._pins.give_up(digest)
            self._fail(digest, _unread(digest, error))
        elif self.residency.state_of(digest) is not AdapterState.HOST:
            if wanted is not None:  # it had no users when its read began
                wanted.num_reads = 0
        elif wanted is not None:
            wanted.num_misses = 0
            self._check_size(digest, wanted)
        elif was_hinted:
            self._bring_hinted(digest)
        else:
            self.residency.release(digest)

    def _check_size(self, digest: str, wanted: Wanted) -> None:
        """Leave an adapter that was read to wait for its rows; fail its users if its size changed and it
        cannot fit."""
        assert self.residency is not None and self.rows is not None
        rows = self.residency.rows_of(digest)
        try:
            self.rows.check_size(rows)
        except RowsExceeded as error:
            self._fail(digest, Failure(str(error), client_fault=True))
        else:
            wanted.is_of(rows)

    def _copy(self, digest: str, *, may_evict: bool = True) -> None:
        """HOST -> device."""
        assert self.residency is not None
        try:
            if self.residency.hold(digest) and self.residency.copy(digest, may_evict=may_evict):
                self._users.num_pin_changes += 1  # on its way it is in use
        except AdapterError as error:
            self._fail(digest, Failure(str(error), isinstance(error, _CLIENT_FAULTS)))

    def _bring_hinted(self, digest: str) -> None:
        """Copy an adapter without users to the device; only the operator's evict rows of others."""
        assert self.residency is not None
        self._hinted = None
        self._copy(digest, may_evict=digest in self._pins)
        if self.residency.state_of(digest) is AdapterState.HOST:
            self.residency.release(digest)

    def _fail(self, digest: str, failure: Failure) -> None:
        assert self.residency is not None
        if self.residency.state_of(digest) is AdapterState.HOST:
            self.residency.release(digest)
        if digest in self._users:
            self._failures[digest] = failure
            self._wake()  # there may be no step to come that would answer them


def _unread(digest: str, error: Exception) -> Failure:
    """The error for the client: an operating system's error names a path of this machine; only its reason is shown."""
    reason = (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
    return Failure(f"Adapter {digest} could not be read: {reason}", isinstance(error, _CLIENT_FAULTS))
