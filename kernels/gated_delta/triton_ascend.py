"""`kernels.gated_delta.ops` on Ascend NPUs: decode is the convolution's launch and one behind it
(`triton_ascend_decode`); prompts are walked token by token in one launch (`triton_ascend_walk`). Not verified on an
NPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels import triton_launch
from kernels.ascend_runtime import check_launch
from kernels.causal_conv1d.ops import causal_conv1d_update
from kernels.contract import Contract
from kernels.gated_delta.ops import num_key_heads_of
from kernels.gated_delta.triton_ascend_decode import gated_delta_decode
from kernels.gated_delta.triton_ascend_walk import gated_delta_walk
from kernels.platform import in_use
from kernels.probe.shapes import ProbeShapes

# float32 elements of a tile of a state: what the compiler makes of it twice, so that one tile is read while another is
# computed, takes 72 % of the unified buffer. Tiles twice as large have the compiler give up the second copy.
_TILE_ELEMENTS = 4096
_MAX_DIM = 256
# Elements of 16 bits in a block of memory as the device moves it; what begins elsewhere is copied one by one.
_BLOCK_ELEMENTS = 16


def refuses(shapes: ProbeShapes) -> str | None:
    """Why the kernel cannot serve a model, as part of a sentence; None if it can."""
    if shapes.delta is None:
        return None
    *_, key_dim, value_dim = shapes.delta
    if key_dim % _BLOCK_ELEMENTS or value_dim % _BLOCK_ELEMENTS or max(key_dim, value_dim) > _MAX_DIM:
        return (
            f"heads of the gated delta rule have a multiple of {_BLOCK_ELEMENTS} elements up to {_MAX_DIM}, not keys "
            f"of {key_dim} and values of {value_dim}"
        )
    return None


@dataclass(frozen=True)
class DeltaLaunch:
    """A kernel, its grid, and all of its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        """Launch it."""
        check_launch(self.grid, self.arguments)
        self.kernel[self.grid](**self.arguments)


def prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_starts: Sequence[int] | None,  # noqa: ARG001 -- for implementations on the host
) -> torch.Tensor:
    """See `ops.gated_delta_prefill`. What `refuses` names must have been kept away."""
    _, num_heads, _, value_dim = states.shape
    out = torch.empty(len(qkv), num_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    if len(qkv) and len(state_indices):
        where = (query_start_loc, state_indices, has_initial_state)
        plan_walk(qkv, b, a, a_log, dt_bias, states, *where, out).run()
    return out


def decode(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    taps: torch.Tensor,
    conv_states: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See `ops.gated_delta_decode`. What `refuses` names must have been kept away."""
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if len(qkv):
        convolved = causal_conv1d_update(qkv, taps, None, conv_states, state_indices, activation="silu")
        plan_decode(convolved, z, b, a, a_log, dt_bias, norm_weight, states, state_indices, eps, out).run()
    return out


def plan_walk(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    out: torch.Tensor,
) -> DeltaLaunch:
    """The launch of a prefill, for at least one token and sequence; looks at sizes, never at values. Arguments as in
    `ops.gated_delta_prefill`.

    out  its result, filled
    """
    sizes = _sizes(num_key_heads_of(qkv, states), states)
    arguments = {
        "qkv_ptr": qkv,
        "b_ptr": b,
        "a_ptr": a,
        "a_log_ptr": a_log,
        "dt_bias_ptr": dt_bias,
        "states_ptr": states,
        "starts_ptr": query_start_loc,
        "lines_ptr": state_indices,
        "continued_ptr": has_initial_state.view(torch.int8),
        "out_ptr": out,
        "num_sequences": len(state_indices),
        "b_stride": b.stride(0),
        "a_stride": a.stride(0),
        **sizes,
        # A single element would be the scalar unit's to load, token by token.
        "BLOCK_H": max(sizes["BLOCK_H"], _BLOCK_ELEMENTS),
    }
    return DeltaLaunch(gated_delta_walk, (in_use(states.device).num_cores,), arguments)


def plan_decode(
    convolved: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> DeltaLaunch:
    """The launch behind the convolution's, for at least one token; looks at sizes, never at values. Arguments as in
    `ops.gated_delta_decode`.

    convolved  like its qkv
    out        its result, filled
    """
    _, _, _, value_dim = states.shape
    sizes = _sizes(num_key_heads_of(convolved, states), states)
    arguments = {
        "qkv_ptr": convolved,
        "z_ptr": z,
        "b_ptr": b,
        "a_ptr": a,
        "a_log_ptr": a_log,
        "dt_bias_ptr": dt_bias,
        "norm_ptr": norm_weight,
        "states_ptr": states,
        "lines_ptr": state_indices,
        "out_ptr": out,
        "num_tokens": len(convolved),
        "qkv_stride": convolved.stride(0),
        "z_stride": z.stride(0),
        "b_stride": b.stride(0),
        "a_stride": a.stride(0),
        "eps": eps,
        **sizes,
        "BLOCK_T": triton.next_power_of_2(value_dim // sizes["BLOCK_V"]),
    }
    return DeltaLaunch(gated_delta_decode, (in_use(states.device).num_cores,), arguments)


def _sizes(num_key_heads: int, states: torch.Tensor) -> dict[str, int]:
    """What the kernels' constants follow from: heads, their sizes, and the tile of a state that is held at a time."""
    _, num_heads, key_dim, value_dim = states.shape
    block_k = triton.next_power_of_2(key_dim)
    return {
        "KEY_HEADS": num_key_heads,
        "VALUE_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_H": triton.next_power_of_2(num_heads),
        "BLOCK_K": block_k,
        "BLOCK_V": min(_TILE_ELEMENTS // block_k, value_dim & -value_dim),
    }


def warm_up(states: torch.Tensor, conv_states: torch.Tensor) -> None:
    """See `ops.warm_up`: one token, which is padding. The number of tokens is no constant of the kernels."""
    _, num_heads, _, value_dim = states.shape
    _, num_rows, num_channels = conv_states.shape
    device, dtype = states.device, conv_states.dtype
    qkv, z, gate, taps = (
        torch.zeros(num, size, dtype=dtype, device=device)
        for num, size in ((1, num_channels), (1, num_heads * value_dim), (1, num_heads), (num_rows + 1, num_channels))
    )
    weight, norm_weight = torch.zeros(num_heads, device=device), torch.zeros(value_dim, device=device)
    line = torch.zeros(1, dtype=torch.int32, device=device)
    decode(qkv, z, gate, gate, taps, conv_states, weight, weight, norm_weight, states, line, 1e-6)
    starts = torch.arange(2, dtype=torch.int32, device=device)
    prefill(qkv, gate, gate, weight, weight, states, starts, line, line.bool(), None)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(gated_delta_decode, gated_delta_walk)


# Of decode, which alone is captured on an NPU: a prompt's lengths are the host's.
CONTRACT = Contract(refuses=refuses, warm_up=warm_up, compiled_count=compiled_count, replayable=True)
