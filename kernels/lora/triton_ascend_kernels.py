"""LoRA shrink and expand for Ascend NPUs. Not verified on an NPU: compiled, and its lowered code executed, without one.

What the hardware wants and this file gives: one-dimensional grids as large as the chip has cores, with a loop over
work inside; tiles whose rows are contiguous (B is stored transposed, transposes happen on the chip); scalar loads of
map entries only; no atomics. A work item is one *visit*: the part of a segment that lies in a tile of tokens, times one
part of the input (shrink) or of the output columns (expand).

Few tokens run on the vector cores, many on the cube cores; which, follows from the padded token count alone.

Shapes: T tokens of a tile, R ranks of a block, K inputs of a block, N output columns of a block.
"""

# Arguments of a kernel have no Python types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

# Everything but the constexprs: a kernel is not compiled anew for another size, or for a map that begins elsewhere.
_MAPS = ["token_segment", "segment_starts", "places", "first_rows", "ranks"]
_SIZES = ["num_tokens", "width", "num_splits", "max_segments", "num_places"]
_SHRINK = [
    "x_ptr",
    "a_table",
    "h_ptr",
    *_MAPS,
    "scalings",
    *_SIZES,
    "in_features",
    "x_stride",
    "split_size",
    "num_slices",
]
_EXPAND = ["h_ptr", "chunks", "b_ptr", "out_ptr", *_MAPS, *_SIZES, "out_stride", "num_chunks"]


