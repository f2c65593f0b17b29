"""The engine: requests in, tokens out, one step at a time. Knows token ids, not text; runs in-process or behind
`process.py`.

Who owns: the scheduler owns the sequences and what they hold; the desk owns the way of adapters to the device; the
runner owns the model and its caches. The engine owns nothing but the table of requests and the records of past steps.
Who frees: `_finish` and `abort`, through the scheduler, at once. After kill -9 nothing is left but the adapter store
on disk, which the engine never writes.
Cost per step outside the model: O(running sequences + tokens of the step), plus sampling, which is a few passes over
the logits.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from adapters.row_pool import PoolUsage
from kernels.lora import ops as lora_ops
from kernels.platform import in_use
from service.engine import admission
from service.engine.adapter_desk import AdapterDesk, HostSource, Loader, Rows
from service.engine.block_pool import BlockPool
from service.engine.config import EngineConfig
from service.engine.maps import BASE, MapLimits, Part, adapter_order, build_step
from service.engine.messages import (
    Abort,
    Evict,
    Finished,
    Load,
    OpInUse,
    Ready,
    Stats,
    Submit,
    Tokens,
)
from service.engine.output import ask_of, sample_step, tokens_message
from service.engine.records import StepRecord, StepRecords, record_of
from service.engine.runner import Runner
from service.engine.sampler import Choice
from service.engine.sampling_plan import arrays_of
from service.engine.scheduler import Scheduler
from service.engine.sequence import Sequence, Share
from service.engine.staging import Staging
from service.engine.state_lines import StateLines

Event = Tokens | Finished
NO_ROWS = PoolUsage(0, 0, 0, 0, 0, 0, 0, 0)
NOT_FINITE = "The model gave no finite logits for this request."
ADAPTER_NOT_FINITE = "The adapter gives no finite logits for this request: its weights or its scaling are too large."


class Engine:
    """See the module's docstring. `rows` and `host` are None where LoRA is off; `ops` are told of in `ready`.

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
    ) -> None:
        capacity = runner.capacity
        self.config = config
        self.capacity = capacity
        self.wake = threading.Event()
        self.desk = AdapterDesk(rows, host, loader, max_loads_ahead=config.max_loads_ahead, wake=self.wake.set)
        self.blocks = BlockPool(capacity.num_blocks)
        self.lines = StateLines(capacity.num_lines) if capacity.num_lines else None
        self.scheduler = Scheduler(
            self.blocks,
            self.lines,
            self.desk,
            block_size_tokens=config.block_size_tokens,
            token_budget=config.token_budget,
            max_sequences=config.max_sequences,
            max_steps_waiting_for_rows=config.max_steps_waiting_for_rows,
            max_prompt_logits=config.max_prompt_logits,
        )
        self.records = StepRecords()
        self.num_steps = 0
        self._runner = runner
        self._ops = ops
        # Those of the probe at the start are no step's.
        self._num_lora_op_calls_before = lora_ops.call_count()
        self._rows = rows
        self._host = host
        self._map_limits = MapLimits(
            block_size=config.block_size_tokens,
            num_groups=capacity.num_groups,
            max_segments=config.max_sequences,
            has_conv=self.lines is not None,
            has_length_limits=capacity.has_length_limits,
            device=capacity.device,
        )
        self._staging = Staging(capacity.device)
        # Of the logits, where the device samples; None where the host does.
        self._sampled_columns = None if in_use(capacity.device).device == "cpu" else capacity.vocab_size
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
            dtype=self.capacity.dtype,
            device=str(self.capacity.device),
            pid=pid,
            row_element_bytes=self.capacity.row_element_bytes,
            row_alignment=self.capacity.row_alignment,
            ops=self._ops,
        )

    def handle(self, message: Submit | Abort | Load | Evict) -> None:
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

    def submit(self, request: Submit) -> None:
        """Queue a request. One that can never run is answered with Finished(error) by the next step."""
        error = admission.error_in(request, self.capacity, self.kv_capacity_tokens, self.desk.rows)
        if error is None and request.request_id in self._sequences:
            error = f"The request id {request.request_id!r} is in use."
        if error is not None:
            self._events.append(Finished(request.request_id, "error", error=error, client_fault=True))
            return
        sequence = admission.sequence_of(request, self._num_arrived, self.capacity)
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Forget the request; everything it holds is free when this returns. Unknown ids are ignored."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.scheduler.remove(sequence)

    def fail_all(self, error: str) -> None:
        """End every request with an error, as at the end of a drain."""
        for sequence in list(self._sequences.values()):
            self._finish(sequence, Finished(sequence.request_id, "error", error=error))

    # ---- the step

    def step(self) -> list[Event]:
        """One forward pass for all that can run, and what came of it. Runs no model if nothing can."""
        started = time.perf_counter()
        self._admit()
        shares = self.scheduler.schedule()
        if shares:
            shares, parts = self._in_adapter_order(shares)
            ask = ask_of(shares, self._sampled_columns)
            riders = {} if ask.plan is None else arrays_of(ask.plan)
            batch = build_step(parts, self._map_limits, self._staging, riders)
            logits = self._runner.run(batch)
            choices = sample_step(logits, ask, batch.riders)
            self._publish(choices)
            self._settle(shares, choices, started)
        return self.take_events()

    def run_until_idle(self, timeout_seconds: float = 60.0) -> list[Event]:
        """Step until no request is left, waiting for adapter loads in between; for use without the process."""
        deadline = time.monotonic() + timeout_seconds
        events = []
        while self._sequences:
            self.wake.clear()
            num_steps = self.num_steps
            events += self.step()
            if self._sequences and self.num_steps == num_steps and not self.wake.wait(deadline - time.monotonic()):
                raise TimeoutError("no step was possible, and no adapter load ended, within the time given")
        return events

    def stats(self) -> Stats:
        """The state now, with the steps since the last call."""
        usage = self._rows.usage() if self._rows is not None else NO_ROWS
        return Stats(
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_total=self.blocks.capacity,
            state_lines_used=0 if self.lines is None else self.lines.num_used,
            state_lines_total=0 if self.lines is None else self.lines.capacity,
            rows_used=usage.rows_used,
            rows_total=usage.rows_total,
            row_bytes_used=usage.bytes_used,
            row_bytes_total=usage.bytes_total,
            adapters_on_device=() if self._rows is None else self._rows.resident(),
            adapters_on_host=() if self._host is None else self._host.resident(),
            num_steps=self.num_steps,
            num_preemptions=self.scheduler.num_preemptions,
            num_adapter_loads=usage.num_loads,
            num_adapter_evictions=usage.num_evictions,
            num_lora_op_calls=lora_ops.call_count() - self._num_lora_op_calls_before,
            steps=self.records.take_new(),
        )

    def check_integrity(self) -> None:
        """Every block, line, pin and row is where the requests say."""
        self.scheduler.check_integrity()
        known = sorted(sequence.key for sequence in self._sequences.values())
        queued = [*self.scheduler.waiting, *self.scheduler.running]
        assert known == sorted(sequence.key for sequence in queued), "a request is lost"

    def compile_kernels(self) -> None:
        """Compile what steps can need, before the first request: on an NPU a kernel takes seconds to compile."""
        self._runner.warm_up(self.config)

    def forget_history(self) -> None:
        """Reset records and counters, after a warm-up."""
        self.records = StepRecords()
        self.num_steps = 0

    def close(self) -> None:
        self.desk.close()

    # ---- inner parts, in the order of the step

    def _admit(self) -> None:
        """Take over finished adapter loads; answer the users of adapters that failed."""
        self.desk.settle_loads()
        failures = self.desk.take_failures()
        if not failures:
            return
        for sequence in list(self._sequences.values()):
            failure = None if sequence.adapter is None else failures.get(sequence.adapter)
            if failure is not None and not sequence.is_running:
                error, is_clients = failure.error, failure.client_fault
                self._finish(sequence, Finished(sequence.request_id, "error", error=error, client_fault=is_clients))

    def _in_adapter_order(self, shares: list[Share]) -> tuple[list[Share], list[Part]]:
        """The shares as a step wants them, and the same in plain integers."""
        parts = [self._part(share) for share in shares]
        order = adapter_order(parts)
        return [shares[i] for i in order], [parts[i] for i in order]

    def _part(self, share: Share) -> Part:
        sequence, start = share.sequence, share.sequence.num_computed
        place, first_rows = self._rows_of(sequence.adapter)
        return Part(
            token_ids=sequence.token_ids[start : start + share.num_tokens],
            start=start,
            blocks=self.blocks.blocks(sequence.key),
            num_logits=share.num_logits,
            place=place,
            first_rows=first_rows,
            state_line=sequence.state_line,
            length_limit=sequence.max_total,
        )

    def _rows_of(self, adapter: str | None) -> tuple[int, tuple[int, ...]]:
        """Place and first rows; asked for in every step, since loads may move ranges."""
        if adapter is None:
            return BASE, ()
        rows = self.desk.rows
        place = None if rows is None else rows.place_of(adapter)
        assert rows is not None and place is not None, "a running sequence has lost its rows"
        return place, rows.first_rows(place)

    def _publish(self, choices: list[tuple[Sequence, Choice]]) -> None:
        """Tell of the new tokens."""
        messages = [tokens_message(sequence, choice) for sequence, choice in choices]
        self._events += [message for message in messages if message is not None]

    def _settle(self, shares: list[Share], choices: list[tuple[Sequence, Choice]], started: float) -> None:
        """Count what is computed, end what has ended, write the record of the step."""
        record = record_of(shares, (time.perf_counter() - started) * 1e3)
        for share in shares:
            share.sequence.num_computed += share.num_tokens
        for sequence, choice in choices:
            self._advance(sequence, choice.token_id)
        self.num_steps += 1
        self.records.add(record)

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
            if sequence.counts is not None:
                sequence.counts.add(token)
            if token in sequence.stop_ids:
                self._finish(sequence, Finished(request_id, "stop", stop_token_id=token))
                return
        if sequence.num_output >= sampling.max_tokens:
            self._finish(sequence, Finished(request_id, "length"))

    def _finish(self, sequence: Sequence, message: Finished) -> None:
        del self._sequences[sequence.request_id]
        self.scheduler.remove(sequence)
        self._events.append(message)

    def take_events(self) -> list[Event]:
        """What there is to tell since the last call; `step` returns it too."""
        events, self._events = self._events, []
        return events
