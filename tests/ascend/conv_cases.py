"""The causal convolution kernels in the forms that their launcher can choose, for the gate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.causal_conv1d import reference, triton_ascend
from tests.ascend.gate.cases import Case, Launch
from tests.tolerances import OP

NUM_VECTOR_CORES = 40
MAPS = frozenset(
    {
        "starts_ptr",
        "lines_ptr",
        "accepted_ptr",
        "initial_ptr",
        "source_block_ptr",
        "first_block_ptr",
        "last_block_ptr",
        "computed_ptr",
    }
)


def _int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _tensors(
    dim: int, width: int, num_tokens: int, num_lines: int, state_len: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(dim + width + num_tokens)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": values(num_tokens, dim).to(dtype),
        "weight": values(width, dim).to(dtype),
        "bias": values(dim).to(dtype),
        "conv_states": values(num_lines, state_len, dim).to(state_dtype),
        "activation": "silu",
    }


def _expected(op: Any, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    states = call["conv_states"].clone()
    return op(**{**call, "conv_states": states}), states


def update(
    dim: int = 2048,
    width: int = 4,
    lines: tuple[int, ...] = tuple(range(1, 33)),
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.bfloat16,
    lengths: tuple[int, ...] | None = None,
    draft: int | None = None,
    is_paged: bool = False,
    is_gated: bool = False,
    judge_traffic: bool = False,
) -> Launch:
    """An update of sequences in random lines; `lengths` makes it varlen, `draft` speculative."""
    num_sequences = len(lines)
    num_tokens = num_sequences if lengths is None else sum(lengths) + 2
    state_len = width - 1 + (draft or 0)
    num_lines = (3 if is_paged else 1) * (max(lines) + 1)
    call = _tensors(dim, width, num_tokens, num_lines, state_len, dtype, state_dtype)
    call["state_indices"] = _int32(lines)
    if lengths is not None:
        call |= {
            "query_start_loc": _int32([sum(lengths[:n]) for n in range(num_sequences + 1)]),
            "max_query_len": max(lengths),
        }
    if draft is not None:
        call["num_accepted_tokens"] = _int32([1 + n % (draft + 1) for n in range(num_sequences)])
    if is_paged:
        call["state_indices"] = torch.stack([_int32(lines), _int32(lines) + num_lines // 3, _int32(lines)], dim=1)
        call |= {
            "initial_state_idx": _int32([0] * num_sequences),
            "block_idx_last_scheduled_token": _int32([n % 2 for n in range(num_sequences)]),
        }
    if is_gated:
        call |= {"gate_in": call["x"].flip(0).contiguous(), "gate_out": call["x"].roll(1, 0)}
    expected, states = _expected(reference.causal_conv1d_update, call)
    plan = triton_ascend.plan_update(**call, out=torch.full_like(call["x"], torch.nan), num_cores=NUM_VECTOR_CORES)
    minimum = 2 * call["x"].nbytes + 2 * num_sequences * (width - 1) * dim * state_dtype.itemsize
    minimum += call["weight"].nbytes + call["bias"].nbytes
    num_blocks = -(-dim // plan.arguments["BLOCK_D"])
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected, "states_ptr": states},
        MAPS,
        num_sequences * num_blocks,
        minimum_bytes=minimum if judge_traffic else None,
        tolerance=OP[dtype],
    )


_UPDATES = {
    "32 sequences": partial(update, judge_traffic=True),
    "padding and odd channels": partial(update, 600, 3, (3, 0, 1, -1, 2), is_gated=True),
    "width 2, fp32": partial(update, 77, 2, (2, 1), dtype=torch.float32, state_dtype=torch.float32),
    "width 8": partial(update, 520, 8, (2, 1, -1), state_dtype=torch.float32),
    "varlen": partial(update, 300, 4, (3, 1, 0, 2), lengths=(2, 0, 1, 5)),
    "drafts": partial(update, 300, 4, (3, 1, 0, 2), lengths=(2, 3, 1, 0), draft=3),
    "prefix cache": partial(update, 300, 3, (3, 1, 0, 2), is_paged=True),
}

CASES = [
    Case("conv_update", triton_ascend.conv_update, _UPDATES, work_loop_depth=2, on_chip_fraction=0.85),
]
