"""The causal convolution in plain torch for any device: few calls on whole tensors, no wait for the device.

`ops.py` states the semantics and has checked the calls. Every input that a token looks back at is picked from one
table, the sequences' histories followed by the step's inputs; updates of one number of tokens need none.
"""

from __future__ import annotations

import torch

from kernels.causal_conv1d.call import NULL_LINE, PrefillCall, UpdateCall
from kernels.contract import Contract

CONTRACT = Contract(replayable=True)


def prefill(call: PrefillCall) -> None:
    """Fill call.out and keep states; see `ops.causal_conv1d_prefill`."""
    starts, device = call.query_start_loc.long(), call.x.device
    source, is_live = _lines(call, call.sources, call.initial_state_idx)
    table, sequence, ends, is_output = _convolve(call, starts, _histories(call, source, is_live), is_live)
    if call.conv_states is None:
        return
    lines, is_kept = _lines(call, call.state_indices, call.block_idx_last_scheduled_token)
    lengths, owners = starts.diff(), torch.arange(call.num_sequences, device=device)
    is_kept = is_kept & is_live & (lengths > 0)
    if call.block_size_tokens is None:
        _keep(call, table, starts, owners, lengths, lines, is_kept)
        return
    # Any token may be the last of a block.
    block_lines, is_boundary = _boundaries(call, sequence, ends)
    is_kept = torch.cat([is_boundary & is_output, is_kept])
    lines = torch.where(is_kept, torch.cat([block_lines, lines]), NULL_LINE)
    _keep(call, table, starts, torch.cat([sequence, owners]), torch.cat([ends, lengths]), lines, is_kept)


def update(call: UpdateCall) -> None:
    """Fill call.out and keep states; see `ops.causal_conv1d_update`."""
    rows, num_tokens, device = call.width - 1, call.tokens_each, call.x.device
    source, is_live = _lines(call, call.sources, call.initial_state_idx)
    lines, is_kept = _lines(call, call.state_indices, call.block_idx_last_scheduled_token)
    if call.query_start_loc is not None or call.num_accepted_tokens is not None:
        starts, owners = call.query_start_loc, torch.arange(call.num_sequences + 1, device=device)
        starts, owners = owners * num_tokens if starts is None else starts.long(), owners[:-1]
        lengths = starts.diff()
        first_row, shift, num_rows = torch.zeros_like(owners), lengths, rows
        if call.num_accepted_tokens is not None:
            first_row = torch.where(is_live, call.num_accepted_tokens.long() - 1, 0)
            shift, num_rows = torch.ones_like(owners), rows - 1 + num_tokens
        row = torch.arange(rows, device=device)
        history = call.conv_states[source[:, None], first_row[:, None] + row].float()
        table, *_ = _convolve(call, starts, history, is_live)
        _keep(call, table, starts, owners, shift, lines, is_kept & is_live & (lengths > 0), num_rows)
        return
    states = call.conv_states[:, :rows]
    before = states.index_select(0, source)
    line_of_inputs = torch.cat([before.float(), _inputs(call).view(call.num_sequences, num_tokens, call.dim)], dim=1)
    total = _bias(call, torch.Size((call.num_sequences, num_tokens, call.dim)))
    for tap in range(call.width):
        total += line_of_inputs[:, tap : tap + num_tokens] * call.weight[tap].float()
    _finish(total.view(-1, call.dim), is_live.repeat_interleave(num_tokens), call)
    _write(states, lines, (is_live & is_kept)[:, None], line_of_inputs[:, num_tokens:])


