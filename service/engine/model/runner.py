"""Runs the model on one step's batch, and says what the engine must know about the model.

Owns the caches (KV blocks and conv-state lines), allocated once; blocks and lines in use are the scheduler's to know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from adapters.layout import NON_LORA_GROUPS
from adapters.memory.device_upload import copy_stream_of
from kernels.platform import Platform, contract
from kernels.row_scatter import ops as row_scatter_ops
from kernels.sampling import ops as sampling_ops
from service.engine.ipc.config import EngineConfig, has_prefix_cache
from service.engine.model.graphs import HIDDEN, CapturedSteps, CudaGraphs, Graphs, unreplayable_ops
from service.engine.model.padding import Padding, StepSizes, from_python_on_npu, padded_tokens
from service.engine.model.sleeping_memory import CannotSleep, SleepingMemory, tensors_on
from service.models.spec.config_json import ModelError
from service.models.step_batch import StepBatch

log = logging.getLogger(__name__)

# Captured beside those that are planned: steps of adapters that have more than rows.
SPARE_GRAPHS = 64

if TYPE_CHECKING:
    from service.models.layers.caches import HostCopies
    from service.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The model and its caches in numbers. num_blocks, num_slots and num_lines include the null one of each;
    lines beyond the slots are the prefix cache's.

    max_blocks                        of one sequence
    num_groups, experts_group, non_lora_groups
                                      see `RowPlan.groups`, and where among them the rows of experts, and what is no
                                      row, stand
    row_element_bytes, row_alignment  of the LoRA rows, 0 where LoRA is off
    rope_class                        of a request's length limit: requests of one class rotate alike
    num_window_rows                   LoRA rows behind the base weights; 0 where they stand by themselves
    swaps_rows                        rows of adapters that run are brought to where windows are short
    """

    vocab_size: int
    hidden_size: int
    max_model_len_tokens: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    max_blocks: int
    num_slots: int
    num_lines: int
    has_conv: bool
    num_groups: int
    has_length_limits: bool
    rope_class: Callable[[int], tuple[int, ...]]
    dtype: str
    device: torch.device
    row_element_bytes: int = 0
    row_alignment: int = 0
    num_window_rows: int = 0
    swaps_rows: bool = False
    non_lora_groups: Mapping[str, int] = field(default_factory=dict)
    experts_group: int | None = None


