"""`kernels.gated_delta.ops` token by token, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.contract import Contract
from kernels.gated_delta.parts import gates_of, heads_of

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
) -> torch.Tensor:
    """See `ops.gated_delta_prefill`."""
    q, k, v = heads_of(qkv, states, torch.float64)
    beta, decay_log = gates_of(b, a, a_log, dt_bias, torch.float64)
    out = torch.zeros(v.shape, dtype=qkv.dtype, device=qkv.device)
    starts = query_start_loc.tolist()
    for n, line in enumerate(state_indices.tolist()):
        if line < 1 or starts[n] == starts[n + 1]:
            continue
        state = states[line].double() if bool(has_initial_state[n]) else torch.zeros_like(states[line]).double()
        for t in range(starts[n], starts[n + 1]):
            state = state * decay_log[t].exp()[:, None, None]
            kept = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], (v[t] - kept) * beta[t][:, None])
            out[t] = torch.einsum("hkv,hk->hv", state, q[t]).to(qkv.dtype)
        states[line] = state.to(states.dtype)
    return out


def update(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    """See `ops.gated_delta_update`."""
    num = len(state_indices)
    starts = torch.arange(num + 1, dtype=torch.int32, device=qkv.device)
    continued = torch.ones(num, dtype=torch.bool, device=qkv.device)
    return prefill(qkv, b, a, a_log, dt_bias, states, starts, state_indices, continued, None)
