"""Division of the device's adapter rows when requests need more rows than there are.

Running requests pin their adapters' rows; the row pool evicts adapters that no request runs with. An adapter that
has been read and finds no room gets it in one of two ways:

- From another tenant whose adapters in use take more rows for its weight, even after it has given one up, than those of
  the newcomer's tenant would with the newcomer's. All that run with such an adapter are preempted, those adapters first
  that fewest run with. Between adapters of one tenant nobody is: each that is in use has as good a right to its rows,
  and changing them for one another costs a computation of all that ran with them.
- By a *reservation*, as batch systems with backfilling have it. Of the requests that were passed over too often the
  oldest reserves the rows that those in use give back first; then younger requests may join only if that does not put
  off the moment: see `Reservation`. Other tenants' are not bound by it, unless there is no room beside what they have:
  what they take beyond their part it gets back from them.

Cost per step: O(flows), and O(running x log adapters in use) while there is a reservation or somebody asks for rows of
other tenants.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, abc
from collections.abc import Collection
from dataclasses import dataclass

from service.engine.loras.prefetch import AdapterLoads
from service.engine.scheduling.fair_queue import FairQueue, TenantFlows, age
from service.engine.sequences.sequence import Sequence


def _tokens_to_come(sequence: Sequence) -> int:
    """The most that are still to be computed for it, of its prompt and of its answer; it may end sooner."""
    return sequence.max_total - sequence.num_computed


@dataclass(frozen=True, slots=True)
class Reservation:
    """Requests that may still join while `holder`, the oldest that has waited too long for rows, lacks them.

    tenant        that it binds; None: all
    lasting       adapters that all may join: their rows are not what it waits for
    until_tokens  any adapter may be joined by requests to which fewer tokens may come

    If those that run end as late as they may, their adapters leave one by one, and after a certain one there is room.
    Those that are in use for longer may be joined by all; any other, whether it runs or not, only by requests that end
    before that certain one. So the end that is waited for never moves away, and comes nearer with its tokens, under any
    load; only older requests, finitely many, can put it off.
    """

    holder: Sequence
    tenant: str | None
    lasting: frozenset[str]
    until_tokens: int

    def lets_in(self, sequence: Sequence) -> bool:
        return (
            sequence.adapter is None
            or sequence.key < self.holder.key
            or self.tenant not in (None, sequence.request.tenant)
            or sequence.adapter in self.lasting
            or _tokens_to_come(sequence) < self.until_tokens
        )


class RowReservations:
    """See the module's docstring. Decides, and changes neither rows nor requests."""

    def __init__(self, queue: FairQueue, adapter_loads: AdapterLoads, *, max_steps: int) -> None:
        self._queue = queue
        self._adapter_loads = adapter_loads
        self._max_steps = max_steps
        # The adapter of the oldest that waits too long, whether it has been read or not.
        self.first: str | None = None
        self._reservation: Reservation | None = None

    def begin_step(self, running: abc.Sequence[Sequence]) -> None:
        """Find the oldest request that has waited too long, and reserve rows for it."""
        late = (flow.waiting[0] for flow in self._queue.flows() if flow.steps_waiting_for_rows >= self._max_steps)
        holder = min(late, key=age, default=None)
        self.first, self._reservation = None, None
        if holder is not None and holder.adapter is not None:
            self.first = holder.adapter
            if self._adapter_loads.is_read(holder.adapter):
                self._reservation = self._reserve(holder, holder.adapter, running)

    def lets_in(self, sequence: Sequence) -> bool:
        """Whether the sequence delays no request with reserved rows."""
        return self._reservation is None or self._reservation.lets_in(sequence)

    def yielding_to(self, newcomer: Sequence) -> Collection[str]:
        """Adapters of other tenants that would make room for the newcomer's; none if they cannot."""
        adapter, tenant = newcomer.adapter, self._queue.flow_of(newcomer).tenant
        assert adapter is not None, "the base takes no rows"
        others = [one for one in self._queue.tenants if one is not tenant and one.num_running]
        if not others:
            return ()
        limit = (self._num_rows(tenant) + self._adapter_loads.num_rows(adapter)) / tenant.weight
        users = Counter(flow.adapter for flow in self._queue.flows() if flow.running and flow.adapter is not None)
        staying, yielding = set(users), list[str]()
        for one in sorted(others, key=lambda one: -self._num_rows(one) / one.weight):
            num_rows = self._num_rows(one)
            for flow in sorted(one.flows.values(), key=lambda flow: len(flow.running)):
                given = flow.adapter
                if given is None or users[given] != 1 or not flow.running:
                    continue
                after = num_rows - self._adapter_loads.num_rows(given)
                if after / one.weight < limit:
                    continue
                num_rows = after
                staying.remove(given)
                yielding.append(given)
                if self._adapter_loads.fits_beside(adapter, staying):
                    return self._needed(adapter, yielding, staying)
        return ()

    # ---- inner parts

    def _reserve(self, holder: Sequence, adapter: str, running: abc.Sequence[Sequence]) -> Reservation:
        tokens_left: dict[str, int] = {}
        for one in running:
            if one.adapter is not None:
                tokens_left[one.adapter] = max(_tokens_to_come(one), tokens_left.get(one.adapter, 0))
        leaving = sorted(tokens_left, key=tokens_left.__getitem__)
        num_ends = bisect_left(
            range(len(leaving)), True, key=lambda num: self._adapter_loads.fits_beside(adapter, leaving[num:])
        )
        until_tokens = tokens_left[leaving[num_ends - 1]] if num_ends else 0
        stays = (one for one in leaving[num_ends:] if tokens_left[one] > until_tokens)
        tenant = holder.request.tenant
        others = {one.adapter for one in running if one.adapter is not None and one.request.tenant != tenant}
        binds = tenant if self._adapter_loads.fits_beside(adapter, others) else None
        return Reservation(holder, binds, frozenset((adapter, *stays)), until_tokens)

    def _needed(self, adapter: str, yielding: list[str], staying: set[str]) -> set[str]:
        """Those of `yielding` without whom it does not fit beside `staying`."""
        needed = set(yielding)
        for one in reversed(yielding):
            if self._adapter_loads.fits_beside(adapter, staying | {one}):
                staying.add(one)
                needed.remove(one)
        return needed

    def _num_rows(self, tenant: TenantFlows) -> int:
        """Rows that a tenant's adapters in use take."""
        return sum(
            self._adapter_loads.num_rows(flow.adapter)
            for flow in tenant.flows.values()
            if flow.running and flow.adapter is not None
        )
