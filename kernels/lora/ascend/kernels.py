"""LoRA shrink and expand for Ascend NPUs. Not verified on an NPU: compiled, and its lowered code executed, without one.

What the hardware wants and this file gives: one-dimensional grids as large as the chip has cores, with a loop over
work inside; tiles whose rows are contiguous (B is stored transposed, transposes happen on the chip); scalar loads of
map entries only; no atomics. A work item is one *visit*: the part of a segment that lies in a tile of tokens, times one
part of the input and every num_parts-th block of ranks (shrink) or a chunk of the output columns (expand).

Ranks are taken in whole blocks of R, without a mask: the rows of A and B from an adapter's rank up to the next multiple
of R are its own and zero, so that h is zero there. Other operands of a product may be masked where what the mask hides
comes into rows or columns alone that are not stored: what a masked load leaves there is not relied on.

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
    "a_stride",
    "split_size",
    "num_slices",
    "num_parts",
]
_EXPAND = ["h_ptr", "chunks", "b_ptr", "out_ptr", *_MAPS, *_SIZES, "out_stride", "num_chunks"]


@triton.jit
def _shrink_item(item, num_tokens, num_splits, num_slices, T: tl.constexpr):
    """(first token of the tile, slice, split, part of the ranks) of a work item of the shrink.

    The part changes slowest: the first one, which every adapter has, is spread over all cores.
    """
    items_of_part = tl.cdiv(num_tokens, T) * num_slices * num_splits
    of_part = item % items_of_part
    begin = of_part // (num_splits * num_slices) * T
    return begin, (of_part // num_splits) % num_slices, of_part % num_splits, item // items_of_part


@triton.jit
def chunk_at(chunks, chunk):
    """(address of B, first column in the output, slice, columns of the chunk, columns of the slice)."""
    packed = tl.load(chunks + chunk * 2 + 1)
    return (
        tl.load(chunks + chunk * 2),
        (packed >> 40).to(tl.int32),
        (packed & 0x3F).to(tl.int32),
        ((packed >> 6) & 0x3FF).to(tl.int32),
        ((packed >> 16) & 0xFFFFFF).to(tl.int32),
    )


@triton.jit
def rows_of(segment, slice_index, places, first_rows, ranks, num_places):
    """(place, first row, rank) of a segment in a slice; (., 0, 0) where its adapter leaves the group alone."""
    place = tl.load(places + segment)
    first_row = tl.load(first_rows + segment)
    rank = tl.load(ranks + slice_index * num_places + place)
    if first_row < 0:
        rank = 0
    return place, tl.maximum(first_row, 0), rank


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
    a_stride,
    width,
    num_splits,
    split_size,
    max_segments,
    num_places,
    num_slices,
    num_parts,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """h[s, t, split, :n] = scaling * x[t, split's inputs] @ A[r : r + n, split's inputs].T, on the vector cores."""
    tokens = tl.arange(0, T)
    rows = tl.arange(0, R)
    inputs = tl.arange(0, K)
    num_items = tl.cdiv(num_tokens, T) * num_slices * num_splits * num_parts
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        begin, slice_index, split, part = _shrink_item(item, num_tokens, num_splits, num_slices, T)
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
                place, first_row, rank = rows_of(segment, slice_index, places, first_rows, ranks, num_places)
                if rank > part * R:
                    scaling = tl.load(scalings + slice_index * num_places + place)
                    for r in range(part * R, rank, R * num_parts):
                        h = tl.zeros((T, R), dtype=tl.float32)
                        for k in range(first_input, last_input, K):
                            inside = k + inputs < last_input
                            a = tl.load(
                                a_ptr
                                + ((first_row + r).to(tl.int64) * a_stride + k)
                                + (rows[:, None] * a_stride + inputs[None, :]),
                                mask=inside[None, :],
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
                            (h * scaling).to(h_ptr.dtype.element_ty),
                            mask=(begin + tokens < end)[:, None],
                        )
                begin = end
                segment += 1
                more = (end < stop) & (segment < max_segments)


@triton.jit
def load_b(b_chunk, row, slice_width, inside, R: tl.constexpr, N: tl.constexpr):
    """Rows [row, row + R) of B in the chunk's columns, [R, N]."""
    rows = tl.arange(0, R)
    return tl.load(
        b_chunk + row.to(tl.int64) * slice_width + (rows[:, None] * slice_width + tl.arange(0, N)[None, :]),
        mask=inside[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def _sum_h(h_row, num_splits, width, R: tl.constexpr, SPLITS: tl.constexpr):
    """Sum of one token's partial products in R ranks; always in the same order."""
    rows = tl.arange(0, R)
    splits = tl.arange(0, SPLITS)
    h = tl.zeros((R,), dtype=tl.float32)
    for split in range(0, num_splits, SPLITS):
        parts = tl.load(
            h_row + split * width + (splits[:, None] * width + rows[None, :]),
            mask=(split + splits < num_splits)[:, None],
            other=0.0,
        )  # [SPLITS, R]
        h += tl.sum(parts.to(tl.float32), axis=0)
    return h


@triton.jit
def store_delta(delta, here, valid, OVERWRITE: tl.constexpr):
    """Add to the output, or overwrite it."""
    if not OVERWRITE:
        delta += tl.load(here, mask=valid, other=0.0).to(tl.float32)
    tl.store(here, delta.to(here.dtype.element_ty), mask=valid)


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
    G: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERWRITE: tl.constexpr,
):
    """out[t, columns] += (sum over splits of h[s, t, split, :n]) @ B[r : r + n, columns], on the vector cores.

    b_ptr is the first slice's B, and only tells the type of its elements. Splits are added up SPLITS at a time. A
    block of B is read once per visit; above rank R once per G tokens of it.
    """
    members = tl.arange(0, G)
    columns = tl.arange(0, N)
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, T) * num_chunks, tl.num_programs(0)):
        begin = item // num_chunks * T
        stop = tl.minimum(begin + T, num_tokens)
        segment = tl.load(token_segment + begin)
        more = segment >= 0
        address, first_column, slice_index, num_columns, slice_width = chunk_at(chunks, item % num_chunks)
        b_chunk = address.to(tl.pointer_type(b_ptr.dtype.element_ty))
        inside = columns < num_columns
        while more:
            end = tl.minimum(tl.load(segment_starts + segment + 1), stop)
            more = end > begin
            if more:
                _, first_row, rank = rows_of(segment, slice_index, places, first_rows, ranks, num_places)
                h_rows = h_ptr + (slice_index * num_tokens + begin).to(tl.int64) * num_splits * width
                out_rows = out_ptr + first_column + begin.to(tl.int64) * out_stride
                # Several blocks of ranks: each is read once for G tokens, whose sums stay on the chip. One: no sums.
                is_summed = rank > R
                if OVERWRITE:
                    is_summed = is_summed | (rank == 0)
                group_tokens = tl.where(is_summed, G, end - begin)
                for group in range(0, end - begin, group_tokens):
                    num_members = tl.minimum(end - begin - group, group_tokens)
                    group_rows = out_rows + tl.cast(group, tl.int64) * out_stride
                    deltas = tl.zeros((G, N), dtype=tl.float32)
                    for r in range(0, rank, R):
                        b = load_b(b_chunk, first_row + r, slice_width, inside, R, N)
                        for t in range(num_members):
                            h_row = h_rows + (group + t) * num_splits * width + r
                            delta = tl.sum(b * _sum_h(h_row, num_splits, width, R, SPLITS)[:, None], axis=0)  # [N]
                            if is_summed:
                                deltas += tl.where((members == t)[:, None], delta[None, :], 0.0)
                            else:
                                here = group_rows + tl.cast(t, tl.int64) * out_stride + columns
                                store_delta(delta, here, inside, OVERWRITE)
                    if is_summed:
                        here = group_rows + (members[:, None] * out_stride + columns[None, :])
                        store_delta(deltas, here, (members < num_members)[:, None] & inside[None, :], OVERWRITE)
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
    a_stride,
    width,
    num_splits,
    split_size,
    max_segments,
    num_places,
    num_slices,
    num_parts,
    T: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
):
    """As `lora_shrink_few`, on the cube cores. in_features and split_size are multiples of K; h in the rows' type."""
    tokens = tl.arange(0, T)
    rows = tl.arange(0, R)
    inputs = tl.arange(0, K)
    num_items = tl.cdiv(num_tokens, T) * num_slices * num_splits * num_parts
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        begin, slice_index, split, part = _shrink_item(item, num_tokens, num_splits, num_slices, T)
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
                place, first_row, rank = rows_of(segment, slice_index, places, first_rows, ranks, num_places)
                if rank > part * R:
                    scaling = tl.load(scalings + slice_index * num_places + place)
                    for r in range(part * R, rank, R * num_parts):
                        h = tl.zeros((T, R), dtype=tl.float32)
                        a_rows = a_ptr + (first_row + r).to(tl.int64) * a_stride
                        x_rows = x_ptr + begin.to(tl.int64) * x_stride
                        for k in range(first_input, last_input, K):
                            x = tl.load(
                                x_rows + k + (tokens[:, None] * x_stride + inputs[None, :]),
                                mask=(tokens < end - begin)[:, None],
                                other=0.0,
                            )  # [T, K]
                            a = tl.load(a_rows + k + (rows[:, None] * a_stride + inputs[None, :]))  # [R, K]
                            h = tl.dot(x, tl.trans(a), h)
                        tl.store(
                            h_ptr
                            + (((slice_index * num_tokens + begin).to(tl.int64) * num_splits + split) * width + r)
                            + (tokens[:, None] * (num_splits * width) + rows[None, :]),
                            (h * scaling).to(h_ptr.dtype.element_ty),
                            mask=(tokens < end - begin)[:, None],
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
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, T) * num_chunks, tl.num_programs(0)):
        begin = item // num_chunks * T
        stop = tl.minimum(begin + T, num_tokens)
        segment = tl.load(token_segment + begin)
        more = segment >= 0
        address, first_column, slice_index, num_columns, slice_width = chunk_at(chunks, item % num_chunks)
        b_chunk = address.to(tl.pointer_type(b_ptr.dtype.element_ty))
        out_chunk = out_ptr + first_column
        while more:
            end = tl.minimum(tl.load(segment_starts + segment + 1), stop)
            more = end > begin
            if more:
                _, first_row, rank = rows_of(segment, slice_index, places, first_rows, ranks, num_places)
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
                            mask=(columns < num_columns)[None, :],
                            other=0.0,
                        )  # [R, N]
                        for split in range(num_splits):
                            h = tl.load(
                                h_rows + split * width + r + (tokens[:, None] * (num_splits * width) + rows[None, :]),
                                mask=(tokens < end - begin)[:, None],
                                other=0.0,
                            )  # [T, R]
                            delta = tl.dot(h, b, delta)
                    store_delta(delta, here, valid, OVERWRITE)
                else:
                    if OVERWRITE:
                        tl.store(here, tl.zeros((T, N), dtype=out_ptr.dtype.element_ty), mask=valid)
                begin = end
                segment += 1
                more = (end < stop) & (segment < max_segments)
