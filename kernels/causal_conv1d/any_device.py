"""The causal convolution in plain torch for any device: few calls on whole tensors, no wait for the device.

Prefill and plain updates are so. Drafts and the prefix cache, which the service does not use, are the reference's: it
gives the same, and waits for the device. `ops.py` states the semantics and has checked the calls.
Every input that a token looks back at is picked from one table, the sequences' histories followed by the step's inputs.
"""

from __future__ import annotations

import torch

from kernels.causal_conv1d import reference
from kernels.causal_conv1d.call import PrefillCall, UpdateCall
from kernels.contract import Contract

NULL_LINE = 0
CONTRACT = Contract()


def prefill(call: PrefillCall) -> None:
    """Fill call.out and keep states; see `ops.causal_conv1d_prefill`."""
    if call.initial_state_idx is not None:
        reference.prefill(call)
        return
    x, rows, num_sequences = call.x, call.width - 1, call.num_sequences
    lines, is_real = _lines(call)
    starts = call.query_start_loc.long()
    tokens = torch.arange(x.shape[0], device=x.device)
    # Tokens after the last sequence belong to none; they are given to the last one, and their outputs dropped.
    sequence = (starts[1:, None] <= tokens).sum(dim=0).clamp(max=num_sequences - 1)  # [tokens]
    position = tokens - starts[sequence]
    inputs = _inputs(call)
    table = torch.cat([_histories(call, lines, is_real).flatten(0, 1), inputs])
    total = _bias(call, inputs.shape)
    for tap in range(call.width):
        back = call.width - 1 - tap
        of_history = sequence * rows + rows - back + position
        of_step = num_sequences * rows + tokens - back
        # A sequence's own inputs, and before them the newest rows of its history.
        index = torch.where(position >= back, of_step, of_history.clamp(max=num_sequences * rows - 1))
        total += table.index_select(0, index) * call.weight[tap].float()
    is_output = is_real[sequence] & (tokens < starts[-1])
    _finish(total, is_output, call)
    if call.conv_states is not None:
        _keep(call, lines, is_real, table, starts)


def update(call: UpdateCall) -> None:
    """Fill call.out and keep states; see `ops.causal_conv1d_update`."""
    if call.query_start_loc is not None or call.num_accepted_tokens is not None or call.initial_state_idx is not None:
        reference.update(call)
        return
    rows, num_tokens = call.width - 1, call.tokens_each
    lines, is_real = _lines(call)
    states = call.conv_states[:, :rows]
    before = states.index_select(0, lines)
    line_of_inputs = torch.cat([before.float(), _inputs(call).view(call.num_sequences, num_tokens, call.dim)], dim=1)
    total = _bias(call, torch.Size((call.num_sequences, num_tokens, call.dim)))
    for tap in range(call.width):
        total += line_of_inputs[:, tap : tap + num_tokens] * call.weight[tap].float()
    _finish(total.view(-1, call.dim), is_real.repeat_interleave(num_tokens), call)
    kept = torch.where(is_real[:, None, None], line_of_inputs[:, num_tokens:].to(states.dtype), before)
    states.index_copy_(0, lines, kept)


def _lines(call: PrefillCall | UpdateCall) -> tuple[torch.Tensor, torch.Tensor]:
    """State lines int64 [sequences], the null line for padding, and whether they are real."""
    if call.state_indices is None:
        lines = torch.arange(call.num_sequences, device=call.x.device)
        return lines, torch.ones_like(lines, dtype=torch.bool)
    is_real = call.state_indices > NULL_LINE
    if call.pad_slot_id is not None:
        is_real &= call.state_indices != call.pad_slot_id
    return torch.where(is_real, call.state_indices, NULL_LINE).long(), is_real


def _inputs(call: PrefillCall | UpdateCall) -> torch.Tensor:
    """The convolved inputs, which the state keeps, float32 [tokens, dim]: x, or B * x rounded to x's dtype."""
    inputs = call.x if call.gate_in is None else call.x * call.gate_in
    return inputs.reshape(-1, call.dim).float()


def _histories(call: PrefillCall, lines: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """float32 [sequences, width - 1, dim], zero where a sequence begins."""
    rows = call.width - 1
    if call.conv_states is None or call.has_initial_state is None:
        return torch.zeros(call.num_sequences, rows, call.dim, device=call.x.device)
    histories = call.conv_states[:, :rows].index_select(0, lines).float()
    return torch.where((call.has_initial_state & is_real)[:, None, None], histories, 0.0)


def _keep(
    call: PrefillCall, lines: torch.Tensor, is_real: torch.Tensor, table: torch.Tensor, starts: torch.Tensor
) -> None:
    """Write the last width - 1 inputs of each sequence, some of which may be its history's, to its line."""
    assert call.conv_states is not None
    rows, num_sequences = call.width - 1, call.num_sequences
    lengths = starts[1:] - starts[:-1]
    row = torch.arange(rows, device=table.device)
    place = lengths[:, None] + row  # in [history; tokens of the sequence]
    of_history = torch.arange(num_sequences, device=table.device)[:, None] * rows + place
    of_step = num_sequences * rows + starts[:-1, None] + place - rows
    index = torch.where(place < rows, of_history, of_step).clamp(max=table.shape[0] - 1)
    last = table.index_select(0, index.flatten()).view(num_sequences, rows, -1)
    states = call.conv_states[:, :rows]
    is_kept = (is_real & (lengths > 0))[:, None, None]
    states.index_copy_(0, lines, torch.where(is_kept, last.to(states.dtype), states.index_select(0, lines)))


def _bias(call: PrefillCall | UpdateCall, shape: torch.Size) -> torch.Tensor:
    if call.bias is None:
        return torch.zeros(shape, device=call.x.device)
    return call.bias.float().expand(shape).clone()


def _finish(total: torch.Tensor, is_output: torch.Tensor, call: PrefillCall | UpdateCall) -> None:
    """Activation, gate and rounding of total [tokens, dim] into call.out; other rows stay, or are zero."""
    if call.has_silu:
        total = total / (1 + torch.exp(-total))
    if call.gate_out is not None:
        total = total * call.gate_out.reshape(-1, call.dim)
    rest = call.x.reshape(-1, call.dim).float() if call.is_in_place else torch.zeros((), device=total.device)
    call.out.copy_(torch.where(is_output[:, None], total, rest).view(call.out.shape))
