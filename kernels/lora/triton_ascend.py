"""The LoRA ops on Ascend NPUs: which kernel runs, on which grid, with which tiles. Not verified on an NPU.

`plan_shrink` and `plan_expand` are pure: they turn tensors and maps into a `LoraLaunch`, and look at sizes, never at
values, so that captured and eager steps of one size take one path. The gate under tests/ascend runs the same plans.

Between the two kernels h is [slices, tokens, splits, width]: partial sums over parts of the input, which the expand
adds up. It lies in one workspace per device, so the LoRA ops of a device must run on one stream at a time. A packed
projection is one shrink and one expand.

This module needs no Triton to be imported; launching does.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from kernels.ascend_relaunch import Relaunch, current_stream, sizes_of
from kernels.ascend_runtime import check_launch
from kernels.contract import Contract
from kernels.lora import MAX_KERNEL_RANK
from kernels.lora.ascend.tiles import RANK_PARTS, Regime, choose
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.skip import launch_idle
from kernels.platform import in_use
from kernels.triton_launch import Workspace, count_compiled, is_capturing

RANK_BLOCK = 16
# Partial sums of one token that are read at once.
SPLITS_BLOCK = 16
# Tokens of a visit that share a block of B where an adapter has more than one; each keeps a row of sums on the chip.
GROUP_TOKENS = 16
# The arguments that a step brings along, in the kernels' order.
_STEP_MAPS = ("token_segment", "segment_starts", "places", "first_rows")
LINEAR = "launches of lora_linear"
_NOT_WARM = "a stack's tables must be made before capture: call warm_up"
# Launches are kept for steps of up to so many tokens, which come in few padded sizes. A larger step keeps the device
# busy for longer than its launches take.
KEPT_TOKENS = 256


@dataclass(frozen=True)
class LoraLaunch:
    """A kernel of a module by name, its grid, and all of its arguments by name."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    module: str = "kernels.lora.ascend.kernels"

    def run(self) -> Any:
        """Launch it. Returns the compiled kernel; None from Triton's interpreter."""
        check_launch(self.grid, self.arguments)
        return getattr(importlib.import_module(self.module), self.kernel)[self.grid](**self.arguments)

    def repeated(self, compiled: Any, changing: str, *before: str) -> Relaunch:
        """The same launch for another step: with other tensors in place of `changing` and of what stands just before
        the maps, and other maps."""
        kernel = getattr(importlib.import_module(self.module), self.kernel)
        names = [param.name for param in kernel.params if not param.is_constexpr]
        following = (*before, *_STEP_MAPS)
        return Relaunch(compiled, self.grid, self.arguments, names, changing=changing, following=following)


