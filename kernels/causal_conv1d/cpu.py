"""The CPU's causal convolution: whole tensors shifted and multiplied, no loop over tokens or sequences.

`ops.py` states the semantics and has checked the calls. Multiplication and addition stay separate
operations, since a fused one would round differently in vector bodies and tails: so any chunking of a sequence, and its
update token by token, give the same bits in float32.
"""

from __future__ import annotations

import torch

from kernels.causal_conv1d.call import NULL_LINE, PrefillCall, UpdateCall
from kernels.contract import Contract

CONTRACT = Contract()


def prefill(call: PrefillCall) -> None:
    """Fill call.out and keep states; see `ops.causal_conv1d_prefill`."""
    x, conv_states = call.x, call.conv_states
    rows = call.width - 1
    starts = call.query_start_loc.to(torch.int64)
    lengths = starts.diff()
    source, is_live = _lines(call.sources, call.num_sequences, call.initial_state_idx, call.pad_slot_id)
    sequences = (is_live & (lengths > 0)).nonzero().flatten()  # [live]
    starts, lengths, source = starts[sequences], lengths[sequences], source[sequences]

    inputs = _inputs(x, call.gate_in)  # [tokens, dim]
    taps, bias = call.weight.float(), None if call.bias is None else call.bias.float()
    # Right everywhere but in the first `rows` tokens of each sequence, whose windows reach into the history.
    total = _shifted_sum(inputs, taps, bias)
    history = torch.zeros(len(sequences), rows, x.shape[1])
    if conv_states is not None and call.has_initial_state is not None:
        kept = call.has_initial_state[sequences]
        history[kept] = conv_states[source[kept], :rows].float()
    row = torch.arange(rows)
    heads = starts[:, None] + row  # [live, rows]
    head_inputs = torch.cat([history, inputs[heads.clamp(max=x.shape[0] - 1)]], dim=1)  # [live, 2 * rows, dim]
    is_token = row < lengths[:, None]
    total[heads[is_token]] = _windows_sum(head_inputs, taps, bias)[is_token]

    if conv_states is not None:
        ends, owners, lines = _boundaries(call, sequences, lengths)
        position = ends[:, None] + row  # in [history; tokens of the sequence]
        near = head_inputs[owners[:, None], position.clamp(max=2 * rows - 1)]
        far = inputs[(starts[owners, None] + position - rows).clamp(0, x.shape[0] - 1)]
        window = torch.where((position < 2 * rows)[..., None], near, far)  # [writes, rows, dim]
        conv_states[lines, :rows] = window.to(conv_states.dtype)

    result = _finish(total, call, call.gate_out)
    if len(sequences) == call.num_sequences and int(lengths.sum()) == x.shape[0]:
        call.out.copy_(result)
        return
    is_output = torch.zeros(x.shape[0], dtype=torch.int64)
    tokens = torch.repeat_interleave(starts - lengths.cumsum(0) + lengths, lengths) + torch.arange(int(lengths.sum()))
    is_output[tokens] = 1
    rest = x.float() if call.is_in_place else torch.zeros(())
    call.out.copy_(torch.where(is_output.bool()[:, None], result, rest))


def update(call: UpdateCall) -> None:
    """Fill call.out and advance states; see `ops.causal_conv1d_update`."""
    x, dim, out, conv_states, lines, sources = (
        call.x, call.dim, call.out, call.conv_states, call.state_indices, call.sources,
    )  # fmt: skip
    taps, bias = call.weight.float(), None if call.bias is None else call.bias.float()
    inputs = _inputs(x, call.gate_in).reshape(-1, dim)  # [tokens, dim]
    rows, accepted = call.width - 1, call.num_accepted_tokens
    is_plain = call.query_start_loc is None and accepted is None and call.initial_state_idx is None
    if is_plain and lines is not None and sources is not None and _have_no_padding(call, lines, sources):
        states = conv_states[:, :rows]
        before = states.index_select(0, sources).float()
        line_of_inputs = torch.cat([before, inputs.reshape(x.shape[0], -1, dim)], dim=1)
        states.index_copy_(0, lines.long(), line_of_inputs[:, -rows:].to(states.dtype))
        out.copy_(_finish(_windows_sum(line_of_inputs, taps, bias).reshape(x.shape), call, call.gate_out))
        return
    tokens_each = call.tokens_each
    if call.query_start_loc is None:
        starts = torch.arange(call.num_sequences) * tokens_each
        lengths = torch.full((call.num_sequences,), tokens_each)
    else:
        starts, lengths = call.query_start_loc[:-1].to(torch.int64), call.query_start_loc.diff().to(torch.int64)
    source, is_live = _lines(sources, call.num_sequences, call.initial_state_idx, call.pad_slot_id)
    target, is_kept = _lines(lines, call.num_sequences, call.block_idx_last_scheduled_token, call.pad_slot_id)
    sequences = (is_live & (lengths > 0)).nonzero().flatten()
    starts, lengths = starts[sequences], lengths[sequences]

    tokens = starts[:, None] + torch.arange(tokens_each)  # [live, tokens_each]
    is_token = torch.arange(tokens_each) < lengths[:, None]
    first_row = torch.zeros_like(starts) if accepted is None else accepted[sequences].long() - 1
    history = conv_states[source[sequences, None], first_row[:, None] + torch.arange(rows)].float()
    line_of_inputs = torch.cat([history, inputs[tokens.clamp(max=inputs.shape[0] - 1)]], dim=1)
    total = _windows_sum(line_of_inputs, taps, bias)

    # A draft may be rejected, so every window of it must stay readable; otherwise only the last window counts.
    num_rows = rows if accepted is None else rows - 1 + tokens_each
    row = torch.arange(num_rows)
    shift = lengths if accepted is None else torch.ones_like(lengths)
    position = row + shift[:, None]  # [live, num_rows]
    is_written = is_kept[sequences, None] & (position < rows + lengths[:, None])
    owner, written_row = is_written.nonzero(as_tuple=True)
    kept = line_of_inputs[owner, position[owner, written_row]]
    conv_states[target[sequences][owner], written_row] = kept.to(conv_states.dtype)

    tokens, total = tokens[is_token], total[is_token]  # [outputs], [outputs, dim]
    result = _finish(total, call, None if call.gate_out is None else call.gate_out.reshape(-1, dim)[tokens])
    flat = x.reshape(-1, dim).clone() if call.is_in_place else torch.zeros(inputs.shape, dtype=x.dtype)
    flat[tokens] = result.to(x.dtype)
    out.copy_(flat.reshape(x.shape))


