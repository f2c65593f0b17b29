"""`kernels.gated_delta.ops` in plain torch, for any device: prompts in chunks of matrix products, decode in one batch.

Within a chunk the recurrence is solved at once (Yang et al., "Parallelizing Linear Transformers with the Delta Rule",
2024). Only exponentials of what is at most 0 are taken: exp(G[i] - G[j]) for i >= j, with G the summed logarithms of
the decay, never exp(-G). float32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional

from kernels.causal_conv1d.ops import causal_conv1d_update
from kernels.contract import Contract
from kernels.gated_delta.ops import gated_norm, gates_of, heads_of

CONTRACT = Contract()

CHUNK = 64


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
    """See `ops.gated_delta_prefill`. Without query_starts it waits for the device; with them nothing is waited for, and
    nothing is brought to the device."""
    sources = state_indices if sources is None else sources
    q, k, v = heads_of(qkv, states, torch.float32)
    beta, decay_log = gates_of(b, a, a_log, dt_bias, torch.float32)
    starts = query_start_loc.tolist() if query_starts is None else query_starts
    lengths = [end - start for start, end in pairwise(starts)]
    num_tokens = len(v)
    out = torch.zeros(num_tokens + 1, *v.shape[1:], dtype=torch.float32, device=v.device)
    if 1 in lengths:
        # All sequences by one token; those of other lengths as padding, and their outputs to a row behind all others.
        is_single = query_start_loc.diff() == 1
        rows = query_start_loc[:-1].long().clamp(max=num_tokens - 1)
        lines = torch.where(is_single, state_indices, 0)
        of_rows = (q[rows], k[rows], v[rows], beta[rows], decay_log[rows])
        advanced = _advance(*of_rows, states, lines, sources, has_initial_state)
        out.index_copy_(0, torch.where(is_single, rows, num_tokens), advanced)
    for n, length in enumerate(lengths):
        if length > 1:
            here = slice(starts[n], starts[n + 1])
            state = state_at(states, sources[n : n + 1], has_initial_state[n : n + 1])[0]
            out[here], state = _in_chunks(q[here], k[here], v[here], beta[here], decay_log[here], state)
            write_states(states, state_indices[n : n + 1], state[None])
    return out[:num_tokens].to(qkv.dtype)


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
    sources = state_indices if sources is None else sources
    convolved = causal_conv1d_update(
        qkv, taps, None, conv_states, state_indices, activation="silu", source_state_indices=sources
    )
    q, k, v = heads_of(convolved, states, torch.float32)
    beta, decay_log = gates_of(b, a, a_log, dt_bias, torch.float32)
    out = _advance(q, k, v, beta, decay_log, states, state_indices, sources, None).to(qkv.dtype)
    return gated_norm(out, z, norm_weight, eps)


def _advance(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay_log: torch.Tensor,
    states: torch.Tensor,
    lines: torch.Tensor,
    sources: torch.Tensor,
    continued: torch.Tensor | None,
) -> torch.Tensor:
    """One token of each sequence; [sequences, num_value_heads, value_dim].

    The states are most of the bytes, and are changed in place between being taken out and put back. Padding decays
    nothing and adds nothing, so that the null line gets what it held.
    """
    is_real = (lines > 0)[:, None]
    state = states.index_select(0, torch.where(is_real[:, 0], sources, 0).long())
    if continued is not None:
        state.masked_fill_((is_real & ~continued[:, None])[..., None, None], 0.0)
    state.mul_(torch.where(is_real, decay_log.exp(), 1.0)[..., None, None])
    # [sequences * heads, ...]
    matrices, keys = state.flatten(0, 1), torch.where(is_real[..., None], k, 0.0).flatten(0, 1)
    kept = torch.bmm(keys.unsqueeze(1), matrices).view(v.shape)
    change = torch.where(is_real[..., None], (v - kept) * beta.unsqueeze(2), 0.0)
    matrices.baddbmm_(keys.unsqueeze(2), change.flatten(0, 1).unsqueeze(1))
    states.index_copy_(0, lines.long().clamp(min=0), state)
    return torch.bmm(q.flatten(0, 1).unsqueeze(1), matrices).view(v.shape)


def _in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    decay_log: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [tokens, heads, value_dim], the state after them) of one sequence; state [heads, key_dim, value_dim]."""
    num_tokens = len(q)
    chunk = min(CHUNK, 1 << (num_tokens - 1).bit_length())
    padding = -num_tokens % chunk
    # [heads, chunks, chunk, ...]; padding neither decays nor writes.
    q, k, v = (chunked(x, chunk, padding) for x in (q, k, v))
    beta, decay_log = (chunked(x.unsqueeze(2), chunk, padding).squeeze(3) for x in (beta, decay_log))
    total = decay_log.cumsum(2)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill_(~causal, -torch.inf).exp_()
    weighted = k * beta.unsqueeze(3)
    # Change of each token's write by those before it in the chunk: unit lower triangular, its ones implied.
    changes = ((weighted @ k.transpose(2, 3)) * decay).tril_(-1)
    both = torch.cat((weighted * total.exp().unsqueeze(3), v * beta.unsqueeze(3)), dim=3)
    from_state, written = (_inverse(changes) @ both).split((k.shape[3], v.shape[3]), dim=3)
    scores = (q @ k.transpose(2, 3)) * decay
    q = q * total.exp().unsqueeze(3)
    left = k * (total[:, :, -1:] - total).exp().unsqueeze(3)
    remaining = total[:, :, -1].exp()[:, :, None, None]
    outs = []
    for i in range(q.shape[1]):
        new = written[:, i] - from_state[:, i] @ state
        outs.append(q[:, i] @ state + scores[:, i] @ new)
        state = remaining[:, i] * state + left[:, i].transpose(1, 2) @ new
    return torch.cat(outs, dim=1).transpose(0, 1)[:num_tokens], state


