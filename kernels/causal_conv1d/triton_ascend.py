"""The causal convolution for Ascend NPUs: one Triton kernel for prefill, one for update. Not verified on an NPU.

`ops.py` states the semantics and has checked the calls. As many programs as the chip has vector
cores loop over work items; an item is a block of channels of one sequence (update) or of one tile of tokens (prefill).
Items are taken channel block by channel block, so that a program reads the taps of a block once. Every transfer is a
contiguous row of channels, of up to 4 KB, and the scalar unit reads maps only: what it must not read is left out by a
branch, since a masked scalar load reads all the same.

Rows are named by age, because the compiler has no tuples: w0 is the newest tap, w7 the oldest of width 8, h1 the input
one token back. Names beyond the width stand for h1 or w0 and are never used. The file is long because both kernels
share taps and outputs, which have an argument for each of these names.
"""

# Triton's functions are untyped; of two nested ifs the outer one is often settled when compiling, the inner one not.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: SIM102

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import triton_launch
from kernels.ascend_runtime import check_launch
from kernels.causal_conv1d.call import ConvLaunch, PrefillCall, UpdateCall, kernel_arguments
from kernels.causal_conv1d.warm_up import warm_up_calls
from kernels.contract import Contract
from kernels.platform import in_use

NULL_LINE = tl.constexpr(0)
SEARCH_BLOCK = tl.constexpr(128)
WARM_UP_TOKENS = (1,)  # nothing but the form of a call is specialised
FAR = tl.constexpr(2147483647)
# Bytes of a row of x that an item moves at once, up to width 4 and for wider taps. By the public tables of transfers
# (tests/ascend/gate/timing.py) one of 256 bytes takes as long as one of 4 KB, so an item is as wide as the on-chip
# memory allows, although each then reads taps that narrower ones would share.
ROW_BYTES = 4096
WIDE_ROW_BYTES = 2048
# A tile reads the width - 1 tokens before it.
SHORTEST_TILE = 8


@triton.jit
def _row(ptr, gate_ptr, token, stride, stride_gate, channel, bound):
    """One input row [BLOCK_D] in float32: x, or B * x rounded to x's dtype; zero from channel `bound` on."""
    row = tl.load(ptr + tl.cast(token, tl.int64) * stride + channel, mask=channel < bound, other=0.0)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + tl.cast(token, tl.int64) * stride_gate + channel, mask=channel < bound, other=0.0)
        row = (row.to(tl.float32) * gate.to(tl.float32)).to(row.dtype)
    return row.to(tl.float32)


@triton.jit
def _tap(weight_ptr, age: tl.constexpr, dim, channel, bound, WIDTH: tl.constexpr):
    row = WIDTH - 1 - age
    return tl.load(weight_ptr + row * dim + channel, mask=channel < bound, other=0.0)


