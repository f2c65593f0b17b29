"""The requests of one tenant for one adapter, and the order of those that wait; see `fair_queue.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from service.engine.sequences.sequence import Sequence


def age(sequence: Sequence) -> int:
    """Its arrival number: older ones have lower ones."""
    return sequence.key


@dataclass(slots=True, eq=False)
class TenantFlows:
    """flows are the active ones, by adapter; deficit in tokens.

    is_owed  its next slot is its own until a request of it has ended, however small its weight is
    """

    weight: float
    flows: dict[str | None, Flow] = field(default_factory=dict)
    num_running: int = 0
    deficit: float = 0.0
    num_tokens: int = 0  # of the present step
    is_owed: bool = False

    def places_for_weight(self, num_more: int = 0) -> float:
        """Running requests, and so many more, in units of its weight; none for the one that it is owed."""
        num_running = self.num_running + num_more
        return 0.0 if self.is_owed and num_running == 1 else num_running / self.weight


@dataclass(slots=True, eq=False)
class Flow:
    """Requests of one adapter of one tenant, by age; deficit in tokens.

    steps_waiting_for_rows  that its oldest waiting request was passed over in, because the adapter was not read or
                            found no rows, since one of its requests last ran
    """

    tenant: TenantFlows
    adapter: str | None
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    steps_waiting_for_rows: int = 0
    deficit: float = 0.0
    num_tokens: int = 0  # of the present step


def by_tenant(flows: Iterable[Flow]) -> Iterable[list[tuple[int, float, int, Flow]]]:
    """The sort keys of these flows, in a list for each tenant."""
    turns: dict[int, list[tuple[int, float, int, Flow]]] = {}
    for flow in flows:
        turns.setdefault(id(flow.tenant), []).append(turn_of(flow))
    return turns.values()


def turn_of(flow: Flow) -> tuple[int, float, int, Flow]:
    """Sort key of a tenant's flows that wait for a slot; no two are equal before the last entry."""
    return len(flow.running), -flow.deficit, flow.waiting[0].key, flow
