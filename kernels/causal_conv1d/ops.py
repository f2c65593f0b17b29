"""Causal short convolution with a state per sequence: the public, checked ops.

A sequence's state is its last `width - 1` inputs, kept in a line of `conv_states` [lines, state_len, dim]. Line 0 is
the null line and `pad_slot_id` (-1) marks padding: such a sequence reads and writes no state and its outputs are zero
(in place, with `out` being `x`, they stay as x was). All metadata stays on the device; nothing here synchronises.

Every implementation adds the bias first, then the taps, oldest first, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kernels.causal_conv1d.checks import check_indices, check_lines, check_tensors, expect
from kernels.platform import implementation


def causal_conv1d_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    *,
    activation: str | bool | None = None,
    gate_in: torch.Tensor | None = None,
    gate_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    block_idx_first_scheduled_token: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    num_computed_tokens: torch.Tensor | None = None,
    block_size_tokens: int | None = None,
    pad_slot_id: int | None = -1,
    query_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Convolve whole sequences or chunks of them, and keep their last inputs. For each sequence n, with s = starts:

        u    = x[s[n]:s[n+1]]  or, with gate_in,  (gate_in * x)[s[n]:s[n+1]] rounded to x's dtype
        h    = concat(conv_states[line, :width-1] if has_initial_state[n] else 0, u)
        y[t] = act(bias + sum_i weight[i] * h[t + i])
        out[s[n]:s[n+1]] = y  or, with gate_out,  gate_out[s[n]:s[n+1]] * y
        conv_states[line, :width-1] = h[-(width-1):]

    Args:
        x: [tokens, dim], bf16, fp16 or fp32; dim contiguous, any row stride.
        weight: [width, dim], contiguous, width 2 to 8; weight[width-1] multiplies the newest token.
        bias: [dim] or None.
        conv_states: [lines, state_len >= width - 1, dim], dim contiguous, any dtype of x's list; changed in place.
            Rows from width - 1 on are left alone. None: histories are zero and nothing is kept.
        query_start_loc: int32 [sequences + 1], ascending from 0. Empty sequences read and write nothing; outputs of
            tokens of no sequence are as for padding.
        state_indices: int32 [sequences], the lines, each at most once beside padding; None: sequence n owns line n and
            none is padding (line 0 too is an ordinary line then). With block indices (below): [sequences, blocks].
        has_initial_state: bool [sequences]; None: no sequence continues an earlier chunk.
        activation: None (or False), or "silu" / "swish" (or True).
        gate_in, gate_out: like x, or None.
        out: like x; may be x itself. None allocates.
        initial_state_idx, block_idx_first_scheduled_token, block_idx_last_scheduled_token, num_computed_tokens:
            int32 [sequences], all or none: the prefix-cache form. The initial state is read from the line
            state_indices[n, initial_state_idx[n]] (a null line there makes the sequence padding), the final one written
            to state_indices[n, block_idx_last[n]], and for each block b in [block_idx_first[n], block_idx_last[n]) the
            state after (b + 1) * block_size_tokens tokens of the whole sequence to state_indices[n, b], if that
            boundary lies in this chunk. Null lines are not written.
        block_size_tokens: tokens per block of the prefix cache.
        pad_slot_id: a further index that means padding, as every index <= 0 does; None: no further one.
        query_starts: query_start_loc as host integers, for implementations that run on the host.

    Returns: out. Raises ValueError for arguments that do not fit together.
    """
    check_tensors(x, weight, bias, conv_states, gate_in, gate_out, out, activation)
    expect(x.dim() == 2, f"x must be [tokens, dim], not {list(x.shape)}")
    num_sequences = query_start_loc.shape[0] - 1
    check_indices(num_sequences, query_start_loc=query_start_loc[1:], has_initial_state=has_initial_state)
    check_lines(conv_states, state_indices, num_sequences, is_paged=block_idx_last_scheduled_token is not None)
    expect(query_starts is None or len(query_starts) == num_sequences + 1, "query_starts must mirror query_start_loc")
    blocks = {
        "initial_state_idx": initial_state_idx,
        "block_idx_first_scheduled_token": block_idx_first_scheduled_token,
        "block_idx_last_scheduled_token": block_idx_last_scheduled_token,
        "num_computed_tokens": num_computed_tokens,
    }
    check_indices(num_sequences, **blocks)
    given = [name for name, value in blocks.items() if value is not None]
    expect(len(given) in (0, len(blocks)), f"the prefix-cache form needs all of {sorted(blocks)}, got only {given}")
    expect(bool(given) == (block_size_tokens is not None), "block_size_tokens belongs to the prefix-cache form only")
    expect(
        block_size_tokens is None or block_size_tokens > 0, f"block_size_tokens {block_size_tokens} must be positive"
    )
    return implementation("causal_conv1d", x.device).causal_conv1d_prefill(
        x,
        weight,
        bias,
        conv_states,
        query_start_loc,
        state_indices,
        has_initial_state,
        activation=activation,
        gate_in=gate_in,
        gate_out=gate_out,
        out=out,
        block_size_tokens=block_size_tokens,
        pad_slot_id=pad_slot_id,
        query_starts=query_starts,
        **blocks,
    )


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    *,
    activation: str | bool | None = None,
    gate_in: torch.Tensor | None = None,
    gate_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    pad_slot_id: int | None = -1,
    query_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Advance sequences by one or a few tokens (decode). For each sequence n with L tokens, a = num_accepted_tokens[n]:

        u    = the L tokens of x  or, with gate_in,  gate_in * x rounded to x's dtype
        h    = concat(conv_states[source, a-1 : a+width-2], u)       (a = 1 without num_accepted_tokens)
        out  = act(bias + sum_i weight[i] * h[t + i])  for t in [0, L),  times gate_out if given
        conv_states[target, :width-1]   = h[L:]                      without num_accepted_tokens
        conv_states[target, :width-2+L] = h[1:]                      with it: every window of the L draft tokens stays
                                                                     readable until it is known how many are accepted

    source = target = state_indices[n], or, with the block indices of the prefix cache, source =
    state_indices[n, initial_state_idx[n]] and target = state_indices[n, block_idx_last_scheduled_token[n]]. A null
    source makes the sequence padding; a null target is not written.

    Args:
        x: [sequences, dim] (one token each), [sequences, tokens each, dim], or with query_start_loc [tokens, dim];
            dim contiguous, rows of one stride.
        weight, bias, conv_states, activation, gate_in, gate_out, pad_slot_id: as in `causal_conv1d_prefill`.
        state_indices: int32 [sequences], or [sequences, blocks] with the block indices; None: sequence n owns line n.
        out: like x; may be x itself. None allocates.
        query_start_loc: int32 [sequences + 1], starting at 0, for sequences of different lengths, 0 included; outputs
            of tokens behind the last sequence are as for padding.
        max_query_len: the most tokens any sequence has; needed with query_start_loc (or query_starts in its stead).
        num_accepted_tokens: int32 [sequences], 1 <= a <= state_len - width + 2 (not checked on the device): how many of
            the tokens of the last call were accepted. state_len must be at least width - 2 + max_query_len.
        query_starts: query_start_loc as host integers.

    Returns: out. Raises ValueError for arguments that do not fit together.
    """
    check_tensors(x, weight, bias, conv_states, gate_in, gate_out, out, activation)
    if query_start_loc is None:
        expect(x.dim() in (2, 3), f"x must be [sequences, dim] or [sequences, tokens, dim], not {list(x.shape)}")
        num_sequences, tokens_each = x.shape[0], 1 if x.dim() == 2 else x.shape[1]
    else:
        expect(x.dim() == 2, f"with query_start_loc x must be [tokens, dim], not {list(x.shape)}")
        if max_query_len is None and query_starts is not None:
            max_query_len = max((end - start for start, end in pairwise(query_starts)), default=0)
        expect(max_query_len is not None, "query_start_loc needs max_query_len, the most tokens any sequence has")
        assert max_query_len is not None
        num_sequences, tokens_each = query_start_loc.shape[0] - 1, max_query_len
        check_indices(num_sequences, query_start_loc=query_start_loc[1:])
    is_paged = block_idx_last_scheduled_token is not None
    expect(
        is_paged == (initial_state_idx is not None),
        "initial_state_idx and block_idx_last_scheduled_token belong together: give both or neither",
    )
    check_indices(
        num_sequences,
        num_accepted_tokens=num_accepted_tokens,
        initial_state_idx=initial_state_idx,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
    )
    check_lines(conv_states, state_indices, num_sequences, is_paged=is_paged)
    needed = weight.shape[0] - 1 if num_accepted_tokens is None else weight.shape[0] - 2 + max(tokens_each, 1)
    expect(
        conv_states.shape[1] >= needed,
        f"conv_states keeps {conv_states.shape[1]} tokens a line, but {tokens_each} draft tokens need {needed}",
    )
    return implementation("causal_conv1d", x.device).causal_conv1d_update(
        x,
        weight,
        bias,
        conv_states,
        state_indices,
        activation=activation,
        gate_in=gate_in,
        gate_out=gate_out,
        out=out,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        num_accepted_tokens=num_accepted_tokens,
        initial_state_idx=initial_state_idx,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        pad_slot_id=pad_slot_id,
        query_starts=query_starts,
    )
