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

from kernels.causal_conv1d.call import PrefillCall, UpdateCall
from kernels.causal_conv1d.checks import check_out, check_prefill, check_update
from kernels.platform import contract, implementation


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
    source_state_indices: torch.Tensor | None = None,
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
        weight: [width, dim], bf16, fp16 or fp32, contiguous, width 2 to 8; weight[width-1] multiplies the newest token.
        bias: [dim], bf16, fp16 or fp32, contiguous, or None.
        conv_states: [lines, state_len >= width - 1, dim], dim contiguous, any dtype of x's list; changed in place.
            Rows from width - 1 on are left alone. None: histories are zero and nothing is kept.
        query_start_loc: int32 [sequences + 1], ascending from 0 (checked only where its values are on the host). Empty
            sequences read and write nothing; outputs of tokens of no sequence are as for padding.
        state_indices: int32 [sequences], the lines, each at most once beside padding; None: sequence n owns line n and
            none is padding (line 0 too is an ordinary line then). With block indices (below): [sequences, blocks]; a
            line may then be shared (by a common prefix) only if no sequence of the call writes it.
        has_initial_state: bool [sequences], only with conv_states; None: no sequence continues an earlier chunk.
        activation: None (or False), or "silu" / "swish" (or True).
        gate_in, gate_out: like x, or None.
        out: like x; x itself, or memory apart from x's; never the gates' memory. None allocates.
        initial_state_idx, block_idx_first_scheduled_token, block_idx_last_scheduled_token, num_computed_tokens:
            int32 [sequences], all or none: the prefix-cache form. The initial state is read from the line
            state_indices[n, initial_state_idx[n]] (a null line there makes the sequence padding), the final one written
            to state_indices[n, block_idx_last[n]], and for each block b in [block_idx_first[n], block_idx_last[n]) the
            state after (b + 1) * block_size_tokens tokens of the whole sequence to state_indices[n, b], if that
            boundary lies in this chunk. Null lines are not written.
        block_size_tokens: tokens per block of the prefix cache.
        pad_slot_id: a further index that means padding, as every index <= 0 does; None: no further one.
        source_state_indices: int32 [sequences], not with the block indices: the lines that initial states are read
            from, unchanged; None: state_indices. A null source makes the sequence padding, a null line in state_indices
            is not written. Sequences may share a source that no other sequence of the call writes.
        query_starts: query_start_loc as host integers, for implementations that run on the host.

    Returns: out. Raises ValueError for arguments that do not fit together.
    """
    call = PrefillCall(
        x=x,
        weight=weight,
        bias=bias,
        conv_states=conv_states,
        state_indices=state_indices,
        activation=activation,
        gate_in=gate_in,
        gate_out=gate_out,
        out=_like(x) if out is None else out,
        query_start_loc=query_start_loc,
        query_starts=query_starts,
        has_initial_state=has_initial_state,
        initial_state_idx=initial_state_idx,
        block_idx_first_scheduled_token=block_idx_first_scheduled_token,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        num_computed_tokens=num_computed_tokens,
        block_size_tokens=block_size_tokens,
        pad_slot_id=pad_slot_id,
        source_state_indices=source_state_indices,
    )
    check_prefill(call)
    if out is not None:
        check_out(call)
    return _run(call)


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
    source_state_indices: torch.Tensor | None = None,
    query_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Advance sequences by one or a few tokens (decode). For each sequence n with L tokens, a = num_accepted_tokens[n]:

        u    = the L tokens of x  or, with gate_in,  gate_in * x rounded to x's dtype
        h    = concat(conv_states[source, a-1 : a+width-2], u)       (a = 1 without num_accepted_tokens)
        out  = act(bias + sum_i weight[i] * h[t + i])  for t in [0, L),  times gate_out if given
        conv_states[target, :width-1]   = h[L:]                      without num_accepted_tokens: all of it, the newest
                                                                     of the history too where L < width - 1
        conv_states[target, :width-2+L] = h[1:]                      with it: every window of the L draft tokens stays
                                                                     readable until it is known how many are accepted

    target = state_indices[n] and source = source_state_indices[n], the target where that is None; or, with the block
    indices of the prefix cache, source = state_indices[n, initial_state_idx[n]] and target =
    state_indices[n, block_idx_last_scheduled_token[n]]. A null source makes the sequence padding; a null target is not
    written.

    Args:
        x: [sequences, dim] (one token each), [sequences, tokens each, dim], or with query_start_loc [tokens, dim];
            dim contiguous, rows of one stride.
        weight, bias, conv_states, activation, gate_in, gate_out, out, pad_slot_id, source_state_indices: as in
            `causal_conv1d_prefill`.
        state_indices: int32 [sequences], or [sequences, blocks] with the block indices, shared only if nobody writes;
            None: sequence n owns line n.
        query_start_loc: int32 [sequences + 1], ascending from 0 (checked where it is on the host), for sequences of
            different lengths, 0 included; outputs of tokens behind the last sequence are as for padding.
        max_query_len: the most tokens any sequence has, checked where the starts are on the host; needed with
            query_start_loc (or query_starts in its stead).
        num_accepted_tokens: int32 [sequences], 1 <= a <= state_len - width + 2 (not checked on the device): how many of
            the tokens of the last call were accepted. state_len must be at least width - 2 + max_query_len.
        query_starts: query_start_loc as host integers.

    Returns: out. Raises ValueError for arguments that do not fit together.
    """
    if max_query_len is None and query_starts is not None:
        max_query_len = max((end - start for start, end in pairwise(query_starts)), default=0)
    call = UpdateCall(
        x=x,
        weight=weight,
        bias=bias,
        conv_states=conv_states,
        state_indices=state_indices,
        activation=activation,
        gate_in=gate_in,
        gate_out=gate_out,
        out=_like(x) if out is None else out,
        query_start_loc=query_start_loc,
        query_starts=query_starts,
        max_query_len=max_query_len,
        num_accepted_tokens=num_accepted_tokens,
        initial_state_idx=initial_state_idx,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        pad_slot_id=pad_slot_id,
        source_state_indices=source_state_indices,
    )
    check_update(call)
    if out is not None:
        check_out(call)
    return _run(call)


