"""The causal convolution for Ascend NPUs: one Triton kernel for prefill, one for update. Not verified on an NPU.

Same signatures and semantics as `ops.py`, which has checked the arguments. As many programs as the chip has vector
cores loop over work items; an item is a block of channels of one sequence (update) or of one tile of tokens (prefill).
Items are taken channel block by channel block, so that a program reads the taps of a block once. Every transfer is a
contiguous row of channels, and the scalar unit reads maps only: what it must not read is left out by a branch, since a
masked scalar load reads all the same.

Rows are named by age, because the compiler has no tuples: w0 is the newest tap, w7 the oldest of width 8, h1 the input
one token back. Names beyond the width stand for h1 or w0 and are never used.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

NULL_LINE = tl.constexpr(0)
SEARCH_BLOCK = tl.constexpr(128)
FAR = tl.constexpr(2147483647)


@triton.jit
def _row(ptr, gate_ptr, token, stride, stride_gate, channel, bound):
    """One input row [BLOCK_D] in float32: x, or B * x rounded to x's dtype; zero from channel `bound` on."""
    row = tl.load(ptr + token.to(tl.int64) * stride + channel, mask=channel < bound, other=0.0)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + token.to(tl.int64) * stride_gate + channel, mask=channel < bound, other=0.0)
        row = (row.to(tl.float32) * gate.to(tl.float32)).to(row.dtype)
    return row.to(tl.float32)


@triton.jit
def _tap(weight_ptr, age: tl.constexpr, dim, channel, WIDTH: tl.constexpr):
    row = WIDTH - 1 - age
    return tl.load(weight_ptr + row * dim + channel, mask=channel < dim, other=0.0).to(tl.float32)


@triton.jit
def _taps(weight_ptr, bias_ptr, dim, channel, WIDTH: tl.constexpr):
    """The bias and the taps, newest first, float32 [BLOCK_D]."""
    w0 = _tap(weight_ptr, 0, dim, channel, WIDTH)
    w1 = _tap(weight_ptr, 1, dim, channel, WIDTH)
    w2 = w0
    w3 = w0
    w4 = w0
    w5 = w0
    w6 = w0
    w7 = w0
    if WIDTH > 2:
        w2 = _tap(weight_ptr, 2, dim, channel, WIDTH)
    if WIDTH > 3:
        w3 = _tap(weight_ptr, 3, dim, channel, WIDTH)
    if WIDTH > 4:
        w4 = _tap(weight_ptr, 4, dim, channel, WIDTH)
    if WIDTH > 5:
        w5 = _tap(weight_ptr, 5, dim, channel, WIDTH)
    if WIDTH > 6:
        w6 = _tap(weight_ptr, 6, dim, channel, WIDTH)
    if WIDTH > 7:
        w7 = _tap(weight_ptr, 7, dim, channel, WIDTH)
    bias = tl.zeros(channel.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < dim, other=0.0).to(tl.float32)
    return bias, w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _output(x, bias, w0, w1, w2, w3, w4, w5, w6, w7, h1, h2, h3, h4, h5, h6, h7, SILU: tl.constexpr,
            WIDTH: tl.constexpr):  # fmt: skip
    """act(bias + taps * inputs), the bias first, then the taps, oldest first."""
    total = bias
    if WIDTH > 7:
        total = total + h7 * w7
    if WIDTH > 6:
        total = total + h6 * w6
    if WIDTH > 5:
        total = total + h5 * w5
    if WIDTH > 4:
        total = total + h4 * w4
    if WIDTH > 3:
        total = total + h3 * w3
    if WIDTH > 2:
        total = total + h2 * w2
    total = total + h1 * w1
    total = total + x * w0
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def _store_output(total, out_ptr, gate_ptr, token, stride_out, stride_gate, channel, dim):
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + token.to(tl.int64) * stride_gate + channel, mask=channel < dim, other=0.0)
        total = total * gate.to(tl.float32)
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * stride_out + channel, total, mask=channel < dim)


@triton.jit
def _zero_rows(out_ptr, start, end, stride_out, channel, dim):
    zeros = tl.zeros(channel.shape, out_ptr.dtype.element_ty)
    for token in range(start, end):
        tl.store(out_ptr + tl.cast(token, tl.int64) * stride_out + channel, zeros, mask=channel < dim)


@triton.jit
def _state_row(states_ptr, line, row, stride_line, stride_row, channel, bound):
    address = states_ptr + line * stride_line + tl.cast(row, tl.int64) * stride_row
    return tl.load(address + channel, mask=channel < bound, other=0.0).to(tl.float32)


