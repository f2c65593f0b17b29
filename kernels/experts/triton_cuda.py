"""`kernels.experts.ops` on NVIDIA GPUs: plain weights by torch's grouped products; codes, of the experts that tokens
chose alone, by a kernel that dequantises them in registers.

All that a launch depends on is the number of pairs: which experts have them is read on the device, so a captured call
does what a new one would. A weight means the same in steps of all sizes.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.experts import grouped
from kernels.experts.ops import ExpertAdapters, PackedExperts
from kernels.experts.pairs import add_biases, by_expert, summed
from kernels.linear import triton_cuda as linear_cuda
from kernels.linear.ops import PackedWeight
from kernels.linear.quantised import Quantised, joined
from kernels.linear.triton_cuda_codes import codes_product
from kernels.linear.triton_cuda_configs import TileConfig
from kernels.swiglu.ops import swiglu
from kernels.triton_launch import count_compiled

# By pairs that an expert has on average, at most, ascending; the last one serves more.
_CONFIGS = {8: TileConfig(128, 16, 4, 4), 48: TileConfig(128, 64, 4, 3), 96: TileConfig(128, 128, 8, 3)}


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCodes:
    """Codes of all experts, one below the other, as one weight."""

    weight: PackedWeight
    num_experts: int

    @property
    def out_features(self) -> int:
        return self.weight.out_features // self.num_experts


@triton.jit(do_not_specialize=["num_blocks", "num_groups"])
def expert_codes_kernel(
    x_ptr,  # [pairs, in_features], in the order of the experts
    ends_ptr,  # int32 [NUM_EXPERTS]: pairs up to each expert's last
    codes_ptr,  # as in `quantised_linear_kernel`, of all experts
    scales_ptr,  # also uint8: exponents of powers of two
    offsets_ptr,
    table_ptr,
    out_ptr,  # [pairs, out_features]
    in_features,
    out_features,  # of one expert
    all_features,
    num_blocks,
    num_groups,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,  # a power of two
    FORM: tl.constexpr,
    OFFSETS: tl.constexpr,
    SCALES_PRODUCTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    CODES: tl.constexpr,
    CODES_OF_GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tiles of an expert's columns, tiles of pairs: as many as there can be)."""
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    each = tl.arange(0, EXPERTS)
    last = tl.load(ends_ptr + each, mask=each < NUM_EXPERTS, other=0)
    first = tl.load(ends_ptr + each - 1, mask=(each > 0) & (each < NUM_EXPERTS), other=0)
    num_tiles = (last - first + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    tiles_before = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tiles_before <= tl.program_id(1)).to(tl.int32))
    if expert < NUM_EXPERTS:
        is_own = each == expert
        own_tile = tl.program_id(1) - tl.sum(tl.where(is_own, tiles_before - num_tiles, 0))
        pair = tl.sum(tl.where(is_own, first, 0)) + own_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        pair_end = tl.sum(tl.where(is_own, last, 0))
        column = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        total = codes_product(
            x_ptr,
            codes_ptr,
            scales_ptr,
            offsets_ptr,
            table_ptr,
            tl.minimum(pair, pair_end - 1),
            expert * out_features + tl.where(column < out_features, column, 0),
            0,
            num_blocks,
            in_features,
            in_features,
            all_features,
            num_groups,
            out_ptr.dtype.element_ty,
            FORM,
            OFFSETS,
            SCALES_PRODUCTS,
            IS_EVEN,
            GROUP,
            WORDS,
            CODES,
            CODES_OF_GROUP,
            BLOCK_OUT,
            BLOCK_TOKENS,
            STAGES,
            IS_INTERPRETED,
        )
        places = out_ptr + pair[None, :].to(tl.int64) * out_features + column[:, None]
        mask = (column[:, None] < out_features) & (pair[None, :] < pair_end)
        tl.store(places, total.to(out_ptr.dtype.element_ty), mask=mask)


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    """Keep the weights as they are."""
    return replace(grouped.pack_experts(gate_up, down), implementation="triton_cuda")


