"""`kernels.gated_delta.ops` on a CPU, each sequence by itself and token by token: prompts and decode tokens take the
same calls of the same shapes, however a sequence is cut. float32 inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.causal_conv1d.ops import causal_conv1d_update
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
    query_starts: Sequence[int] | None,
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.gated_delta_prefill`."""
    q, k, v = heads_of(qkv, states, torch.float32)
    beta, decay_log = gates_of(b, a, a_log, dt_bias, torch.float32)
    decay = decay_log.exp()
    out = torch.zeros_like(v)
    starts = query_start_loc.tolist() if query_starts is None else query_starts
    lines, continued = state_indices.tolist(), has_initial_state.tolist()
    read = lines if sources is None else sources.tolist()
    for n, line in enumerate(lines):
        if line < 1 or starts[n] == starts[n + 1]:
            continue
        state = states[read[n]].clone() if continued[n] else torch.zeros_like(states[line])
        for t in range(starts[n], starts[n + 1]):
            # [heads, 1, ...] each
            state.mul_(decay[t, :, None, None])
            kept = torch.bmm(k[t].unsqueeze(1), state)
            change = (v[t].unsqueeze(1) - kept).mul_(beta[t, :, None, None])
            state.add_(k[t].unsqueeze(2) * change)
            out[t] = torch.bmm(q[t].unsqueeze(1), state).squeeze(1)
        states[line] = state
    return out.to(qkv.dtype)


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
    """See `ops.gated_delta_decode`; the convolution is the device's own."""
    convolved = causal_conv1d_update(
        qkv,
        taps,
        None,
        conv_states,
        state_indices,
        activation="silu",
        source_state_indices=state_indices if sources is None else sources,
    )
    num = len(state_indices)
    starts = torch.arange(num + 1, dtype=torch.int32)
    continued = torch.ones(num, dtype=torch.bool)
    out = prefill(convolved, b, a, a_log, dt_bias, states, starts, state_indices, continued, range(num + 1), sources)
    return gated_norm(out, z, norm_weight, eps)
