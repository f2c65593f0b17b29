"""`kernels.mamba2.ops` token by token, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.contract import Contract
from kernels.mamba2.ops import heads_of, steps_of

CONTRACT = Contract()


def prefill(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_starts: Sequence[int] | None,  # noqa: ARG001 -- for implementations on the host
    sources: torch.Tensor,
) -> torch.Tensor:
    """See `ops.mamba2_prefill`."""
    x, b, c = heads_of(xbc, states, torch.float64)
    step, decay_log = steps_of(dt, a_log, dt_bias, torch.float64)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    starts = query_start_loc.tolist()
    for n, (line, source) in enumerate(zip(state_indices.tolist(), sources.tolist(), strict=True)):
        if line < 1 or starts[n] == starts[n + 1]:
            continue
        state = states[source].double() if bool(has_initial_state[n]) else torch.zeros_like(states[line]).double()
        for t in range(starts[n], starts[n + 1]):
            written = torch.einsum("hn,hp->hnp", b[t], step[t][:, None] * x[t])
            state = state * decay_log[t].exp()[:, None, None] + written
            out[t] = (torch.einsum("hnp,hn->hp", state, c[t]) + d.double()[:, None] * x[t]).float()
        states[line] = state.to(states.dtype)
    return out


def decode(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    sources: torch.Tensor,
) -> torch.Tensor:
    """See `ops.mamba2_decode`."""
    starts = torch.arange(len(state_indices) + 1, dtype=torch.int32, device=xbc.device)
    continued = torch.ones(len(state_indices), dtype=torch.bool, device=xbc.device)
    return prefill(xbc, dt, a_log, dt_bias, d, states, starts, state_indices, continued, None, sources)