def _convolve(
    call: PrefillCall | UpdateCall, starts: torch.Tensor, histories: torch.Tensor, is_live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill call.out. Returns the table, and for each token its sequence, its number there from 1 on, and whether it is
    one of a sequence that is no padding.

    starts     int64 [sequences + 1]
    histories  float32 [sequences, width - 1, dim], which `_histories` makes
    """
    rows, num_sequences = call.width - 1, call.num_sequences
    tokens = torch.arange(call.num_tokens, device=call.x.device)
    # Tokens after the last sequence belong to none; they are given to the last one, and their outputs dropped.
    sequence = (starts[1:, None] <= tokens).sum(dim=0).clamp(max=num_sequences - 1)  # [tokens]
    position = tokens - starts[sequence]
    inputs = _inputs(call)
    table = torch.cat([histories.flatten(0, 1), inputs])
    total = _bias(call, inputs.shape)
    for tap in range(call.width):
        back = call.width - 1 - tap
        of_history = sequence * rows + rows - back + position
        of_step = num_sequences * rows + tokens - back
        # A sequence's own inputs, and before them the newest rows of its history.
        index = torch.where(position >= back, of_step, of_history.clamp(max=num_sequences * rows - 1))
        total += table.index_select(0, index) * call.weight[tap].float()
    is_output = is_live[sequence] & (tokens < starts[-1])
    _finish(total, is_output, call)
    return table, sequence, position + 1, is_output


def _lines(
    call: PrefillCall | UpdateCall, indices: torch.Tensor | None, column: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """State lines int64 [sequences], the null line for padding, and whether they are real."""
    if indices is None:
        lines = torch.arange(call.num_sequences, device=call.x.device)
        return lines, torch.ones_like(lines, dtype=torch.bool)
    lines = indices if column is None else indices.gather(1, column[:, None].long())[:, 0]
    is_real = lines > NULL_LINE
    if call.pad_slot_id is not None:
        is_real &= lines != call.pad_slot_id
    return torch.where(is_real, lines, NULL_LINE).long(), is_real


def _boundaries(call: PrefillCall, sequence: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lines of the blocks that end after so many tokens of a sequence in this step, and whether any does."""
    first, last, computed = (
        call.block_idx_first_scheduled_token, call.block_idx_last_scheduled_token, call.num_computed_tokens,
    )  # fmt: skip
    assert call.block_size_tokens is not None
    assert call.state_indices is not None
    assert first is not None
    assert last is not None
    assert computed is not None
    total = computed[sequence] + ends
    block = total // call.block_size_tokens - 1
    is_asked = (total % call.block_size_tokens == 0) & (first[sequence] <= block) & (block < last[sequence])
    table = call.state_indices.index_select(0, sequence)
    lines, is_real = _lines(call, table, block.clamp(0, table.shape[1] - 1))
    return lines, is_asked & is_real


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
    call: PrefillCall | UpdateCall,
    table: torch.Tensor,
    starts: torch.Tensor,
    owners: torch.Tensor,
    ends: torch.Tensor,
    lines: torch.Tensor,
    is_kept: torch.Tensor,
    num_rows: int | None = None,
) -> None:
    """Write to each line the inputs of its owner, a sequence, from the width - 1 before token `ends` on: so many, or
    what there is of them. Some may be its history's. num_rows None: width - 1."""
    assert call.conv_states is not None
    rows = call.width - 1
    num_rows = num_rows or rows
    place = ends[:, None] + torch.arange(num_rows, device=table.device)  # in [history; tokens of the sequence]
    of_history = owners[:, None] * rows + place
    of_step = call.num_sequences * rows + starts[owners, None] + place - rows
    index = torch.where(place < rows, of_history, of_step).clamp(max=table.shape[0] - 1)
    is_input = is_kept[:, None] & (place < rows + starts.diff()[owners, None])
    new = table.index_select(0, index.flatten()).view(*place.shape, -1)
    _write(call.conv_states[:, :num_rows], lines, is_input, new)


def _write(states: torch.Tensor, lines: torch.Tensor, is_new: torch.Tensor, new: torch.Tensor) -> None:
    """Write rows to the lines, or what they hold; the null line may be among these several times.

    is_new  bool [lines, rows], or of one row for all
    """
    old = states.index_select(0, lines)
    states.index_copy_(0, lines, torch.where(is_new[..., None], new.to(states.dtype), old))


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
