"""The engine: requests in, tokens out, one step at a time. Knows token ids, not text; runs in-process or behind
`process.py`.

Who owns: the scheduler owns the sequences and what they hold; the desk owns the way of adapters to the device; the
runner owns the model and its caches. The engine owns nothing but the table of requests, the inputs of its steps and
the records of past ones. Who frees: `_finish` and `abort`, through the scheduler, at once. After kill -9 nothing is
left but the adapter store on disk, which the engine never writes.

A step has two halves: `_launch` decides what runs and asks the device for it, `_collect` waits for what was sampled and
tells of it. With overlap, which is for devices, the next step is launched before the last one is collected, so that the
device never waits for the host: one step is *in flight* between two calls of `step`, two for a while within one. Why
nothing goes wrong then:

- All that a step reads and writes on the device happens in the order of the launches: copies of inputs, adapter loads,
  moves of rows, resets of penalty counts, the model, the sampler, the copy of the result. Blocks, slots and rows that
  are freed while a step in flight works with them are therefore rewritten after it, by whoever gets them next, and
  what it writes there late is never read: a sequence reads what it has itself written, and counts that were reset.
- What a step samples goes to the next one by slot, on the device (`request_table.py`). The host counts it, and looks at
  its value when the step is collected. A sequence that ends by its length is never scheduled again; one that turns out
  to have ended otherwise (a stop token, an abort, logits that are not finite) may have one more row in flight, which is
  dropped when that step is collected, since its request is gone.
- A preempted sequence gives up everything at once; its token in flight still comes, is told, and is among the tokens
  that it is computed again from: it joins again two launches later at the earliest, when that token is known.
- Sampling needs nothing of the token before but what the device has: numbers, bars and endings by length follow from
  counts, penalties from counts by slot on the device. So the tokens are those of a run without overlap.
- The mask of a sequence that follows a grammar, or has bad words, needs the token before on the host. In a step that
  has such sequences the model is launched first, then the last step is collected and masks are made while the model
  runs, and sampling is launched last. That costs nothing as long as collecting and masks take less than the model; no
  other step waits.

Cost per step outside the model: O(running sequences + tokens of prompts), plus sampling, which is a few passes over the
logits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from adapters.row_pool import PoolUsage
from kernels.lora import ops as lora_ops
from kernels.sampling.maps import SamplingMaps, number_dtype
from kernels.sampling.ops import new_state, sample
from kernels.sampling.parameters import uses_penalties
from service.engine import admission
from service.engine.adapter_loads import AdapterLoads
from service.engine.block_pool import BlockPool
from service.engine.brief_thread import BriefThread
from service.engine.config import EngineConfig
from service.engine.grammars import Constraint, Grammars, StepMasks, Worker, has_constraint
from service.engine.maps import BASE, IN_FLIGHT, ChunkInput, adapter_order, is_all_decode, side_lines
from service.engine.messages import (
    Abort,
    Evict,
    Finished,
    Keep,
    Load,
    OpInUse,
    Ready,
    Stats,
    Submit,
    Tokens,
)
from service.engine.pooling import PooledStep, Pools
from service.engine.records import StepRecord, StepRecords, record_of
from service.engine.request_table import RequestTable
from service.engine.residency import HostSource, Loader, Rows
from service.engine.results import ResultBuffers, StepResult
from service.engine.runner import Runner
from service.engine.sampled import StepSampling, read_sampled, sampling_of, tokens_message
from service.engine.scheduler import Scheduler
from service.engine.sequence import ScheduledChunk, Sequence
from service.engine.slots import Slots
from service.engine.step_inputs import InputLimits, StepInputs
from service.engine.step_sizes import StepSizes, padded_tokens
from service.grammars.matching import GrammarError, TokenTable
from service.grammars.trial import ENGINE_STACK_BYTES
from service.models.batch import StepBatch

Event = Tokens | Finished
NO_ROWS = PoolUsage(0, 0, 0, 0, 0, 0, 0, 0)
NOT_FINITE = "The model gave no finite logits for this request."
ADAPTER_NOT_FINITE = "The adapter gives no finite logits for this request: its weights or its scaling are too large."


BAD_GRAMMAR = "The answer's format cannot be followed"


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that was launched and not collected: what is asked of it, and where the answer arrives."""

    sampling: StepSampling
    pooled: PooledStep
    result: StepResult
    record: StepRecord
    launched_at: float
    number: int


