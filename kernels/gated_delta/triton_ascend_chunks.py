"""Long prompts by the delta rule on Ascend NPUs, in chunks of matrix products on the cube: the launches of one
sequence. Not verified on an NPU.

A sequence at a time, since a launch takes where it begins and ends as numbers of the host: there are few long prompts
in a step, and all heads of one fill the chip.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from kernels.ascend_relaunch import AscendLaunch
from kernels.gated_delta.ops import num_key_heads_of
from kernels.gated_delta.triton_ascend_prepare import (
    BLOCK,
    NUM_FACTORS,
    gated_delta_double,
    gated_delta_norm,
    gated_delta_prepare,
    gated_delta_solve,
)
from kernels.gated_delta.triton_ascend_scan import gated_delta_scan
from kernels.platform import in_use

CHUNK = 64
# Sequences up to this length are walked token by token (`triton_ascend_walk`). Not measured: it is a single chunk.
MAX_SHORT_TOKENS = CHUNK
# Chunks of a sequence computed at a time, which bounds the memory in between.
PIECE_TOKENS = 2048
KERNELS = (gated_delta_norm, gated_delta_prepare, gated_delta_solve, gated_delta_double, gated_delta_scan)
# Heads with larger keys are walked, whatever their length: with these the scan takes 92 % of a cube's memory.
MAX_KEY_DIM = 128
# float32 elements of a tile of the state: with it all kernels stay below 85 % of the unified buffer.
_TILE_ELEMENTS = 4096
_MIN_BLOCK_H = 16


class Buffers:
    """Intermediate results between the launches of a piece, float32; the same memory for all pieces of a step."""

    def __init__(self, num_tokens: int, num_key_heads: int, states: torch.Tensor) -> None:
        """num_tokens  of the longest sequence."""
        _, num_heads, key_dim, _ = states.shape
        num_chunks = triton.cdiv(min(num_tokens, PIECE_TOKENS), CHUNK)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(num_chunks, *shape, dtype=torch.float32, device=states.device)

        self.normed = empty(2 * num_key_heads, CHUNK, triton.next_power_of_2(key_dim))
        self.factors = empty(num_heads, NUM_FACTORS.value, CHUNK)
        self.matrix = empty(num_heads, CHUNK, CHUNK)
        self.scores = empty(num_heads, CHUNK, CHUNK)


def plan_sequence(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    sources: torch.Tensor,
    has_initial_state: torch.Tensor,
    out: torch.Tensor,
    buffers: Buffers,
    sequence: int,
    start: int,
    end: int,
) -> Iterator[AscendLaunch]:
    """The launches, in order, that advance one sequence by its tokens [start, end); looks at sizes, never at values.
    Arguments as in `ops.gated_delta_prefill`.

    out       its result, of which these tokens are filled
    buffers   for sequences of this length, or longer ones
    sequence  which one
    """
    sizes = _sizes(qkv, states)
    for first in range(start, end, PIECE_TOKENS):
        num_tokens = min(end - first, PIECE_TOKENS)
        yield from plan_prepare(qkv, b, a, a_log, dt_bias, states, buffers, first, num_tokens)
        arguments = {
            "qkv_ptr": qkv,
            "normed_ptr": buffers.normed,
            "factors_ptr": buffers.factors,
            "matrix_ptr": buffers.matrix,
            "scores_ptr": buffers.scores,
            "states_ptr": states,
            "lines_ptr": state_indices,
            "sources_ptr": sources,
            "continued_ptr": has_initial_state.view(torch.int8),
            "out_ptr": out,
            "sequence": sequence,
            "first_token": first,
            "num_tokens": num_tokens,
            "is_begun": int(first > start),
            **sizes,
            "BLOCK_V": min(_TILE_ELEMENTS // sizes["BLOCK_K"], states.shape[3] & -states.shape[3]),
        }
        yield AscendLaunch(gated_delta_scan, (_num_cubes(states),), arguments)


def plan_prepare(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    buffers: Buffers,
    first_token: int,
    num_tokens: int,
) -> Iterator[AscendLaunch]:
    """The launches before `gated_delta_scan`'s, for one piece of a sequence; see `plan_sequence`."""
    sizes, num_heads = _sizes(qkv, states), states.shape[1]
    where = {"first_token": first_token, "num_tokens": num_tokens}
    num_matrices = triton.cdiv(num_tokens, CHUNK) * num_heads
    vector, cube = (in_use(states.device).num_cores,), (_num_cubes(states),)
    yield AscendLaunch(gated_delta_norm, vector, {"qkv_ptr": qkv, "normed_ptr": buffers.normed, **where, **sizes})
    arguments = {
        "normed_ptr": buffers.normed,
        "b_ptr": b,
        "a_ptr": a,
        "a_log_ptr": a_log,
        "dt_bias_ptr": dt_bias,
        "factors_ptr": buffers.factors,
        "matrix_ptr": buffers.matrix,
        "scores_ptr": buffers.scores,
        **where,
        "b_stride": b.stride(0),
        "a_stride": a.stride(0),
        "BLOCK_H": max(_MIN_BLOCK_H, triton.next_power_of_2(num_heads)),
        **{name: sizes[name] for name in ("KEY_HEADS", "VALUE_HEADS", "BLOCK_K", "CHUNK")},
    }
    yield AscendLaunch(gated_delta_prepare, cube, arguments)
    matrices = {"matrix_ptr": buffers.matrix, "num_matrices": num_matrices, "CHUNK": CHUNK}
    yield AscendLaunch(gated_delta_solve, vector, matrices)
    width = BLOCK.value
    while width < CHUNK:
        yield AscendLaunch(gated_delta_double, cube, {**matrices, "WIDTH": width})
        width *= 2


def _sizes(qkv: torch.Tensor, states: torch.Tensor) -> dict[str, int]:
    _, num_heads, key_dim, value_dim = states.shape
    return {
        "KEY_HEADS": num_key_heads_of(qkv, states),
        "VALUE_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_K": triton.next_power_of_2(key_dim),
        "CHUNK": CHUNK,
    }


def _num_cubes(states: torch.Tensor) -> int:
    """Each has two of the vector cores."""
    return max(1, in_use(states.device).num_cores // 2)