@triton.jit
def _taps(weight_ptr, bias_ptr, dim, channel, bound, WIDTH: tl.constexpr):
    """The bias and the taps, newest first, [BLOCK_D] in their own type, which takes less of the chip."""
    w0 = _tap(weight_ptr, 0, dim, channel, bound, WIDTH)
    w1 = _tap(weight_ptr, 1, dim, channel, bound, WIDTH)
    w2 = w0
    w3 = w0
    w4 = w0
    w5 = w0
    w6 = w0
    w7 = w0
    if WIDTH > 2:
        w2 = _tap(weight_ptr, 2, dim, channel, bound, WIDTH)
    if WIDTH > 3:
        w3 = _tap(weight_ptr, 3, dim, channel, bound, WIDTH)
    if WIDTH > 4:
        w4 = _tap(weight_ptr, 4, dim, channel, bound, WIDTH)
    if WIDTH > 5:
        w5 = _tap(weight_ptr, 5, dim, channel, bound, WIDTH)
    if WIDTH > 6:
        w6 = _tap(weight_ptr, 6, dim, channel, bound, WIDTH)
    if WIDTH > 7:
        w7 = _tap(weight_ptr, 7, dim, channel, bound, WIDTH)
    bias = tl.zeros(channel.shape, weight_ptr.dtype.element_ty)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < bound, other=0.0)
    return bias, w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _output(x, bias, w0, w1, w2, w3, w4, w5, w6, w7, h1, h2, h3, h4, h5, h6, h7, SILU: tl.constexpr,
            WIDTH: tl.constexpr):  # fmt: skip
    """act(bias + taps * inputs), the bias first, then the taps, oldest first."""
    total = bias.to(tl.float32)
    if WIDTH > 7:
        total = total + h7 * w7.to(tl.float32)
    if WIDTH > 6:
        total = total + h6 * w6.to(tl.float32)
    if WIDTH > 5:
        total = total + h5 * w5.to(tl.float32)
    if WIDTH > 4:
        total = total + h4 * w4.to(tl.float32)
    if WIDTH > 3:
        total = total + h3 * w3.to(tl.float32)
    if WIDTH > 2:
        total = total + h2 * w2.to(tl.float32)
    total = total + h1 * w1.to(tl.float32)
    total = total + x * w0.to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def _store_output(total, out_ptr, gate_ptr, token, stride_out, stride_gate, channel, dim):
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + tl.cast(token, tl.int64) * stride_gate + channel, mask=channel < dim, other=0.0)
        total = total * gate.to(tl.float32)
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.cast(token, tl.int64) * stride_out + channel, total, mask=channel < dim)


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
def _shifted(row, h1, h2, h3, h4, h5, h6, h7, WIDTH: tl.constexpr):
    """The history once another row has followed."""
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
    return row, h2, h3, h4, h5, h6, h7


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
           "lines_ptr", "sources_ptr", "accepted_ptr", "source_block_ptr", "last_block_ptr", "num_tokens",
           "num_sequences", "tokens_each", "pad_slot", "stride_lines", "dim", "stride_x", "stride_gate_in",
           "stride_gate_out", "stride_out", "stride_line", "stride_row"]  # fmt: skip


