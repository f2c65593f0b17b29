"""`kernels.gated_delta.ops` on Ascend NPUs: decode is the convolution's launch and one behind it
(`triton_ascend_decode`); of a prefill, long sequences are computed in chunks (`triton_ascend_chunks`), and short ones
walked token by token (`triton_ascend_walk`). Not verified on an NPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
import triton

from kernels import triton_launch
from kernels.ascend_relaunch import AscendLaunch
from kernels.causal_conv1d.ops import causal_conv1d_update
from kernels.contract import Contract
from kernels.gated_delta.ops import num_key_heads_of
from kernels.gated_delta.triton_ascend_chunks import KERNELS, MAX_KEY_DIM, MAX_SHORT_TOKENS, Buffers, plan_sequence
from kernels.gated_delta.triton_ascend_decode import gated_delta_decode
from kernels.gated_delta.triton_ascend_walk import gated_delta_walk
from kernels.platform import in_use
from kernels.shapes import ProbeShapes

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
    query_starts: Sequence[int] | None,
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.gated_delta_prefill`. What `refuses` names must have been kept away. Without query_starts all sequences
    are walked; nothing is waited for in either case."""
    num_tokens, (_, num_heads, key_dim, value_dim) = len(qkv), states.shape
    out = torch.empty(num_tokens, num_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    inputs, sources = (qkv, b, a, a_log, dt_bias, states), state_indices if sources is None else sources
    lengths = [num_tokens]
    if query_starts is not None:
        lengths = [end - start for start, end in pairwise(query_starts)]
    max_walked = num_tokens if query_starts is None or key_dim > MAX_KEY_DIM else MAX_SHORT_TOKENS
    if any(0 < length <= max_walked for length in lengths):
        where = (query_start_loc, state_indices, sources, has_initial_state)
        plan_walk(*inputs, *where, out, max_walked).run()
    if max(lengths) > max_walked:
        assert query_starts is not None
        buffers = Buffers(max(lengths), num_key_heads_of(qkv, states), states)
        whose = (state_indices, sources, has_initial_state)
        for n, (start, end) in enumerate(pairwise(query_starts)):
            if end - start > max_walked:
                for launch in plan_sequence(*inputs, *whose, out, buffers, n, start, end):
                    launch.run()
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
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.gated_delta_decode`. What `refuses` names must have been kept away."""
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    sources = state_indices if sources is None else sources
    if len(qkv):
        convolved = causal_conv1d_update(
            qkv, taps, None, conv_states, state_indices, activation="silu", source_state_indices=sources
        )
        plan_decode(convolved, z, b, a, a_log, dt_bias, norm_weight, states, state_indices, sources, eps, out).run()
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
    sources: torch.Tensor,
    has_initial_state: torch.Tensor,
    out: torch.Tensor,
    max_tokens: int,
) -> AscendLaunch:
    """The launch of a prefill's sequences of up to max_tokens, for at least one token; looks at sizes, never at values.
    Arguments as in `ops.gated_delta_prefill`.

    out  its result, of which these sequences' tokens are filled
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
        "sources_ptr": sources,
        "continued_ptr": has_initial_state.view(torch.int8),
        "out_ptr": out,
        "num_sequences": len(state_indices),
        "max_tokens": max_tokens,
        "b_stride": b.stride(0),
        "a_stride": a.stride(0),
        **sizes,
        # A single element would be the scalar unit's to load, token by token.
        "BLOCK_H": max(sizes["BLOCK_H"], _BLOCK_ELEMENTS),
    }
    return AscendLaunch(gated_delta_walk, (in_use(states.device).num_cores,), arguments)


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
    sources: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> AscendLaunch:
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
        "sources_ptr": sources,
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
    return AscendLaunch(gated_delta_decode, (in_use(states.device).num_cores,), arguments)


def _sizes(num_key_heads: int, states: torch.Tensor) -> dict[str, int]:
    """Sizes that the kernels' constants follow from: heads, their sizes, and the tile of a state held at a time."""
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


def warm_up_with(prefill: Callable[..., torch.Tensor], states: torch.Tensor, conv_states: torch.Tensor) -> None:
    """See `ops.warm_up`: a token of decode, and of this prefill a short and a long sequence, all padding. Numbers of
    tokens are no constants of the kernels."""
    _, num_heads, _, value_dim = states.shape
    _, num_rows, num_channels = conv_states.shape
    device, dtype, num_tokens = states.device, conv_states.dtype, MAX_SHORT_TOKENS + 2

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    qkv, z, gate = zeros(num_tokens, num_channels), zeros(1, num_heads * value_dim), zeros(num_tokens, num_heads)
    taps, weight, norm_weight = zeros(num_rows + 1, num_channels), zeros(num_heads).float(), zeros(value_dim).float()
    line, starts = torch.zeros(2, dtype=torch.int32, device=device), [0, 1, num_tokens]
    of_token = (qkv[:1], z, gate[:1], gate[:1], taps, conv_states)
    decode(*of_token, weight, weight, norm_weight, states, line[:1], 1e-6)
    where = (torch.tensor(starts, dtype=torch.int32, device=device), line, line.bool(), starts)
    prefill(qkv, gate, gate, weight, weight, states, *where)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(gated_delta_decode, gated_delta_walk, *KERNELS)


# Only decode is captured on an NPU: a prompt's lengths are on the host.
CONTRACT = Contract(
    refuses=refuses, warm_up=partial(warm_up_with, prefill), compiled_count=compiled_count, replayable=True
)