def warm_up(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    *,
    activation: str | bool | None = None,
    gated: bool = False,
    drafts: bool = False,
    paged: bool = False,
    x_dtype: torch.dtype | None = None,
    x_columns: int | None = None,
) -> int:
    """Compile every kernel that calls with these tensors can need, whatever their batches and lengths.

    Runs each form of a call once, on padding: conv_states are neither read nor changed. Covers prefill and plain
    decoding with state_indices, has_initial_state and fresh outputs. Does nothing on the host.

    Args:
        weight, bias, conv_states, activation: of a layer, as in `causal_conv1d_prefill`.
        gated: both gates are used; x and the gates are thirds of one tensor [tokens, 3 * dim].
        drafts: sequences may have several tokens in an update, and num_accepted_tokens.
        paged: calls have the block indices of the prefix cache; without it they have none.
        x_dtype: of x, the gates and the outputs; None: weight's.
        x_columns: without gates, x is the first columns of a tensor of so many; None: it is contiguous. How far its
            rows are apart decides, by what divides it, which variant serves.

    Returns the number of variants that were compiled.
    """
    return contract("causal_conv1d", weight.device).warm_up_and_count(
        weight,
        bias,
        conv_states,
        activation=activation,
        gated=gated,
        drafts=drafts,
        paged=paged,
        x_dtype=weight.dtype if x_dtype is None else x_dtype,
        x_columns=x_columns,
    )


def _run(call: PrefillCall | UpdateCall) -> torch.Tensor:
    """Have the implementation for x's device fill `out`; it sees no call without tokens or without sequences."""
    if call.x.numel() == 0:
        return call.out
    if call.num_sequences == 0:
        return call.out if call.is_in_place else call.out.zero_()
    if isinstance(call, PrefillCall):
        implementation("causal_conv1d", call.x.device, "prefill").prefill(call)
    else:
        implementation("causal_conv1d", call.x.device).update(call)
    return call.out


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