def _have_no_padding(call: UpdateCall, *indices: torch.Tensor) -> bool:
    return (call.pad_slot_id or 0) <= 0 and all(int(each.amin()) > 0 for each in indices)


def _inputs(x: torch.Tensor, gate_in: torch.Tensor | None) -> torch.Tensor:
    """The convolved inputs, which the state keeps, in float32: x, or B * x rounded to x's dtype."""
    return (x if gate_in is None else x * gate_in).float()


def _lines(
    indices: torch.Tensor | None, num_sequences: int, column: torch.Tensor | None, pad_slot_id: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """State lines int64 [sequences] and whether they are real; without indices sequence i owns line i."""
    if indices is None:
        return torch.arange(num_sequences), torch.ones(num_sequences, dtype=torch.bool)
    lines = indices if column is None else indices.gather(1, column[:, None].long())[:, 0]
    is_real = lines > NULL_LINE
    if pad_slot_id is not None and pad_slot_id > NULL_LINE:
        is_real &= lines != pad_slot_id
    return lines.long(), is_real


def _shifted_sum(inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """total[t] = bias + sum over i of taps[i] * inputs[t - (width - 1) + i], where that token exists."""
    total = torch.zeros_like(inputs) if bias is None else bias.expand_as(inputs).clone()
    width, num_tokens = taps.shape[0], inputs.shape[0]
    product = torch.empty_like(inputs)
    for tap in range(width):
        back = width - 1 - tap
        if back < num_tokens:
            torch.mul(inputs[: num_tokens - back], taps[tap], out=product[back:])
            total[back:] += product[back:]
    return total


def _windows_sum(line_of_inputs: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """total[s, t] = bias + sum over i of taps[i] * line_of_inputs[s, t + i], for every whole window."""
    width = taps.shape[0]
    num_windows = line_of_inputs.shape[1] - width + 1
    shape = (line_of_inputs.shape[0], num_windows, line_of_inputs.shape[2])
    total = torch.zeros(shape) if bias is None else bias.expand(shape).clone()
    for tap in range(width):
        total += line_of_inputs[:, tap : tap + num_windows] * taps[tap]
    return total


def _finish(total: torch.Tensor, call: PrefillCall | UpdateCall, gate_out: torch.Tensor | None) -> torch.Tensor:
    if call.has_silu:
        total = total / (1 + torch.exp(-total))
    return total if gate_out is None else total * gate_out


def _boundaries(
    call: PrefillCall, sequences: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which states to keep: (token count they follow, index into `sequences`, line), int64 [writes] each.

    Block boundaries come before the final states; no two writes of one call go to the same line.
    """
    owners = torch.arange(len(sequences))
    first, last, computed = (
        call.block_idx_first_scheduled_token, call.block_idx_last_scheduled_token, call.num_computed_tokens,
    )  # fmt: skip
    if last is None:
        lines, is_real = _lines(call.state_indices, call.num_sequences, None, call.pad_slot_id)
        lines, is_real = lines[sequences], is_real[sequences]
        return lengths[is_real], owners[is_real], lines[is_real]
    assert first is not None
    assert computed is not None
    assert call.block_size_tokens is not None
    assert call.state_indices is not None
    first, last, computed = first[sequences].long(), last[sequences].long(), computed[sequences].long()
    counts = (last - first).clamp(min=0)
    crossing = torch.repeat_interleave(owners, counts)  # [boundaries]
    block = torch.arange(len(crossing)) - (counts.cumsum(0) - counts)[crossing] + first[crossing]
    ends = torch.cat([(block + 1) * call.block_size_tokens - computed[crossing], lengths])
    owners = torch.cat([crossing, owners])
    lines = call.state_indices[sequences[owners], torch.cat([block, last])].long()
    is_real = (lines > NULL_LINE) & (ends > 0) & (ends <= lengths[owners])
    if call.pad_slot_id is not None:
        is_real &= lines != call.pad_slot_id
    return ends[is_real], owners[is_real], lines[is_real]