def pack_quantised(gate_up: Sequence[Quantised], down: Sequence[Quantised], dtype: torch.dtype) -> PackedExperts | None:
    """The codes laid out anew; None where no kernel serves them, or those of all experts alike."""
    into, back = _packed(gate_up, dtype), _packed(down, dtype)
    if into is None or back is None:
        return None
    nbytes = into.weight.nbytes + back.weight.nbytes
    hidden_size, size = down[0].out_features, down[0].in_features
    return PackedExperts(into, back, dtype, len(down), hidden_size, size, "triton_cuda", nbytes, holds_codes=True)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """See `ops.experts`."""
    if not packed.holds_codes:
        return grouped.experts(x, chosen, weights, packed, adapters)
    in_order, order, rows = by_expert(x, chosen)
    ends = grouped.ends_of(in_order, packed.num_experts)
    gate_up = multiply(rows, packed.gate_up, ends)
    add_biases(gate_up, packed.biases, 0, in_order)
    pairs = Pairs(in_order, order // chosen.shape[1], packed.num_experts)
    if adapters is not None:
        adapters.add_gate_up(rows, gate_up, pairs)
    gated = swiglu(gate_up, packed.activation)
    out = multiply(gated, packed.down, ends)
    add_biases(out, packed.biases, 1, in_order)
    if adapters is not None:
        adapters.add_down(gated, out, pairs)
    return summed(out, order, weights)


def multiply(
    rows: torch.Tensor, codes: ExpertCodes, ends: torch.Tensor, config: TileConfig | None = None
) -> torch.Tensor:
    """The rows [pairs, in] of each expert, which follow one another up to ends int32 [num_experts], by its weight.

    config  for tuning
    """
    weight, num_pairs, out_features = codes.weight, len(rows), codes.out_features
    out = torch.empty(num_pairs, out_features, dtype=rows.dtype, device=rows.device)
    if not num_pairs:
        return out
    per_expert = num_pairs // codes.num_experts
    chosen = config or next((one for most, one in _CONFIGS.items() if per_expert <= most), _CONFIGS[96])
    tiled: linear_cuda.TiledCodes = weight.tiled
    num_tiles = -(-num_pairs // chosen.block_tokens) + min(codes.num_experts, num_pairs) - 1
    expert_codes_kernel[(-(-out_features // chosen.block_out), max(1, num_tiles))](
        rows.contiguous(),
        ends,
        tiled.weight.codes,
        tiled.weight.scales,
        tiled.offsets,
        tiled.table,
        out,
        weight.in_features,
        out_features,
        weight.out_features,
        tiled.weight.codes.shape[0],
        tiled.num_groups,
        NUM_EXPERTS=codes.num_experts,
        EXPERTS=triton.next_power_of_2(codes.num_experts),
        SCALES_PRODUCTS=tiled.scales_products,
        IS_EVEN=weight.in_features % tiled.inputs_of_block == 0,
        CODES_OF_GROUP=tiled.codes_of_group,
        BLOCK_OUT=chosen.block_out,
        BLOCK_TOKENS=chosen.block_tokens,
        STAGES=chosen.stages,
        IS_INTERPRETED=os.environ.get("TRITON_INTERPRET") == "1",
        num_warps=chosen.num_warps,
        **tiled.constants(),
        **linear_cuda.launch_options_of(rows.device),
    )
    return out


def warm_up(packed: PackedExperts) -> None:
    """See `ops.warm_up`."""
    if not packed.holds_codes:
        return
    for codes in (packed.gate_up, packed.down):
        rows = torch.zeros(1, codes.weight.in_features, dtype=packed.dtype, device=codes.weight.data.device)
        ends = torch.ones(packed.num_experts, dtype=torch.int32, device=rows.device)
        for config in _CONFIGS.values():
            multiply(rows, codes, ends, config)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return count_compiled(expert_codes_kernel)


CONTRACT = Contract(refuses=grouped.refuses, warm_up=warm_up, compiled_count=compiled_count, replayable=True)


def _packed(weights: Sequence[Quantised], dtype: torch.dtype) -> ExpertCodes | None:
    """All experts' codes as one weight; exponents of powers of two stay in 8 bits."""
    whole = joined(weights)
    if whole is None or whole.order is not None:
        return None
    is_power = whole.scales.dtype == torch.float8_e8m0fnu
    packed = linear_cuda.pack_quantised(replace(whole, scales=whole.scales.float()), None, dtype)
    if packed is None or not is_power:
        return None if packed is None else ExpertCodes(packed, len(weights))
    tiled: linear_cuda.TiledCodes = packed.tiled
    powers = whole.scales.view(torch.uint8).t().contiguous()
    nbytes = packed.nbytes - tiled.weight.scales.nbytes + powers.nbytes
    held = replace(tiled, weight=replace(tiled.weight, scales=powers))
    return ExpertCodes(replace(packed, tiled=held, nbytes=nbytes), len(weights))
