"""The window's ops on Ascend NPUs, for decode steps: one launch each, on the vector cores. Not verified on an NPU.

`plan_expand` and `plan_swiglu` are pure and look at sizes, never at values, as those of `kernels.lora.triton_ascend`,
from which tiles, tables and the way to launch again are taken. The gate under tests/ascend runs the same plans.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kernels.ascend_relaunch import current_stream, sizes_of
from kernels.contract import Contract
from kernels.lora import triton_ascend as lora
from kernels.lora.ascend.tiles import FEW_TOKENS, Regime, choose
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.skip import idle_maps
from kernels.lora.triton_ascend import KEPT_TOKENS, RANK_BLOCK, LoraLaunch
from kernels.triton_launch import count_compiled

_MODULE = "kernels.lora_window.triton_ascend_kernels"
_EXPAND, _SWIGLU = "launch of lora_expand_window", "launch of swiglu_window"
# Tokens of a visit that share a block of B where an adapter has more than one. Columns of each half in a block of the
# gate, which holds blocks and sums of both on the chip.
GROUP_TOKENS = 8
SWIGLU_COLUMNS = 128


def lora_expand_window(product: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> None:
    """See `ops.lora_expand_window`."""
    addresses, map_sizes = lora.step_maps(maps, stack.group)
    key = (_EXPAND, map_sizes, sizes_of(product))
    kept = stack.kept.get(key)
    if kept is not None:
        kept(current_stream()(), product.data_ptr(), addresses)
        return
    launch = plan_expand(product, stack, maps, regime_of(str(product.device)))
    compiled = launch.run()
    if compiled is not None and maps.num_tokens <= KEPT_TOKENS:
        stack.kept[key] = launch.repeated(compiled, "product_ptr")


def swiglu_window(product: torch.Tensor, stack: LoraStack, maps: LoraMaps, *, out: torch.Tensor) -> None:
    """See `ops.swiglu_window`."""
    addresses, map_sizes = lora.step_maps(maps, stack.group)
    key = (_SWIGLU, map_sizes, sizes_of(product, out))
    kept = stack.kept.get(key)
    if kept is not None:
        kept(current_stream()(), product.data_ptr(), (out.data_ptr(), *addresses))
        return
    launch = plan_swiglu(product, out, stack, maps, regime_of(str(product.device)))
    compiled = launch.run()
    if compiled is not None and maps.num_tokens <= KEPT_TOKENS:
        stack.kept[key] = launch.repeated(compiled, "product_ptr", "out_ptr")


def plan_expand(product: torch.Tensor, stack: LoraStack, maps: LoraMaps, regime: Regime) -> LoraLaunch:
    """product[t, slice s] += c[s, p] * h[t, s] @ B[r : r + n]; its first columns change in place."""
    num_slices = len(stack.b)
    block, chunk = regime.columns(sum(b.shape[1] for b in stack.b), maps.num_tokens)
    chunks = lora.column_chunks(stack, chunk)
    arguments = {
        "product_ptr": product,
        "chunks": chunks,
        "b_ptr": stack.b[0],
        **_map_arguments(stack, maps, product),
        "out_features": stack.output_width,
        "num_slices": num_slices,
        "num_chunks": chunks.shape[0],
        **_tile_arguments(regime, num_slices),
        "N": block,
    }
    return LoraLaunch("lora_expand_window_few", (regime.num_cores,), arguments, _MODULE)


def plan_swiglu(
    product: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, regime: Regime
) -> LoraLaunch:
    """out[t] = silu(gate) * up of product + delta; out is contiguous."""
    gate_b, up_b = stack.b
    _block, chunk = regime.columns(out.shape[1], maps.num_tokens)
    arguments = {
        "product_ptr": product,
        "gate_b_ptr": gate_b,
        "up_b_ptr": up_b,
        "out_ptr": out,
        **_map_arguments(stack, maps, product),
        "size": out.shape[1],
        "chunk_columns": min(chunk, SWIGLU_COLUMNS),
        **_tile_arguments(regime, 2),
        "N": SWIGLU_COLUMNS,
    }
    return LoraLaunch("swiglu_window_few", (regime.num_cores,), arguments, _MODULE)


def _map_arguments(stack: LoraStack, maps: LoraMaps, product: torch.Tensor) -> dict[str, Any]:
    return {
        **lora.map_arguments(stack, maps),
        "scalings": stack.scalings,
        "num_tokens": maps.num_tokens,
        "product_stride": product.stride(0),
        "max_segments": maps.places.shape[0],
        "num_places": stack.ranks.shape[1],
    }


def _tile_arguments(regime: Regime, num_slices: int) -> dict[str, int]:
    # The power of two that holds a block of ranks of all slices.
    columns = RANK_BLOCK << (num_slices - 1).bit_length()
    return {"T": regime.tiles.expand_tokens, "R": RANK_BLOCK, "G": GROUP_TOKENS, "F": columns}


def regime_of(device: str) -> Regime:
    """Tiles for few tokens, whatever their number: larger steps have no window."""
    return choose(1, 0, *lora.chip_sizes(device))


def warm_up(stack: LoraStack, max_tokens: int, dtype: torch.dtype, max_segments: int, *, is_gated: bool) -> None:
    """See `ops.warm_up`, of one stack; and make the tables that are kept with it: one step for each number of tiles,
    from which blocks and chunks of columns follow, up to `FEW_TOKENS` tokens, the largest step with a window."""
    width = stack.output_width + RANK_BLOCK * len(stack.b)
    tile = regime_of(str(stack.ranks.device)).tiles.expand_tokens
    for num_tokens in range(1, min(max_tokens, FEW_TOKENS) + 1, tile):
        product = torch.zeros(num_tokens, width, dtype=dtype, device=stack.ranks.device)
        maps = idle_maps(num_tokens, max_segments, stack)
        if is_gated:
            swiglu_window(product, stack, maps, out=product.new_empty(num_tokens, stack.b[0].shape[1]))
        else:
            lora_expand_window(product, stack, maps)


def compiled_count() -> int:
    """Number of compiled variants of these kernels in this process; it must not rise after warm-up."""
    kernels = importlib.import_module(_MODULE)
    return count_compiled(kernels.lora_expand_window_few, kernels.swiglu_window_few)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
