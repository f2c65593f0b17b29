"""Demand for adapters: the requests that wait for each or run with it, and whether it has room beside those in use.

Room is computed anew for an adapter only when rows have come into use, or out of it, since it was last asked for.

Pins are the operator's: adapters held on the device without requests. While a request waits or runs whose adapter
cannot fit beside them, they are adapters like any others: no request may wait forever for a pin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from service.engine.loras.interfaces import Rows
from service.engine.loras.residency import AdapterState, Residency

_UNKNOWN = (-1, False)


@dataclass(slots=True)
class Wanted:
    """An adapter that has users.

    rows       rows that it takes on the device, by its users' requests until it has been read
    num_pins   users that run
    num_reads  reads begun for its users; an adapter that was read and dropped is read again only when it can be used
    num_misses reads that found no files
    room       whether it has room, and the number of pin changes at which that was found
    """

    rows: Mapping[str, int] = field(default_factory=dict)
    num_users: int = 0
    num_pins: int = 0
    num_reads: int = 0
    num_misses: int = 0
    room: tuple[int, bool] = _UNKNOWN

    def is_of(self, rows: Mapping[str, int]) -> None:
        """Set the rows of an adapter that has been read."""
        self.rows, self.room = rows, _UNKNOWN

    def forget_reads(self) -> None:
        """Reset the counts, which were of other files."""
        self.num_reads = self.num_misses = 0


class AdapterUsers:
    """The adapters that have users, by digest.

    rows             None where LoRA is off
    num_pin_changes  how often rows have come into use, or out of it; counted up by the code that does it
    """

    def __init__(self, rows: Rows | None) -> None:
        self.num_pin_changes = 0
        self._rows = rows
        self._wanted: dict[str, Wanted] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __contains__(self, digest: str) -> bool:
        return digest in self._wanted

    def __getitem__(self, digest: str) -> Wanted:
        return self._wanted[digest]

    def get(self, digest: str) -> Wanted | None:
        """The adapter's demand; None if it has no users."""
        return self._wanted.get(digest)

    def enter(self, digest: str, rows: Mapping[str, int]) -> Wanted:
        """Add a user, by whose request the adapter takes so many rows."""
        wanted = self._wanted.setdefault(digest, Wanted())
        if not wanted.rows:
            wanted.rows = rows
        wanted.num_users += 1
        return wanted

    def leave(self, digest: str) -> bool:
        """Remove a user that holds no pin; whether it was the last one."""
        wanted = self._wanted[digest]
        wanted.num_users -= 1
        assert wanted.num_pins <= wanted.num_users, "a request left with its pin"
        if wanted.num_users:
            return False
        del self._wanted[digest]
        return True

    def is_in_use(self, digest: str) -> bool:
        """Whether requests run with it, so that its rows are pinned."""
        wanted = self._wanted.get(digest)
        return wanted is not None and wanted.num_pins > 0

    def has_room(self, digest: str) -> bool:
        """Whether the rows in use leave it its own."""
        assert self._rows is not None
        wanted = self._wanted[digest]
        if wanted.room[0] != self.num_pin_changes:
            wanted.room = (self.num_pin_changes, self._rows.has_room(wanted.rows))
        return wanted.room[1]

    def num_rows(self, digest: str) -> int:
        """Rows that an adapter takes on the device, in all groups together."""
        return sum(self._wanted[digest].rows.values())

    def fits_beside(self, digest: str, others: Collection[str]) -> bool:
        """Whether it would have room if no other adapters than these, which are resident, were in use."""
        assert self._rows is not None
        return self._rows.fits_beside(self._wanted[digest].rows, others)

    def check_integrity(self) -> None:
        """Pins never exceed users, nothing is held for nobody, room is what it would be found to be."""
        for digest, wanted in self._wanted.items():
            assert 0 <= wanted.num_pins <= wanted.num_users, f"{digest}: more pins than users"
            assert wanted.num_users, f"{digest}: kept for nobody"
            assert (
                wanted.room[0] != self.num_pin_changes
                or self._rows is None
                or (wanted.room[1] == self._rows.has_room(wanted.rows))
            ), f"{digest}: room is wrong"


class OperatorPins:
    """By digest. Without residency, where LoRA is off, there are none."""

    def __init__(self, residency: Residency | None, users: AdapterUsers) -> None:
        self._residency = residency
        self._users = users
        self._tried: dict[str, int] = {}  # each, and the pin changes at which it was last tried to bring it
        self._yield_to: str | None = None  # which has users, and no room beside them

    def __contains__(self, digest: str) -> bool:
        return digest in self._tried

    def pin(self, digests: Collection[str]) -> None:
        """Pin these adapters, and no others."""
        if self._residency is None:
            return
        self._yield_to = None
        self._tried = {digest: self._tried.get(digest, -1) for digest in digests}
        self._residency.set_operator_pins(digests)
        self._users.num_pin_changes += 1

    def give_up(self, digest: str) -> None:
        """Stop loading an adapter that cannot be read until it is pinned again. Unknown digests are ignored."""
        self._tried.pop(digest, None)

    def yield_to_some(self, wanted: Mapping[str, bool]) -> None:
        """Suspend all pins if one of these has no room beside them, until it has no users.

        wanted  adapters that requests wait for, and whether one could join now with it
        """
        if self._residency is None or not self._tried or self._yield_to is not None:
            return
        for digest, could_join in wanted.items():
            if could_join or self._residency.state_of(digest) in (AdapterState.COPYING, AdapterState.DEVICE):
                continue
            if not self._residency.fits_beside_operator_pins(self._users[digest].rows):
                self._yield_to = digest
                self._residency.set_operator_pins(())
                self._users.num_pin_changes += 1
                return

    def users_left(self, digest: str) -> None:
        """An adapter has no users any more."""
        if digest == self._yield_to:
            self.pin(list(self._tried))

    def due(self) -> Iterator[str]:
        """Those that are to be brought and may have room by now, each once until that may be so again."""
        residency = self._residency
        if residency is None or self._yield_to is not None:
            return
        for digest, tried in self._tried.items():
            if tried != self._users.num_pin_changes and residency.state_of(digest) in (
                AdapterState.ABSENT,
                AdapterState.HOST,
            ):
                self._tried[digest] = self._users.num_pin_changes
                yield digest
