"""The causal convolution for NVIDIA GPUs: one Triton kernel for prefill, one for update.

`ops.py` states the semantics and has checked the calls. Threads own channels and walk over tokens, so that an input is
read once and stays in a register for all of its taps. Grids follow from shapes alone and nothing is read back, so that
a call can be captured in a graph. What changes with the batch is not specialised: a layer's calls need two variants of
the prefill kernel (`WARM_UP_TOKENS` reaches both), and one of the update kernel for each form of call.

Both kernels keep rows of channels [BLOCK_D] in tuples, which unroll at compile time. The file is long because they
share taps, outputs and the state's lines.
"""

# Triton's functions are untyped, its tuples grow by `+` alone, and of two nested ifs the outer one is often settled
# when compiling, the inner one not.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, var-annotated"
# ruff: noqa: RUF005, SIM102

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import triton_launch
from kernels.causal_conv1d.call import ConvLaunch, PrefillCall, UpdateCall, kernel_arguments
from kernels.causal_conv1d.warm_up import warm_up_calls
from kernels.contract import Contract

NULL_LINE = tl.constexpr(0)
SEARCH_BLOCK = tl.constexpr(128)
# Tokens that an update loads before it computes, where sequences have several.
STEP = tl.constexpr(4)
TILE_TOKENS = 8
WARM_UP_TOKENS = (1, TILE_TOKENS)

_METADATA = [
    "starts_ptr",
    "lines_ptr",
    "sources_ptr",
    "initial_ptr",
    "accepted_ptr",
    "source_block_ptr",
    "first_block_ptr",
    "last_block_ptr",
    "computed_ptr",
    "num_tokens",
    "num_sequences",
    "stride_lines",
    "tokens_each",
    "block_size_tokens",
    "pad_slot",
]


@triton.jit
def _row(ptr, gate_ptr, token, stride, stride_gate, channel, mask):
    """One input row [BLOCK_D]: x, or B * x rounded to x's dtype. int64 addresses: tokens * stride may pass 2^31."""
    row = tl.load(ptr + token.to(tl.int64) * stride + channel, mask=mask, other=0.0)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + token.to(tl.int64) * stride_gate + channel, mask=mask, other=0.0)
        row = (row.to(tl.float32) * gate.to(tl.float32)).to(row.dtype)
    return row


@triton.jit
def _taps(weight_ptr, bias_ptr, dim, channel, mask, WIDTH: tl.constexpr):
    """The taps, a tuple of WIDTH rows, and the bias row, in float32."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight_ptr + tap * dim + channel, mask=mask, other=0.0).to(tl.float32),)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros(channel.shape, tl.float32)
    return taps, bias


@triton.jit
def _silu(total, NATIVE: tl.constexpr):
    """total / (1 + exp(-total)), with the chip's exp2 and reciprocal: under half the instructions of `exp` and `/`."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.f32 $0, $1, t;
            }""",
            "=f,f",
            [total],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return total / (1.0 + tl.exp(-total))


@triton.jit
def _output(rows, first: tl.constexpr, taps, bias, SILU: tl.constexpr, NATIVE: tl.constexpr, WIDTH: tl.constexpr):
    """act(bias + sum_i taps[i] * rows[first + i]): the bias first, then the taps, oldest first."""
    total = bias
    for tap in tl.static_range(WIDTH):
        total += rows[first + tap].to(tl.float32) * taps[tap]
    if SILU:
        total = _silu(total, NATIVE)
    return total


@triton.jit
def _channels(block, dim, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr):
    """The channels of a block, and which of them exist."""
    channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
    if EVEN_D:
        return channel, tl.full([BLOCK_D], True, tl.int1)
    else:
        return channel, channel < dim


@triton.jit
def _gated(total, gate_ptr, token, stride_gate, channel, mask):
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + token.to(tl.int64) * stride_gate + channel, mask=mask, other=0.0)
        total = total * gate.to(tl.float32)
    return total


@triton.jit
def _store_output(total, out_ptr, token, stride_out, channel, mask):
    tl.store(out_ptr + token.to(tl.int64) * stride_out + channel, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _line(lines_ptr, block_ptr, sequence, stride_lines, pad_slot, mask):
    """State line of a sequence (int64) and whether it is a real one; without lines_ptr sequence n owns line n."""
    if lines_ptr is None:
        return sequence.to(tl.int64), mask
    else:
        column = 0
        if block_ptr is not None:
            column = tl.load(block_ptr + sequence, mask=mask, other=0)
        line = tl.load(lines_ptr + sequence.to(tl.int64) * stride_lines + column, mask=mask, other=0)
        return line.to(tl.int64), (line > NULL_LINE) & (line != pad_slot)


@triton.jit
def _state(end, start, history, x_ptr, gate_in_ptr, stride_x, stride_gate_in, channel, mask, HALO: tl.constexpr):
    """The HALO inputs before the sequence's token `end`, which are history where that is less than HALO."""
    kept = ()
    for row in tl.static_range(HALO):
        position = end + row  # in concat(history, inputs)
        is_input = mask & (position >= HALO)
        value = _row(x_ptr, gate_in_ptr, start + position - HALO, stride_x, stride_gate_in, channel, is_input)
        value = value.to(tl.float32)
        for past in tl.static_range(HALO):
            value = tl.where(position == past, history[past].to(tl.float32), value)
        kept = kept + (value,)
    return kept


