"""Fair shares: an engine's slots, tokens and rows are divided between tenants by their weights, and a tenant's part
equally between its adapters, of which the base model counts as one.

A *flow* holds the requests of one tenant for one adapter, in the order of their arrival; some of them run. A tenant or
a flow is *active* while it has requests. Resources are divided between the active ones that can use them: a lone tenant
has everything, and nothing stands idle that somebody could use.

Slots, and the blocks behind them. The next slot goes to the tenant with the fewest running requests for its weight,
within it to the flow with the fewest, and within that to the oldest request. If no slot is free, or too few blocks are,
a running request is preempted: the youngest of the largest flow of the tenant with the most for its weight, provided
that this tenant has more than the newcomer's will have with one more; else the same holds between the flows of the
newcomer's own tenant. After such an exchange the opposite one is not due, so that no two requests swap back and forth.
Where running requests run out of blocks, they are preempted in the same order.

Where a tenant's weight is more times another's than there are slots, this rule alone would never admit the other one.
It is *owed* a slot when it runs nothing, its deficit would pay for its next request or is at its maximum, and some
tenant runs less for its weight than one request is for the other's. Then one of its requests counts as none until one
has ended. As many tenants at a time are owed a slot as there are slots for the weights of all that run nothing else,
since their requests may be longer than their deficits paid for.

Tokens. Each running request that decodes gets one token of each step. The others go to prompts, largest *deficit*
first; among equal numbers of running requests the deficit also decides about slots. A deficit is the tokens of past
steps that were due to a tenant (in proportion to weights) or a flow (equal parts of its tenant's) less those it got. It
is bounded by the tokens of one full step, either way: a tenant that asks for little builds up no claim, and one that
uses idle tokens no debt. Only the deficit of a tenant that runs nothing goes on growing until it runs, so that among
these the one that has waited longest is first. A tenant or flow that becomes active begins with none.

Rows. See `row_reservations.py`.

Preemption. A preempted request frees slot, blocks and pins at once, between two launches, as if blocks had run out; see
`engine.py` for why a step in flight is not harmed, and why the request joins again only when its token in flight is
known. It keeps its tokens and its age: its keys and values are computed anew from all of them, as a prompt is, and no
token is sent twice or changes. To a captured step a newcomer in its slot is a sequence like any other.

Nobody starves. Let C be the tokens of a full step, T those of the longest request, prompt and answer, and n the number
of flows, all tenants being equal. The oldest request of a flow of which nothing runs is passed only by flows with a
higher deficit; one that gets 2 C + T tokens meanwhile has none, and one that became active later has a lower one from
the beginning. So it has a slot when at most n (2 C + T) tokens were computed, beside those of requests that run
already. Requests of one flow are served in order.

Who owns: the scheduler, which moves requests between the lists, owns the sequences and what they hold; the queue owns
lists and deficits alone. Cost per step: O(active tenants + flows + chunks) for deficits, O(1) while there is but one
flow; and O(log flows) for each request that joins.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from service.engine.sequences.sequence import ScheduledChunk, Sequence


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

    def slots_per_weight(self, num_more: int = 0) -> float:
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


class FairQueue:
    """See the module's docstring."""

    def __init__(self, token_budget: int) -> None:
        self.num_waiting = 0
        self._max_deficit_tokens = float(token_budget)
        self._tenants: dict[str, TenantFlows] = {}
        self._num_flows = 0

    # ---- who waits and who runs

    def add(self, sequence: Sequence) -> None:
        """A new request; it waits."""
        request = sequence.request
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = TenantFlows(request.weight)
        tenant.weight = request.weight
        flow = tenant.flows.get(sequence.adapter)
        if flow is None:
            flow = tenant.flows[sequence.adapter] = Flow(tenant, sequence.adapter)
            self._num_flows += 1
        insort(flow.waiting, sequence, key=age)
        self.num_waiting += 1

    def start(self, sequence: Sequence) -> None:
        """One that waits runs from now on."""
        flow = self.flow_of(sequence)
        flow.waiting.remove(sequence)
        insort(flow.running, sequence, key=age)
        flow.steps_waiting_for_rows = 0
        flow.tenant.num_running += 1
        flow.tenant.deficit = min(flow.tenant.deficit, self._max_deficit_tokens)
        self.num_waiting -= 1

    def stop(self, sequence: Sequence) -> None:
        """One that runs waits from now on."""
        flow = self.flow_of(sequence)
        flow.running.remove(sequence)
        insort(flow.waiting, sequence, key=age)
        flow.tenant.num_running -= 1
        self.num_waiting += 1

    def remove(self, sequence: Sequence, *, has_run: bool) -> None:
        """One that waits is over; has_run: it did not wait until now."""
        flow = self.flow_of(sequence)
        flow.waiting.remove(sequence)
        self.num_waiting -= 1
        flow.tenant.is_owed &= not has_run
        if not flow.waiting:
            flow.steps_waiting_for_rows = 0
        if flow.waiting or flow.running:
            return
        del flow.tenant.flows[flow.adapter]
        self._num_flows -= 1
        if not flow.tenant.flows:
            del self._tenants[sequence.request.tenant]

    def move(self, sequence: Sequence, set_adapter: Callable[[], None]) -> None:
        """Let one that waits or runs be of another adapter of its tenant, which `set_adapter` gives it. Its age and
        place stay, and a flow that it opens has the deficit of the one that it leaves."""
        flow = self.flow_of(sequence)
        tenant = flow.tenant
        (flow.running if sequence.is_running else flow.waiting).remove(sequence)
        if not flow.waiting:
            flow.steps_waiting_for_rows = 0
        if not flow.waiting and not flow.running:
            del tenant.flows[flow.adapter]
            self._num_flows -= 1
        set_adapter()
        other = tenant.flows.get(sequence.adapter)
        if other is None:
            other = tenant.flows[sequence.adapter] = Flow(tenant, sequence.adapter, deficit=flow.deficit)
            self._num_flows += 1
        insort(other.running if sequence.is_running else other.waiting, sequence, key=age)

    def flow_of(self, sequence: Sequence) -> Flow:
        return self._tenants[sequence.request.tenant].flows[sequence.adapter]

    def flows(self) -> Iterator[Flow]:
        """All that are active."""
        for tenant in self._tenants.values():
            yield from tenant.flows.values()

    @property
    def tenants(self) -> Collection[TenantFlows]:
        """All that are active."""
        return self._tenants.values()

    def waiting(self) -> list[Sequence]:
        """All that wait, by age."""
        return sorted((one for flow in self.flows() for one in flow.waiting), key=age)

    # ---- slots

    def in_turn(self, flows: Iterable[Flow], lets_in: Callable[[Sequence], bool]) -> Iterator[Sequence]:
        """Requests of these flows, all of which wait, in the order in which they get a slot, without those that are not
        let in. A request that the caller has not started when it asks for the next is passed over, with the rest of
        its flow."""
        tenants = []
        for index, of_tenant in enumerate(by_tenant(flows)):
            tenant, oldest = of_tenant[0][3].tenant, min(key for _, _, key, _ in of_tenant)
            heapq.heapify(of_tenant)
            tenants.append((tenant.slots_per_weight(1), -tenant.deficit, oldest, index, tenant, of_tenant))
        heapq.heapify(tenants)
        while tenants:
            turn, deficit, oldest, index, tenant, of_tenant = tenants[0]
            flow = heapq.heappop(of_tenant)[3]
            sequence = next((one for one in flow.waiting if lets_in(one)), None)
            if sequence is not None:
                yield sequence
                if sequence.is_running and flow.waiting:
                    heapq.heappush(of_tenant, turn_of(flow))
            # A tenant that was passed over counts as served, so that the other tenants come next.
            turn += 1 / tenant.weight
            if of_tenant:
                heapq.heapreplace(tenants, (turn, deficit, oldest, index, tenant, of_tenant))
            else:
                heapq.heappop(tenants)

    def turns(self, flows: Iterable[Flow]) -> list[Flow]:
        """These flows, all of which wait, each once, in the order in which they get their next slot."""
        turns = []
        for of_tenant in by_tenant(flows):
            tenant = of_tenant[0][3].tenant
            for index, (_, _, oldest, flow) in enumerate(sorted(of_tenant)):
                turns.append((tenant.slots_per_weight(1 + index), -tenant.deficit, oldest, flow))
        return [flow for _, _, _, flow in sorted(turns)]

    def has_excess(self) -> bool:
        """Whether any running request could be among the `exceeding` of one that waits."""
        most, fewest = 0.0, math.inf
        for tenant in self._tenants.values():
            most = max(most, tenant.slots_per_weight())
            wanting = [len(flow.running) for flow in tenant.flows.values() if flow.waiting]
            if wanting:
                fewest = min(fewest, tenant.slots_per_weight(1))
                if max(len(flow.running) for flow in tenant.flows.values()) > min(wanting) + 1:
                    return True
        return most > fewest

    def exceeding(self, newcomer: Sequence) -> Iterator[Sequence]:
        """Running requests beyond the shares of their tenants and flows, now that `newcomer` needs a slot; each as if
        those before it had been preempted."""
        if self._num_flows == 1:
            return
        flow = self.flow_of(newcomer)
        tenant, gone = flow.tenant, Counter[int]()
        while True:
            yielding = None
            others = [one for one in self._tenants.values() if one is not tenant]
            most = max(others, key=lambda one: one.slots_per_weight(-gone[id(one)]), default=None)
            if most is not None and most.slots_per_weight(-gone[id(most)]) > tenant.slots_per_weight(1):
                yielding = _largest(most, gone)
            else:
                own = _largest(tenant, gone)
                if own is not None and len(own.running) - gone[id(own)] > len(flow.running) + 1:
                    yielding = own
            if yielding is None:
                return
            gone[id(yielding)] += 1
            gone[id(yielding.tenant)] += 1
            yield yielding.running[-gone[id(yielding)]]

    def last_in_turn(self) -> Sequence:
        """The running request that yields when blocks run out. There must be one."""
        tenant = max(
            (one for one in self._tenants.values() if one.num_running),
            key=lambda one: (one.slots_per_weight(), max(f.running[-1].key for f in one.flows.values() if f.running)),
        )
        flow = max(
            (one for one in tenant.flows.values() if one.running),
            key=lambda one: (len(one.running), one.running[-1].key),
        )
        return flow.running[-1]

    # ---- tokens

    def prompt_turn(self, sequence: Sequence) -> tuple[float, float, int]:
        """Sort key of sequences whose prompts are computed: lower ones first."""
        flow = self.flow_of(sequence)
        return -flow.tenant.deficit, -flow.deficit, sequence.key

    def beside_flood(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The running sequences whose flows run nothing else, while another tenant, or another flow of their own, has
        more than half of all that run."""
        half = sum(tenant.num_running for tenant in self._tenants.values()) / 2
        largest = next((tenant for tenant in self._tenants.values() if tenant.num_running > half), None)
        if self._num_flows == 1 or largest is None or half < 1:
            return []
        has_large_flow = any(len(flow.running) > half for flow in largest.flows.values())
        beside = []
        for sequence in sequences:
            flow = self.flow_of(sequence)
            if len(flow.running) == 1 and (has_large_flow or flow.tenant is not largest):
                beside.append(sequence)
        return beside

    def charge(self, chunks: Collection[ScheduledChunk]) -> None:
        """Charge the tokens of a step to flows and tenants."""
        if self._num_flows <= 1:
            return
        for chunk in chunks:
            flow = self.flow_of(chunk.sequence)
            flow.num_tokens += chunk.num_tokens
            flow.tenant.num_tokens += chunk.num_tokens
        num_tokens = sum(tenant.num_tokens for tenant in self._tenants.values())
        due_for_weight = num_tokens / sum(tenant.weight for tenant in self._tenants.values())
        for tenant in self._tenants.values():
            due = tenant.num_tokens / len(tenant.flows)
            for flow in tenant.flows.values():
                flow.deficit = self._bounded(flow.deficit + due - flow.num_tokens)
                flow.num_tokens = 0
            deficit = tenant.deficit + due_for_weight * tenant.weight - tenant.num_tokens
            # While tenants run nothing, the one that has waited for longest has most.
            tenant.deficit = self._bounded(deficit) if tenant.num_running else max(deficit, -self._max_deficit_tokens)
            tenant.num_tokens = 0
        self._owe_slots()

    def _owe_slots(self) -> None:
        """Mark the tenants that are owed a slot from now on, the largest deficits first."""
        apart = [one for one in self._tenants.values() if one.is_owed or not one.num_running]
        if not apart or len(apart) == len(self._tenants):
            return
        tenants = self._tenants.values()
        fewest = min(one.slots_per_weight() for one in tenants if one.num_running)
        due = sum(one.weight for one in apart) / sum(one.weight for one in tenants)
        num_more = int(max(1.0, due * sum(one.num_running for one in tenants))) - sum(one.is_owed for one in apart)
        for tenant in sorted(apart, key=lambda one: -one.deficit):
            if num_more <= 0:
                return
            if tenant.is_owed or fewest >= tenant.slots_per_weight(1):
                continue
            shortest = min(flow.waiting[0].max_total for flow in tenant.flows.values())
            if tenant.deficit >= min(shortest, self._max_deficit_tokens):
                tenant.is_owed = True
                num_more -= 1

    def _bounded(self, deficit: float) -> float:
        return min(max(deficit, -self._max_deficit_tokens), self._max_deficit_tokens)

    def check_integrity(self) -> None:
        """Lists are in order, counts add up, and nothing is kept for nobody."""
        for tenant in self._tenants.values():
            assert tenant.flows, "a tenant without requests"
            assert tenant.num_running == sum(len(flow.running) for flow in tenant.flows.values()), "running miscounted"
        for flow in self.flows():
            assert flow.waiting or flow.running, "a flow without requests"
            told = flow.tenant.deficit if flow.tenant.num_running else min(flow.tenant.deficit, 0.0)
            assert abs(flow.deficit) <= self._max_deficit_tokens >= abs(told), "a deficit without bound"
            assert all(one.is_running for one in flow.running), "a waiting one among those that run"
            assert not any(one.is_running for one in flow.waiting), "a running one among those that wait"
            for requests in (flow.waiting, flow.running):
                assert requests == sorted(requests, key=age), "not in order of arrival"
        assert self._num_flows == sum(1 for _ in self.flows()), "flows miscounted"
        assert self.num_waiting == len(self.waiting()), "waiting miscounted"


def _largest(tenant: TenantFlows, gone: Counter[int]) -> Flow | None:
    """The flow that runs most, without those that have gone; of equal ones the one whose youngest is youngest."""
    running = [flow for flow in tenant.flows.values() if len(flow.running) > gone[id(flow)]]
    return max(
        running,
        key=lambda flow: (len(flow.running) - gone[id(flow)], flow.running[-1 - gone[id(flow)]].key),
        default=None,
    )