def _inverse(changes: torch.Tensor) -> torch.Tensor:
    """The inverse of 1 + changes [..., n, n], strictly lower triangular, n a power of two: by products alone, which
    every device has, with blocks twice as large at each step. The inverse of [[A, 0], [C, B]] is [[A', 0], [-B' C A',
    B']], with A' the inverse of A."""
    size = changes.shape[-1]
    # The inverses of the blocks on the diagonal, [..., blocks, width, width].
    inverse = torch.ones_like(changes[..., 0])[..., None, None]
    width = 1
    while width < size:
        blocks = changes.unflatten(-1, (-1, width)).unflatten(-3, (-1, width))
        below = blocks[..., 1::2, :, 0::2, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        left, right = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(right @ below @ left)
        upper = torch.cat((left, torch.zeros_like(left)), dim=-1)
        inverse = torch.cat((upper, torch.cat((corner, right), dim=-1)), dim=-2)
        width *= 2
    return inverse.squeeze(-3)


def chunked(x: torch.Tensor, chunk: int, padding: int) -> torch.Tensor:
    """x [tokens, heads, size] -> [heads, chunks, chunk, size]"""
    return functional.pad(x.transpose(0, 1), (0, 0, 0, padding)).unflatten(1, (-1, chunk))


def state_at(states: torch.Tensor, lines: torch.Tensor, continued: torch.Tensor | None) -> torch.Tensor:
    """Fresh states of the lines; zeros, chosen and not multiplied, where nothing is continued."""
    state = states.index_select(0, lines.long().clamp(min=0))
    if continued is not None:
        state = torch.where(continued[:, None, None, None], state, torch.zeros((), device=state.device))
    return state


def write_states(states: torch.Tensor, lines: torch.Tensor, new: torch.Tensor) -> None:
    """Padding writes to the null line what is there."""
    lines = lines.long()
    is_real = (lines > 0)[:, None, None, None]
    states.index_copy_(0, lines.clamp(min=0), torch.where(is_real, new, states[0]))