class Engine:
    """See the module's docstring. `rows` and `host` are None where LoRA is off; `ops` are told of in `ready`.

    tokens    of the vocabulary, for grammars; None: requests with a grammar are refused
    compiler  where grammars are compiled; None: a thread that lives while there are any

    Not thread-safe; only `wake` may be set from other threads, and is set when adapter loads have news.
    """

    def __init__(
        self,
        runner: Runner,
        rows: Rows | None,
        host: HostSource | None,
        config: EngineConfig,
        ops: tuple[OpInUse, ...] = (),
        *,
        loader: Loader,
        tokens: TokenTable | None = None,
        compiler: Worker | None = None,
    ) -> None:
        capacity = runner.capacity
        self.config = config
        self.capacity = capacity
        self.wake = threading.Event()
        self.desk = AdapterLoads(rows, host, loader, max_loads_ahead=config.max_loads_ahead, wake=self.wake.set)
        self.blocks = BlockPool(capacity.num_blocks)
        self.slots = Slots(capacity.num_slots)
        self.scheduler = Scheduler(
            self.blocks,
            self.slots,
            self.desk,
            block_size_tokens=config.block_size_tokens,
            token_budget=config.token_budget,
            max_steps_waiting_for_rows=config.max_steps_waiting_for_rows,
            max_prompt_logits=config.max_prompt_logits,
        )
        self.records = StepRecords()
        self.num_steps = 0
        self.is_idle = True  # the last call of `step` has neither launched nor collected anything
        self._runner = runner
        self._ops = ops
        # Those of the probe at the start are no step's.
        self._num_lora_op_calls_before = lora_ops.call_count()
        self._rows = rows
        self._host = host
        self._table = RequestTable(capacity.num_slots, capacity.max_blocks, capacity.device)
        self._inputs = StepInputs(
            InputLimits(
                token_budget=padded_tokens(config.token_budget),
                max_sequences=config.max_sequences,
                max_blocks=capacity.max_blocks,
                max_logits_rows=padded_tokens(config.max_sequences) + config.max_prompt_logits,
                block_size=config.block_size_tokens,
                num_groups=capacity.num_groups,
                side_groups=capacity.side_groups,
                has_conv=capacity.has_conv,
                has_length_limits=capacity.has_length_limits,
                device=capacity.device,
            )
        )
        self._penalties = new_state(capacity.num_slots, capacity.vocab_size, capacity.device)
        self._pools = Pools()
        self._results = ResultBuffers(capacity.device)
        self._grammars = Grammars(
            tokens, compiler or BriefThread("grammar-compiler", ENGINE_STACK_BYTES), self.wake.set
        )
        self._masks = StepMasks(config.max_sequences, capacity.vocab_size, capacity.device)
        self._compiling: set[Sequence] = set()  # not scheduled before their grammars are compiled
        self._overlaps = config.overlap if config.overlap is not None else capacity.device.type != "cpu"
        self._in_flight: _StepInFlight | None = None
        self._to_capture: deque[StepSizes] = deque()
        self._collected_at = 0.0
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._events: list[Event] = []

    # ---- requests

    @property
    def kv_capacity_tokens(self) -> int:
        """The longest sequence that the KV budget can hold."""
        return self.blocks.capacity * self.config.block_size_tokens

    @property
    def num_requests(self) -> int:
        """Waiting and running."""
        return len(self._sequences)

    @property
    def step_records(self) -> deque[StepRecord]:
        """Records of the latest steps, oldest first."""
        return self.records.all

    def ready(self, pid: int) -> Ready:
        """The sizes that admission needs."""
        return Ready(
            max_model_len_tokens=self.capacity.max_model_len_tokens,
            kv_capacity_tokens=self.kv_capacity_tokens,
            vocab_size=self.capacity.vocab_size,
            hidden_size=self.capacity.hidden_size,
            dtype=self.capacity.dtype,
            device=str(self.capacity.device),
            pid=pid,
            row_bytes=self.config.row_bytes,
            row_element_bytes=self.capacity.row_element_bytes,
            row_alignment=self.capacity.row_alignment,
            side_bytes=self.config.side_bytes,
            ops=self._ops,
        )

    def handle(self, message: Submit | Abort | Load | Evict | Keep) -> None:
        """Take one message; never raises for what it says."""
        match message:
            case Submit():
                self.submit(message)
            case Abort():
                self.abort(message.request_id)
            case Load():
                self.desk.hint(message.adapter)
            case Evict():
                self.desk.evict(message.adapter)
            case Keep():
                self.desk.keep(message.adapters)

    def submit(self, request: Submit) -> None:
        """Queue a request. One that can never run is answered with Finished(error) by the next step."""
        error = admission.error_in(
            request,
            self.capacity,
            self.kv_capacity_tokens,
            self.desk.rows,
            has_grammars=self._grammars.table is not None,
        )
        if error is None and request.request_id in self._sequences:
            error = f"The request id {request.request_id!r} is in use."
        if error is not None:
            self._events.append(Finished(request.request_id, "error", error=error, client_fault=True))
            return
        grammar = request.sampling.grammar
        if grammar is not None:  # it may be long, and each sequence has a copy of it
            sampling = msgspec.structs.replace(request.sampling, grammar=None)
            request = msgspec.structs.replace(request, sampling=sampling)
        sequence = admission.sequence_of(request, self._num_arrived, self.capacity)
        sequence.came_at = (time.perf_counter(), self.num_steps)
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        if grammar is None or not request.sampling.max_tokens:
            if has_constraint(request.sampling):
                sequence.constraint = Constraint(request.sampling, sequence.stop_ids, self.capacity.vocab_size)
            self.scheduler.add(sequence)
        else:
            self._compiling.add(sequence)
            # Of tenants, and where there are none, of adapters.
            self._grammars.begin(grammar, sequence, request.tenant or request.adapter or "")

    def abort(self, request_id: str) -> None:
        """Forget the request; everything it holds is free when this returns. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._forget(sequence)

    def fail_all(self, error: str) -> None:
        """End every request with an error, as at the end of a drain."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, Finished(sequence.request_id, "error", error=error))

    # ---- the step

    def step(self) -> list[Event]:
        """One forward pass for all that can run, and what came of it: of the pass before, with overlap. Runs no model
        if nothing can."""
        launched = self._launch()
        has_collected = self._collect_in_flight()
        self._in_flight = launched
        if not self._overlaps:
            has_collected = self._collect_in_flight()
        self.is_idle = launched is None and not has_collected
        return self.take_events()

    def run_until_idle(self, timeout_seconds: float = 60.0) -> list[Event]:
        """Step until no request is left, waiting for adapter loads in between; for use without the process."""
        deadline = time.monotonic() + timeout_seconds
        events = []
        while self._sequences or self._in_flight is not None:
            self.wake.clear()
            events += self.step()
            if self._sequences and self.is_idle and not self.wake.wait(deadline - time.monotonic()):
                raise TimeoutError("no step was possible, and no adapter load ended, within the time given")
        return events

    def stats(self) -> Stats:
        """The state now, with what is new since the last call: steps, and where adapters are."""
        residency = self.desk.residency
        usage = self._rows.usage() if self._rows is not None else NO_ROWS
        return Stats(
            num_waiting=self.scheduler.num_waiting + len(self._compiling),
            num_running=len(self.scheduler.running),
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_total=self.blocks.capacity,
            state_lines_used=self.slots.num_used if self.capacity.has_conv else 0,
            state_lines_total=self.slots.capacity if self.capacity.has_conv else 0,
            rows_used=usage.rows_used,
            rows_total=usage.rows_total,
            row_bytes_used=usage.bytes_used,
            row_bytes_total=usage.bytes_total,
            num_adapters_on_device=usage.num_resident,
            num_adapters_on_host=0 if self._host is None else self._host.num_kept,
            num_adapter_requests={**self.desk.num_hits},
            num_tier_evictions={} if residency is None else {**residency.evictions},
            loaded_bytes={} if residency is None else {**residency.loaded_bytes},
            host_bytes_used=0 if self._host is None else self._host.used_bytes,
            adapter_load_seconds=() if residency is None else residency.take_load_seconds(),
            first_tokens=self.records.take_first_tokens(),
            moved_adapters={} if residency is None else residency.take_moved(),
            num_steps=self.num_steps,
            num_preemptions=self.scheduler.num_preemptions,
            num_adapter_loads=usage.num_loads,
            num_adapter_evictions=usage.num_evictions,
            num_steps_replayed=self._runner.captured.num_replayed,
            num_steps_eager=dict(self._runner.captured.eager),
            num_lora_op_calls=lora_ops.call_count() - self._num_lora_op_calls_before,
            steps=self.records.take_new(),
        )

    def trim(self) -> None:
        """Give memory of what is gone back to the system; for when nothing runs."""
        if self._rows is not None:
            self._rows.trim()

    def check_integrity(self) -> None:
        """Every block, slot, pin and row is where the requests say."""
        self.scheduler.check_integrity()
        known = sorted(sequence.key for sequence in self._sequences.values())
        queued = [*self.scheduler.waiting, *self.scheduler.running, *self._compiling]
        assert known == sorted(sequence.key for sequence in queued), "a request is lost"

    def compile_kernels(self) -> None:
        """Compile what steps can need, before the first request: on an NPU a kernel takes seconds to compile."""
        self._runner.warm_up(self.config)

    def capture_steps(self) -> None:
        """Capture steps of the sizes that are used most, before the first request."""
        first, later = self._runner.sizes_to_capture()
        for sizes in first[:1]:  # what ops make at their first call must not be made in a capture
            self._runner.run_with_hidden(self._inputs.fill([], self._table.block_table, [], sizes), sizes)
        for sizes in first:
            self._capture(sizes)
        self._to_capture.extend(later)

    def capture_while_idle(self) -> bool:
        """Capture steps of one more size, which takes as long as a few steps; False if there is none, or work.

        What has not come to its turn is captured by the first step of its size.
        """
        if self._sequences or self._in_flight is not None or not self._to_capture:
            return False
        self._capture(self._to_capture.popleft())
        return True

    def _capture(self, sizes: StepSizes) -> None:
        if self._runner.captured.is_missing(sizes):
            self._runner.capture(self._inputs.fill([], self._table.block_table, [], sizes), sizes)

    def forget_history(self) -> None:
        """Reset records and counters, after a warm-up."""
        self.records = StepRecords()
        self.num_steps = 0
        self._runner.captured.forget_history()
        self._num_lora_op_calls_before = lora_ops.call_count()

    def close(self) -> None:
        self.desk.close()
        self._grammars.close()
        self._masks.close()

    # ---- inner parts, in the order of the step

    def _admit(self) -> None:
        """Take over compiled grammars and finished adapter loads; answer the users of those that failed."""
        for sequence, grammar, outcome in self._grammars.take_done():
            self._begin_constrained(sequence, grammar, outcome)
        self.desk.settle_loads(is_idle=not self.scheduler.running)
        failures = self.desk.take_failures()
        if not failures:
            return
        for sequence in list(self._sequences.values()):
            failure = None if sequence.adapter is None else failures.get(sequence.adapter)
            if failure is not None and not sequence.is_running:
                error, is_clients = failure.error, failure.client_fault
                self._finish(sequence, Finished(sequence.request_id, "error", error=error, client_fault=is_clients))

    def _begin_constrained(self, sequence: Sequence, grammar: str, outcome: Any) -> None:
        """The sequence may be scheduled, with the matcher that it was given, or its grammar cannot be followed."""
        if sequence not in self._compiling:
            return  # it has ended meanwhile
        if isinstance(outcome, GrammarError):
            self._finish(sequence, _bad_grammar(sequence, str(outcome)))
            return
        self._compiling.remove(sequence)
        table, sampling = self._grammars.table, sequence.request.sampling
        assert table is not None
        sequence.constraint = Constraint(
            sampling,
            sequence.stop_ids,
            self.capacity.vocab_size,
            grammar=grammar,
            matcher=outcome,
            eos_token_ids=table.eos_token_ids,
        )
        self.scheduler.add(sequence)

    def _launch(self) -> _StepInFlight | None:
        """Decide what runs next, and ask the device for it. None if nothing can run."""
        launched_at = time.perf_counter()
        self._admit()
        chunks = self.scheduler.schedule()
        if not chunks:
            return None
        inputs = [self._input_of(chunk) for chunk in chunks]
        order = adapter_order(inputs)
        chunks, inputs = [chunks[i] for i in order], [inputs[i] for i in order]
        sizes = self._runner.padded(self._sizes_of(inputs, chunks))
        num_logits = sizes.num_tokens if sizes.num_rows is None else sizes.num_rows
        sampling = sampling_of(chunks, num_logits, self.capacity.vocab_size)
        riders = sampling.asked.arrays(number_dtype(self.capacity.device))
        riders["sampled_slots"] = np.array([sequence.slot for sequence in sampling.sequences], np.int64)
        blocks = [self.blocks.blocks(chunk.sequence.key) for chunk in chunks]
        batch = self._inputs.fill(inputs, self._table.block_table, blocks, sizes, riders)
        if self._overlaps:
            assert batch.token_slots is not None
            self._table.resolve_tokens(batch.token_ids, batch.token_slots)
        self._reset_penalties(chunks)
        constrained = sampling.constrained
        if constrained and self._in_flight is None:
            self._masks.begin([sequence.constraint for sequence in constrained])
        logits, pooled = self._run(batch, sizes, chunks)
        result = self._sample(logits, sampling, {**batch.riders, **self._masks_of(constrained)}, pooled)
        self.num_steps += 1
        return _StepInFlight(sampling, pooled, result, record_of(chunks), launched_at, self.num_steps)

    def _input_of(self, chunk: ScheduledChunk) -> ChunkInput:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        self._table.set_blocks(sequence.slot, self.blocks.blocks(sequence.key))
        place, first_rows = self._rows_of(chunk.adapter)
        token_ids = sequence.token_ids[chunk.start : end]
        return ChunkInput(
            token_ids=token_ids if len(token_ids) == chunk.num_tokens else [*token_ids, IN_FLIGHT],
            start=chunk.start,
            slot=sequence.slot,
            num_logits=chunk.num_logits,
            place=place,
            first_rows=first_rows,
            length_limit=sequence.max_total,
        )

    def _sizes_of(self, inputs: list[ChunkInput], chunks: list[ScheduledChunk]) -> StepSizes:
        """Without padding."""
        all_decode = is_all_decode(inputs)
        return StepSizes(
            num_tokens=sum(len(chunk.token_ids) for chunk in inputs),
            num_sequences=len(inputs),
            num_rows=None if all_decode else sum(chunk.num_logits for chunk in inputs),
            table_blocks=max(-(-chunk.end // self.config.block_size_tokens) for chunk in inputs),
            all_decode=all_decode,
            has_lora=any(chunk.place != BASE for chunk in inputs),
            window_rows=self._window_rows(chunks),
            side=side_lines(inputs, self.capacity.side_groups),
        )

    def _window_rows(self, chunks: list[ScheduledChunk]) -> int:
        """Rows that a window must hold for the step's adapters; 0 without adapters or windows."""
        if self._rows is None or not self.capacity.num_window_rows:
            return 0
        return self._rows.rows_end({chunk.adapter for chunk in chunks if chunk.adapter is not None})

    def _rows_of(self, adapter: str | None) -> tuple[int, tuple[int, ...]]:
        """Place and first rows; asked for in every step, since loads may move ranges."""
        if adapter is None:
            return BASE, ()
        rows = self.desk.rows
        place = None if rows is None else rows.place_of(adapter)
        assert rows is not None and place is not None, "a running sequence has lost its rows"
        return place, rows.first_rows(place)

    def _reset_penalties(self, chunks: list[ScheduledChunk]) -> None:
        """Count anew for those that begin; all their tokens are known then."""
        for sequence in (chunk.sequence for chunk in chunks if chunk.start == 0):
            if uses_penalties(sequence.parameters):
                prompt, output = sequence.token_ids[: sequence.num_prompt], sequence.token_ids[sequence.num_prompt :]
                self._penalties.reset(sequence.slot, prompt, output)

    def _masks_of(self, constrained: list[Sequence]) -> dict[str, torch.Tensor]:
        """The masks of these sequences, whose tokens before this step are known when this returns."""
        if not constrained:
            return {}
        if self._collect_in_flight():
            living = (self._sequences.get(sequence.request_id) is sequence for sequence in constrained)
            pairs = zip(constrained, living, strict=True)
            self._masks.begin([sequence.constraint if is_living else None for sequence, is_living in pairs])
        masks = self._masks.wait()
        for sequence in constrained:
            if sequence.constraint is not None and sequence.constraint.error:
                self._fail_constrained(sequence)
        return {"masks": masks}

    def _fail_constrained(self, sequence: Sequence) -> None:
        """Its grammar cannot be followed any further."""
        assert sequence.constraint is not None
        if sequence.constraint.grammar is not None:
            self._grammars.forget(sequence.constraint.grammar)
        if self._sequences.get(sequence.request_id) is sequence:
            self._finish(sequence, _bad_grammar(sequence, sequence.constraint.error))

    @torch.inference_mode()
    def _run(self, batch: StepBatch, sizes: StepSizes, chunks: list[ScheduledChunk]) -> tuple[torch.Tensor, PooledStep]:
        """The step's logits, and what is wanted of its hidden states."""
        if not any(chunk.sequence.request.pooling for chunk in chunks):
            return self._runner.run(batch, sizes), PooledStep()
        logits, hidden = self._runner.run_with_hidden(batch, sizes)
        return logits, self._pools.pool(hidden, chunks)

    @torch.inference_mode()
    def _sample(
        self, logits: torch.Tensor, sampling: StepSampling, riders: Mapping[str, torch.Tensor], pooled: PooledStep
    ) -> StepResult:
        """Ask for the tokens, keep them for the next step, and begin to bring them to the host."""
        facts = sampling.asked.facts
        if not facts.num_rows + facts.num_given:  # chunks of prompts alone
            return self._results.fetch(logits.new_empty(0, dtype=torch.int32))
        sampled = sample(logits, SamplingMaps.from_tensors(facts, riders), self._penalties)
        if self._overlaps and sampling.sequences:
            self._table.keep_tokens(riders["sampled_slots"], sampled.token_ids)
        return self._results.fetch(pooled.packed_with(sampled.packed))

    def _collect_in_flight(self) -> bool:
        """Collect the step in flight; False without one."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._collect(step)
        return step is not None

    def _collect(self, step: _StepInFlight) -> None:
        """Wait for what the step has sampled, tell of it, and end what has ended."""
        packed = step.pooled.read(step.result.wait())
        for sequence, choice in read_sampled(packed, step.sampling):
            if self._sequences.get(sequence.request_id) is not sequence:
                continue  # it has ended since the launch
            if sequence.request.sampling.max_tokens > 0:
                sequence.num_in_flight -= 1
            message = tokens_message(sequence, choice)
            if message is not None:
                self._events.append(message)
                self.records.add_first_token(sequence, step.number, time.perf_counter())
            self._advance(sequence, choice.token_id)
        now = time.perf_counter()
        self.records.add(step.record, (now - max(step.launched_at, self._collected_at)) * 1e3)
        self._collected_at = now

    def _advance(self, sequence: Sequence, token: int | None) -> None:
        """The sequence has its next token (None: there was none to choose); end it if that was the last."""
        request_id, sampling = sequence.request_id, sequence.request.sampling
        if token is None:
            is_adapters = sequence.adapter is not None
            error = ADAPTER_NOT_FINITE if is_adapters else NOT_FINITE
            self._finish(sequence, Finished(request_id, "error", error=error, client_fault=is_adapters))
            return
        if sampling.max_tokens > 0:
            sequence.token_ids.append(token)
            if token in sequence.stop_ids:
                self._finish(sequence, Finished(request_id, "stop", stop_token_id=token))
                return
        if sequence.constraint is not None:
            sequence.constraint.consume(token)
            if sequence.constraint.error:
                self._fail_constrained(sequence)
                return
            if sequence.constraint.is_complete:
                self._finish(sequence, Finished(request_id, "stop"))
                return
        if len(sequence.token_ids) >= sequence.max_total:
            self._finish(sequence, Finished(request_id, "length", pooled=sequence.pooled))

    def _finish(self, sequence: Sequence, message: Finished) -> None:
        self._forget(sequence)
        self._events.append(message)

    def _forget(self, sequence: Sequence) -> None:
        """Give back all that the sequence holds."""
        del self._sequences[sequence.request_id]
        if sequence in self._compiling:
            self._compiling.remove(sequence)
        else:
            self.scheduler.remove(sequence)

    def take_events(self) -> list[Event]:
        """What there is to tell since the last call; `step` returns it too."""
        events, self._events = self._events, []
        return events


def _bad_grammar(sequence: Sequence, reason: str) -> Finished:
    return Finished(sequence.request_id, "error", error=f"{BAD_GRAMMAR}: {reason}.", client_fault=True)
