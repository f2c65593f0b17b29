"""State-space layers with a matrix of state per head (Dao and Gu, "Transformers are SSMs", 2024): the public, checked
ops.

What a short convolution has left of x, B and C comes in, and what the state is read out as goes out. Head h writes and
reads by group h // (num_heads / num_groups). For each token t of a sequence, in float32, with S [state_size, head_dim]
the state of a head:

    step   = softplus(dt[t] + dt_bias)
    S      = exp(-exp(a_log) * step) * S + outer(B[t], step * x[t])
    out[t] = S.T @ C[t] + d * x[t]

Lines of states, padding and `source_state_indices` are those of `kernels.gated_delta.ops`. All metadata stays on the
device; nothing here synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.platform import implementation


def mamba2_prefill(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    *,
    source_state_indices: torch.Tensor | None = None,
    query_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Advance sequences by whole prompts, chunks of them, or single tokens.

    Args:
        xbc: [tokens, num_heads * head_dim + 2 * num_groups * state_size]: x, B, C; float32, bfloat16 or float16, unit
            stride along the columns, any stride between tokens.
        dt: [tokens, num_heads], strided likewise, dtype of xbc.
        a_log, dt_bias, d: float32 [num_heads].
        states: float32 [lines, num_heads, state_size, head_dim], contiguous; changed in place.
        query_start_loc, state_indices, has_initial_state, source_state_indices, query_starts: as in
            `kernels.gated_delta.ops.gated_delta_prefill`.

    Returns: float32 [tokens, num_heads, head_dim], fresh and contiguous. Tokens of no sequence come out as anything.
    """
    _check(xbc, dt, a_log, dt_bias, d, states)
    num_sequences = state_indices.shape[0]
    assert query_start_loc.shape == (num_sequences + 1,), "query_start_loc is int32 [sequences + 1]"
    assert has_initial_state.shape == (num_sequences,), "has_initial_state is bool [sequences]"
    sources = state_indices if source_state_indices is None else source_state_indices
    out: torch.Tensor = implementation("mamba2", xbc.device).prefill(
        xbc, dt, a_log, dt_bias, d, states, query_start_loc, state_indices, has_initial_state, query_starts, sources
    )
    return out


def mamba2_decode(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    source_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advance each sequence by one token: token n is sequence n's, and continues what its line holds. Arguments and
    result as in `mamba2_prefill`."""
    _check(xbc, dt, a_log, dt_bias, d, states)
    assert state_indices.shape == (xbc.shape[0],), "state_indices is int32 [tokens]"
    sources = state_indices if source_state_indices is None else source_state_indices
    out: torch.Tensor = implementation("mamba2", xbc.device).decode(
        xbc, dt, a_log, dt_bias, d, states, state_indices, sources
    )
    return out


def _check(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
) -> None:
    assert states.dim() == 4 and states.is_contiguous() and states.dtype == torch.float32, (
        "states are float32 [lines, num_heads, state_size, head_dim], contiguous"
    )
    num_heads, state_size, head_dim = states.shape[1:]
    assert xbc.dim() == 2 and xbc.stride(1) == 1, "xbc is [tokens, columns], unit stride along the columns"
    num_groups, rest = divmod(xbc.shape[1] - num_heads * head_dim, 2 * state_size)
    assert num_groups > 0 and rest == 0 and num_heads % num_groups == 0, "xbc holds x of all heads, B, C of all groups"
    assert dt.shape == (xbc.shape[0], num_heads) and dt.dtype == xbc.dtype, "dt is [tokens, num_heads], as xbc"
    for weight in (a_log, dt_bias, d):
        assert weight.shape == (num_heads,) and weight.dtype == torch.float32, "a_log, dt_bias, d: float32 [num_heads]"


def heads_of(
    xbc: torch.Tensor, states: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [tokens, num_heads, head_dim], B and C [tokens, num_heads, state_size])"""
    _, num_heads, state_size, head_dim = states.shape
    size = num_heads * head_dim
    size_of_groups = (xbc.shape[1] - size) // 2
    x, b, c = xbc.to(dtype).split((size, size_of_groups, size_of_groups), dim=1)
    num_shared = num_heads * state_size // size_of_groups
    b, c = (part.unflatten(1, (-1, state_size)).repeat_interleave(num_shared, dim=1) for part in (b, c))
    return x.unflatten(1, (num_heads, head_dim)), b, c


def steps_of(
    dt: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, the logarithm of the decay), each [tokens, num_heads]; the latter is at most 0."""
    step = functional.softplus(dt.to(dtype) + dt_bias.to(dtype))
    return step, -a_log.to(dtype).exp() * step
