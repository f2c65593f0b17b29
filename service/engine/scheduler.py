"""Which sequences run in the next step, with how many tokens each.

Owns the waiting and the running list (both in order of arrival) and, through them, who holds a slot, blocks and a pin
on adapter rows: a running sequence holds all of its own, a waiting one holds nothing. Freed on `remove` (ended,
aborted) and on preemption, at once and completely, whether or not a launched step still works with them: see
`engine.py` for why that is right.

It counts tokens and never looks at their values: what a launched step samples is a token like any other here.

One step, under one token budget:
1. every decoding sequence gets one token, every prefilling one a chunk of what is left, oldest first;
2. if blocks run out, the youngest running sequence is preempted: it gives up everything and waits to be computed again
   from its tokens, so that nothing is lost and the output does not change. The oldest never yields, hence there is
   progress;
3. waiting sequences join, oldest first, while a slot and the blocks for all their present tokens are free. One whose
   adapter has not been read, or finds no rows, is passed over, not waited for.
Nobody starves: slots and blocks go strictly by age among those who have rows. Of those that were passed over
too often, the adapter of the oldest is read before all others and stays in host memory. From then on that sequence
closes the door to younger requests, but for those that keep it waiting no longer, until enough have ended and given
their rows back; `_door_of` says for whom, and why that comes to an end.

Cost per step: O(running + waiting).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise

from service.engine.adapter_desk import AdapterDesk
from service.engine.block_pool import BlockPool
from service.engine.sequence import ScheduledChunk, Sequence
from service.engine.slots import Slots


def _age(sequence: Sequence) -> int:
    return sequence.key


def _tokens_to_come(sequence: Sequence) -> int:
    """The most that are still to be computed for it, of its prompt and of its answer; it may end sooner."""
    return sequence.max_total - sequence.num_computed


def _count(chunk: ScheduledChunk) -> None:
    """The chunk will run: what it computes and samples is counted from now on."""
    sequence = chunk.sequence
    sequence.num_computed += chunk.num_tokens
    sequence.num_prompt_logprobs += chunk.num_prompt_logits
    if chunk.samples and sequence.request.sampling.max_tokens > 0:
        sequence.num_in_flight += 1


@dataclass(frozen=True, slots=True)
class _Door:
    """Who may still join while the oldest that has waited too long for rows lacks them.

    closed_by     older ones are let in as ever
    harmless      adapters that all may join: their rows are not what it waits for
    until_tokens  any adapter may be joined by requests to which fewer tokens may come
    """

    closed_by: Sequence
    harmless: frozenset[str]
    until_tokens: int

    def lets_in(self, sequence: Sequence) -> bool:
        return (
            sequence.key < self.closed_by.key
            or sequence.adapter in self.harmless
            or _tokens_to_come(sequence) < self.until_tokens
        )


class Scheduler:
    """See the module's docstring."""

    def __init__(
        self,
        blocks: BlockPool,
        slots: Slots,
        desk: AdapterDesk,
        *,
        block_size_tokens: int,
        token_budget: int,
        max_steps_waiting_for_rows: int,
        max_prompt_logits: int,
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self.desk = desk
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._block_size = block_size_tokens
        self._token_budget = token_budget
        self._max_steps_waiting_for_rows = max_steps_waiting_for_rows
        self._max_prompt_logits = max_prompt_logits

    def add(self, sequence: Sequence) -> None:
        """A new request; it waits."""
        insort(self.waiting, sequence, key=_age)
        if sequence.adapter is not None:
            self.desk.enter(sequence.adapter, sequence.request.adapter_rows)

    def remove(self, sequence: Sequence) -> None:
        """The request is over, for whatever reason: everything it holds is free when this returns."""
        if sequence.is_running:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.adapter is not None:
            self.desk.leave(sequence.adapter)

    def schedule(self) -> list[ScheduledChunk]:
        """The next step; blocks for its tokens are taken. Empty if nothing can run now."""
        chunks: list[ScheduledChunk] = []
        self._prompt_logits_left = self._max_prompt_logits
        num_decoding = sum(sequence.num_to_compute == 1 for sequence in self.running)
        prefill_budget = self._token_budget - num_decoding
        num_preemptions = self.num_preemptions
        index = 0
        while index < len(self.running):  # the list shortens from its end when a sequence is preempted
            sequence = self.running[index]
            is_last_token = sequence.num_to_compute == 1
            chunk = self._chunk(sequence, 1 if is_last_token else prefill_budget)
            if chunk is not None and self._make_room(sequence, chunk.num_tokens):
                chunks.append(chunk)
                prefill_budget -= 0 if is_last_token else chunk.num_tokens
            index += 1
        # Whoever was preempted needs the blocks more than a newcomer does.
        if num_preemptions == self.num_preemptions:
            self._admit(chunks, prefill_budget)
            self.desk.follow_hints()
        for chunk in chunks:
            _count(chunk)
        return chunks

    def check_integrity(self) -> None:
        """Slots, blocks and pins are held by running sequences and by nobody else."""
        self.blocks.check_integrity()
        held = sum(len(self.blocks.blocks(sequence.key)) for sequence in self.running)
        assert held == self.blocks.num_used, "blocks held by a sequence that does not run"
        self.slots.check_integrity()
        assert self.slots.num_used == len(self.running), "slots held by a sequence that does not run"
        for queue in (self.waiting, self.running):
            assert all(a.key < b.key for a, b in pairwise(queue)), "not in order of arrival"
        for sequence in self.running:
            covered = len(self.blocks.blocks(sequence.key)) * self._block_size
            assert sequence.num_computed <= covered, "computed tokens without blocks"
        assert all(sequence.num_computed == 0 for sequence in self.waiting), "a waiting sequence holds results"
        self.desk.check_integrity()

    # ---- inner parts

    def _chunk(self, sequence: Sequence, budget: int) -> ScheduledChunk | None:
        """Up to `budget` tokens of the sequence, with the logits that they must yield; None if there is no budget."""
        start, num_tokens = sequence.num_computed, min(budget, sequence.num_to_compute)
        if num_tokens <= 0:
            return None
        end = start + num_tokens
        if not sequence.num_prompt_logprobs_missing:
            samples = end == sequence.num_tokens
            return ScheduledChunk(sequence, start, num_tokens, int(samples), samples)
        # The logits of token i tell of prompt token i + 1; entry 0 has no logprob and is there from the start.
        first = sequence.num_prompt_logprobs
        first_row = max(start, first - 1)
        end = min(end, first_row + self._prompt_logits_left)
        if end <= start:
            return None
        num_logits = max(end - first_row, 0)
        self._prompt_logits_left -= num_logits
        num_prompt_logits = min(num_logits, sequence.num_prompt - first)
        samples = end == sequence.num_tokens
        return ScheduledChunk(sequence, start, end - start, num_logits, samples, first, num_prompt_logits)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for `num_tokens` more, taken from the youngest if need be. False if the sequence had to yield."""
        total = self._blocks_for(sequence.num_computed + num_tokens)
        while not self.blocks.extend(sequence.key, total):
            youngest = self.running[-1]
            self._stop(youngest)
            youngest.num_computed = 0
            insort(self.waiting, youngest, key=_age)
            self.num_preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _admit(self, chunks: list[ScheduledChunk], budget: int) -> None:
        """Let waiting sequences join; see the module's docstring."""
        if not self.waiting:
            return
        door = self._prefetch()
        passed_over: set[str] = set()  # their answer holds for the step: no rows come free in between
        free_blocks = self.blocks.num_free - sum(self._blocks_missing(sequence) for sequence in self.running)
        for sequence in list(self.waiting):
            need = self._blocks_missing(sequence)
            if budget <= 0 or self.slots.num_free == 0:
                return
            assert not sequence.num_in_flight, "a sequence joins when all its tokens are known"
            if sequence.adapter is not None:
                if door is not None and not door.lets_in(sequence):
                    continue
                # It would take the blocks that come free, and its pins would only come and go.
                if need > free_blocks and self.desk.is_on_device(sequence.adapter):
                    return
                if sequence.adapter in passed_over or not self.desk.acquire(sequence.adapter):
                    passed_over.add(sequence.adapter)
                    sequence.steps_waiting_for_rows += 1
                    continue
            # Asked after rows: who lacks those too must not keep the blocks from the others.
            if need > free_blocks:
                if sequence.adapter is not None:
                    self.desk.release(sequence.adapter)
                return
            free_blocks -= need
            chunk = self._start(sequence, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.num_tokens

    def _prefetch(self) -> _Door | None:
        """Have the waiting ones' adapters read, those first that may join. Returns the door, if one is closed."""
        too_long = self._max_steps_waiting_for_rows
        first = next((one for one in self.waiting if one.steps_waiting_for_rows >= too_long), None)
        first_adapter = None if first is None else first.adapter
        door = None
        if first is not None and first_adapter is not None and self.desk.is_read(first_adapter):
            door = self._door_of(first, first_adapter)
        wanted: dict[str, bool] = {}
        for one in self.waiting:
            if one.adapter is not None and not wanted.get(one.adapter):
                wanted[one.adapter] = door is None or door.lets_in(one)
        self.desk.prefetch(wanted, first_adapter)
        return door

    def _door_of(self, waiting: Sequence, its_adapter: str) -> _Door:
        """The door that `waiting`, whose adapter has been read, has closed.

        If those that run end as late as they may, their adapters leave one by one, and after a certain one there is
        room. Those that are in use for longer may be joined by all; any other, whether it runs or not, only by requests
        that end before that certain one. So the end that is waited for never moves away, and comes nearer with its
        tokens, under any load; only older requests, finitely many, can put it off.
        """
        tokens_left: dict[str, int] = {}
        for one in self.running:
            if one.adapter is not None:
                tokens_left[one.adapter] = max(_tokens_to_come(one), tokens_left.get(one.adapter, 0))
        leaving = sorted(tokens_left, key=tokens_left.__getitem__)
        num_ends = bisect_left(
            range(len(leaving)), True, key=lambda num: self.desk.fits_beside(its_adapter, leaving[num:])
        )
        until_tokens = tokens_left[leaving[num_ends - 1]] if num_ends else 0
        stays = (adapter for adapter in leaving[num_ends:] if tokens_left[adapter] > until_tokens)
        return _Door(waiting, frozenset((its_adapter, *stays)), until_tokens)

    def _blocks_missing(self, sequence: Sequence) -> int:
        """Blocks it lacks for all its present tokens and the next; admitted with fewer, it would soon be preempted."""
        held = len(self.blocks.blocks(sequence.key)) if sequence.is_running else 0
        return max(self._blocks_for(min(sequence.num_tokens + 1, sequence.max_total)) - held, 0)

    def _start(self, sequence: Sequence, budget: int) -> ScheduledChunk | None:
        """The sequence runs from now on, its pin being taken already."""
        self.waiting.remove(sequence)
        sequence.slot = self.slots.take()
        insort(self.running, sequence, key=_age)
        sequence.steps_waiting_for_rows = 0
        self.blocks.open(sequence.key, self._blocks_for(sequence.max_total))
        chunk = self._chunk(sequence, budget)
        if chunk is not None:
            has_blocks = self.blocks.extend(sequence.key, self._blocks_for(chunk.num_tokens))
            assert has_blocks, "room was looked at before"
        return chunk

    def _stop(self, sequence: Sequence) -> None:
        """The sequence runs no more: slot, blocks and pin are given back."""
        self.running.remove(sequence)
        self.slots.release(sequence.slot)
        sequence.slot = 0
        self.blocks.release(sequence.key)
        if sequence.adapter is not None:
            self.desk.release(sequence.adapter)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
