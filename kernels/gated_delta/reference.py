"""`kernels.gated_delta.ops` token by token, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from kernels.contract import Contract
from kernels.gated_delta.ops import gated_norm, gates_of, heads_of

CONTRACT = Contract()


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
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.gated_delta_prefill`."""
    q, k, v = heads_of(qkv, states, torch.float64)
    beta, decay_log = gates_of(b, a, a_log, dt_bias, torch.float64)
    out = torch.zeros(v.shape, dtype=qkv.dtype, device=qkv.device)
    starts = query_start_loc.tolist()
    for n, (line, source) in enumerate(_pairs(state_indices, sources)):
        if line < 1 or starts[n] == starts[n + 1]:
            continue
        state = states[source].double() if bool(has_initial_state[n]) else torch.zeros_like(states[line]).double()
        for t in range(starts[n], starts[n + 1]):
            state = state * decay_log[t].exp()[:, None, None]
            kept = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - kept) * beta[t][:, None])
            out[t] = torch.einsum("hkv,hk->hv", state, q[t]).to(qkv.dtype)
        states[line] = state.to(states.dtype)
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
    """See `ops.gated_delta_decode`."""
    num = len(state_indices)
    convolved = torch.zeros_like(qkv)
    for n, (line, source) in enumerate(_pairs(state_indices, sources)):
        if line > 0:
            rows = torch.cat((conv_states[source], qkv[n : n + 1]))
            convolved[n] = functional.silu((rows.double() * taps.double()).sum(0)).to(qkv.dtype)
            conv_states[line] = rows[1:]
    starts = torch.arange(num + 1, dtype=torch.int32, device=qkv.device)
    continued = torch.ones(num, dtype=torch.bool, device=qkv.device)
    out = prefill(convolved, b, a, a_log, dt_bias, states, starts, state_indices, continued, None, sources)
    return gated_norm(out, z, norm_weight, eps, torch.float64)


def _pairs(lines: torch.Tensor, sources: torch.Tensor | None) -> Iterator[tuple[int, int]]:
    """(line, source) of each sequence."""
    return zip(lines.tolist(), (lines if sources is None else sources).tolist(), strict=True)
