"""The LoRA ops on NVIDIA GPUs: at most two launches for a packed projection, no allocation, no synchronisation.

Grid and tiles follow from the padded token count alone, and the kernels read what is active from the maps on the
device. A captured step can therefore be replayed with another mix of adapters, ranks and tokens of its padded size.

The partial products between the two launches lie in one workspace per device, so the LoRA ops of a device must run on
one stream at a time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from kernels.contract import Contract
from kernels.lora import MAX_KERNEL_RANK, cublas
from kernels.lora.cuda import one_token
from kernels.lora.cuda.configs import (
    BATCH_INVARIANT,
    ExpandConfig,
    LoraConfig,
    OneTokenExpand,
    OneTokenShrink,
    ShrinkConfig,
    config_for,
)
from kernels.lora.cuda.expand import lora_expand_kernel
from kernels.lora.cuda.shrink import lora_embedding_kernel, lora_shrink_kernel
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.skip import launch_idle
from kernels.platform import detect, in_use
from kernels.triton_launch import Workspace, count_compiled, launch_options, launches_dependently

# Tokens of a tile of the expand where columns do not start at multiples of 16. Tiles of 64 go through wgmma, which
# finds operands through descriptors, and CUDA 12.8's ptxas (Triton 3.6 and 3.7 bring it) takes some of those from the
# wrong register in these variants, which have addresses for every column: illegal accesses, or wrong results.
# tests/support/ops/sass.py looks for that in the variants that are used.
_MAX_UNALIGNED_TOKENS = 32


def lora_shrink(
    x: torch.Tensor, stack: LoraStack, maps: LoraMaps, *, out: torch.Tensor, row_index: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.lora_shrink`. One launch without a split of the input, so that few tokens keep few cores busy."""
    device = _Device.of(x)
    _launch_shrink(
        device, device.config(maps.num_tokens).shrink, x, out.unsqueeze(0), stack, maps, row_index, dependent=False
    )
    return out


