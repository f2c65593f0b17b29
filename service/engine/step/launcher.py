"""Launch of a step on the device: its inputs in one copy, the model, run or replayed, and the sampling of its logits.

Who owns: the launcher owns all that steps read and write on the device beside the model and its caches: inputs, latest
tokens, penalty counts, sums of pooled vectors, results under way. It knows chunks and slots, and nothing of requests.
Nothing here waits for the device, but for the copy of the last inputs but one (`inputs.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from kernels.lora_window.ops import window_for
from kernels.sampling.maps import SamplingMaps, uses_penalties
from kernels.sampling.ops import new_state, sample
from service.engine.ipc.config import EngineConfig
from service.engine.loras.interfaces import Rows
from service.engine.model.padding import StepSizes, padded_tokens
from service.engine.model.runner import Runner
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.sequences.sequence import ScheduledChunk
from service.engine.step.inputs import RequestTable, StepInputs
from service.engine.step.maps import (
    BASE,
    IN_FLIGHT,
    ChunkInput,
    InputLimits,
    SamplerArrays,
    adapter_order,
    has_rows,
    is_all_decode,
    non_lora_lines,
)
from service.engine.step.outputs import PooledStep, Pools, ResultBuffers, StepResult, StepSampling, sampling_of
from service.models.step_batch import StepBatch

# In one step: a burst of many new adapters is spread over some. Each takes 0.3 ms of the host in a pool of a thousand.
MAX_ADAPTERS_A_STEP = 4


class RowCompaction:
    """Moves running adapters to low rows between launches, so that the windows of their steps are short.

    A window is a prefix of the rows (`kernels.lora_window`), so one adapter that stands high makes it long for all, and
    past the longest there is none. Before a step the rows of its adapters that stand higher than they need to change
    places with rows of nobody, or of adapters that do not run: on a GPU a launch for each group of projections (0.15 ms
    for an adapter of 84 MB on an H100), which saves time in each step until another adapter joins.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._settled: tuple[frozenset[str], int, int] | None = None

    def bring(self, digests: frozenset[str], num_tokens: int) -> None:
        """Shorten the window of a step of `num_tokens` padded tokens with these adapters, which are pinned."""
        now = digests, num_tokens, self._rows.num_changes
        if now == self._settled:
            return
        end_row = window_for(self._rows.rows_needed(digests), num_tokens)
        if end_row is None or self._rows.bring_below(end_row, digests, max_adapters=MAX_ADAPTERS_A_STEP):
            self._settled = now


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step whose inputs are on their way: its chunks in adapter order, and what is asked of its logits.

    sampler  what is asked, on the device
    """

    chunks: list[ScheduledChunk]
    sizes: StepSizes
    batch: StepBatch
    sampling: StepSampling
    sampler: SamplerArrays[torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """logits [rows, vocab], and what is wanted of the hidden states."""

    logits: torch.Tensor
    pooled: PooledStep


class StepLauncher:
    """See the module's docstring. A step is filled, run and sampled, in this order, before the next one is filled.

    rows    None where LoRA is off
    blocks  of whom the chunks' sequences hold theirs
    keeps_tokens  for the next step, which is launched before this one's are on the host
    """

    def __init__(
        self, runner: Runner, rows: Rows | None, blocks: BlockPool, config: EngineConfig, *, keeps_tokens: bool
    ) -> None:
        capacity = runner.capacity
        self._runner = runner
        self._rows = rows
        self._row_compaction = None if rows is None or not capacity.swaps_rows else RowCompaction(rows)
        self._blocks = blocks
        self._block_size = config.block_size_tokens
        self._keeps_tokens = keeps_tokens
        self._table = RequestTable(capacity.num_slots, capacity.max_blocks, capacity.device)
        self._inputs = StepInputs(
            InputLimits(
                token_budget=padded_tokens(config.token_budget),
                max_sequences=config.max_sequences,
                max_blocks=capacity.max_blocks,
                max_logits_rows=padded_tokens(config.max_sequences) + config.max_prompt_logits,
                block_size=config.block_size_tokens,
                num_groups=capacity.num_groups,
                non_lora_groups=capacity.non_lora_groups,
                has_conv=capacity.has_conv,
                has_length_limits=capacity.has_length_limits,
                device=capacity.device,
            )
        )
        self._penalties = new_state(capacity.num_slots, capacity.vocab_size, capacity.device)
        self._pools = Pools()
        self._results = ResultBuffers(capacity.device)
        self._to_capture: deque[StepSizes] = deque()

    # ---- a step

    def fill(self, chunks: list[ScheduledChunk]) -> FilledStep:
        """Bring the step's inputs to the device."""
        adapters = frozenset(chunk.adapter for chunk in chunks if chunk.adapter is not None)
        if adapters and self._row_compaction is not None:
            self._row_compaction.bring(adapters, padded_tokens(sum(chunk.num_tokens for chunk in chunks)))
        inputs = [self._input_of(chunk) for chunk in chunks]
        order = adapter_order(inputs)
        chunks, inputs = [chunks[i] for i in order], [inputs[i] for i in order]
        sizes = self._runner.padded(self._sizes_of(inputs, adapters))
        num_logits = sizes.num_tokens if sizes.num_rows is None else sizes.num_rows
        sampling = sampling_of(chunks, num_logits, self._runner.capacity.vocab_size)
        slots = [sequence.slot for sequence in sampling.sequences]
        blocks = [self._blocks.blocks(chunk.sequence.key) for chunk in chunks]
        batch, sampler = self._inputs.fill(inputs, self._table.block_table, blocks, sizes, sampling.asked, slots)
        assert sampler is not None
        if self._keeps_tokens:
            assert batch.token_slots is not None
            self._table.resolve_tokens(batch.token_ids, batch.token_slots)
        self._reset_penalties(chunks)
        return FilledStep(chunks, sizes, batch, sampling, sampler)

    @torch.inference_mode()
    def run(self, step: FilledStep) -> ModelOutput:
        """The model's answer; the next step that runs may write to the memory of its logits."""
        self._copy_blocks(step.chunks)
        poolings = {chunk.sequence.request.pooling for chunk in step.chunks}
        if not any(poolings):
            return ModelOutput(self._runner.run(step.batch, step.sizes), PooledStep())
        # Others read the last token of a prompt, which has logits: its last layer need not feed all tokens forward.
        of_all = "mean" in poolings
        logits, hidden = self._runner.run_with_hidden(step.batch, step.sizes, of_all=of_all)
        return ModelOutput(logits, self._pools.pool(hidden, step.chunks, of_all=of_all))

    @torch.inference_mode()
    def sample(self, step: FilledStep, output: ModelOutput, masks: torch.Tensor | None) -> StepResult:
        """Ask for the tokens, keep them for the next step, and begin to bring them to the host.

        masks  int32 [constrained sequences, ceil(vocab / 32)], None without such sequences
        """
        facts = step.sampling.asked.facts
        if not facts.num_rows + facts.num_given:  # chunks of prompts alone
            return self._results.fetch(output.logits.new_empty(0, dtype=torch.int32))
        maps = SamplingMaps.of(facts, step.sampler, masks)
        sampled = sample(output.logits, maps, self._penalties)
        if self._keeps_tokens and step.sampling.sequences:
            self._table.keep_tokens(step.sampler.sampled_slots, sampled.token_ids)
        return self._results.fetch(output.pooled.packed_with(sampled.packed))

    # ---- captures

    def capture_first(self) -> None:
        """Capture steps of the sizes that are used most."""
        first, later = self._runner.sizes_to_capture()
        for sizes in first[:1]:  # what ops make at their first call must not be made in a capture
            self.run_eagerly(sizes)
        for sizes in first:
            self.capture(sizes)
        self._to_capture.extend(later)

    def capture_again(self) -> None:
        """Have `capture_next` capture all sizes, of whose steps no graph is left."""
        self._to_capture = deque(sizes for some in self._runner.sizes_to_capture() for sizes in some)

    def capture_next(self) -> bool:
        """Capture steps of one more size, which takes as long as a few steps; False if none is left."""
        if not self._to_capture:
            return False
        self.capture(self._to_capture.popleft())
        return True

    def run_eagerly(self, sizes: StepSizes) -> None:
        """Run an empty step of these sizes."""
        self._runner.run_with_hidden(self._empty(sizes), sizes)

    def capture(self, sizes: StepSizes) -> None:
        """Capture steps of these sizes, unless they are."""
        if self._runner.captured.is_missing(sizes):
            self._runner.capture(self._empty(sizes), sizes)

    def _empty(self, sizes: StepSizes) -> StepBatch:
        batch, _ = self._inputs.fill([], self._table.block_table, [], sizes)
        return batch

    # ---- inner parts of `fill`

    def _input_of(self, chunk: ScheduledChunk) -> ChunkInput:
        sequence, end = chunk.sequence, chunk.start + chunk.num_tokens
        self._table.set_blocks(sequence.slot, self._blocks.blocks(sequence.key))
        place, first_rows = self._rows_of(chunk.adapter)
        token_ids = sequence.token_ids[chunk.start : end]
        return ChunkInput(
            token_ids=token_ids if len(token_ids) == chunk.num_tokens else [*token_ids, IN_FLIGHT],
            start=chunk.start,
            slot=sequence.slot,
            num_logits=chunk.num_logits,
            line=chunk.line,
            begins=chunk.begins,
            place=place,
            first_rows=first_rows,
            length_limit=sequence.max_total,
            source_line=chunk.source_line,
        )

    def _copy_blocks(self, chunks: list[ScheduledChunk]) -> None:
        """Copy the blocks whose first tokens sequences share with others, and go on behind."""
        pairs = []
        for chunk in chunks:
            if chunk.copied_block:
                own = self._blocks.blocks(chunk.sequence.key)[chunk.start // self._block_size]
                pairs.append((chunk.copied_block, own))
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self._runner.copy_blocks(sources, targets)

    def _sizes_of(self, inputs: list[ChunkInput], adapters: frozenset[str]) -> StepSizes:
        """Without padding."""
        all_decode = is_all_decode(inputs)
        return StepSizes(
            num_tokens=sum(len(chunk.token_ids) for chunk in inputs),
            num_sequences=len(inputs),
            num_rows=None if all_decode else sum(chunk.num_logits for chunk in inputs),
            table_blocks=max(-(-chunk.end // self._block_size) for chunk in inputs),
            all_decode=all_decode,
            has_lora=any(chunk.place != BASE for chunk in inputs),
            window_rows=self._window_rows(adapters),
            side=non_lora_lines(inputs, self._runner.capacity.non_lora_groups),
            has_experts=has_rows(inputs, self._runner.capacity.experts_group),
        )

    def _window_rows(self, adapters: frozenset[str]) -> int:
        """Rows that a window must hold for the step's adapters; 0 without adapters or windows."""
        if self._rows is None or not self._runner.capacity.num_window_rows:
            return 0
        return self._rows.rows_end(adapters)

    def _rows_of(self, adapter: str | None) -> tuple[int, tuple[int, ...]]:
        """Place and first rows; asked for in every step, since loads may move ranges."""
        if adapter is None:
            return BASE, ()
        place = None if self._rows is None else self._rows.place_of(adapter)
        assert self._rows is not None and place is not None, "a running sequence has lost its rows"
        return place, self._rows.first_rows(place)

    def _reset_penalties(self, chunks: list[ScheduledChunk]) -> None:
        """Count anew for those that begin; all their tokens are known then."""
        for sequence in (chunk.sequence for chunk in chunks if chunk.begins):
            if uses_penalties(sequence.parameters):
                prompt, output = sequence.token_ids[: sequence.num_prompt], sequence.token_ids[sequence.num_prompt :]
                self._penalties.reset(sequence.slot, prompt, output)
