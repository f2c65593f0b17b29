"""The slow torch truth of the causal convolution ops: one token after another, one line of Python per rule.

Same signatures and semantics as `ops.py`, whose docstrings state the equations. Arithmetic is float32, or float64 if x
is float64, which is how the tests get their truth. Metadata is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from kernels.causal_conv1d.call import NULL_LINE, PrefillCall, UpdateCall
from kernels.contract import Contract

CONTRACT = Contract()


def prefill(call: PrefillCall) -> None:
    """The reference of `ops.causal_conv1d_prefill`."""
    causal_conv1d_prefill(**vars(call))


def update(call: UpdateCall) -> None:
    """The reference of `ops.causal_conv1d_update`."""
    causal_conv1d_update(**vars(call))


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
    """See `ops.causal_conv1d_prefill`."""
    compute = _compute_dtype(x)
    inputs = _inputs(x, gate_in)
    in_place = out is not None and out.data_ptr() == x.data_ptr()
    gate = None if gate_out is None else gate_out.to(compute)
    result = x.clone() if in_place else torch.zeros_like(x)
    starts = list(query_starts) if query_starts is not None else query_start_loc.tolist()
    history_rows = weight.shape[0] - 1
    sources = state_indices if source_state_indices is None else source_state_indices
    states_before = None if conv_states is None else conv_states.clone()
    for sequence, (start, end) in enumerate(pairwise(starts)):
        source = _line(sources, sequence, initial_state_idx, pad_slot_id)
        if source is None or start == end:
            continue
        history = torch.zeros(history_rows, x.shape[1], dtype=compute, device=x.device)
        if states_before is not None and has_initial_state is not None and bool(has_initial_state[sequence]):
            history = states_before[source, :history_rows].to(compute)
        line_of_inputs = torch.cat([history, inputs[start:end].to(compute)])
        for token in range(start, end):
            window = line_of_inputs[token - start : token - start + history_rows + 1]
            result[token] = _output(window, weight, bias, activation, None if gate is None else gate[token]).to(x.dtype)
        if conv_states is None:
            continue
        if block_idx_last_scheduled_token is not None:
            assert block_idx_first_scheduled_token is not None
            assert num_computed_tokens is not None
            assert block_size_tokens is not None
            assert state_indices is not None
            first, last = int(block_idx_first_scheduled_token[sequence]), int(block_idx_last_scheduled_token[sequence])
            for block in range(first, last):
                boundary = (block + 1) * block_size_tokens - int(num_computed_tokens[sequence])
                line = int(state_indices[sequence, block])
                if 0 < boundary <= end - start and line > NULL_LINE and line != pad_slot_id:
                    conv_states[line, :history_rows] = line_of_inputs[boundary : boundary + history_rows]
        target = _line(state_indices, sequence, block_idx_last_scheduled_token, pad_slot_id)
        if target is not None:
            conv_states[target, :history_rows] = line_of_inputs[end - start :]
    return result if out is None else out.copy_(result)


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
    max_query_len: int | None = None,  # noqa: ARG001 - bounds what the fast implementations unroll
    num_accepted_tokens: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    pad_slot_id: int | None = -1,
    source_state_indices: torch.Tensor | None = None,
    query_starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """See `ops.causal_conv1d_update`."""
    compute = _compute_dtype(x)
    dim = x.shape[-1]
    inputs = _inputs(x, gate_in).reshape(-1, dim)
    in_place = out is not None and out.data_ptr() == x.data_ptr()
    result = (x.clone() if in_place else torch.zeros_like(x)).reshape(-1, dim)
    gate = None if gate_out is None else gate_out.to(compute).reshape(-1, dim)
    if query_starts is not None:
        starts = list(query_starts)
    elif query_start_loc is not None:
        starts = query_start_loc.tolist()
    else:
        tokens_each = 1 if x.dim() == 2 else x.shape[1]
        starts = [sequence * tokens_each for sequence in range(x.shape[0] + 1)]
    history_rows = weight.shape[0] - 1
    sources = state_indices if source_state_indices is None else source_state_indices
    states_before = conv_states.clone()
    for sequence, (start, end) in enumerate(pairwise(starts)):
        source = _line(sources, sequence, initial_state_idx, pad_slot_id)
        if source is None or start == end:
            continue
        first_row = 0 if num_accepted_tokens is None else int(num_accepted_tokens[sequence]) - 1
        history = states_before[source, first_row : first_row + history_rows].to(compute)
        line_of_inputs = torch.cat([history, inputs[start:end].to(compute)])
        for token in range(start, end):
            window = line_of_inputs[token - start : token - start + history_rows + 1]
            result[token] = _output(window, weight, bias, activation, None if gate is None else gate[token]).to(x.dtype)
        # A draft may be rejected, so every window of it must stay readable; otherwise only the last window counts.
        kept = line_of_inputs[end - start :] if num_accepted_tokens is None else line_of_inputs[1:]
        target = _line(state_indices, sequence, block_idx_last_scheduled_token, pad_slot_id)
        if target is not None:
            conv_states[target, : kept.shape[0]] = kept
    result = result.reshape(x.shape)
    return result if out is None else out.copy_(result)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _inputs(x: torch.Tensor, gate_in: torch.Tensor | None) -> torch.Tensor:
    """The convolved inputs, which the state keeps: x, or B * x rounded to x's dtype."""
    return x if gate_in is None else x * gate_in


def _line(
    indices: torch.Tensor | None, sequence: int, column: torch.Tensor | None, pad_slot_id: int | None
) -> int | None:
    """The state line of a sequence; None for padding. Without indices, sequence i owns line i."""
    if indices is None:
        return sequence
    line = int(indices[sequence] if column is None else indices[sequence, int(column[sequence])])
    return None if line <= NULL_LINE or line == pad_slot_id else line


def _output(
    window: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | bool | None,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    """One token [dim] of its window [width, dim]: the bias first, then the taps, oldest first."""
    total = torch.zeros_like(window[0]) if bias is None else bias.to(window.dtype)
    for tap in range(weight.shape[0]):
        total = total + window[tap] * weight[tap].to(window.dtype)
    if activation in ("silu", "swish", True):
        total = total / (1 + torch.exp(-total))
    return total if gate is None else total * gate