@triton.jit(do_not_specialize=_UPDATE)
def conv_update(
    x_ptr,  # rows [tokens, dim]
    weight_ptr,  # [WIDTH, dim]
    bias_ptr,  # [dim] or None
    states_ptr,  # [lines, state_len, dim]
    gate_in_ptr,  # like x or None
    gate_out_ptr,  # like x or None
    out_ptr,  # like x
    starts_ptr,  # [num_sequences + 1] or None: every sequence has tokens_each
    lines_ptr,  # [num_sequences] or [num_sequences, blocks] or None, sources likewise
    sources_ptr,
    accepted_ptr,  # [num_sequences] or None
    source_block_ptr,  # [num_sequences] or None, like the next one
    last_block_ptr,
    num_tokens,
    num_sequences,
    tokens_each,
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
        bias, w0, w1, w2, w3, w4, w5, w6, w7 = _taps(weight_ptr, bias_ptr, dim, channel, dim, WIDTH)
        for sequence in range(tl.maximum(first_item - block * num_sequences, 0),
                              tl.minimum(last_item - block * num_sequences, num_sequences)):  # fmt: skip
            start = sequence * tokens_each
            length = tokens_each
            if starts_ptr is not None:
                start = tl.load(starts_ptr + sequence)
                length = tl.load(starts_ptr + sequence + 1) - start
            source = tl.cast(sequence, tl.int32)
            is_live = length > 0
            if lines_ptr is not None:
                column = 0
                if source_block_ptr is not None:
                    column = tl.load(source_block_ptr + sequence)
                source = tl.load(sources_ptr + sequence * stride_lines + column)
                is_live = (source > NULL_LINE) & (source != pad_slot) & (length > 0)
            if is_live:
                first_row = 0
                if accepted_ptr is not None:
                    first_row = tl.load(accepted_ptr + sequence) - 1
                h1 = tl.zeros(channel.shape, tl.float32)
                h2, h3, h4, h5, h6, h7 = h1, h1, h1, h1, h1, h1
                for row in range(WIDTH - 1):
                    past = _state_row(states_ptr, source.to(tl.int64), first_row + row, stride_line, stride_row,
                                      channel, dim)  # fmt: skip
                    h1, h2, h3, h4, h5, h6, h7 = _shifted(past, h1, h2, h3, h4, h5, h6, h7, WIDTH)
                target = source
                is_kept = True
                if lines_ptr is not None:
                    last_block = 0
                    if last_block_ptr is not None:
                        last_block = tl.load(last_block_ptr + sequence)
                    target = tl.load(lines_ptr + sequence * stride_lines + last_block)
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
                    h1, h2, h3, h4, h5, h6, h7 = _shifted(x, h1, h2, h3, h4, h5, h6, h7, WIDTH)
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


@triton.jit
def _before(age, x_ptr, gate_in_ptr, states_ptr, token, line, stride_x, stride_gate_in, stride_line,
            stride_row, channel, x_bound, state_bound, WIDTH: tl.constexpr):  # fmt: skip
    """The row of that age before a token: an input or a row of the state, whichever has a bound other than 0."""
    row = _row(x_ptr, gate_in_ptr, tl.maximum(token - age, 0), stride_x, stride_gate_in, channel, x_bound)
    if states_ptr is not None:
        past = _state_row(states_ptr, line, WIDTH - 1 - age, stride_line, stride_row, channel, state_bound)
        row = tl.where(x_bound > 0, row, past)  # a sum would make +0 of -0
    return row


@triton.jit
def _copy_state(states_ptr, target, source, end, start, x_ptr, gate_in_ptr, stride_x, stride_gate_in, stride_line,
                stride_row, channel, dim, state_bound, WIDTH: tl.constexpr):  # fmt: skip
    """Keep in line `target` the inputs before token `end` of a sequence whose history, before `start`, is in `source`.

    Rows go from old to new, so that source and target may be one line.
    """
    for row in range(WIDTH - 1):
        token = end - (WIDTH - 1) + row
        is_input = token >= start
        x_bound = tl.where(is_input, dim, 0)
        kept = _row(x_ptr, gate_in_ptr, tl.maximum(token, 0), stride_x, stride_gate_in, channel, x_bound)
        old_row = tl.maximum(tl.minimum(token - start + WIDTH - 1, WIDTH - 2), 0)
        past = _state_row(states_ptr, source, old_row, stride_line, stride_row, channel,
                          tl.where(is_input, 0, state_bound))  # fmt: skip
        kept = tl.where(is_input, kept, past)
        _store_state(kept, states_ptr, target, row, stride_line, stride_row, channel, dim)


_PREFILL = ["x_ptr", "weight_ptr", "bias_ptr", "states_ptr", "gate_in_ptr", "gate_out_ptr", "out_ptr", "starts_ptr",
            "lines_ptr", "sources_ptr", "initial_ptr", "source_block_ptr", "first_block_ptr", "last_block_ptr",
            "computed_ptr", "num_tokens", "num_sequences", "tile_tokens", "block_size_tokens", "pad_slot",
            "stride_lines", "dim", "stride_x", "stride_gate_in", "stride_gate_out", "stride_out", "stride_line",
            "stride_row"]  # fmt: skip


@triton.jit(do_not_specialize=_PREFILL)
def conv_prefill(
    x_ptr,  # [num_tokens, dim]
    weight_ptr,  # [WIDTH, dim]
    bias_ptr,  # [dim] or None
    states_ptr,  # [lines, state_len, dim] or None
    gate_in_ptr,  # like x or None
    gate_out_ptr,  # like x or None
    out_ptr,  # like x
    starts_ptr,  # [num_sequences + 1]
    lines_ptr,  # [num_sequences] or [num_sequences, blocks] or None, sources likewise
    sources_ptr,
    initial_ptr,  # int8 [num_sequences] or None
    source_block_ptr,  # [num_sequences] or None, like the next three
    first_block_ptr,
    last_block_ptr,
    computed_ptr,
    num_tokens,
    num_sequences,
    tile_tokens,
    block_size_tokens,
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
    SILU: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    HALO: tl.constexpr = WIDTH - 1
    num_tiles = tl.cdiv(num_tokens, tile_tokens)
    num_items = tl.cdiv(dim, BLOCK_D) * num_tiles
    share = tl.cdiv(num_items, tl.num_programs(0))
    first_item = tl.program_id(0) * share
    last_item = tl.minimum(first_item + share, num_items)
    for block in range(first_item // num_tiles, tl.cdiv(last_item, num_tiles)):
        channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
        bias, w0, w1, w2, w3, w4, w5, w6, w7 = _taps(weight_ptr, bias_ptr, dim, channel, dim, WIDTH)
        num_real_tokens = tl.load(starts_ptr + num_sequences)
        for tile in range(tl.maximum(first_item - block * num_tiles, 0),
                          tl.minimum(last_item - block * num_tiles, num_tiles)):  # fmt: skip
            first_token = tile * tile_tokens
            end_token = tl.minimum(first_token + tile_tokens, num_tokens)
            stop = tl.minimum(end_token, num_real_tokens)
            # Sequences [first, last) have tokens in this tile; empty ones behind the last token are not walked over.
            first = -1
            last = 0
            for base in range(0, num_sequences, SEARCH_BLOCK):
                index = base + tl.arange(0, SEARCH_BLOCK)
                starts = tl.load(starts_ptr + index, mask=index < num_sequences, other=FAR)
                first += tl.sum((starts <= first_token).to(tl.int32), 0)
                last += tl.sum((starts < stop).to(tl.int32), 0)
            # Starts that do not begin at 0 are against the rules; at least nothing before the maps is read.
            for sequence in range(tl.maximum(first, 0), last):
                start = tl.load(starts_ptr + sequence)
                end = tl.load(starts_ptr + sequence + 1)
                source = tl.cast(sequence, tl.int32)
                is_live = end > start
                if lines_ptr is not None:
                    column = 0
                    if source_block_ptr is not None:
                        column = tl.load(source_block_ptr + sequence)
                    source = tl.load(sources_ptr + sequence * stride_lines + column)
                    is_live = (source > NULL_LINE) & (source != pad_slot) & (end > start)
                if is_live:
                    # The head's program has the first HALO tokens, wherever they lie: it alone reads and writes states.
                    is_head = start >= first_token
                    walk_start = tl.where(is_head, start, tl.maximum(first_token, start + HALO))
                    walk_end = tl.minimum(end, end_token)
                    if is_head:
                        walk_end = tl.minimum(end, tl.maximum(end_token, start + HALO))
                    line = source.to(tl.int64)
                    x_bound = tl.where(is_head | (walk_start >= walk_end), 0, dim)
                    state_bound = 0
                    if initial_ptr is not None:
                        state_bound = tl.where(tl.load(initial_ptr + sequence) != 0, dim, 0)
                    head_bound = tl.where(is_head, state_bound, 0)
                    h1 = tl.zeros(channel.shape, tl.float32)
                    h2, h3, h4, h5, h6, h7 = h1, h1, h1, h1, h1, h1
                    for row in range(HALO):
                        past = _before(HALO - row, x_ptr, gate_in_ptr, states_ptr, walk_start, line, stride_x,
                                       stride_gate_in, stride_line, stride_row, channel, x_bound, head_bound,
                                       WIDTH)  # fmt: skip
                        h1, h2, h3, h4, h5, h6, h7 = _shifted(past, h1, h2, h3, h4, h5, h6, h7, WIDTH)
                    for token in range(walk_start, walk_end):
                        x = _row(x_ptr, gate_in_ptr, token, stride_x, stride_gate_in, channel, dim)
                        total = _output(x, bias, w0, w1, w2, w3, w4, w5, w6, w7, h1, h2, h3, h4, h5, h6, h7, SILU,
                                        WIDTH)  # fmt: skip
                        _store_output(total, out_ptr, gate_out_ptr, token, stride_out, stride_gate_out, channel, dim)
                        h1, h2, h3, h4, h5, h6, h7 = _shifted(x, h1, h2, h3, h4, h5, h6, h7, WIDTH)
                    if states_ptr is not None:
                        if is_head:
                            target = line
                            is_kept = True
                            if lines_ptr is not None:
                                last_block = 0
                                if last_block_ptr is not None:
                                    last_block = tl.load(last_block_ptr + sequence)
                                target = tl.load(lines_ptr + sequence * stride_lines + last_block).to(tl.int64)
                                is_kept = (target > NULL_LINE) & (target != pad_slot)
                            if last_block_ptr is not None:
                                # From the block behind the one with the old state, around, to that one.
                                computed = tl.load(computed_ptr + sequence)
                                first_block = tl.load(first_block_ptr + sequence)
                                is_read = (column >= first_block) & (column < last_block)
                                begin = tl.where(is_read, column + 1, first_block)
                                for index in range(last_block - first_block):
                                    crossed = begin + index
                                    crossed -= tl.where(crossed < last_block, 0, last_block - first_block)
                                    boundary = (crossed + 1) * block_size_tokens - computed
                                    kept_line = tl.load(lines_ptr + sequence * stride_lines + crossed)
                                    if (boundary > 0) & (boundary <= end - start):
                                        if (kept_line > NULL_LINE) & (kept_line != pad_slot):
                                            _copy_state(states_ptr, kept_line.to(tl.int64), line, start + boundary,
                                                        start, x_ptr, gate_in_ptr, stride_x, stride_gate_in,
                                                        stride_line, stride_row, channel, dim, state_bound,
                                                        WIDTH)  # fmt: skip
                            # May replace the old state, which it needs no more: h1 and on are the last inputs, or the
                            # sequence is longer than HALO.
                            if is_kept:
                                if walk_end == end:
                                    for row in tl.static_range(HALO):
                                        _store_state(_past(HALO - row, h1, h2, h3, h4, h5, h6, h7), states_ptr, target,
                                                     row, stride_line, stride_row, channel, dim)  # fmt: skip
                                if walk_end < end:
                                    _copy_state(states_ptr, target, line, end, start, x_ptr, gate_in_ptr, stride_x,
                                                stride_gate_in, stride_line, stride_row, channel, dim, state_bound,
                                                WIDTH)  # fmt: skip
                if not IN_PLACE:
                    if is_live == 0:
                        _zero_rows(out_ptr, tl.maximum(start, first_token), tl.minimum(end, stop), stride_out, channel,
                                   dim)  # fmt: skip
            if not IN_PLACE:
                _zero_rows(out_ptr, tl.maximum(num_real_tokens, first_token), end_token, stride_out, channel, dim)


def prefill(call: PrefillCall) -> None:
    """Fill call.out and keep states. In place, x is copied first: tiles read tokens that their neighbours write."""
    _launch(plan_prefill(call))


def update(call: UpdateCall) -> None:
    """Fill call.out and advance states."""
    _launch(plan_update(call))


def _launch(launch: ConvLaunch) -> None:
    check_launch(launch.grid, launch.arguments)
    launch.run()


def warm_up(*layer: Any, **options: Any) -> None:
    """See `ops.warm_up`."""
    for call in warm_up_calls(WARM_UP_TOKENS, *layer, **options):
        if isinstance(call, PrefillCall):
            prefill(call)
        else:
            update(call)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(conv_prefill, conv_update)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)


def plan_prefill(call: PrefillCall) -> ConvLaunch:
    """The launch of a prefill with at least one token and one sequence; looks at sizes, never at values."""
    num_cores = in_use(call.x.device).num_cores
    block = _num_channels(call)
    arguments = kernel_arguments(call)
    if call.is_in_place:
        copy = call.x.clone()
        arguments |= {"x_ptr": copy, "stride_x": copy.stride(0)}
    # One tile for each core that a block of channels has: a longer one takes longer, a shorter one reads back more.
    num_tiles = max(1, num_cores // triton.cdiv(call.dim, block))
    arguments |= {
        "initial_ptr": None if call.has_initial_state is None else call.has_initial_state.view(torch.int8),
        "tile_tokens": max(SHORTEST_TILE, triton.cdiv(call.num_tokens, num_tiles)),
        "BLOCK_D": block,
    }
    return ConvLaunch(conv_prefill, (num_cores,), arguments)


def plan_update(call: UpdateCall) -> ConvLaunch:
    """The launch of an update with at least one token and one sequence; looks at sizes, never at values."""
    arguments = kernel_arguments(call) | {
        "tokens_each": 1 if call.x.dim() == 2 else call.x.shape[1],
        "BLOCK_D": _num_channels(call),
    }
    return ConvLaunch(conv_update, (in_use(call.x.device).num_cores,), arguments)


def _num_channels(call: PrefillCall | UpdateCall) -> int:
    """Channels of an item, a power of two: rows as long as the on-chip memory has room for."""
    row_bytes = ROW_BYTES if call.width <= 4 else WIDE_ROW_BYTES
    return min(row_bytes // max(call.x.element_size(), call.weight.element_size()), triton.next_power_of_2(call.dim))
