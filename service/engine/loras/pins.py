"""The operator's pins: adapters held on the device without requests.

While a request waits or runs whose adapter cannot fit beside them, they are adapters like any others: no request may
wait forever for an operator's pins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from service.engine.loras.demand import AdapterUsers
from service.engine.loras.residency import AdapterState, Residency


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
