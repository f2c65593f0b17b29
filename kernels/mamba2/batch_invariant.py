"""`kernels.mamba2.ops` on a CPU, each sequence by itself and token by token: prompts and decode tokens take the same
calls of the same shapes, however a sequence is cut. float32 inside."""

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
    query_starts: Sequence[int] | None,
    sources: torch.Tensor,
) -> torch.Tensor:
    """See `ops.mamba2_prefill`."""
    x, b, c = heads_of(xbc, states, torch.float32)
    step, decay_log = steps_of(dt, a_log, dt_bias, torch.float32)
    decay, written = decay_log.exp(), x * step.unsqueeze(2)
    out = torch.zeros_like(x)
    starts = query_start_loc.tolist() if query_starts is None else query_starts
    lines, continued, read = state_indices.tolist(), has_initial_state.tolist(), sources.tolist()
    for n, line in enumerate(lines):
        if line < 1 or starts[n] == starts[n + 1]:
            continue
        state = states[read[n]].clone() if continued[n] else torch.zeros_like(states[line])
        for t in range(starts[n], starts[n + 1]):
            state.mul_(decay[t, :, None, None]).add_(b[t].unsqueeze(2) * written[t].unsqueeze(1))
            out[t] = torch.bmm(c[t].unsqueeze(1), state).squeeze(1)
        states[line] = state
    return out.add_(x * d[:, None])


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
    starts = torch.arange(len(state_indices) + 1, dtype=torch.int32)
    continued = torch.ones(len(state_indices), dtype=torch.bool)
    return prefill(xbc, dt, a_log, dt_bias, d, states, starts, state_indices, continued, starts.tolist(), sources)
