"""Scheduler: the sequences of the next step, with the number of tokens of each.

It owns waiting and running sequences and, through them, slots, lines, blocks and pins on adapter rows: a running
sequence holds all of its own, a waiting one holds nothing. Freed on `remove` (ended, aborted) and on preemption, at
once and completely, whether or not a launched step still works with them: see `engine.py` for why that is right.

It counts tokens and never looks at their values: what a launched step samples is a token like any other here.

One step, under one token budget:
1. waiting sequences join, in the order of `fair_queue.py`, while there are tokens for them, and acquire a slot, their
   adapter's rows, and blocks for all their present tokens. They begin behind the tokens that the prefix cache has; one
   whose prompt is just being computed for another waits for that. Where slots, rows or blocks are not free, sequences
   with more than their share are preempted. A sequence whose adapter has not been read, or finds no rows, is passed
   over, not waited for; one that finds no blocks is waited for;
2. every decoding sequence gets one token, prompts a chunk of what is left, largest deficit first. If blocks run out,
   running sequences are preempted, those with most first: they free everything and wait to be computed again from
   their tokens, so that nothing is lost and the output does not change. Since each has joined with the blocks of its
   next token, every preempted one leaves a token behind it, hence there is progress.
   Where a step takes as long as its tokens do (`prompts_apart`), the first prompt of a newcomer beside a flood has a
   step to itself, as far as the step of all would have had it too: the others' tokens come in the next one, when they
   would have come with it, and the newcomer's does not wait for them.
   Sequences whose grammars cost the others too much are deferred, see `grammar_budget.py`.

Cost per step: O(running + flows), and the cost of `fair_queue.py`.
"""

from __future__ import annotations

import time
from bisect import insort
from itertools import accumulate, pairwise
from typing import Literal

from service.engine.loras.prefetch import AdapterLoads
from service.engine.scheduling.fair_queue import FairQueue, Flow, age
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.scheduling.prefix_cache import PrefixCache
from service.engine.scheduling.prefix_trie import Found
from service.engine.scheduling.row_reservations import RowReservations
from service.engine.scheduling.state_lines import StateLines
from service.engine.scheduling.version_moves import VersionMoves, set_adapter
from service.engine.sequences.grammar_budget import GrammarBudget
from service.engine.sequences.sequence import ScheduledChunk, Sequence, StepTokens
from service.engine.sequences.slots import Slots


def _count(chunk: ScheduledChunk) -> None:
    """The chunk will run: what it computes and samples is counted from now on."""
    sequence = chunk.sequence
    sequence.num_computed += chunk.num_tokens
    sequence.has_begun, sequence.copied_block = True, 0
    if sequence.waited_seconds is None:
        sequence.waited_seconds = time.perf_counter() - sequence.came_at[0]
    sequence.num_prompt_logprobs += chunk.num_prompt_logits
    if chunk.samples and sequence.request.sampling.max_tokens > 0:
        sequence.num_in_flight += 1