@triton.jit
def _history(states_ptr, line, newest, stride_line, stride_row, channel, bound, WIDTH: tl.constexpr):
    """Rows newest, newest - 1, ... of a state line, float32. The oldest is read first, as states are written later."""
    if WIDTH > 7:
        h7 = _state_row(states_ptr, line, newest - 6, stride_line, stride_row, channel, bound)
    if WIDTH > 6:
        h6 = _state_row(states_ptr, line, newest - 5, stride_line, stride_row, channel, bound)
    if WIDTH > 5:
        h5 = _state_row(states_ptr, line, newest - 4, stride_line, stride_row, channel, bound)
    if WIDTH > 4:
        h4 = _state_row(states_ptr, line, newest - 3, stride_line, stride_row, channel, bound)
    if WIDTH > 3:
        h3 = _state_row(states_ptr, line, newest - 2, stride_line, stride_row, channel, bound)
    if WIDTH > 2:
        h2 = _state_row(states_ptr, line, newest - 1, stride_line, stride_row, channel, bound)
    h1 = _state_row(states_ptr, line, newest, stride_line, stride_row, channel, bound)
    if WIDTH <= 2:
        h2 = h1
    if WIDTH <= 3:
        h3 = h1
    if WIDTH <= 4:
        h4 = h1
    if WIDTH <= 5:
        h5 = h1
    if WIDTH <= 6:
        h6 = h1
    if WIDTH <= 7:
        h7 = h1
    return h1, h2, h3, h4, h5, h6, h7


@triton.jit
def _store_state(value, states_ptr, line, row, stride_line, stride_row, channel, dim):
    address = states_ptr + line * stride_line + tl.cast(row, tl.int64) * stride_row
    tl.store(address + channel, value.to(states_ptr.dtype.element_ty), mask=channel < dim)


@triton.jit
def _past(age: tl.constexpr, h1, h2, h3, h4, h5, h6, h7):
    """The history row of that age."""
    row = h1
    if age == 2:
        row = h2
    if age == 3:
        row = h3
    if age == 4:
        row = h4
    if age == 5:
        row = h5
    if age == 6:
        row = h6
    if age == 7:
        row = h7
    return row


_UPDATE = ["x_ptr", "weight_ptr", "bias_ptr", "states_ptr", "gate_in_ptr", "gate_out_ptr", "out_ptr", "starts_ptr",
           "lines_ptr", "accepted_ptr", "source_block_ptr", "last_block_ptr", "num_tokens", "num_sequences", "pad_slot",
           "stride_lines", "dim", "stride_x", "stride_gate_in", "stride_gate_out", "stride_out", "stride_line",
           "stride_row"]  # fmt: skip


