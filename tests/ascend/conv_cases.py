"""The causal convolution kernels in the forms that their launcher can choose, for the gate."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from kernels.causal_conv1d import reference, triton_ascend
from kernels.causal_conv1d.call import Launch as Plan
from kernels.causal_conv1d.call import PrefillCall, UpdateCall
from tests.ascend.gate.cases import Case, Launch
from tests.support.conv_checks import serving
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


def _plan(kind: type[PrefillCall] | type[UpdateCall], call: dict[str, Any]) -> Plan:
    """What the launcher makes of a call, with fresh outputs."""
    fields = dict.fromkeys(field.name for field in dataclasses.fields(kind))
    made = kind(**{**fields, "pad_slot_id": -1, "out": torch.full_like(call["x"], torch.nan), **call})
    with serving(triton_ascend, num_cores=NUM_VECTOR_CORES):
        return triton_ascend.plan_prefill(made) if isinstance(made, PrefillCall) else triton_ascend.plan_update(made)


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
    plan = _plan(UpdateCall, call)
    minimum = 2 * call["x"].nbytes + 2 * num_sequences * (width - 1) * dim * state_dtype.itemsize
    minimum += call["weight"].nbytes + call["bias"].nbytes
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected, "states_ptr": states},
        MAPS,
        minimum_bytes=minimum if judge_traffic else None,
        tolerance=OP[dtype],
    )


def prefill(
    dim: int = 300,
    width: int = 4,
    lines: tuple[int, ...] | None = (2, 0, 1, 3, -1),
    lengths: tuple[int, ...] = (20, 5, 2, 33, 3),
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.bfloat16,
    block_size_tokens: int | None = None,
    has_states: bool = True,
    is_gated: bool = False,
    judge_traffic: bool = False,
) -> Launch:
    """A prefill of sequences of these lengths, every second one with an initial state, two tokens of padding behind."""
    num_sequences, num_tokens = len(lengths), sum(lengths) + (0 if judge_traffic else 2)
    num_blocks = 1
    num_lines = num_sequences + 2
    if block_size_tokens is not None:
        num_blocks = max(lengths) // block_size_tokens + 3
        num_lines = num_sequences * num_blocks + 1
    call = _tensors(dim, width, num_tokens, num_lines, width - 1, dtype, state_dtype)
    call |= {
        "query_start_loc": _int32([sum(lengths[:n]) for n in range(num_sequences + 1)]),
        "has_initial_state": torch.tensor([n % 2 == 0 for n in range(num_sequences)]),
    }
    if lines is not None:
        call["state_indices"] = _int32(lines)
    if block_size_tokens is not None:
        computed = [n % 2 * 3 for n in range(num_sequences)]
        last = [(before + length - 1) // block_size_tokens for before, length in zip(computed, lengths, strict=True)]
        call |= {
            "state_indices": _int32(range(1, num_lines)).view(num_sequences, num_blocks).flip(1).contiguous(),
            "initial_state_idx": _int32([max(before - 1, 0) // block_size_tokens for before in computed]),
            "block_idx_first_scheduled_token": _int32([before // block_size_tokens for before in computed]),
            "block_idx_last_scheduled_token": _int32(last),
            "num_computed_tokens": _int32(computed),
            "block_size_tokens": block_size_tokens,
        }
    if is_gated:
        call |= {"gate_in": call["x"].flip(0).contiguous(), "gate_out": call["x"].roll(1, 0)}
    if not has_states:
        call |= {"conv_states": None, "state_indices": None, "has_initial_state": None}
        expected, states = reference.causal_conv1d_prefill(**call), None
    else:
        expected, states = _expected(reference.causal_conv1d_prefill, call)
    plan = _plan(PrefillCall, call)
    minimum = 2 * call["x"].nbytes + call["weight"].nbytes + call["bias"].nbytes
    minimum += sum(2 * (width - 1) * dim * state_dtype.itemsize for length in lengths if length)
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected} | ({} if states is None else {"states_ptr": states}),
        MAPS,
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

_PREFILLS = {
    "mixed": prefill,
    "long": partial(prefill, 512, 4, (1, 2), (400, 240), judge_traffic=True),
    "gated, width 3, own lines": partial(prefill, 600, 3, None, (3, 0, 18), is_gated=True, state_dtype=torch.float32),
    "width 8, fp32": partial(prefill, 130, 8, dtype=torch.float32, state_dtype=torch.float32),
    "width 2, no states": partial(prefill, 77, 2, None, has_states=False),
}
_PREFIX_CACHE = {
    "blocks of 8": partial(prefill, 300, 4, None, (20, 5, 2, 33), block_size_tokens=8),
    "blocks of 1": partial(prefill, 300, 4, None, (5, 2), block_size_tokens=1),
}

CASES = [
    Case("conv_update", triton_ascend.conv_update, _UPDATES, work_loop_depth=2, on_chip_fraction=0.85),
    # An item is what one sequence has in a tile; a block boundary of the prefix cache is one of its own.
    Case("conv_prefill", triton_ascend.conv_prefill, _PREFILLS, work_loop_depth=3, on_chip_fraction=0.85),
    Case("conv_prefix", triton_ascend.conv_prefill, _PREFIX_CACHE, work_loop_depth=4, on_chip_fraction=0.85),
]
