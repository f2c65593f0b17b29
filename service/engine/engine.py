"""The engine: requests in, tokens out, one step at a time. Knows token ids, not text; runs in-process or behind
`process.py`.

Who owns: `requests.py` owns the table of requests; the scheduler owns the sequences and what they hold;
`prefetch.py` owns the way of adapters to the device; the runner owns the model and its caches, the launcher all
else that a step reads and writes there. The engine owns nothing but the step in flight and the records of past ones.
After kill -9 nothing is left but the adapter store on disk, which the engine never writes.

A step has two halves: `_launch` decides what runs and asks the device for it, `_collect` waits for what was sampled and
tells of it. With overlap, which is for devices, the next step is launched before the last one is collected, so that the
device never waits for the host: one step is *in flight* between two calls of `step`, two for a while within one. Why
nothing goes wrong then:

- All that a step reads and writes on the device happens in the order of the launches: copies of inputs, adapter loads,
  moves of rows, resets of penalty counts, the model, the sampler, the copy of the result. Blocks, slots, lines and rows
  that are freed while a step in flight works with them are therefore rewritten after it, by whoever gets them next, and
  what it writes there late is never read: a sequence reads what it has itself written, and counts that were reset.
- What a step samples goes to the next one by slot, on the device (`inputs.py`). The host counts it, and looks at
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
from dataclasses import dataclass

import torch

from adapters.memory.row_pool import PoolUsage
from service.engine.grammar.compiled_grammars import Worker
from service.engine.grammar.grammar_sequences import GrammarSequences
from service.engine.ipc.config import EngineConfig, has_prefix_cache
from service.engine.ipc.messages import (
    Abort,
    Evict,
    Load,
    Move,
    OpInUse,
    Pin,
    Ready,
    ResetPrefixCache,
    Stats,
    Submit,
)
from service.engine.loras.interfaces import HostSource, Loader, Rows
from service.engine.loras.prefetch import AdapterLoads
from service.engine.model.runner import Runner
from service.engine.pauses import Pauses
from service.engine.requests import Event, Requests
from service.engine.scheduling.cache_counts import CacheCounts
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.scheduling.prefix_cache import PrefixCache
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.state_lines import StateLines
from service.engine.sequences.sequence import Sequence
from service.engine.sequences.slots import Slots
from service.engine.sleeping import Sleeping
from service.engine.step.launcher import StepLauncher
from service.engine.step.outputs import PooledStep, StepResult, StepSampling, read_sampled, tokens_message
from service.engine.step_records import StepRecord, StepRecords, record_of
from service.grammars.matching import TokenTable

_NO_ROWS = PoolUsage(0, 0, 0, 0, 0, 0, 0, 0)


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
        self.adapter_loads = AdapterLoads(
            rows, host, loader, max_loads_ahead=config.max_loads_ahead, wake=self.wake.set
        )
        # Blocks that are evicted together are not all in host memory yet.
        makes_runs = capacity.device.type == "cpu" and runner.host_copies is None
        self.blocks = BlockPool(capacity.num_blocks, makes_runs=makes_runs)
        self.slots, self.lines = Slots(capacity.num_slots), StateLines(capacity.num_lines, capacity.num_slots)
        self.cache = PrefixCache(
            self.blocks,
            self.lines,
            block_size_tokens=config.block_size_tokens,
            token_budget=config.token_budget,
            is_on=has_prefix_cache(config) and (not capacity.has_conv or self.lines.most_kept > 0),
            is_shared=config.prefix_cache_scope == "server",
            rope_class=capacity.rope_class,
            copies=runner.host_copies,
        )
        self.scheduler = Scheduler(
            self.blocks,
            self.cache,
            self.slots,
            self.lines,
            self.adapter_loads,
            block_size_tokens=config.block_size_tokens,
            token_budget=config.token_budget,
            max_steps_waiting_for_rows=config.max_steps_waiting_for_rows,
            max_prompt_logits=config.max_prompt_logits,
            # A device's step takes the time of reading the weights, however few its tokens are.
            prompts_apart=capacity.device.type == "cpu",
        )
        self.constrained = GrammarSequences(
            tokens, compiler, self.wake.set, capacity, config.max_sequences, self.scheduler.grammar_budget
        )
        self.requests = Requests(
            capacity, self.kv_capacity_tokens, self.adapter_loads.rows, self.scheduler, self.constrained
        )
        self.pauses = Pauses(self.scheduler, self.requests)
        self.records = StepRecords()
        self.is_idle = True  # the last call of `step` has neither launched, collected nor preempted anything
        self.rows = rows
        self.host = host
        self.runner = runner
        self._ops = ops
        self._overlaps = config.overlap if config.overlap is not None else capacity.device.type != "cpu"
        self._launcher = StepLauncher(runner, rows, self.blocks, config, keeps_tokens=self._overlaps)
        self.sleeping = Sleeping(runner, rows, self.cache, self._launcher, self.pauses, self.requests)
        self._in_flight: _StepInFlight | None = None
        self._collected_at = 0.0

    # ---- requests

    @property
    def kv_capacity_tokens(self) -> int:
        """The longest sequence that the KV budget can hold."""
        return self.blocks.capacity * self.config.block_size_tokens

    @property
    def num_requests(self) -> int:
        """Waiting and running."""
        return len(self.requests)

    @property
    def num_steps(self) -> int:
        """Launched since the start, or since `forget_history`."""
        return self.records.num_steps

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
            keeps_prefixes=self.cache.is_on,
            keeps_states=self.cache.is_on and self.lines.most_kept > 0,
        )

    def handle(self, message: Submit | Abort | Move | Load | Evict | Pin | ResetPrefixCache) -> None:
        """Take one message; never raises for what it says."""
        match message:
            case Submit():
                self.submit(message)
            case Abort():
                self.abort(message.request_id)
            case Move():
                self.requests.move(message)
            case Load():
                self.adapter_loads.hint(message.adapter)
            case Evict():
                self.adapter_loads.evict(message.adapter)
                self.cache.drop_adapter(message.adapter)
            case Pin():
                self.adapter_loads.pin(message.adapters)
            case ResetPrefixCache():
                self.cache.reset()

    def submit(self, request: Submit) -> None:
        """Queue a request. One that can never run is answered with Finished(error) by the next step."""
        self.requests.submit(request, self.records.num_steps)

    def abort(self, request_id: str) -> None:
        """Forget the request; everything it holds is free when this returns. Unknown ids are ignored."""
        self.requests.abort(request_id)

    def fail_all(self, error: str) -> None:
        """End every request with an error, as at the end of a drain."""
        self.requests.end_all("error", error)

    def take_events(self) -> list[Event]:
        """The events since the last call; `step` returns them too."""
        return self.requests.take_events()

    def sleep(self, request_id: str) -> None:
        """See `Sleep`."""
        self.sleeping.begin(request_id, has_step_in_flight=self.has_step_in_flight)

    def resume(self, request_id: str) -> None:
        """See `Resume`. Raises what `Sleeping.end` does."""
        self.sleeping.end()
        self.pauses.end(request_id)

    # ---- the step

    def step(self) -> list[Event]:
        """One forward pass for all that can run, and what came of it: of the pass before, with overlap. Runs no model
        if nothing can, and touches no memory of the device while asleep."""
        if self.sleeping.is_asleep:
            return self.take_events()
        num_preemptions = self.scheduler.num_preemptions
        launched = self._launch()
        has_collected = self._collect_in_flight()
        self._in_flight = launched
        if not self._overlaps:
            has_collected = self._collect_in_flight()
        has_preempted = self.scheduler.num_preemptions > num_preemptions  # what has yielded may join in the next one
        self.is_idle = launched is None and not (has_collected or has_preempted)
        self.pauses.settle(has_step_in_flight=self.has_step_in_flight)
        return self.take_events()

    @property
    def has_step_in_flight(self) -> bool:
        """A step was launched, and its tokens are not collected yet."""
        return self._in_flight is not None

    def run_until_idle(self, timeout_seconds: float = 60.0) -> list[Event]:
        """Step until no request is left, waiting for adapter loads in between; for use without the process."""
        deadline = time.monotonic() + timeout_seconds
        events = []
        while self.requests or self.has_step_in_flight:
            self.wake.clear()
            events += self.step()
            if self.requests and self.is_idle and not self.wake.wait(deadline - time.monotonic()):
                raise TimeoutError("no step was possible, and no adapter load ended, within the time given")
        return events

    def stats(self) -> Stats:
        """The state now, with what is new since the last call: steps, and where adapters are."""
        residency, host, records = self.adapter_loads.residency, self.host, self.records
        usage = self.rows.usage() if self.rows is not None else _NO_ROWS
        has_states, host_tier = self.capacity.has_conv, self.cache.host
        return Stats(
            is_paused=self.scheduler.paused is not None,
            num_waiting=self.scheduler.num_waiting + len(self.constrained.waiting),
            num_running=len(self.scheduler.running),
            kv_blocks_used=self.blocks.num_used,
            kv_blocks_total=self.blocks.capacity,
            state_lines_used=self.lines.num_used - self.lines.num_kept if has_states else 0,
            state_lines_total=self.slots.capacity if has_states else 0,
            rows_used=usage.rows_used,
            rows_total=usage.rows_total,
            row_bytes_used=usage.bytes_used,
            row_bytes_total=usage.bytes_total,
            num_adapters_on_device=usage.num_resident,
            num_adapters_on_host=0 if host is None else host.num_kept,
            num_adapter_requests={**self.adapter_loads.num_hits},
            num_tier_evictions={} if residency is None else {**residency.evictions},
            loaded_bytes={} if residency is None else {**residency.loaded_bytes},
            host_bytes_used=0 if host is None else host.used_bytes,
            adapter_load_seconds=() if residency is None else residency.take_load_seconds(),
            first_tokens=records.take_first_tokens(),
            moved_adapters={} if residency is None else residency.take_moved(),
            num_steps=records.num_steps,
            num_preemptions=self.scheduler.num_preemptions,
            num_adapter_loads=usage.num_loads,
            num_adapter_evictions=usage.num_evictions,
            prefix_cache_queried_tokens=self.cache.counts.queried_tokens,
            prefix_cache_hit_tokens=self.cache.counts.hit_tokens,
            prefix_cache_host_hit_tokens=self.cache.counts.host_hit_tokens,
            prefix_cache_host_bytes_used=0 if host_tier is None else host_tier.used_bytes,
            prefix_cache_host_bytes_total=0 if host_tier is None else host_tier.total_bytes,
            prefix_cache_resumed_tokens=self.cache.counts.resumed_tokens,
            prefix_cache_idle_blocks=self.cache.trie.num_idle,
            prefix_cache_stateless_tokens=self.cache.counts.stateless_tokens,
            prefix_cache_states=self.lines.num_kept,
            prefix_cache_evicted_states=self.lines.num_evicted,
            prefix_cache_evicted_blocks=self.cache.trie.num_evicted,
            num_steps_replayed=self.runner.captured.num_replayed,
            num_steps_eager=dict(self.runner.captured.eager),
            num_lora_op_calls=records.num_lora_op_calls,
            steps=records.take_new(),
        )

    def trim(self) -> None:
        """Give memory of what is gone back to the system; for when nothing runs."""
        if self.rows is not None:
            self.rows.trim()

    def check_integrity(self) -> None:
        """Every block, slot, pin and row is where the requests say."""
        self.scheduler.check_integrity()
        self.requests.check_integrity()

    def compile_kernels(self) -> None:
        """Compile what steps can need, before the first request: on an NPU a kernel takes seconds to compile."""
        self.runner.warm_up(self.config)

    def capture_steps(self) -> None:
        """Capture steps of the sizes that are used most, before the first request."""
        self._launcher.capture_first()

    def capture_while_idle(self) -> bool:
        """Capture steps of one more size, which takes as long as a few steps; False if there is none, or work.

        What has not come to its turn is captured by the first step of its size.
        """
        if self.requests or self.has_step_in_flight or self.sleeping.is_asleep:
            return False
        return self._launcher.capture_next()

    def forget_history(self) -> None:
        """Reset records, counters and the prefix cache, after a warm-up."""
        self.records = StepRecords()
        self.cache.reset()
        self.cache.counts = CacheCounts()
        self.runner.captured.forget_history()

    def close(self) -> None:
        self.adapter_loads.close()
        self.constrained.close()

    # ---- inner parts, in the order of the step

    def _admit(self) -> None:
        """Take over compiled grammars and finished adapter loads; answer the users of those that failed."""
        self.pauses.expire()
        self.requests.schedule_compiled()
        self.adapter_loads.settle_loads(is_idle=not self.scheduler.goes_on)
        self.requests.fail_waiting(self.adapter_loads.take_failures())

    def _launch(self) -> _StepInFlight | None:
        """Decide what runs next, and ask the device for it. None if nothing can run."""
        launched_at = time.perf_counter()
        self._admit()
        chunks = self.scheduler.schedule()
        if not chunks:
            return None
        step = self._launcher.fill(chunks)
        constrained = step.sampling.constrained
        if constrained and self._in_flight is None:
            self.constrained.begin_masks(constrained)
        output = self._launcher.run(step)
        masks = self._masks_of(constrained) if constrained else None
        result = self._launcher.sample(step, output, masks)
        self.records.num_steps += 1
        number = self.records.num_steps
        return _StepInFlight(step.sampling, output.pooled, result, record_of(step.chunks), launched_at, number)

    def _masks_of(self, constrained: list[Sequence]) -> torch.Tensor:
        """The masks of these sequences, whose tokens before this step are known when this returns."""
        if self._collect_in_flight():
            gone = {one for one in constrained if one not in self.requests}
            self.constrained.begin_masks(constrained, gone)
        masks = self.constrained.wait_masks()
        for sequence in constrained:
            self.requests.end_if_stuck(sequence)
        return masks

    def _collect_in_flight(self) -> bool:
        """Collect the step in flight; False without one."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._collect(step)
        return step is not None

    def _collect(self, step: _StepInFlight) -> None:
        """Wait for what the step has sampled, tell of it, and end what has ended."""
        packed = step.pooled.read(step.result.wait(), self.adapter_loads.head_of)
        for sequence, choice in read_sampled(packed, step.sampling):
            if sequence not in self.requests:
                continue  # it has ended since the launch
            if sequence.request.sampling.max_tokens > 0:
                sequence.num_in_flight -= 1
            message = tokens_message(sequence, choice)
            if message is not None:
                self.requests.events.append(message)
                self.records.add_first_token(sequence, step.number, time.perf_counter())
            self.requests.advance(sequence, choice.token_id)
        now = time.perf_counter()
        self.records.add(step.record, (now - max(step.launched_at, self._collected_at)) * 1e3)
        self._collected_at = now