@triton.jit(do_not_specialize=_SHRINK)
def lora_shrink_few(
    x_ptr,
    a_table,
    h_ptr,
    token_segment,
    segment_starts,
    places,
    first_rows,
    ranks,
    scalings,
    num_tokens,
    in_features,
    x_stride,
    width,
    num_splits,
    split_size,
    max_segments,
    num_places,
    num_slices,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """h[s, t, split, :n] = scaling * x[t, split's inputs] @ A[r : r + n, split's inputs].T, on the vector cores."""
    tokens = tl.arange(0, T)
    rows = tl.arange(0, R)
    inputs = tl.arange(0, K)
    num_tiles = tl.cdiv(num_tokens, T)
    for item in range(tl.program_id(0), num_tiles * num_slices * num_splits, tl.num_programs(0)):
        split = item % num_splits
        slice_index = (item // num_splits) % num_slices
        begin = item // (num_splits * num_slices) * T
        stop = tl.minimum(begin + T, num_tokens)
        segment = tl.load(token_segment + begin)
        more = segment >= 0
        a_ptr = tl.load(a_table + slice_index).to(tl.pointer_type(x_ptr.dtype.element_ty))
        first_input = split * split_size
        last_input = tl.minimum(first_input + split_size, in_features)
        while more:
            end = tl.minimum(tl.load(segment_starts + segment + 1), stop)
            # Segments after the last active one are empty.
            more = end > begin
            if more:
                place = tl.load(places + segment)
                first_row = tl.load(first_rows + segment)
                rank = tl.load(ranks + slice_index * num_places + place)
                if (rank > 0) & (first_row >= 0):
                    scaling = tl.load(scalings + slice_index * num_places + place)
                    for r in range(0, rank, R):
                        h = tl.zeros((T, R), dtype=tl.float32)
                        for k in range(first_input, last_input, K):
                            inside = k + inputs < last_input
                            a = tl.load(
                                a_ptr
                                + ((first_row + r).to(tl.int64) * in_features + k)
                                + (rows[:, None] * in_features + inputs[None, :]),
                                mask=(r + rows < rank)[:, None] & inside[None, :],
                                other=0.0,
                            ).to(tl.float32)  # [R, K]
                            for t in range(begin, end):
                                x = tl.load(
                                    x_ptr + (tl.cast(t, tl.int64) * x_stride + k) + inputs, mask=inside, other=0.0
                                )
                                dots = tl.sum(a * x.to(tl.float32)[None, :], axis=1)  # [R]
                                h += tl.where((tokens == t - begin)[:, None], dots[None, :], 0.0)
                        tl.store(
                            h_ptr
                            + (((slice_index * num_tokens + begin).to(tl.int64) * num_splits + split) * width + r)
                            + (tokens[:, None] * (num_splits * width) + rows[None, :]),
                            h * scaling,
                            mask=(begin + tokens < end)[:, None] & (r + rows < rank)[None, :],
                        )
                begin = end
                segment += 1
                more = (end < stop) & (segment < max_segments)


@triton.jit(do_not_specialize=_EXPAND)
def lora_expand_few(
    h_ptr,
    chunks,
    b_ptr,
    out_ptr,
    token_segment,
    segment_starts,
    places,
    first_rows,
    ranks,
    num_tokens,
    out_stride,
    width,
    num_splits,
    max_segments,
    num_places,
    num_chunks,
    T: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERWRITE: tl.constexpr,
):
    """out[t, columns] += (sum over splits of h[s, t, split, :n]) @ B[r : r + n, columns], on the vector cores.

    b_ptr is the first slice's B, and only tells the type of its elements. Splits are added up SPLITS at a time.
    """
    rows = tl.arange(0, R)
    columns = tl.arange(0, N)
    splits = tl.arange(0, SPLITS)
    num_tiles = tl.cdiv(num_tokens, T)
    for item in range(tl.program_id(0), num_tiles * num_chunks, tl.num_programs(0)):
        chunk = item % num_chunks
        begin = item // num_chunks * T
        stop = tl.minimum(begin + T, num_tokens)
        segment = tl.load(token_segment + begin)
        more = segment >= 0
        b_chunk = tl.load(chunks + chunk * 3).to(tl.pointer_type(b_ptr.dtype.element_ty))
        out_chunk = out_ptr + tl.load(chunks + chunk * 3 + 1)
        packed = tl.load(chunks + chunk * 3 + 2)
        slice_index = (packed & 0xFF).to(tl.int32)
        inside = columns < ((packed >> 8) & 0xFFFF).to(tl.int32)
        slice_width = packed >> 24
        while more:
            end = tl.minimum(tl.load(segment_starts + segment + 1), stop)
            more = end > begin
            if more:
                place = tl.load(places + segment)
                first_row = tl.load(first_rows + segment)
                rank = tl.load(ranks + slice_index * num_places + place)
                if first_row < 0:
                    rank = 0
                # One block of ranks: B is loaded once for all tokens. More: the blocks of a token are added up on the
                # chip, so that its output is rounded once, and B is loaded again for the next token.
                group = end - begin
                if rank > R:
                    group = 1
                last_row = first_row + rank
                if OVERWRITE:
                    rank = tl.maximum(rank, 1)
                for group_begin in range(begin, end, group):
                    delta = tl.zeros((N,), dtype=tl.float32)
                    for r in range(0, rank, R):
                        row = first_row + r
                        b = tl.load(
                            b_chunk + row * slice_width + (rows[:, None] * slice_width.to(tl.int32) + columns[None, :]),
                            mask=(row + rows < last_row)[:, None] & inside[None, :],
                            other=0.0,
                        ).to(tl.float32)  # [R, N]
                        for t in range(group_begin, group_begin + group):
                            h_row = h_ptr + (tl.cast(slice_index * num_tokens + t, tl.int64) * num_splits * width + r)
                            h = tl.zeros((R,), dtype=tl.float32)
                            for split in range(0, num_splits, SPLITS):
                                parts = tl.load(
                                    h_row + split * width + (splits[:, None] * width + rows[None, :]),
                                    mask=(split + splits < num_splits)[:, None] & (row + rows < last_row)[None, :],
                                    other=0.0,
                                )  # [SPLITS, R]
                                h += tl.sum(parts, axis=0)
                            delta = tl.where(row > first_row, delta, 0.0) + tl.sum(b * h[:, None], axis=0)  # [N]
                            here = out_chunk + tl.cast(t, tl.int64) * out_stride + columns
                            complete = inside & (row + R >= last_row)
                            if OVERWRITE:
                                tl.store(here, delta.to(out_ptr.dtype.element_ty), mask=complete)
                            else:
                                before = tl.load(here, mask=complete, other=0.0).to(tl.float32)
                                tl.store(here, (before + delta).to(out_ptr.dtype.element_ty), mask=complete)
                begin = end
                segment += 1
                more = (end < stop) & (segment < max_segments)


@triton.jit(do_not_specialize=_SHRINK)
def lora_shrink_many(
    x_ptr,
    a_table,
    h_ptr,
    token_segment,
    segment_starts,
    places,
    first_rows,
    ranks,
    scalings,
    num_tokens,
    in_features,
    x_stride,
    width,
    num_splits,
    split_size,
    max_segments,
    num_places,
    num_slices,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """As `lora_shrink_few`, on the cube cores. in_features and split_size are multiples of K; h in the rows' type."""
    tokens = tl.arange(0, T)
    rows = tl.arange(0, R)
    inputs = tl.arange(0, K)
    num_tiles = tl.cdiv(num_tokens, T)
    for item in range(tl.program_id(0), num_tiles * num_slices * num_splits, tl.num_programs(0)):
        split = item % num_splits
        slice_index = (item // num_splits) % num_slices
        begin = item // (num_splits * num_slices) * T
        stop = tl.minimum(begin + T, num_tokens)
        segment = tl.load(token_segment + begin)
        more = segment >= 0
        a_ptr = tl.load(a_table + slice_index).to(tl.pointer_type(x_ptr.dtype.element_ty))
        first_input = split * split_size
        last_input = tl.minimum(first_input + split_size, in_features)
        while more:
            end = tl.minimum(tl.load(segment_starts + segment + 1), stop)
            # Segments after the last active one are empty.
            more = end > begin
            if more:
                place = tl.load(places + segment)
                first_row = tl.load(first_rows + segment)
                rank = tl.load(ranks + slice_index * num_places + place)
                if (rank > 0) & (first_row >= 0):
                    scaling = tl.load(scalings + slice_index * num_places + place)
                    for r in range(0, rank, R):
                        h = tl.zeros((T, R), dtype=tl.float32)
                        a_rows = a_ptr + (first_row + r).to(tl.int64) * in_features
                        x_rows = x_ptr + begin.to(tl.int64) * x_stride
                        for k in range(first_input, last_input, K):
                            x = tl.load(
                                x_rows + k + (tokens[:, None] * x_stride + inputs[None, :]),
                                mask=(tokens < end - begin)[:, None],
                                other=0.0,
                            )  # [T, K]
                            a = tl.load(
                                a_rows + k + (rows[:, None] * in_features + inputs[None, :]),
                                mask=(r + rows < rank)[:, None],
                                other=0.0,
                            )  # [R, K]
                            h = tl.dot(x, tl.trans(a), h)
                        tl.store(
                            h_ptr
                            + (((slice_index * num_tokens + begin).to(tl.int64) * num_splits + split) * width + r)
                            + (tokens[:, None] * (num_splits * width) + rows[None, :]),
                            (h * scaling).to(h_ptr.dtype.element_ty),
                            mask=(tokens < end - begin)[:, None] & (r + rows < rank)[None, :],
                        )
                begin = end
                segment += 1
                more = (end < stop) & (segment < max_segments)


@triton.jit(do_not_specialize=_EXPAND)
def lora_expand_many(
    h_ptr,
    chunks,
    b_ptr,
    out_ptr,
    token_segment,
    segment_starts,
    places,
    first_rows,
    ranks,
    num_tokens,
    out_stride,
    width,
    num_splits,
    max_segments,
    num_places,
    num_chunks,
    T: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    OVERWRITE: tl.constexpr,
):
    """As `lora_expand_few`, on the cube cores; h in the rows' type."""
    tokens = tl.arange(0, T)
    rows = tl.arange(0, R)
    columns = tl.arange(0, N)
    num_tiles = tl.cdiv(num_tokens, T)
    for item in range(tl.program_id(0), num_tiles * num_chunks, tl.num_programs(0)):
        chunk = item % num_chunks
        begin = item // num_chunks * T
        stop = tl.minimum(begin + T, num_tokens)
        segment = tl.load(token_segment + begin)
        more = segment >= 0
        b_chunk = tl.load(chunks + chunk * 3).to(tl.pointer_type(b_ptr.dtype.element_ty))
        out_chunk = out_ptr + tl.load(chunks + chunk * 3 + 1)
        packed = tl.load(chunks + chunk * 3 + 2)
        slice_index = (packed & 0xFF).to(tl.int32)
        num_columns = ((packed >> 8) & 0xFFFF).to(tl.int32)
        slice_width = (packed >> 24).to(tl.int32)
        while more:
            end = tl.minimum(tl.load(segment_starts + segment + 1), stop)
            more = end > begin
            if more:
                place = tl.load(places + segment)
                first_row = tl.load(first_rows + segment)
                rank = tl.load(ranks + slice_index * num_places + place)
                if first_row < 0:
                    rank = 0
                valid = (tokens < end - begin)[:, None] & (columns < num_columns)[None, :]
                here = out_chunk + begin.to(tl.int64) * out_stride + (tokens[:, None] * out_stride + columns[None, :])
                h_rows = h_ptr + (slice_index * num_tokens + begin).to(tl.int64) * num_splits * width
                # Only where the loops run: after no iteration the cube's accumulator is not the zeros it began with.
                if rank > 0:
                    delta = tl.zeros((T, N), dtype=tl.float32)
                    for r in range(0, rank, R):
                        b = tl.load(
                            b_chunk
                            + (first_row + r).to(tl.int64) * slice_width
                            + (rows[:, None] * slice_width + columns[None, :]),
                            mask=(r + rows < rank)[:, None] & (columns < num_columns)[None, :],
                            other=0.0,
                        )  # [R, N]
                        for split in range(num_splits):
                            h = tl.load(
                                h_rows + split * width + r + (tokens[:, None] * (num_splits * width) + rows[None, :]),
                                mask=(tokens < end - begin)[:, None] & (r + rows < rank)[None, :],
                                other=0.0,
                            )  # [T, R]
                            delta = tl.dot(h, b, delta)
                    if OVERWRITE:
                        tl.store(here, delta.to(out_ptr.dtype.element_ty), mask=valid)
                    else:
                        before = tl.load(here, mask=valid, other=0.0)
                        tl.store(here, (before.to(tl.float32) + delta).to(out_ptr.dtype.element_ty), mask=valid)
                else:
                    if OVERWRITE:
                        tl.store(here, tl.zeros((T, N), dtype=out_ptr.dtype.element_ty), mask=valid)
                begin = end
                segment += 1
                more = (end < stop) & (segment < max_segments)