class Runner(Protocol):
    """The model as the engine uses it. `captured` counts how its steps were run; `host_copies` is None without the host
    tier of the prefix cache."""

    capacity: Capacity
    captured: CapturedSteps
    host_copies: HostCopies | None

    def warm_up(self, config: EngineConfig) -> None:
        """Compile all that steps within the configuration's sizes can need."""

    def sizes_to_capture(self) -> tuple[Sequence[StepSizes], Sequence[StepSizes]]:
        """Sizes that the engine is to `capture`: before the first request, and while it has nothing to do."""

    def capture(self, batch: StepBatch, sizes: StepSizes) -> None:
        """Have steps of these sizes captured, by running an empty one, which is not counted."""

    def padded(self, exact: StepSizes) -> StepSizes:
        """The sizes in which a step of these sizes is to be run."""

    def run(self, batch: StepBatch, sizes: StepSizes) -> torch.Tensor:
        """[rows of logits, vocab] in the model's dtype, each row contiguous; writes the caches. The next call may write
        to that memory."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values of whole blocks, in all layers, before the next step runs."""

    def sleep(self, rows: object) -> None:
        """Give the memory of caches back, on a GPU that of weights and of the pool's `rows` too, until `wake`; no step
        runs. Raises CannotSleep."""

    def wake(self) -> None:
        """Have that memory again, with nothing in the caches, and no step captured."""

    def run_with_hidden(
        self, batch: StepBatch, sizes: StepSizes, *, of_all: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `run`, and the hidden states behind the final norm: [tokens, hidden_size], or of the tokens with logits
        alone. Runs eagerly."""


class ModelRunner:
    """A loaded model, its LoRA rows bound, with its `caches`.

    graphs          None: the device's own, if it has such
    num_kv_blocks   of the KV cache, of a trial that writes to none but the null block; None: what the budget holds
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        platform: Platform,
        graphs: Graphs | None = None,
        *,
        num_kv_blocks: int | None = None,
    ) -> None:
        from service.models.layers.caches import HostRowCopies, allocate_caches

        self.capacity = capacity_of(loaded, config, platform)
        self._model = loaded.model
        self._dtype = loaded.dtype
        self.caches = allocate_caches(
            loaded.spec,
            num_kv_blocks or self.capacity.num_blocks,
            config.block_size_tokens,
            self.capacity.num_lines,
            loaded.dtype,
            loaded.device,
        )
        self.host_copies: HostCopies | None = None
        if config.prefix_host_bytes and num_kv_blocks is None:
            stream = copy_stream_of(loaded.device)
            self.host_copies = HostRowCopies(self.caches, config.prefix_host_bytes, stream)
        self._asleep: SleepingMemory | None = None
        self._token_budget = config.token_budget
        self._has_lora = config.row_bytes > 0
        self._padding: Padding | None = None
        # Logits of all replayed steps, and the view of it for each size: with a window, rows stand apart.
        self._logits = torch.empty(0, device=loaded.device)
        self._logits_of: dict[StepSizes, torch.Tensor] = {}
        reason = _eager_reason(config, platform.device, loaded, has_graphs=graphs is not None)
        # Elsewhere nothing is captured, and padding costs.
        self._is_npu = platform.device == "npu"
        if loaded.device.type == "cuda" or (reason is None if self._is_npu else graphs is not None):
            self._padding = Padding(
                config.max_sequences, self.capacity.max_blocks, config.block_size_tokens, self._is_npu
            )
            num_elements = self._padding.max_rows * loaded.model.most_logits_columns
            self._logits = torch.empty(num_elements, dtype=loaded.dtype, device=loaded.device)
        if reason is None and graphs is None:
            graphs = _graphs_of(loaded.device)
        num_planned = sum(map(len, self._planned()))
        is_replayable = not loaded.spec.moes or contract("expert_lora", loaded.device).replayable
        if reason is None and not is_replayable:
            log.info("steps with adapters of experts run eagerly: expert_lora is not replayable here")
        self.captured = CapturedSteps(
            None if reason else graphs,
            reason,
            max_graphs=num_planned + SPARE_GRAPHS,
            has_eager_experts=not is_replayable,
        )

    def warm_up(self, config: EngineConfig) -> None:
        """See `Runner.warm_up`; the model's LoRA rows are bound by now."""
        self._model.warm_up(self.caches, padded_tokens(config.token_budget), config.max_sequences)
        sampling_ops.warm_up(self.capacity.vocab_size, self._dtype, self.capacity.device)
        if self._has_lora:
            row_scatter_ops.warm_up(self.capacity.device)

    def sizes_to_capture(self) -> tuple[Sequence[StepSizes], Sequence[StepSizes]]:
        """See `Runner.sizes_to_capture`."""
        return ((), ()) if self.captured.is_off else self._planned()

    def _planned(self) -> tuple[Sequence[StepSizes], Sequence[StepSizes]]:
        """The sizes to capture first and later; both empty if steps cannot be captured."""
        if self._padding is None:
            return (), ()
        return self._padding.to_capture(
            token_budget=self._token_budget, has_lora=self._has_lora, num_window_rows=self.capacity.num_window_rows
        )

    def capture(self, batch: StepBatch, sizes: StepSizes) -> None:
        """See `Runner.capture`."""
        num_replayed = self.captured.num_replayed
        self._run_shared(batch, sizes)
        self.captured.num_replayed = num_replayed

    def padded(self, exact: StepSizes) -> StepSizes:
        """On a CPU a step is as large as it is; on an NPU it is so unless it is replayed."""
        captured = None if self._padding is None else self._padding.captured(exact)
        if self._is_npu and (captured is None or not self.captured.serves(captured)):
            return from_python_on_npu(exact)
        if self._padding is None:
            return exact
        if captured is None:
            return self._padding.wide(exact)
        return self.captured.nearest(captured, self._padding.with_longer_windows(captured))

    def run(self, batch: StepBatch, sizes: StepSizes) -> torch.Tensor:
        """See `Runner.run`."""
        num_rows = sizes.num_tokens if sizes.num_rows is None else sizes.num_rows
        if self._padding is None or num_rows > self._padding.max_rows:
            self.captured.note_eager(sizes)
            return self._model.forward(batch, self.caches)
        is_padded = self._run_shared(batch, sizes)
        # A step that is not padded was not captured, and its size may not come again.
        return self._logits_of[sizes] if is_padded else self._logits_of.pop(sizes)

    def _run_shared(self, batch: StepBatch, sizes: StepSizes) -> bool:
        """With logits in the memory that all such steps share; whether the sizes are padded ones."""
        assert self._padding is not None
        is_padded = self._padding.captured(sizes) == sizes
        self.captured.run(batch, sizes, is_padded, lambda: self._forward(batch, sizes))
        return is_padded

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Runner.copy_blocks`."""
        self.caches.copy_blocks(torch.tensor([sources, targets]).to(self.capacity.device, non_blocking=True))

    def sleep(self, rows: object) -> None:
        """See `Runner.sleep`."""
        device = self.capacity.device
        if device.type not in ("cpu", "cuda"):
            raise CannotSleep("launches on this device keep addresses")
        self.captured.forget_graphs()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # adapters may be on their way
        kept = () if device.type == "cpu" else tensors_on(device, self._model, rows)
        self._asleep = SleepingMemory(self.caches.tensors, kept)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """See `Runner.wake`."""
        assert self._asleep is not None, "asleep"
        self._asleep.bring_back()
        self._asleep = None

    def run_with_hidden(
        self, batch: StepBatch, sizes: StepSizes, *, of_all: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Runner.run_with_hidden`."""
        self.captured.note_eager(sizes, HIDDEN)
        return self._model.forward_with_hidden(batch, self.caches, of_all=of_all)

    def _forward(self, batch: StepBatch, sizes: StepSizes) -> None:
        self._logits_of[sizes] = self._model.forward(batch, self.caches, self._logits)


def _graphs_of(device: torch.device) -> Graphs:
    if device.type == "npu":
        from service.engine.model.npu_graphs import NpuGraphs

        return NpuGraphs(device)
    return CudaGraphs(device)


def _eager_reason(config: EngineConfig, kind: str, loaded: LoadedModel, *, has_graphs: bool) -> str | None:
    """Why no step is captured; None if steps are. `kind`: of the platform that serves the device."""
    device, spec = loaded.device, loaded.spec
    if config.eager:
        return "asked for"
    if kind == "npu" and not config.npu_graphs:
        return "npu_graphs is off"
    if not has_graphs and device.type not in ("cuda", "npu"):
        return f"no graphs on {device.type}"
    users: dict[str, Sequence[object]] = {
        "causal_conv1d": spec.convs,
        "gated_delta": spec.deltas,
        "mamba2": spec.mambas,
        "experts": spec.moes,
    }
    # Steps with adapters of experts, which alone use it, may run eagerly beside the others.
    unused = {"expert_lora", *(op for op, layers in users.items() if not layers)}
    ops = unreplayable_ops(device, unused)
    return f"{', '.join(ops)} not replayable" if ops else None


def capacity_of(loaded: LoadedModel, config: EngineConfig, platform: Platform) -> Capacity:
    """How the byte budgets divide into blocks and slots; the null block and the null slot come on top.

    Raises ModelError if a budget does not hold a single block or line of state.
    """
    from service.models.layers.caches import kv_bytes_per_token, state_bytes_per_line

    spec = loaded.spec
    block_bytes = kv_bytes_per_token(spec, loaded.dtype) * config.block_size_tokens
    num_blocks = config.kv_bytes // block_bytes
    if num_blocks < 1:
        raise ModelError(
            f"The KV budget of {config.kv_bytes} bytes holds no block of {config.block_size_tokens} tokens, which "
            f"takes {block_bytes} bytes; raise --kv-bytes."
        )
    num_slots = config.max_sequences
    if spec.has_states and config.state_bytes is not None:
        line_bytes = state_bytes_per_line(spec, loaded.dtype)
        num_slots = min(num_slots, config.state_bytes // line_bytes)
        if num_slots < 1:
            raise ModelError(
                f"The state budget of {config.state_bytes} bytes holds no line of state, one of which takes "
                f"{line_bytes} bytes; raise --state-bytes."
            )
    num_kept = 0
    if spec.has_states and has_prefix_cache(config, platform.device):
        # A state belongs to a block: more than there are blocks could not be kept.
        num_kept = min(config.state_cache_bytes // state_bytes_per_line(spec, loaded.dtype), num_blocks)
    if config.prefix_host_bytes:
        if not has_prefix_cache(config, platform.device) or (spec.has_states and not num_kept):
            raise ModelError("--prefix-host-bytes is for a prefix cache, and this server has none; leave it out.")
        if config.prefix_host_bytes < 2 * block_bytes:
            raise ModelError(f"--prefix-host-bytes must be at least two blocks of keys and values, {2 * block_bytes}.")
    context = spec.context_tokens
    if config.max_model_len_tokens is not None:
        context = min(config.max_model_len_tokens, spec.longest_context_tokens)
    has_non_lora = config.row_bytes > 0 and config.side_bytes > 0
    side: tuple[str, ...] = NON_LORA_GROUPS if has_non_lora else ()
    non_lora_groups = {group: len(loaded.layout.groups) + index for index, group in enumerate(side)}
    longest = min(context, num_blocks * config.block_size_tokens)
    return Capacity(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_model_len_tokens=context,
        eos_token_ids=spec.eos_token_ids,
        num_blocks=1 + num_blocks,
        max_blocks=-(-longest // config.block_size_tokens),
        num_slots=1 + num_slots,
        num_lines=1 + num_slots + num_kept,
        has_conv=spec.has_states,
        num_groups=len(loaded.layout.groups) + len(non_lora_groups),
        non_lora_groups=non_lora_groups,
        experts_group=loaded.layout.groups.index("experts") if loaded.layout.experts else None,
        num_window_rows=loaded.model.num_window_rows,
        swaps_rows=loaded.model.num_window_rows > 0 and platform.swaps_at_once,
        has_length_limits=spec.needs_rope_limits,
        rope_class=spec.rope_class,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device,
        row_element_bytes=platform.row_dtype(loaded.dtype).itemsize if config.row_bytes else 0,
        row_alignment=platform.row_alignment if config.row_bytes else 0,
    )