class Scheduler:
    """See the module's docstring. `running` is in the order of arrival."""

    def __init__(
        self,
        blocks: BlockPool,
        cache: PrefixCache,
        slots: Slots,
        lines: StateLines,
        adapter_loads: AdapterLoads,
        *,
        block_size_tokens: int,
        token_budget: int,
        max_steps_waiting_for_rows: int,
        max_prompt_logits: int,
        prompts_apart: bool = False,
    ) -> None:
        self.blocks = blocks
        self.cache = cache
        self.slots = slots
        self.lines = lines
        self.adapter_loads = adapter_loads
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.paused: Literal["keep", "wait"] | None = None
        self._held: dict[int, Sequence] = {}  # by key; came while those before a pause end, and are in no queue
        self.grammar_budget = GrammarBudget()
        self._queue = FairQueue(token_budget)
        self._row_reservations = RowReservations(self._queue, adapter_loads, max_steps=max_steps_waiting_for_rows)
        self.moves = VersionMoves(self._queue, cache, adapter_loads, self.preempt, max_steps=max_steps_waiting_for_rows)
        self._block_size = block_size_tokens
        self._token_budget = token_budget
        self._max_prompt_logits = max_prompt_logits
        self._prompts_apart = prompts_apart
        self._was_apart = False  # the last step had newcomers alone

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences in the order of arrival."""
        return [*self._queue.waiting(), *self._held.values()]

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting + len(self._held)

    @property
    def goes_on(self) -> bool:
        """Whether sequences run that the next step has tokens of, whatever waits."""
        return bool(self.running) and self.paused != "keep"

    @property
    def num_held(self) -> int:
        """Those that wait for the end of a pause of mode "wait"."""
        return len(self._held)

    def pause(self, mode: Literal["keep", "wait"]) -> None:
        """Let nothing run until `resume`, or with "wait" nothing that comes from now on."""
        self.paused = mode

    def resume(self) -> None:
        """Let all run."""
        self.paused = None
        held, self._held = self._held, {}
        for sequence in held.values():
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Add a new request, which waits."""
        if self.paused == "wait":
            self._held[sequence.key] = sequence
            return
        self._queue.add(sequence)
        if sequence.adapter is not None:
            sequence.came_from = self.adapter_loads.enter(sequence.adapter, sequence.request.adapter_rows)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request that is over, for whatever reason; everything it holds is free when this returns."""
        if self._held.pop(sequence.key, None) is not None:
            return
        self.moves.forget(sequence)
        if has_run := sequence.is_running:
            self._stop(sequence)
        self._queue.remove(sequence, has_run=has_run)
        self.cache.forget(sequence)
        if sequence.adapter is not None:
            self.adapter_loads.leave(sequence.adapter)

    def preempt(self, sequence: Sequence) -> None:
        """Free all that a running sequence holds; it waits to be computed again."""
        self._stop(sequence, yields=True)
        sequence.num_computed = 0
        self.num_preemptions += 1
        self.moves.stopped(sequence)

    def move(self, sequence: Sequence, adapter: str, rows: dict[str, int]) -> None:
        """Let a request with an adapter go on with this one, see `version_moves.py`."""
        if sequence.key in self._held:
            set_adapter(sequence, adapter, rows)
        else:
            self.moves.ask(sequence, adapter, rows)

    def schedule(self) -> list[ScheduledChunk]:
        """The next step, which is launched before anything else is asked; blocks for its tokens are taken. Empty if
        nothing can run now."""
        if self.paused == "keep":
            self.cache.pass_step()
            self.adapter_loads.follow_hints()
            return []
        self.cache.begin_step(is_idle=not self.goes_on)
        self.moves.begin_step()
        if self._queue.num_waiting:
            self._admit()
        self.adapter_loads.follow_hints()
        chunks = self._chunks()
        for chunk in chunks:
            _count(chunk)
        for chunk in chunks:
            self.cache.follow(chunk.sequence)
        self._queue.charge(chunks)
        return chunks

    def check_integrity(self) -> None:
        """Slots, lines, blocks and pins are held by running sequences only."""
        self.blocks.check_integrity()
        self.cache.check_integrity()
        held = {block for sequence in self.running for block in self.blocks.blocks(sequence.key)}
        loading = [] if self.cache.host is None else self.cache.host.loading_keys
        held |= self.blocks.held_beside | {block for key in loading for block in self.blocks.blocks(key)}
        assert len(held) == self.blocks.num_used, "blocks held by a sequence that does not run"
        self.slots.check_integrity()
        self.lines.check_integrity()
        assert self.slots.num_used == len(self.running), "slots held by a sequence that does not run"
        num_lines = len({one.line for one in self.running}) + self.lines.num_kept
        assert self.lines.num_used == num_lines, "lines held by others, or shared"
        assert all(a.key < b.key for a, b in pairwise(self.running)), "not in order of arrival"
        for sequence in self.running:
            covered = len(self.blocks.blocks(sequence.key)) * self._block_size
            assert sequence.num_computed <= covered, "computed tokens without blocks"
        assert all(sequence.num_computed == 0 for sequence in self.waiting), "a waiting sequence holds results"
        self._queue.check_integrity()
        self.moves.check_integrity({*self.waiting, *self.running})
        self.adapter_loads.check_integrity()

    # ---- admission

    def _admit(self) -> None:
        """Let waiting sequences run, and have the adapters read that others of them wait for."""
        self._row_reservations.begin_step(self.running)
        ready, unread = [], []
        for flow in self._queue.flows():
            if flow.waiting and (flow.adapter is None or self.adapter_loads.is_on_device(flow.adapter)):
                ready.append(flow)
            elif flow.waiting:
                unread.append(flow)
        if unread:
            self._prefetch(unread)
            for flow in unread:
                assert flow.adapter is not None, "the base is not read"
                if self.adapter_loads.is_read(flow.adapter):
                    ready.append(flow)
                elif self.slots.num_free:
                    flow.steps_waiting_for_rows += 1
        if ready and (self.slots.num_free or self._queue.has_excess()):
            self._join(ready)

    def _prefetch(self, flows: list[Flow]) -> None:
        """Start reading adapters of these flows, in fair order."""
        wanted: dict[str, bool] = {}
        tenants = set()
        for flow in self._queue.turns(flows):
            assert flow.adapter is not None, "the base is not read"
            may_join = any(map(self._row_reservations.lets_in, flow.waiting))
            has_room = may_join and self.adapter_loads.has_room(flow.adapter)
            if may_join and not has_room and flow.tenant not in tenants:
                tenants.add(flow.tenant)  # other tenants' rows are asked for once
                has_room = bool(self._row_reservations.yielding_to(flow.waiting[0]))
            wanted[flow.adapter] = wanted.get(flow.adapter, False) or has_room
        self.adapter_loads.prefetch(wanted, self._row_reservations.first)

    def _join(self, flows: list[Flow]) -> None:
        """Let sequences of these run, whose adapters have been read; see the module's docstring."""
        prompts = [one for one in self.running if one.num_to_compute > 1]
        budget = self._token_budget - (len(self.running) - len(prompts))
        free_blocks = self._free_blocks()
        for sequence in self._queue.in_turn(flows, self._lets_in):
            if sequence.num_in_flight:  # it has just yielded, and joins when all its tokens are known
                continue
            # Without a free slot one that decodes makes room, also in the budget.
            if self._tokens_before(sequence, prompts) >= budget + (self.slots.num_free == 0):
                continue
            num_preemptions = self.num_preemptions
            if not self._find_rows(sequence):
                continue
            if num_preemptions != self.num_preemptions:
                free_blocks = self._free_blocks()
            if self.cache.is_loading(sequence, free_blocks, is_idle=not self.running):
                free_blocks = self._free_blocks()
                continue
            found = self.cache.find(sequence)
            need = self._blocks_missing(sequence) - len(found.blocks) + self.blocks.num_idle_in(found.held)
            is_short = self.slots.num_free == 0 or need > free_blocks
            if is_short and not self._find_place(sequence, need - free_blocks, found.blocks):
                return
            if sequence.adapter is not None:
                self.adapter_loads.acquire(sequence.adapter)
                if sequence.waited_seconds is None and sequence.came_from != "device":
                    sequence.loads = self.adapter_loads.loads_since(sequence.adapter, sequence.came_at[0])
            self._start(sequence, None if is_short else found)
            prompts.append(sequence)
            free_blocks = self._free_blocks()

    def _lets_in(self, sequence: Sequence) -> bool:
        return self._row_reservations.lets_in(sequence) and not self.cache.is_awaiting(sequence)

    def _tokens_before(self, sequence: Sequence, prompts: list[Sequence]) -> int:
        """Tokens of the step's budget that go to prompts computed before its own."""
        if not prompts:
            return 0
        turn = self._queue.prompt_turn(sequence)
        return sum(self._most_tokens(one) for one in prompts if one.is_running and self._queue.prompt_turn(one) < turn)

    def _most_tokens(self, sequence: Sequence) -> int:
        """The most tokens that a sequence can use in a step."""
        has_logprobs = sequence.num_prompt_logprobs_missing > 0
        return min(sequence.num_to_compute, self._max_prompt_logits) if has_logprobs else sequence.num_to_compute

    def _find_rows(self, sequence: Sequence) -> bool:
        """Whether its adapter is on the device, those in use having made room if need be. Where a copy takes time it is
        there in a later step."""
        adapter = sequence.adapter
        if adapter is None or self.adapter_loads.is_on_device(adapter):
            return True
        if not self.adapter_loads.can_bring(adapter):
            yielding = self._row_reservations.yielding_to(sequence)
            if not yielding:
                self._queue.flow_of(sequence).steps_waiting_for_rows += 1
                return False
            for one in [one for one in self.running if one.adapter in yielding]:
                self.preempt(one)
        return self.adapter_loads.bring(adapter)

    def _find_place(self, sequence: Sequence, num_blocks: int, found: list[int]) -> bool:
        """A slot and so many more blocks, of those who have more than their part; none yields if it is not enough.

        found  blocks that it will hold, whoever yields
        """
        wanted = set(found)
        yielding: list[Sequence] = []
        num_slots = self.slots.num_free
        exceeding = self._queue.exceeding(sequence)
        while num_slots == 0 or num_blocks > 0:
            one = next(exceeding, None)
            if one is None:
                return False
            yielding.append(one)
            num_slots += 1
            num_blocks -= self.blocks.num_held_alone(one.key, wanted) + self._blocks_missing(one)
        for one in yielding:
            self.preempt(one)
        return True

    def _start(self, sequence: Sequence, found: Found | None) -> None:
        """The sequence runs from now on, its pin being taken already; found: as in `PrefixCache.start`."""
        sequence.slot, sequence.line = self.slots.acquire(), self.lines.acquire()
        sequence.has_begun = False
        self._queue.start(sequence)
        insort(self.running, sequence, key=age)
        self.cache.start(sequence, self._blocks_for(sequence.max_total), found)

    def _stop(self, sequence: Sequence, *, yields: bool = False) -> None:
        """Stop a running sequence: free its slot, line, blocks and pin. yields: it will run again."""
        self.running.remove(sequence)
        self.cache.stop(sequence, yields=yields)
        self.slots.release(sequence.slot)
        self.lines.release(sequence.line)
        sequence.slot = sequence.line = 0
        self._queue.stop(sequence)
        if sequence.adapter is not None:
            self.adapter_loads.release(sequence.adapter)

    # ---- what they compute

    def _chunks(self) -> list[ScheduledChunk]:
        multiple = self._block_size if self.lines.most_kept else 1
        tokens = StepTokens(self._token_budget, self._max_prompt_logits, multiple)
        chunks: dict[int, ScheduledChunk] = {}
        prompts: list[Sequence] = []
        others: list[Sequence] = []
        deferred = self.grammar_budget.deferred(self.running)
        for sequence in self.running:
            if sequence not in deferred:
                (prompts if sequence.num_to_compute > 1 else others).append(sequence)
        if len(prompts) > 1:
            prompts.sort(key=self._queue.prompt_turn)
        for sequence in self._newcomers(prompts, len(others)):
            if sequence.is_running:
                self._add_chunk(chunks, sequence, tokens)
        self._was_apart = bool(chunks)
        if not chunks:
            for sequence in [*others, *prompts]:
                if sequence.is_running:
                    self._add_chunk(chunks, sequence, tokens)
        if not chunks:  # deferred sequences delay no others
            for sequence in sorted(deferred, key=age):
                if sequence.is_running:
                    self._add_chunk(chunks, sequence, tokens)
        return list(chunks.values())

    def _newcomers(self, prompts: list[Sequence], num_others: int) -> list[Sequence]:
        """The prompts, in order, that get a step to themselves: beside a flood, while a step of all would have tokens
        for them."""
        if not self._prompts_apart or self._was_apart:
            return []
        num_left = self._token_budget - num_others
        num_tokens = accumulate(map(self._most_tokens, prompts))
        fitting = [one for one, num in zip(prompts, num_tokens, strict=True) if num <= num_left]
        return self._queue.beside_flood(fitting)

    def _add_chunk(self, chunks: dict[int, ScheduledChunk], sequence: Sequence, tokens: StepTokens) -> None:
        """Its part of the step, with blocks, if there is one. Others may yield, and lose theirs."""
        chunk = tokens.next_chunk(sequence)
        if chunk is None:
            return
        total = self._blocks_for(sequence.num_computed + chunk.num_tokens)
        while not self.blocks.extend(sequence.key, total):
            last = self._queue.last_in_turn()
            self.preempt(last)
            chunks.pop(last.key, None)
            if last is sequence:
                return
        chunks[sequence.key] = chunk

    # ---- blocks

    def _free_blocks(self) -> int:
        """Blocks that no running sequence needs for its present tokens and the next one."""
        return self.blocks.num_free - sum(self._blocks_missing(sequence) for sequence in self.running)

    def _blocks_missing(self, sequence: Sequence) -> int:
        """Blocks it lacks for all its present tokens and the next; admitted with fewer, it would soon be preempted."""
        held = len(self.blocks.blocks(sequence.key)) if sequence.is_running else 0
        return max(self._blocks_for(min(sequence.num_tokens + 1, sequence.max_total)) - held, 0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
