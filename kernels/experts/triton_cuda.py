"""`kernels.experts.ops` on NVIDIA GPUs: each expert's rows by its weights as these stream by; where experts have many
rows each, plain weights by torch's grouped products. Codes are dequantised in registers.

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

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.experts import grouped
from kernels.experts.ops import ExpertAdapters, PackedExperts, by_expert, mlps, summed
from kernels.experts.triton_cuda_kernels import expert_codes_kernel, order_kernel, product_kernel, sum_kernel
from kernels.linear import triton_cuda as linear_cuda
from kernels.linear.ops import PackedWeight
from kernels.linear.quantised import Quantised, joined
from kernels.linear.triton_cuda_configs import TileConfig
from kernels.platform import in_use
from kernels.triton_launch import count_compiled

# Up to so many pairs of each expert, on average, it is the weights' bytes that take the time.
_FEW_ROWS = 16
_ORDERED_AT_ONCE = 32  # pairs, or experts, of a program
_COMPARED_AT_ONCE = 512
_ROWS, _COLUMNS, _INPUTS = 16, 64, 128  # of a step of the product
_SUMMED_COLUMNS = 1024
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
    is_few = chosen.numel() <= _FEW_ROWS * packed.num_experts and not in_use(x.device).batch_invariant
    if not is_few and not packed.holds_codes:
        return grouped.experts(x, chosen, weights, packed, adapters)
    if is_few:
        pairs, positions, ends = _ordered(chosen, packed.num_experts)
    else:
        in_order, order = by_expert(chosen)
        pairs = Pairs(in_order, order // chosen.shape[1], packed.num_experts)
        ends = grouped.ends_of(in_order, packed.num_experts)
    product = multiply if packed.holds_codes else _multiply
    rows = mlps(x, pairs, packed, adapters, lambda rows, held: product(rows, held, ends))
    return _summed(rows, positions, weights) if is_few else summed(rows, order, weights)


def _ordered(chosen: torch.Tensor, num_experts: int) -> tuple[Pairs, torch.Tensor, torch.Tensor]:
    """(pairs by expert and then by token; int64 [pairs], the position of each pair of chosen row by row; int32
    [num_experts], where each expert's pairs end)."""
    num_pairs, num_chosen = chosen.numel(), chosen.shape[1]
    of_pairs = torch.empty(3, num_pairs, dtype=torch.int64, device=chosen.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    num_blocks = triton.cdiv(num_pairs, _ORDERED_AT_ONCE) + triton.cdiv(num_experts, _ORDERED_AT_ONCE)
    order_kernel[(num_blocks,)](
        *(chosen, *of_pairs, ends, num_pairs, num_chosen),
        NUM_EXPERTS=num_experts,
        PAIRS=_ORDERED_AT_ONCE,
        BLOCK=_COMPARED_AT_ONCE,
        num_warps=4,
    )
    experts_of, tokens, positions = of_pairs
    return Pairs(experts_of, tokens, num_experts), positions, ends


def _multiply(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The rows of each expert by its weights [num_experts, out, in]."""
    num_experts, outputs, inputs = weights.shape
    out = rows.new_empty(len(rows), outputs)
    product_kernel[triton.cdiv(outputs, _COLUMNS), num_experts](
        *(rows, weights, out, ends),
        INPUTS=inputs,
        OUTPUTS=outputs,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        BLOCK=_INPUTS,
        num_warps=4,
        num_stages=3,
    )
    return out


def _summed(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's pairs; rows [pairs, hidden_size], weights [tokens, num_chosen]."""
    (num_tokens, num_chosen), size = weights.shape, rows.shape[1]
    out = rows.new_empty(num_tokens, size)
    block = min(_SUMMED_COLUMNS, triton.next_power_of_2(size))
    sum_kernel[num_tokens, triton.cdiv(size, block)](
        rows, positions, weights, out, num_chosen, SIZE=size, BLOCK=block, num_warps=4
    )
    return out


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
        out,
        weight.in_features,
        out_features,
        weight.out_features,
        tiled.weight.codes.shape[0],
        tiled.num_groups,
        NUM_EXPERTS=codes.num_experts,
        EXPERTS=triton.next_power_of_2(codes.num_experts),
        TABLE=tiled.table,
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


def warm_up(packed: PackedExperts, num_chosen: int) -> None:
    """See `ops.warm_up`. The number of pairs is no constant of the kernels. No result is used as an index, since
    compilation ahead launches nothing."""
    device = packed.gate_up.weight.data.device if packed.holds_codes else packed.gate_up.device
    if in_use(device).batch_invariant:
        grouped.warm_up(packed, num_chosen)
        return
    _, positions, ends = _ordered(torch.arange(num_chosen, device=device).unsqueeze(0), packed.num_experts)
    for held, inputs in ((packed.gate_up, packed.hidden_size), (packed.down, packed.size)):
        rows = torch.zeros(num_chosen, inputs, dtype=packed.dtype, device=device)
        if packed.holds_codes:
            for config in _CONFIGS.values():
                out = multiply(rows, held, ends, config)
        else:
            out = _multiply(rows, held, ends)
    _summed(out, positions, out.new_zeros(1, num_chosen))


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return count_compiled(expert_codes_kernel, order_kernel, product_kernel, sum_kernel)


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