def lora_expand(
    h: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_expand`. One launch."""
    device = _Device.of(out)
    expand = device.config(maps.num_tokens).expand
    _launch_expand(device, expand, h.unsqueeze(0), out, stack, maps, row_index, overwrite, dependent=False)


def lora_linear(
    x: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
    config: LoraConfig | None = None,
    join_previous: bool = True,
) -> None:
    """See `ops.lora_linear`. Two launches; the second overlaps the first where the GPU can.

    Long prompts that are captured by nobody are products of the library instead, where these are faster (`plain`).

    config         for tuning
    join_previous  let the shrink begin while the kernel before it ends; False is for measuring
    """
    device = _Device.of(x)
    config = config or device.config(maps.num_tokens)
    if not overwrite and row_index is None and cublas.serves(config, x, stack, maps):
        h = device.h(1, len(stack.a), maps.num_tokens, x.dtype)[0]
        cublas.lora_linear(x, out, h, stack, maps)
        return
    h = device.h(config.shrink.splits(x.shape[1]), len(stack.a), maps.num_tokens, stack.a[0].dtype)
    dependent = device.dependent_launch
    _launch_shrink(
        device, config.shrink, x, h, stack, maps, row_index, dependent=dependent, join_previous=join_previous
    )
    _launch_expand(device, config.expand, h, out, stack, maps, row_index, overwrite, dependent=dependent)


def lora_embedding(
    token_ids: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_embedding`. Two launches."""
    if not maps.num_tokens:
        return
    device = _Device.of(out)
    h = device.h(1, 1, maps.num_tokens, torch.float32)
    lora_embedding_kernel[(maps.num_tokens,)](
        token_ids,
        stack.a[0],
        h,
        maps.token_segment,
        maps.places,
        maps.first_rows[stack.group],
        stack.ranks,
        stack.scalings,
        row_index,
        stack.a[0].stride(0),
        h.stride(2),
        BLOCK_R=16,
        HAS_INDEX=row_index is not None,
    )
    expand = device.config(maps.num_tokens).expand
    _launch_expand(device, expand, h, out, stack, maps, row_index, overwrite, dependent=False)


def warm_up(stack: LoraStack, max_tokens: int, dtype: torch.dtype, max_segments: int, *, is_embedding: bool) -> None:
    """See `ops.warm_up`, of one stack."""
    reserve_workspace(stack, max_tokens)
    run = lora_embedding if is_embedding else lora_linear
    launch_idle(run, stack, step_sizes(stack, max_tokens), dtype, max_segments, is_embedding=is_embedding)


def reserve_workspace(stack: LoraStack, max_tokens: int) -> None:
    """Allocate what `lora_linear` and `lora_embedding` of a stack need for any step of up to max_tokens tokens.

    To be called before a graph is captured: the workspace never grows meanwhile.
    """
    device = _Device.of(stack.a[0])
    num_slices, in_features, row_dtype = len(stack.a), stack.a[0].shape[1], stack.a[0].dtype
    shapes = [(1, 1, max_tokens, torch.float32)]  # of the embedding
    for config in device.table_up_to(max_tokens):
        shapes.append((config.shrink.splits(in_features), num_slices, min(config.max_tokens, max_tokens), row_dtype))
    # The largest first: a buffer that is outgrown is kept.
    for shape in sorted(shapes, key=lambda shape: _workspace_bytes(*shape), reverse=True):
        device.h(*shape)


def step_sizes(stack: LoraStack, max_tokens: int) -> list[int]:
    """Token counts that choose, between them, every variant that steps of 1 to max_tokens tokens can choose."""
    # Tiles and splits follow from the bucket of the table alone.
    return [min(config.max_tokens, max_tokens) for config in _Device.of(stack.a[0]).table_up_to(max_tokens)]


def fit_columns(config: ExpandConfig, *columns: int) -> ExpandConfig:
    """The configuration, with small tiles where any of the widths, starts and strides is no multiple of 16."""
    if all(number % 16 == 0 for number in columns):
        return config
    return replace(config, block_m=min(config.block_m, _MAX_UNALIGNED_TOKENS))


def compiled_count() -> int:
    """Number of compiled variants of the LoRA kernels in this process; it must not rise after warm-up."""
    return count_compiled(
        lora_shrink_kernel,
        lora_expand_kernel,
        lora_embedding_kernel,
        one_token.lora_shrink_one_token_kernel,
        one_token.lora_expand_one_token_kernel,
    )


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)


class _Device:
    """Launch settings of one GPU: its configurations, and whether it has dependent launch."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = device
        self.kind = detect(str(device)).kind
        self.num_cores = detect(str(device)).num_cores if on_gpu else 2
        self.dependent_launch = launches_dependently(device)
        self._configs: dict[int, LoraConfig] = {}

    @staticmethod
    def of(tensor: torch.Tensor) -> _Device:
        """The device a tensor lives on."""
        found = _devices.get(tensor.device)
        if found is None:
            found = _devices[tensor.device] = _Device(tensor.device)
        return found

    def config(self, num_tokens: int) -> LoraConfig:
        """The configuration of this GPU for a padded token count."""
        if in_use(self.device).batch_invariant:
            return BATCH_INVARIANT
        found = self._configs.get(num_tokens)
        if found is None:
            found = self._configs[num_tokens] = config_for(self.kind, num_tokens)
        return found

    def table_up_to(self, max_tokens: int) -> list[LoraConfig]:
        """The configurations that steps of 1 to max_tokens tokens choose."""
        found = [self.config(1)]
        while found[-1].max_tokens < max_tokens:
            found.append(self.config(found[-1].max_tokens + 1))
        return found

    def h(self, num_splits: int, num_slices: int, num_tokens: int, row_dtype: torch.dtype) -> torch.Tensor:
        """h as [splits, slices, tokens, largest rank]: float32 where it is summed later, else in the rows' dtype."""
        dtype = _workspace_dtype(num_splits, row_dtype)
        shape = (num_splits, num_slices, num_tokens, MAX_KERNEL_RANK)
        num_bytes = _workspace_bytes(num_splits, num_slices, num_tokens, row_dtype)
        return workspace.take(self.device, num_bytes).view(dtype).view(shape)


workspace = Workspace()
_devices: dict[torch.device, _Device] = {}


def _workspace_dtype(num_splits: int, row_dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if num_splits > 1 else row_dtype


def _workspace_bytes(num_splits: int, num_slices: int, num_tokens: int, row_dtype: torch.dtype) -> int:
    return num_splits * num_slices * num_tokens * MAX_KERNEL_RANK * _workspace_dtype(num_splits, row_dtype).itemsize


def _launch_shrink(
    device: _Device,
    config: ShrinkConfig | OneTokenShrink,
    x: torch.Tensor,
    h: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    row_index: torch.Tensor | None,
    *,
    dependent: bool,
    join_previous: bool = True,
) -> None:
    """h: [splits, slices, tokens, width]."""
    if not maps.num_tokens:
        return
    if isinstance(config, OneTokenShrink):
        options = launch_options(device.device, dependent=dependent and join_previous)
        one_token.launch_shrink(config, device.num_cores, x, h, stack, maps, row_index, dependent, options)
        return
    num_splits, num_slices, in_features = h.shape[0], len(stack.a), stack.a[0].shape[1]
    # For a rank just below the largest, the rest beyond whole blocks uses one block of each smaller height.
    blocks_of_slice = MAX_KERNEL_RANK // config.block_r + max(0, (config.block_r // 32).bit_length() - 1)
    items_of_tile = num_slices * num_splits * blocks_of_slice
    grid = _grid(device, config.block_m, maps, items_of_tile, config.programs_per_core)
    block_k = _even_block(in_features, num_splits, config.block_k)
    blocks_per_split = -(-in_features // (num_splits * block_k))
    lora_shrink_kernel[grid](
        x,
        stack.a,
        h,
        maps.segment_starts,
        maps.places,
        maps.first_rows[stack.group],
        maps.num_segments,
        stack.ranks,
        stack.scalings,
        row_index,
        in_features,
        x.stride(0),
        stack.a[0].stride(0),
        h.stride(0),
        h.stride(1),
        h.stride(2),
        stack.ranks.shape[1],
        NUM_SLICES=num_slices,
        NUM_SPLITS=num_splits,
        MAX_SEGMENTS=_padded_segments(maps),
        BLOCK_M=config.block_m,
        BLOCK_K=block_k,
        BLOCKS_PER_SPLIT=blocks_per_split,
        BLOCK_R=config.block_r,
        GROUPS=config.groups,
        STAGES=config.stages,
        EVEN_K=in_features == num_splits * block_k * blocks_per_split,
        HAS_INDEX=row_index is not None,
        DEPENDENT_LAUNCH=dependent,
        num_warps=config.num_warps,
        **launch_options(device.device, dependent=dependent and join_previous, max_registers=config.max_registers),
    )


def _launch_expand(
    device: _Device,
    config: ExpandConfig | OneTokenExpand,
    h: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    row_index: torch.Tensor | None,
    overwrite: bool,
    *,
    dependent: bool,
) -> None:
    """h: [splits, slices, tokens, width]."""
    if not maps.num_tokens:
        return
    if isinstance(config, OneTokenExpand):
        options = launch_options(device.device, dependent=dependent)
        one_token.launch_expand(config, device.num_cores, h, out, stack, maps, row_index, overwrite, dependent, options)
        return
    widths = tuple(b.shape[1] for b in stack.b)
    tallest, tallest_stages = config.of_tallest
    config = fit_columns(config, *widths, *stack.slice_starts, out.stride(0))
    num_blocks = sum(-(-width // config.block_n) for width in widths)
    grid = _grid(device, config.block_m, maps, num_blocks, config.programs_per_core)
    lora_expand_kernel[grid](
        h,
        stack.b,
        out,
        maps.segment_starts,
        maps.places,
        maps.first_rows[stack.group],
        maps.num_segments,
        stack.ranks,
        row_index,
        widths,
        stack.slice_starts,
        out.stride(0),
        h.stride(0),
        h.stride(1),
        h.stride(2),
        stack.ranks.shape[1],
        NUM_SLICES=len(widths),
        NUM_SPLITS=h.shape[0],
        MAX_SEGMENTS=_padded_segments(maps),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_N_TALL=config.block_n_tall,
        BLOCK_N_TALLEST=tallest,
        STAGES=config.stages,
        TALLEST_STAGES=tallest_stages,
        EVEN_N=all(width % config.block_n == 0 for width in widths),
        OVERWRITE=overwrite,
        HAS_INDEX=row_index is not None,
        DEPENDENT_LAUNCH=dependent,
        num_warps=config.num_warps,
        **launch_options(device.device, dependent=dependent, max_registers=config.max_registers),
    )


def _grid(device: _Device, block_m: int, maps: LoraMaps, items_per_tile: int, programs_per_core: int) -> tuple[int]:
    """As many programs as there can be items, but no more than the cores hold at once."""
    num_tokens = maps.num_tokens
    max_tiles = min(num_tokens, num_tokens // block_m + maps.places.shape[0])
    return (max(1, min(max_tiles * items_per_tile, programs_per_core * device.num_cores)),)


def _even_block(in_features: int, num_splits: int, block_k: int) -> int:
    """The table's block, or the half or quarter of it that covers the inputs without masks where it does not."""
    for block in (block_k, block_k // 2, block_k // 4):
        if block >= 64 and in_features % (num_splits * block) == 0:
            return block
    return block_k


def _padded_segments(maps: LoraMaps) -> int:
    """Length of the vector that holds all segments; few distinct lengths, since each is a compilation of its own."""
    num_segments = maps.places.shape[0]
    return 1 if num_segments <= 1 else max(64, triton.next_power_of_2(num_segments))