@triton.jit(do_not_specialize=_UPDATE)
def conv_update(
    x_ptr,  # rows [tokens, dim]
    weight_ptr,  # [WIDTH, dim]
    bias_ptr,  # [dim] or None
    states_ptr,  # [lines, state_len, dim]
    gate_in_ptr,  # like x or None
    gate_out_ptr,  # like x or None
    out_ptr,  # like x
    starts_ptr,  # [num_sequences + 1] or None: every sequence has TOKENS tokens
    lines_ptr,  # [num_sequences] or [num_sequences, blocks] or None
    accepted_ptr,  # [num_sequences] or None
    source_block_ptr,  # [num_sequences] or None, like the next one
    last_block_ptr,
    num_tokens,
    num_sequences,
    pad_slot,
    stride_lines,
    dim,
    stride_x,
    stride_gate_in,
    stride_gate_out,
    stride_out,
    stride_line,
    stride_row,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SILU: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_items = tl.cdiv(dim, BLOCK_D) * num_sequences
    share = tl.cdiv(num_items, tl.num_programs(0))
    first_item = tl.program_id(0) * share
    last_item = tl.minimum(first_item + share, num_items)
    for block in range(first_item // num_sequences, tl.cdiv(last_item, num_sequences)):
        channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
        bias, w0, w1, w2, w3, w4, w5, w6, w7 = _taps(weight_ptr, bias_ptr, dim, channel, WIDTH)
        for sequence in range(tl.maximum(first_item - block * num_sequences, 0),
                              tl.minimum(last_item - block * num_sequences, num_sequences)):  # fmt: skip
            start = sequence * TOKENS
            length = TOKENS
            if starts_ptr is not None:
                start = tl.load(starts_ptr + sequence)
                length = tl.load(starts_ptr + sequence + 1) - start
            source = tl.cast(sequence, tl.int32)
            is_live = length > 0
            if lines_ptr is not None:
                column = 0
                if source_block_ptr is not None:
                    column = tl.load(source_block_ptr + sequence)
                source = tl.load(lines_ptr + sequence * stride_lines + column)
                is_live = (source > NULL_LINE) & (source != pad_slot) & (length > 0)
            if is_live:
                first_row = 0
                if accepted_ptr is not None:
                    first_row = tl.load(accepted_ptr + sequence) - 1
                h1, h2, h3, h4, h5, h6, h7 = _history(states_ptr, source.to(tl.int64), first_row + WIDTH - 2,
                                                      stride_line, stride_row, channel, dim, WIDTH)  # fmt: skip
                target = source
                is_kept = True
                if last_block_ptr is not None:
                    target = tl.load(lines_ptr + sequence * stride_lines + tl.load(last_block_ptr + sequence))
                    is_kept = (target > NULL_LINE) & (target != pad_slot)
                # Rows of drafts: all but the oldest of the history now, each token below.
                if accepted_ptr is not None:
                    if is_kept:
                        for row in tl.static_range(WIDTH - 2):
                            kept = _past(WIDTH - 2 - row, h1, h2, h3, h4, h5, h6, h7)
                            _store_state(kept, states_ptr, target.to(tl.int64), row, stride_line, stride_row, channel,
                                         dim)  # fmt: skip
                for index in range(length):
                    token = start + index
                    x = _row(x_ptr, gate_in_ptr, token, stride_x, stride_gate_in, channel, dim)
                    total = _output(x, bias, w0, w1, w2, w3, w4, w5, w6, w7, h1, h2, h3, h4, h5, h6, h7, SILU, WIDTH)
                    _store_output(total, out_ptr, gate_out_ptr, token, stride_out, stride_gate_out, channel, dim)
                    if accepted_ptr is not None:
                        if is_kept:
                            _store_state(x, states_ptr, target.to(tl.int64), WIDTH - 2 + index, stride_line,
                                         stride_row, channel, dim)  # fmt: skip
                    if WIDTH > 7:
                        h7 = h6
                    if WIDTH > 6:
                        h6 = h5
                    if WIDTH > 5:
                        h5 = h4
                    if WIDTH > 4:
                        h4 = h3
                    if WIDTH > 3:
                        h3 = h2
                    if WIDTH > 2:
                        h2 = h1
                    h1 = x
                if accepted_ptr is None:
                    if is_kept:
                        for row in tl.static_range(WIDTH - 1):
                            kept = _past(WIDTH - 1 - row, h1, h2, h3, h4, h5, h6, h7)
                            _store_state(kept, states_ptr, target.to(tl.int64), row, stride_line, stride_row, channel,
                                         dim)  # fmt: skip
            if not IN_PLACE:
                if is_live == 0:
                    _zero_rows(out_ptr, start, start + length, stride_out, channel, dim)
                if starts_ptr is not None:
                    if sequence == num_sequences - 1:
                        _zero_rows(out_ptr, start + length, num_tokens, stride_out, channel, dim)


@dataclass(frozen=True)
class Launch:
    """A kernel of this file, its grid, and all of its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        """Launch it."""
        self.kernel[self.grid](**self.arguments)


def plan_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    state_indices: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    num_cores: int,
    activation: str | bool | None = None,
    gate_in: torch.Tensor | None = None,
    gate_out: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    pad_slot_id: int | None = -1,
) -> Launch:
    """The launch of an update with at least one token and one sequence; looks at sizes, never at values."""
    dim = x.shape[-1]
    tokens_each = 1 if x.dim() == 2 else x.shape[1]
    if query_start_loc is not None:
        assert max_query_len is not None
        tokens_each = max_query_len
    num_sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "states_ptr": conv_states,
        "gate_in_ptr": gate_in,
        "gate_out_ptr": gate_out,
        "out_ptr": out,
        "starts_ptr": query_start_loc,
        "lines_ptr": state_indices,
        "accepted_ptr": num_accepted_tokens,
        "source_block_ptr": initial_state_idx,
        "last_block_ptr": block_idx_last_scheduled_token,
        "num_tokens": x.numel() // dim,
        "num_sequences": num_sequences,
        "pad_slot": pad_slot_id if pad_slot_id is not None else 0,
        "stride_lines": 0 if state_indices is None else state_indices.stride(0),
        "dim": dim,
        "stride_x": _row_stride(x),
        "stride_gate_in": _row_stride(gate_in),
        "stride_gate_out": _row_stride(gate_out),
        "stride_out": _row_stride(out),
        "stride_line": conv_states.stride(0),
        "stride_row": conv_states.stride(1),
        "WIDTH": weight.shape[0],
        "TOKENS": tokens_each,
        "SILU": activation in ("silu", "swish", True),
        "IN_PLACE": out.data_ptr() == x.data_ptr(),
        "BLOCK_D": _block(dim),
    }
    return Launch(conv_update, (num_cores,), arguments)


def _block(dim: int) -> int:
    """Channels of an item: long rows for the DMA engine, within a core's memory at width 8."""
    return min(512, triton.next_power_of_2(dim))


def _row_stride(tensor: torch.Tensor | None) -> int:
    """Distance of two tokens in a [tokens, dim] or [sequences, tokens, dim] tensor."""
    if tensor is None:
        return 0
    return tensor.stride(0) if tensor.dim() == 2 or tensor.shape[1] == 1 else tensor.stride(1)
