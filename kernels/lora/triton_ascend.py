"""The LoRA ops on Ascend NPUs: which kernel runs, on which grid, with which tiles. Not verified on an NPU.

`plan_shrink` and `plan_expand` are pure: they turn tensors and maps into a `Launch`, and look at sizes, never at
values, so that captured and eager steps of one size take one path. The gate under tests/ascend runs the same plans.

Between the two kernels h is float32 [slices, tokens, splits, width]: partial sums over parts of the input, which the
expand adds up. A packed projection is one shrink and one expand.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from kernels.lora.maps import LoraMaps, LoraStack

RANK_BLOCK = 16
# The few-tokens kernels take tiles of this many tokens.
FEW_TILE_TOKENS = 16
# Inputs or columns of a block: from the largest that fits the unified buffer twice to the smallest worth a transfer.
BLOCKS = (512, 256, 128)


@dataclass(frozen=True)
class Launch:
    """A kernel of `triton_ascend_kernels` by name, its grid, and all of its arguments by name."""

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        """Launch it."""
        kernels = importlib.import_module("kernels.lora.triton_ascend_kernels")
        getattr(kernels, self.kernel)[self.grid](**self.arguments)


def split_inputs(in_features: int, num_items: int, num_cores: int) -> tuple[int, int]:
    """(number of splits, inputs of a split): enough splits for every core to get an item, none below a block."""
    smallest = BLOCKS[-1]
    wanted = min(-(-num_cores // num_items), -(-in_features // smallest))
    size = -(-in_features // (max(wanted, 1) * smallest)) * smallest
    return -(-in_features // size), size


def _block(extent: int) -> int:
    """The smallest block that covers the extent, or the largest one."""
    return next((block for block in reversed(BLOCKS) if block >= extent), BLOCKS[0])


def allocate_partials(x: torch.Tensor, stack: LoraStack, maps: LoraMaps, width: int, num_cores: int) -> torch.Tensor:
    """h, uninitialised, with as many splits as a shrink of x wants."""
    num_slices = len(stack.a)
    num_items = -(-maps.num_tokens // FEW_TILE_TOKENS) * num_slices
    num_splits, _ = split_inputs(x.shape[1], num_items, num_cores)
    return x.new_empty(num_slices, maps.num_tokens, num_splits, width, dtype=torch.float32)


def plan_shrink(x: torch.Tensor, h: torch.Tensor, stack: LoraStack, maps: LoraMaps, num_cores: int) -> Launch:
    """h[s, t, split, :n] = scaling * x[t, split] @ A[r : r + n, split].T

    x in the dtype of the rows; h from `allocate_partials`, changed in place.
    """
    num_slices, num_tokens, num_splits, width = h.shape
    smallest = BLOCKS[-1]
    split_size = -(-x.shape[1] // (num_splits * smallest)) * smallest
    arguments = {
        "x_ptr": x,
        "a_table": _addresses(stack.a),
        "h_ptr": h,
        **_map_arguments(stack, maps),
        "scalings": stack.scalings,
        "num_tokens": num_tokens,
        "in_features": x.shape[1],
        "x_stride": x.stride(0),
        "width": width,
        "num_splits": num_splits,
        "split_size": split_size,
        "max_segments": maps.places.shape[0],
        "num_places": stack.ranks.shape[1],
        "num_slices": num_slices,
        "T": FEW_TILE_TOKENS,
        "R": RANK_BLOCK,
        "K": _block(split_size),
    }
    return Launch("lora_shrink_few", (num_cores,), arguments)


def plan_expand(
    h: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, num_cores: int, *, overwrite: bool
) -> Launch:
    """out[t, slice s] += (sum over splits of h[s, t, split, :n]) @ B[r : r + n]; out changes in place."""
    _, num_tokens, num_splits, width = h.shape
    num_tiles = -(-num_tokens // FEW_TILE_TOKENS)
    columns = max(sum(b.shape[1] for b in stack.b) * num_tiles // num_cores, 1)
    block = _block(columns)
    chunks = _column_chunks(stack, block)
    arguments = {
        "h_ptr": h,
        "chunks": chunks,
        "b_ptr": stack.b[0],
        "out_ptr": out,
        **_map_arguments(stack, maps),
        "num_tokens": num_tokens,
        "out_stride": out.stride(0),
        "width": width,
        "num_splits": num_splits,
        "max_segments": maps.places.shape[0],
        "num_places": stack.ranks.shape[1],
        "num_chunks": chunks.shape[0],
        "T": FEW_TILE_TOKENS,
        "R": RANK_BLOCK,
        "N": block,
        "SPLITS": 1 << (num_splits - 1).bit_length(),
        "OVERWRITE": overwrite,
    }
    return Launch("lora_expand_few", (num_cores,), arguments)


def _map_arguments(stack: LoraStack, maps: LoraMaps) -> dict[str, torch.Tensor]:
    return {
        "token_segment": maps.token_segment,
        "segment_starts": maps.segment_starts,
        "places": maps.places,
        "first_rows": maps.first_rows[stack.group],
        "ranks": stack.ranks,
    }


# Tables that depend only on where a stack's rows lie, which does not change while a model serves; by their own content.
_tables: dict[tuple[Any, ...], torch.Tensor] = {}


def _table(values: tuple[tuple[int, ...], ...] | tuple[int, ...], device: torch.device) -> torch.Tensor:
    key = (device, values)
    if key not in _tables:
        _tables[key] = torch.tensor(values, dtype=torch.int64, device=device)
    return _tables[key]


def _addresses(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return _table(tuple(tensor.data_ptr() for tensor in tensors), tensors[0].device)


def _column_chunks(stack: LoraStack, block: int) -> torch.Tensor:
    """int64 [chunks, 3]: address of B at the chunk's first column; that column in the output; and, packed from the low
    end, slice (8 bits), columns of the chunk (16 bits), columns of the slice."""
    chunks: list[tuple[int, ...]] = []
    for s, (b, start) in enumerate(zip(stack.b, stack.slice_starts, strict=True)):
        slice_width = b.shape[1]
        for column in range(0, slice_width, block):
            packed = slice_width << 24 | min(block, slice_width - column) << 8 | s
            chunks.append((b.data_ptr() + column * b.element_size(), start + column, packed))
    return _table(tuple(chunks), stack.b[0].device)