@triton.jit
def _write_state(kept, states_ptr, line, stride_line, stride_row, channel, mask, HALO: tl.constexpr):
    for row in tl.static_range(HALO):
        address = states_ptr + line * stride_line + row * stride_row + channel
        tl.store(address, kept[row].to(states_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _head(x_ptr, states_ptr, gate_in_ptr, gate_out_ptr, out_ptr, starts_ptr, lines_ptr, sources_ptr, initial_ptr,
          source_block_ptr, first_block_ptr, last_block_ptr, computed_ptr, sequence, taps, bias, block_size_tokens,
          pad_slot, stride_x, stride_gate_in, stride_gate_out, stride_out, stride_line, stride_row, stride_lines,
          channel, mask, SILU: tl.constexpr, NATIVE: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """The first WIDTH - 1 tokens of a sequence, which reach into its history, and the states it leaves behind.

    One program reads the old state and writes all new ones that need it or lie in its line, so that no other can
    overtake it.
    """
    HALO: tl.constexpr = WIDTH - 1
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    source, is_live = _line(sources_ptr, source_block_ptr, sequence, stride_lines, pad_slot, True)
    is_live = is_live & (length > 0)
    has_history = is_live
    if initial_ptr is not None:
        has_history = has_history & (tl.load(initial_ptr + sequence) != 0)
    history = ()
    for row in tl.static_range(HALO):
        if states_ptr is not None and initial_ptr is not None:
            address = states_ptr + source * stride_line + row * stride_row + channel
            history = history + (tl.load(address, mask=mask & has_history, other=0.0),)
        else:
            history = history + (tl.zeros(channel.shape, tl.float32),)
    rows = history
    for row in tl.static_range(HALO):
        is_token = mask & is_live & (row < length)
        rows = rows + (_row(x_ptr, gate_in_ptr, start + row, stride_x, stride_gate_in, channel, is_token),)
    if states_ptr is not None:
        target, is_kept = _line(lines_ptr, last_block_ptr, sequence, stride_lines, pad_slot, True)
        final = _state(length, start, history, x_ptr, gate_in_ptr, stride_x, stride_gate_in, channel, mask & is_live,
                       HALO)  # fmt: skip
    for row in tl.static_range(HALO):
        total = _output(rows, row, taps, bias, SILU, NATIVE, WIDTH)
        is_written = mask & is_live & (row < length)
        total = _gated(total, gate_out_ptr, start + row, stride_gate_out, channel, is_written)
        _store_output(total, out_ptr, start + row, stride_out, channel, is_written)
    if states_ptr is not None:
        # A new state may land on the old one, which other threads may still be reading.
        tl.debug_barrier()
        if first_block_ptr is not None:
            if is_live:
                # The others are written by the tiles, see `_write_boundaries`.
                computed = tl.load(computed_ptr + sequence)
                first_block = tl.load(first_block_ptr + sequence)
                last_block = tl.load(last_block_ptr + sequence)
                source_block = tl.load(source_block_ptr + sequence)
                early = tl.maximum(tl.minimum((computed + HALO - 1) // block_size_tokens, last_block), first_block)
                for index in range(early - first_block + 1):
                    block = tl.where(first_block + index < early, first_block + index, source_block)
                    boundary = (block + 1) * block_size_tokens - computed
                    is_mine = (first_block + index < early) | ((source_block >= early) & (source_block < last_block))
                    is_mine = is_mine & (boundary > 0) & (boundary <= length)
                    line = tl.load(lines_ptr + sequence.to(tl.int64) * stride_lines + block, mask=is_mine, other=0)
                    is_mine = is_mine & (line > NULL_LINE) & (line != pad_slot)
                    kept = _state(boundary, start, history, x_ptr, gate_in_ptr, stride_x, stride_gate_in, channel,
                                  mask & is_mine, HALO)  # fmt: skip
                    _write_state(kept, states_ptr, line.to(tl.int64), stride_line, stride_row, channel, mask & is_mine,
                                 HALO)  # fmt: skip
        _write_state(final, states_ptr, target, stride_line, stride_row, channel, mask & is_live & is_kept, HALO)


@triton.jit
def _write_boundaries(x_ptr, states_ptr, gate_in_ptr, lines_ptr, source_block_ptr, first_block_ptr, last_block_ptr,
                      computed_ptr, sequence, start, first_token, end_token, block_size_tokens, pad_slot, stride_x,
                      stride_gate_in, stride_line, stride_row, stride_lines, channel, mask,
                      HALO: tl.constexpr):  # fmt: skip
    """The states after the block boundaries of a sequence that tokens [first_token, end_token) of a tile end at.

    But for those that `_head` writes: they reach into the history, or replace the line that it is read from.
    """
    computed = tl.load(computed_ptr + sequence)
    source_block = tl.load(source_block_ptr + sequence)
    done = tl.maximum(first_token - start, HALO - 1) + computed  # tokens before any boundary of this tile
    first_block = tl.maximum(done // block_size_tokens, tl.load(first_block_ptr + sequence))
    end_block = tl.minimum((end_token - start + computed) // block_size_tokens, tl.load(last_block_ptr + sequence))
    no_history = ()
    for _ in tl.static_range(HALO):
        no_history = no_history + (tl.zeros(channel.shape, tl.float32),)
    for index in range(end_block - first_block):
        block = first_block + index
        line = tl.load(lines_ptr + sequence.to(tl.int64) * stride_lines + block)
        is_mine = mask & (line > NULL_LINE) & (line != pad_slot) & (block != source_block)
        kept = _state((block + 1) * block_size_tokens - computed, start, no_history, x_ptr, gate_in_ptr, stride_x,
                      stride_gate_in, channel, is_mine, HALO)  # fmt: skip
        _write_state(kept, states_ptr, line.to(tl.int64), stride_line, stride_row, channel, is_mine, HALO)


@triton.jit(do_not_specialize=_METADATA)
def _prefill_kernel(
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
    initial_ptr,  # [num_sequences] or None
    source_block_ptr,  # [num_sequences] or None, like the next three
    first_block_ptr,
    last_block_ptr,
    computed_ptr,
    num_tokens,
    num_sequences,
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
    BLOCK_T: tl.constexpr,  # at most num_tokens
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    HALO: tl.constexpr = WIDTH - 1
    tile = tl.program_id(0)
    channel, mask = _channels(tl.program_id(1), dim, BLOCK_D, EVEN_D)
    if DEPENDENT_LAUNCH:
        # The launch overlaps the end of the kernel before; nothing is read or written until that one has finished.
        gdc_wait()
        gdc_launch_dependents()
    taps, bias = _taps(weight_ptr, bias_ptr, dim, channel, mask, WIDTH)
    if tile < num_sequences:
        _head(x_ptr, states_ptr, gate_in_ptr, gate_out_ptr, out_ptr, starts_ptr, lines_ptr, sources_ptr, initial_ptr,
              source_block_ptr, first_block_ptr, last_block_ptr, computed_ptr, tile, taps, bias, block_size_tokens,
              pad_slot, stride_x, stride_gate_in, stride_gate_out, stride_out, stride_line, stride_row, stride_lines,
              channel, mask, SILU, NATIVE, WIDTH)  # fmt: skip
        return
    # The last tile reaches back over its neighbour, and both write the same: so no tile has to mask its rows.
    first_token = tl.maximum(tl.minimum((tile - num_sequences) * BLOCK_T, num_tokens - BLOCK_T), 0)
    end_token = tl.minimum(first_token + BLOCK_T, num_tokens)
    rows = ()  # tokens [first_token - HALO, first_token + BLOCK_T); where there are none, any others: nobody uses them
    for row in tl.static_range(HALO):
        token = tl.maximum(first_token + row - HALO, 0)
        rows = rows + (_row(x_ptr, gate_in_ptr, token, stride_x, stride_gate_in, channel, mask),)
    x_rows = x_ptr + first_token.to(tl.int64) * stride_x + channel
    for row in tl.static_range(BLOCK_T):
        value = tl.load(x_rows + row * stride_x, mask=mask, other=0.0)
        if gate_in_ptr is not None:
            gate_rows = gate_in_ptr + first_token.to(tl.int64) * stride_gate_in + channel
            gate = tl.load(gate_rows + row * stride_gate_in, mask=mask, other=0.0)
            value = (value.to(tl.float32) * gate.to(tl.float32)).to(value.dtype)
        rows = rows + (value,)

    # Sequences [first, last) have tokens in this tile; empty ones at the end of a captured batch are not walked over.
    num_real_tokens = tl.load(starts_ptr + num_sequences)
    stop = tl.minimum(end_token, num_real_tokens)
    first = -1
    last = 0
    for base in range(0, num_sequences, SEARCH_BLOCK):
        index = base + tl.arange(0, SEARCH_BLOCK)
        starts = tl.load(starts_ptr + index, mask=index < num_sequences, other=2147483647)
        first += tl.sum((starts <= first_token).to(tl.int32), 0)
        last += tl.sum((starts < stop).to(tl.int32), 0)
    tl.device_assert(first >= 0, "query_start_loc must start at 0")  # with TRITON_DEBUG=1; else it costs nothing
    outputs = ()
    gate_rows = gate_out_ptr
    if gate_out_ptr is not None:
        gate_rows = gate_out_ptr + first_token.to(tl.int64) * stride_gate_out + channel
    for row in tl.static_range(BLOCK_T):
        total = _output(rows, row, taps, bias, SILU, NATIVE, WIDTH)
        if gate_out_ptr is not None:
            total = total * tl.load(gate_rows + row * stride_gate_out, mask=mask, other=0.0).to(tl.float32)
        outputs = outputs + (total.to(out_ptr.dtype.element_ty),)

    out_rows = out_ptr + first_token.to(tl.int64) * stride_out + channel
    for index in range(last - first):
        sequence = first + index
        start = tl.load(starts_ptr + sequence)
        end = tl.load(starts_ptr + sequence + 1)
        _, is_live = _line(sources_ptr, source_block_ptr, sequence, stride_lines, pad_slot, True)
        if first_block_ptr is not None:
            if is_live:
                _write_boundaries(x_ptr, states_ptr, gate_in_ptr, lines_ptr, source_block_ptr, first_block_ptr,
                                  last_block_ptr, computed_ptr, sequence, start, first_token, tl.minimum(end, stop),
                                  block_size_tokens, pad_slot, stride_x, stride_gate_in, stride_line, stride_row,
                                  stride_lines, channel, mask, HALO)  # fmt: skip
        lowest = start + HALO - first_token  # the rows before belong to the head
        highest = end - first_token
        if is_live & (lowest <= 0) & (highest >= BLOCK_T):
            for row in tl.static_range(BLOCK_T):
                tl.store(out_rows + row * stride_out, outputs[row], mask=mask)
        elif is_live:
            for row in tl.static_range(BLOCK_T):
                tl.store(out_rows + row * stride_out, outputs[row], mask=mask & (row >= lowest) & (row < highest))
        elif not IN_PLACE:
            _zero_rows(out_ptr, tl.maximum(start, first_token), tl.minimum(end, stop), stride_out, channel, mask)
    if not IN_PLACE:
        _zero_rows(out_ptr, tl.maximum(num_real_tokens, first_token), end_token, stride_out, channel, mask)


@triton.jit
def _zero_rows(out_ptr, start, end, stride_out, channel, mask):
    zeros = tl.zeros(channel.shape, out_ptr.dtype.element_ty)
    for index in range(end - start):
        token = start + index
        tl.store(out_ptr + token.to(tl.int64) * stride_out + channel, zeros, mask=mask)


@triton.jit
def _update_output(rows, first: tl.constexpr, taps, bias, out_ptr, gate_ptr, token, stride_out, stride_gate, channel,
                   mask, is_live, SILU: tl.constexpr, IN_PLACE: tl.constexpr, NATIVE: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """Compute and store one token's output; zero for padding, whose gate may hold anything."""
    total = _output(rows, first, taps, bias, SILU, NATIVE, WIDTH)
    is_written = mask
    if IN_PLACE:
        is_written = is_written & is_live
    total = _gated(total, gate_ptr, token, stride_gate, channel, is_written & is_live)
    total = tl.where(is_live, total, 0.0)
    _store_output(total, out_ptr, token, stride_out, channel, is_written)


@triton.jit(do_not_specialize=_METADATA)
def _update_kernel(
    x_ptr,  # rows [tokens, dim]
    weight_ptr,  # [WIDTH, dim]
    bias_ptr,  # [dim] or None
    states_ptr,  # [lines, state_len, dim]
    gate_in_ptr,  # like x or None
    gate_out_ptr,  # like x or None
    out_ptr,  # like x
    starts_ptr,  # [num_sequences + 1] or None: every sequence has as many tokens
    lines_ptr,  # [num_sequences] or [num_sequences, blocks] or None, sources likewise
    sources_ptr,
    accepted_ptr,  # [num_sequences] or None
    source_block_ptr,  # [num_sequences] or None, like the next one
    last_block_ptr,
    num_tokens,
    num_sequences,
    tokens_each,  # or None: one, or as the starts say
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
    EVEN_D: tl.constexpr,
    NATIVE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    HALO: tl.constexpr = WIDTH - 1
    sequence = tl.program_id(0)
    channel, mask = _channels(tl.program_id(1), dim, BLOCK_D, EVEN_D)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    taps, bias = _taps(weight_ptr, bias_ptr, dim, channel, mask, WIDTH)
    source, is_live = _line(sources_ptr, source_block_ptr, sequence, stride_lines, pad_slot, True)
    first_row = 0
    if accepted_ptr is not None:
        first_row = tl.where(is_live, tl.load(accepted_ptr + sequence) - 1, 0)
    history = ()
    for row in tl.static_range(HALO):
        address = states_ptr + source * stride_line + (first_row + row) * stride_row + channel
        history = history + (tl.load(address, mask=mask & is_live, other=0.0),)
    target, is_kept = _line(lines_ptr, last_block_ptr, sequence, stride_lines, pad_slot, True)
    is_kept = is_kept & is_live
    if starts_ptr is None and tokens_each is None:
        rows = history + (_row(x_ptr, gate_in_ptr, sequence, stride_x, stride_gate_in, channel, mask),)
        _update_output(rows, 0, taps, bias, out_ptr, gate_out_ptr, sequence, stride_out, stride_gate_out, channel, mask,
                       is_live, SILU, IN_PLACE, NATIVE, WIDTH)  # fmt: skip
        # Rows of the state are read above and written below by one program, though not always by the same thread.
        tl.debug_barrier()
        target_ptr = states_ptr + target * stride_line + channel
        for row in tl.static_range(HALO):
            kept = rows[row + 1].to(states_ptr.dtype.element_ty)
            tl.store(target_ptr + row * stride_row, kept, mask=mask & is_kept)
    else:
        if starts_ptr is not None:
            start = tl.load(starts_ptr + sequence)
            length = tl.load(starts_ptr + sequence + 1) - start
        else:
            start = sequence * tokens_each
            length = tokens_each
        is_kept = is_kept & (length > 0)
        tl.debug_barrier()
        target_ptr = states_ptr + target * stride_line + channel
        past = ()  # the HALO inputs before the next token
        for row in tl.static_range(HALO):
            past = past + (history[row].to(tl.float32),)
            # Every window of a draft is kept, as any of its tokens may be rejected: here those of the old inputs.
            if accepted_ptr is not None and row > 0:
                tl.store(target_ptr + (row - 1) * stride_row, history[row], mask=mask & is_kept)
        for done in range(0, length, STEP):
            rows = past
            for row in tl.static_range(STEP):
                is_token = mask & (done + row < length)
                token = start + done + row
                value = _row(x_ptr, gate_in_ptr, token, stride_x, stride_gate_in, channel, is_token)
                rows = rows + (value.to(tl.float32),)
            for row in tl.static_range(STEP):
                is_token = mask & (done + row < length)
                _update_output(rows, row, taps, bias, out_ptr, gate_out_ptr, start + done + row, stride_out,
                               stride_gate_out, channel, is_token, is_live, SILU, IN_PLACE, NATIVE, WIDTH)  # fmt: skip
                if accepted_ptr is not None:
                    kept = rows[HALO + row].to(states_ptr.dtype.element_ty)
                    address = target_ptr + (HALO - 1 + done + row) * stride_row
                    tl.store(address, kept, mask=is_token & is_kept)
            past = ()
            for row in tl.static_range(HALO):
                value = rows[row + STEP]
                for shorter in tl.static_range(1, STEP):
                    value = tl.where(length - done == shorter, rows[row + shorter], value)
                past = past + (value,)
        if accepted_ptr is None:
            _write_state(past, states_ptr, target, stride_line, stride_row, channel, mask & is_kept, HALO)
        if starts_ptr is not None and not IN_PLACE:
            if sequence == num_sequences - 1:
                _zero_rows(out_ptr, start + length, num_tokens, stride_out, channel, mask)


def prefill(call: PrefillCall) -> None:
    """Fill call.out and keep states. In place, x is copied first: tiles read tokens that their neighbours write."""
    plan_prefill(call).run()


def update(call: UpdateCall) -> None:
    """Fill call.out and advance states."""
    plan_update(call).run()


def warm_up(*layer: Any, **options: Any) -> None:
    """See `ops.warm_up`."""
    for call in warm_up_calls(WARM_UP_TOKENS, *layer, **options):
        if isinstance(call, PrefillCall):
            prefill(call)
        else:
            update(call)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(_prefill_kernel, _update_kernel)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)


def plan_prefill(call: PrefillCall) -> ConvLaunch:
    """The launch of a prefill with at least one token and one sequence; looks at sizes, never at values."""
    tile = prefill_tile(call.num_tokens, call.dim, call.width, call.x.element_size(), is_gated=call.is_gated)
    arguments = kernel_arguments(call)
    if call.is_in_place:
        copy = call.x.clone()
        arguments |= {"x_ptr": copy, "stride_x": copy.stride(0)}
    arguments |= {"BLOCK_T": tile.tokens} | _device_arguments(call, tile)
    grid = (call.num_sequences + triton.cdiv(call.num_tokens, tile.tokens), triton.cdiv(call.dim, tile.channels))
    return ConvLaunch(_prefill_kernel, grid, arguments, _options(call, tile))


def plan_update(call: UpdateCall) -> ConvLaunch:
    """The launch of an update with at least one token and one sequence; looks at sizes, never at values."""
    tile = update_tile(call.dim)
    # None, hence no argument of the compiled kernel, in the form of plain decoding, and where the starts show it.
    tokens_each = None if call.x.dim() == 2 else call.x.shape[1]
    arguments = kernel_arguments(call) | {"tokens_each": tokens_each} | _device_arguments(call, tile)
    grid = (call.num_sequences, triton.cdiv(call.dim, tile.channels))
    return ConvLaunch(_update_kernel, grid, arguments, _options(call, tile))


@dataclass(frozen=True)
class Tile:
    """The tile of one program, chosen from sizes that a captured graph fixes; measured on an H200.

    tokens         of a prefill tile
    channels       of a tile, 4 a thread where there are enough
    max_registers  of a thread, where more threads on a multiprocessor are worth a few spilled values; None: the
                   compiler's choice
    """

    tokens: int
    channels: int
    num_warps: int
    max_registers: int | None = None


def prefill_tile(num_tokens: int, dim: int, width: int, element_bytes: int, *, is_gated: bool) -> Tile:
    """Narrow convolutions are bound by how many loads are in flight, hence by threads; wide ones would spill.

    Depends on the number of tokens in one point, which `WARM_UP_TOKENS` shows: fewer than a tile are taken one by one.
    """
    tokens = TILE_TOKENS if num_tokens >= TILE_TOKENS else 1
    channels = min(512, triton.next_power_of_2(dim))
    if width > 4:
        return Tile(tokens, channels, 4)
    return Tile(tokens, channels, 4, 64 if element_bytes == 2 and not is_gated else 80)


def update_tile(dim: int) -> Tile:
    """A program advances one sequence."""
    return Tile(1, min(512, triton.next_power_of_2(dim)), 4)


def _device_arguments(call: PrefillCall | UpdateCall, tile: Tile) -> dict[str, Any]:
    return {
        "BLOCK_D": tile.channels,
        "EVEN_D": call.dim % tile.channels == 0,
        "NATIVE": call.x.is_cuda,
        "DEPENDENT_LAUNCH": triton_launch.launches_dependently(call.x.device),
    }


def _options(call: PrefillCall | UpdateCall, tile: Tile) -> dict[str, Any]:
    options = triton_launch.launch_options(call.x.device, max_registers=tile.max_registers)
    return {"num_warps": tile.num_warps, **options}
