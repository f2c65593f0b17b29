"""`kernels.mamba2.ops` in plain torch, for any device: prompts in chunks of matrix products, decode in one batch.

Only exponentials of what is at most 0 are taken, as in `kernels.gated_delta.any_device`. float32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kernels.contract import Contract
from kernels.gated_delta.any_device import CHUNK, chunked, state_at, write_states
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
    """See `ops.mamba2_prefill`. Without query_starts it waits for the device."""
    x, b, c = heads_of(xbc, states, torch.float32)
    step, decay_log = steps_of(dt, a_log, dt_bias, torch.float32)
    written = x * step.unsqueeze(2)
    starts = query_start_loc.tolist() if query_starts is None else query_starts
    lengths = [end - start for start, end in pairwise(starts)]
    num_tokens = len(x)
    out = torch.zeros(num_tokens + 1, *x.shape[1:], dtype=torch.float32, device=x.device)
    if 1 in lengths:
        # All sequences by one token; those of other lengths as padding, and their outputs to a row behind all others.
        is_single = query_start_loc.diff() == 1
        rows = query_start_loc[:-1].long().clamp(max=num_tokens - 1)
        lines = torch.where(is_single, state_indices, 0)
        of_rows = (c[rows], b[rows], written[rows], decay_log[rows])
        advanced = _advance(*of_rows, states, lines, sources, has_initial_state)
        out.index_copy_(0, torch.where(is_single, rows, num_tokens), advanced)
    for n, length in enumerate(lengths):
        if length > 1:
            here = slice(starts[n], starts[n + 1])
            state = state_at(states, sources[n : n + 1], has_initial_state[n : n + 1])[0]
            out[here], state = _in_chunks(c[here], b[here], written[here], decay_log[here], state)
            write_states(states, state_indices[n : n + 1], state[None])
    return out[:num_tokens].addcmul_(x, d[:, None])


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
    x, b, c = heads_of(xbc, states, torch.float32)
    step, decay_log = steps_of(dt, a_log, dt_bias, torch.float32)
    out = _advance(c, b, x * step.unsqueeze(2), decay_log, states, state_indices, sources, None)
    return out.addcmul_(x, d[:, None])


def _advance(
    c: torch.Tensor,
    b: torch.Tensor,
    written: torch.Tensor,
    decay_log: torch.Tensor,
    states: torch.Tensor,
    lines: torch.Tensor,
    sources: torch.Tensor,
    continued: torch.Tensor | None,
) -> torch.Tensor:
    """One token of each sequence; [sequences, num_heads, head_dim]. Padding decays nothing and adds nothing, so that
    the null line gets what it held."""
    is_real = lines > 0
    state = states.index_select(0, torch.where(is_real, sources, 0).long())
    if continued is not None:
        state.masked_fill_((is_real & ~continued)[:, None, None, None], 0.0)
    state.mul_(torch.where(is_real[:, None], decay_log.exp(), 1.0)[..., None, None])
    matrices = state.flatten(0, 1)  # [sequences * heads, ...]
    b, written = (torch.where(is_real[:, None, None], one, 0.0).flatten(0, 1) for one in (b, written))
    matrices.baddbmm_(b.unsqueeze(2), written.unsqueeze(1))
    states.index_copy_(0, lines.long().clamp(min=0), state)
    return torch.bmm(c.flatten(0, 1).unsqueeze(1), matrices).view(*decay_log.shape, -1)


def _in_chunks(
    c: torch.Tensor, b: torch.Tensor, written: torch.Tensor, decay_log: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [tokens, heads, head_dim], the state after them) of one sequence; state [heads, state_size, head_dim]."""
    num_tokens = len(c)
    chunk = min(CHUNK, 1 << (num_tokens - 1).bit_length())
    padding = -num_tokens % chunk
    # [heads, chunks, chunk, ...]; padding neither decays nor writes.
    c, b, written = (chunked(one, chunk, padding) for one in (c, b, written))
    total = chunked(decay_log.unsqueeze(2), chunk, padding).squeeze(3).cumsum(2)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=c.device).tril()
    decay = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill_(~causal, -torch.inf).exp_()
    within = ((c @ b.transpose(2, 3)) * decay) @ written
    added = (b * (total[:, :, -1:] - total).exp().unsqueeze(3)).transpose(2, 3) @ written
    c, remaining = c * total.exp().unsqueeze(3), total[:, :, -1].exp()[:, :, None, None]
    outs = []
    for i in range(c.shape[1]):
        outs.append(c[:, i] @ state + within[:, i])
        state = remaining[:, i] * state + added[:, i]
    return torch.cat(outs, dim=1).transpose(0, 1)[:num_tokens], state