def lora_shrink(
    x: torch.Tensor, stack: LoraStack, maps: LoraMaps, *, out: torch.Tensor, row_index: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.lora_shrink`. One launch, no split of the input."""
    x = _ordered(x, row_index).to(stack.a[0].dtype)
    width = out.shape[2]
    h = out if width % RANK_BLOCK == 0 else out.new_empty(*out.shape[:2], width + -width % RANK_BLOCK)
    plan_shrink(x, h.unsqueeze(2), stack, maps, _regime(x, maps)).run()
    return out if h is out else out.copy_(h[:, :, :width])


def lora_expand(
    h: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_expand`. One launch; the cube multiplies h in the rows' type."""
    _expand_columns(_whole_blocks(h, stack, maps), out, stack, maps, overwrite, row_index)


def _whole_blocks(h: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> torch.Tensor:
    """h with zeros from each rank on, as wide as whole blocks of ranks; what `ops.lora_expand` is given may be NaN."""
    h = functional.pad(h, (0, -h.shape[2] % RANK_BLOCK))
    segments = maps.token_segment.long().clamp_min(0)
    ranks = stack.ranks[:, maps.places[segments].long()]  # [slices, tokens]
    ranks = torch.where(maps.first_rows[stack.group][segments] >= 0, ranks, 0)
    return torch.where(torch.arange(h.shape[2], device=h.device) < ranks[:, :, None], h, 0.0)


def _expand_columns(
    h: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    overwrite: bool,
    row_index: torch.Tensor | None,
) -> None:
    """`lora_expand` of an h that is zero from each rank on."""
    # Any number of ranks can be split into whole blocks, so no inputs speak against the cube.
    regime = choose(maps.num_tokens, 0, *chip_sizes(str(out.device)))
    partials = h.unsqueeze(2) if regime.name == "few" else h.unsqueeze(2).to(stack.a[0].dtype)
    ordered = _ordered(out, row_index)
    plan_expand(partials, ordered, stack, maps, regime, overwrite=overwrite).run()
    if row_index is not None:
        out.index_copy_(0, row_index.long(), ordered)


def lora_linear(
    x: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_linear`. Two launches; a row index costs a copy of x and of out before and after them.

    What a stack launched once for a padded size is kept, so that the next step of that size only sets addresses.
    """
    rows_dtype = stack.a[0].dtype
    if row_index is not None or x.dtype != rows_dtype:
        ordered = _ordered(out, row_index)
        _launch_linear(_ordered(x, row_index).to(rows_dtype), ordered, stack, maps, overwrite)
        if row_index is not None:
            out.index_copy_(0, row_index.long(), ordered)
        return
    addresses, map_sizes = step_maps(maps, stack.group)
    key = (LINEAR, map_sizes, sizes_of(x, out), overwrite)
    kept = stack.kept.get(key)
    if kept is not None:
        shrink, expand = kept
        stream = current_stream()()
        shrink(stream, x.data_ptr(), addresses)
        expand(stream, out.data_ptr(), addresses)
        return
    launches = _launch_linear(x, out, stack, maps, overwrite)
    if launches is not None and maps.num_tokens <= KEPT_TOKENS:
        stack.kept[key] = launches


def _launch_linear(
    x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, overwrite: bool
) -> tuple[Relaunch, Relaunch] | None:
    """The two launches of `lora_linear`, with x in the rows' type; how to repeat them, None in the interpreter."""
    regime = _regime(x, maps)
    h = _workspace(stack, x.shape[1], maps.num_tokens, regime)
    shrink = plan_shrink(x, h, stack, maps, regime)
    expand = plan_expand(h, out, stack, maps, regime, overwrite=overwrite)
    compiled = shrink.run(), expand.run()
    if None in compiled:
        return None
    return shrink.repeated(compiled[0], "x_ptr"), expand.repeated(compiled[1], "out_ptr")


def step_maps(maps: LoraMaps, group: int) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """Addresses and sizes of `_STEP_MAPS`, found once per step and group."""
    found: tuple[tuple[int, ...], tuple[object, ...]] | None = maps.kept.get((_STEP_MAPS, group))
    if found is None:
        tensors = maps.token_segment, maps.segment_starts, maps.places, maps.first_rows[group]
        found = tuple(tensor.data_ptr() for tensor in tensors), (maps.num_tokens, *sizes_of(*tensors))
        maps.kept[_STEP_MAPS, group] = found
    return found


def lora_embedding(
    token_ids: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_embedding`. Columns of A are gathered by torch, once per step; the expand is a launch."""
    ids = token_ids if row_index is None else token_ids[row_index.long()]
    segments = maps.token_segment.long().clamp_min(0)
    places = maps.places[segments].long()
    first_rows = maps.first_rows[stack.group][segments].long()
    ranks = torch.arange(MAX_KERNEL_RANK, device=out.device)
    present = ranks < stack.ranks[0][places][:, None]
    rows = torch.where(present, first_rows[:, None] + ranks, 0)  # [tokens, MAX_KERNEL_RANK]
    columns = stack.a[0][rows, ids[:, None]].float() * stack.scalings[0][places][:, None]
    h = torch.where(present, columns, 0.0).unsqueeze(0)
    _expand_columns(h, out, stack, maps, overwrite, row_index)


def warm_up(stack: LoraStack, max_tokens: int, dtype: torch.dtype, max_segments: int, *, is_embedding: bool) -> None:
    """See `ops.warm_up`, of one stack."""
    reserve_workspace(stack, max_tokens)
    run = lora_embedding if is_embedding else lora_linear
    launch_idle(run, stack, step_sizes(stack, max_tokens), dtype, max_segments, is_embedding=is_embedding)


def reserve_workspace(stack: LoraStack, max_tokens: int) -> None:
    """Allocate what `lora_linear` of a stack needs for steps of up to max_tokens tokens, before graph capture."""
    in_features, chip = stack.a[0].shape[1], chip_sizes(str(stack.a[0].device))
    num_tokens = _largest_step(in_features, len(stack.a), max_tokens, *chip)
    _workspace(stack, in_features, num_tokens, choose(num_tokens, in_features, *chip))


def step_sizes(stack: LoraStack, max_tokens: int) -> tuple[int, ...]:
    """Token counts that choose, between them, every variant that steps of 1 to max_tokens tokens can choose, and every
    table that is kept with the stack: one that was first needed in a capture would be copied to the device there."""
    num_columns, chip = sum(b.shape[1] for b in stack.b), chip_sizes(str(stack.a[0].device))
    return _step_sizes(stack.a[0].shape[1], len(stack.a), num_columns, max_tokens, *chip)


@cache
def _largest_step(in_features: int, num_slices: int, max_tokens: int, *chip: int) -> int:
    """The token count, of 1 to max_tokens, whose partial sums take most memory: not the last, since splits vary."""

    def size(num_tokens: int) -> int:
        regime = choose(num_tokens, in_features, *chip)
        return math.prod(partials_shape(in_features, num_tokens, num_slices, 1, regime))

    return max(range(1, max_tokens + 1), key=size)


@cache
def _step_sizes(in_features: int, num_slices: int, num_columns: int, max_tokens: int, *chip: int) -> tuple[int, ...]:
    first_of: dict[tuple[Any, ...], int] = {}
    for num_tokens in range(1, max_tokens + 1):
        regime = choose(num_tokens, in_features, *chip)
        split_size = regime.split_size(in_features, regime.num_splits(in_features, num_tokens, num_slices))
        of_embedding = choose(num_tokens, 0, *chip)
        first_of.setdefault(("shrink", regime.name, regime.block(split_size, in_features)), num_tokens)
        for expand in (regime, of_embedding):
            first_of.setdefault(("expand", expand.name, *expand.columns(num_columns, num_tokens)), num_tokens)
    return tuple(sorted(set(first_of.values())))


def compiled_count() -> int:
    """Number of compiled variants of the LoRA kernels in this process; it must not rise after warm-up."""
    return count_compiled(*(kernel for name, kernel in vars(_kernels()).items() if name.startswith("lora_")))


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)


def plan_shrink(x: torch.Tensor, h: torch.Tensor, stack: LoraStack, maps: LoraMaps, regime: Regime) -> LoraLaunch:
    """h[s, t, split, :n] = scaling * x[t, split] @ A[r : r + n, split].T

    x  in the rows' type, tokens in adapter order
    h  [slices, tokens, splits, width], changed in place in the columns below an adapter's rank, and made zero from
       there up to the next multiple of `RANK_BLOCK`
    """
    num_slices, num_tokens, num_splits, width = h.shape
    split_size = regime.split_size(x.shape[1], num_splits)
    arguments = {
        "x_ptr": x,
        "a_table": row_addresses(stack),
        "h_ptr": h,
        **map_arguments(stack, maps),
        "scalings": stack.scalings,
        "num_tokens": num_tokens,
        "in_features": x.shape[1],
        "x_stride": x.stride(0),
        "a_stride": stack.a[0].stride(0),
        "width": width,
        "num_splits": num_splits,
        "split_size": split_size,
        "max_segments": maps.places.shape[0],
        "num_places": stack.ranks.shape[1],
        "num_slices": num_slices,
        "num_parts": RANK_PARTS,
        "T": regime.tiles.shrink_tokens,
        "R": RANK_BLOCK,
        "K": regime.block(split_size, x.shape[1]),
    }
    return LoraLaunch(f"lora_shrink_{regime.name}", (regime.num_cores,), arguments)


def plan_expand(
    h: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, regime: Regime, *, overwrite: bool
) -> LoraLaunch:
    """out[t, slice s] += (sum over splits of h[s, t, split, :n]) @ B[r : r + n]; out changes in place.

    h in float32 for the vector cores, in the rows' type for the cube; zero from an adapter's rank up to the next
    multiple of `RANK_BLOCK`.
    """
    _, num_tokens, num_splits, width = h.shape
    block, chunk = regime.columns(sum(b.shape[1] for b in stack.b), num_tokens)
    chunks = column_chunks(stack, chunk)
    arguments = {
        "h_ptr": h,
        "chunks": chunks,
        "b_ptr": stack.b[0],
        "out_ptr": out,
        **map_arguments(stack, maps),
        "num_tokens": num_tokens,
        "out_stride": out.stride(0),
        "width": width,
        "num_splits": num_splits,
        "max_segments": maps.places.shape[0],
        "num_places": stack.ranks.shape[1],
        "num_chunks": chunks.shape[0],
        "T": regime.tiles.expand_tokens,
        "R": RANK_BLOCK,
        "N": block,
        "OVERWRITE": overwrite,
    }
    if regime.name == "few":
        arguments |= {"G": GROUP_TOKENS, "SPLITS": SPLITS_BLOCK}
    return LoraLaunch(f"lora_expand_{regime.name}", (regime.num_cores,), arguments)


def partials_shape(in_features: int, num_tokens: int, num_slices: int, width: int, regime: Regime) -> tuple[int, ...]:
    """Shape of h between a shrink and an expand."""
    return num_slices, num_tokens, regime.num_splits(in_features, num_tokens, num_slices), width


def _ordered(tensor: torch.Tensor, row_index: torch.Tensor | None) -> torch.Tensor:
    """Rows in adapter order: an NPU wants tiles of neighbouring rows, so others are brought together first."""
    return tensor if row_index is None else tensor.index_select(0, row_index.long())


def map_arguments(stack: LoraStack, maps: LoraMaps) -> dict[str, torch.Tensor]:
    """Kernel arguments from a step's maps and a stack, the same for every kernel."""
    return {
        "token_segment": maps.token_segment,
        "segment_starts": maps.segment_starts,
        "places": maps.places,
        "first_rows": maps.first_rows[stack.group],
        "ranks": stack.ranks,
    }


# ---------------------------------------------------------------- what a device keeps between launches
def _kernels() -> ModuleType:
    return importlib.import_module("kernels.lora.ascend.kernels")


@cache
def chip_sizes(device: str) -> tuple[int, int]:
    """(vector cores, bytes of unified buffer)"""
    platform = in_use(torch.device(device))
    return platform.num_cores, platform.on_chip_bytes


def _regime(x: torch.Tensor, maps: LoraMaps) -> Regime:
    return choose(maps.num_tokens, x.shape[1], *chip_sizes(str(x.device)))


workspace = Workspace()


def _workspace(stack: LoraStack, in_features: int, num_tokens: int, regime: Regime) -> torch.Tensor:
    """h, uninitialised. It is as wide as any rank, so that a captured graph stays valid when other adapters come."""
    dtype = stack.a[0].dtype
    shape = partials_shape(in_features, num_tokens, len(stack.a), MAX_KERNEL_RANK, regime)
    num_bytes = math.prod(shape) * dtype.itemsize
    return workspace.take(stack.a[0].device, num_bytes).view(dtype).view(shape)


def row_addresses(stack: LoraStack) -> torch.Tensor:
    """int64 [slices]: where A of each slice begins. Kept, as rows do not move while a stack lives."""
    key = ("addresses of a",)
    if key not in stack.kept:
        assert not is_capturing(stack.a[0].device), _NOT_WARM
        assert {a.stride() for a in stack.a} == {(stack.a[0].stride(0), 1)}, "rows of A have one stride"
        addresses = [a.data_ptr() for a in stack.a]
        stack.kept[key] = torch.tensor(addresses, dtype=torch.int64, device=stack.a[0].device)
    return stack.kept[key]


def column_chunks(stack: LoraStack, width: int) -> torch.Tensor:
    """int64 [chunks, 2]: address of B at the chunk's first column; and, packed from the low end, slice (6 bits),
    columns of the chunk (10), columns of the slice (24), and the chunk's first column in the output. Kept."""
    key = ("column chunks of b", width)
    if key in stack.kept:
        return stack.kept[key]
    assert not is_capturing(stack.b[0].device), _NOT_WARM
    chunks: list[tuple[int, int]] = []
    assert len(stack.b) < 1 << 6, "the kernels take up to 63 slices"
    for s, (b, start) in enumerate(zip(stack.b, stack.slice_starts, strict=True)):
        slice_width = b.shape[1]
        assert max(slice_width, start + slice_width) < 1 << 23, "the kernels take outputs of up to 8 million columns"
        for column in range(0, slice_width, width):
            packed = start + column << 40 | slice_width << 16 | min(width, slice_width - column) << 6 | s
            chunks.append((b.data_ptr() + column * b.element_size(), packed))
    table = stack.kept[key] = torch.tensor(chunks, dtype=torch.int64, device=stack.b[0].device)
    return table
