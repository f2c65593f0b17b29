"""The window's LoRA kernels for Ascend NPUs. Not verified on an NPU: compiled, and its lowered code executed, without.

For few tokens, on the vector cores; as `kernels.lora.ascend.kernels`, whose words for work items, visits and
shapes are used here. h stands behind the base output, the slices of a rank side by side: a block of R ranks is read in
one transfer with all of its slices, of which the chip keeps one. So what is read besides B is a few bytes for each
token and chunk of columns, where a shrink of its own leaves as many partial sums as it has splits.

More shapes: F columns of h that hold a block of ranks, a power of two.
"""

# Arguments of a kernel have no Python types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from kernels.lora.ascend.kernels import chunk_at, load_b, rows_of, store_delta

# Everything but the constexprs: a kernel is not compiled anew for another size, or for a map that begins elsewhere.
_MAPS = ["token_segment", "segment_starts", "places", "first_rows", "ranks", "scalings"]
_SIZES = ["num_tokens", "product_stride", "max_segments", "num_places"]
_EXPAND = ["product_ptr", "chunks", "b_ptr", *_MAPS, *_SIZES, "out_features", "num_slices", "num_chunks"]
_SWIGLU = ["product_ptr", "gate_b_ptr", "up_b_ptr", "out_ptr", *_MAPS, *_SIZES, "size", "chunk_columns"]


@triton.jit
def _load_h(h_row, num_slices, R: tl.constexpr, F: tl.constexpr):
    """h of one token: a block of ranks in all slices, [F]."""
    columns = tl.arange(0, F)
    return tl.load(h_row + columns, mask=columns < R * num_slices, other=0.0).to(tl.float32)


@triton.jit
def _of_slice(h, slice_index, num_slices, rank, scaling, R: tl.constexpr, F: tl.constexpr):
    """scaling * h of one slice, [R]. Columns from the rank on may hold anything."""
    rows = tl.arange(0, R)
    is_mine = tl.arange(0, F)[None, :] == (rows * num_slices + slice_index)[:, None]
    is_mine = is_mine & (rows < rank)[:, None]
    return tl.sum(tl.where(is_mine, h[None, :], 0.0), axis=1) * scaling


@triton.jit(do_not_specialize=_EXPAND)
def lora_expand_window_few(
    product_ptr,
    chunks,
    b_ptr,
    token_segment,
    segment_starts,
    places,
    first_rows,
    ranks,
    scalings,
    num_tokens,
    product_stride,
    max_segments,
    num_places,
    out_features,
    num_slices,
    num_chunks,
    T: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
):
    """product[t, columns] += scaling * h[t, s, :n] @ B[r : r + n, columns].

    b_ptr is the first slice's B, and only tells the type of its elements. A block of B is read once per visit; above
    rank R once per G tokens of it.
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
            # Segments after the last active one are empty.
            more = end > begin
            if more:
                place, first_row, rank = rows_of(segment, slice_index, places, first_rows, ranks, num_places)
                scaling = tl.load(scalings + slice_index * num_places + place)
                # Several blocks of ranks: each is read once for G tokens, whose sums stay on the chip. One: no sums.
                is_summed = rank > R
                group_tokens = tl.where(is_summed, G, end - begin)
                for group in range(0, end - begin, group_tokens):
                    num_members = tl.minimum(end - begin - group, group_tokens)
                    group_rows = product_ptr + tl.cast(begin + group, tl.int64) * product_stride
                    h_rows = group_rows + out_features + first_row * num_slices
                    deltas = tl.zeros((G, N), dtype=tl.float32)
                    for r in range(0, rank, R):
                        b = load_b(b_chunk, first_row + r, slice_width, inside, R, N)
                        for t in range(num_members):
                            row = tl.cast(t, tl.int64) * product_stride
                            h = _load_h(h_rows + row + r * num_slices, num_slices, R, F)
                            h = _of_slice(h, slice_index, num_slices, rank - r, scaling, R, F)
                            delta = tl.sum(b * h[:, None], axis=0)  # [N]
                            if is_summed:
                                deltas += tl.where((members == t)[:, None], delta[None, :], 0.0)
                            else:
                                store_delta(delta, group_rows + row + first_column + columns, inside, False)
                    if is_summed:
                        here = group_rows + first_column + (members[:, None] * product_stride + columns[None, :])
                        store_delta(deltas, here, (members < num_members)[:, None] & inside[None, :], False)
                begin = end
                segment += 1
                more = (end < stop) & (segment < max_segments)


@triton.jit
def _store_gated(gate, up, gate_here, up_here, out_here, valid):
    """silu(gate) * up of the product with these deltas."""
    gate += tl.load(gate_here, mask=valid, other=0.0).to(tl.float32)
    up += tl.load(up_here, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_here, (gate / (1.0 + tl.exp(-gate)) * up).to(out_here.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=_SWIGLU)
def swiglu_window_few(
    product_ptr,
    gate_b_ptr,
    up_b_ptr,
    out_ptr,
    token_segment,
    segment_starts,
    places,
    first_rows,
    ranks,
    scalings,
    num_tokens,
    product_stride,
    max_segments,
    num_places,
    size,
    chunk_columns,
    T: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    F: tl.constexpr,
):
    """out[t, columns] = silu(gate) * up of product + delta. The base tokens of a tile are one more visit, without rows.

    A chunk has chunk_columns <= N columns of each half.
    """
    members = tl.arange(0, G)
    columns = tl.arange(0, N)
    num_chunks = tl.cdiv(size, chunk_columns)
    for item in range(tl.program_id(0), tl.cdiv(num_tokens, T) * num_chunks, tl.num_programs(0)):
        begin = item // num_chunks * T
        stop = tl.minimum(begin + T, num_tokens)
        first_column = item % num_chunks * chunk_columns
        inside = columns < tl.minimum(chunk_columns, size - first_column)
        segment = tl.load(token_segment + begin)
        while begin < stop:
            # Behind the last adapter's tokens are the base's, and segments are empty, if there are any.
            has_segment = (segment >= 0) & (segment < max_segments)
            known = tl.where(has_segment, segment, 0)
            end = tl.minimum(tl.load(segment_starts + known + 1), stop)
            has_segment = has_segment & (end > begin)
            end = tl.where(has_segment, end, stop)
            first_row = tl.load(first_rows + known)
            place = tl.maximum(tl.load(places + known), 0)
            has_rows = has_segment & (first_row >= 0)
            first_row = tl.maximum(first_row, 0)
            gate_rank = tl.where(has_rows, tl.load(ranks + place), 0)
            up_rank = tl.where(has_rows, tl.load(ranks + num_places + place), 0)
            gate_scaling = tl.load(scalings + place)
            up_scaling = tl.load(scalings + num_places + place)
            rank = tl.maximum(gate_rank, up_rank)
            # As in the expand; without rows there are no deltas to add as they come, so the sums, zeros, are taken.
            is_summed = (rank > R) | (rank == 0)
            group_tokens = tl.where(is_summed, G, end - begin)
            for group in range(0, end - begin, group_tokens):
                num_members = tl.minimum(end - begin - group, group_tokens)
                rows = product_ptr + tl.cast(begin + group, tl.int64) * product_stride
                gate_rows = rows + first_column
                h_rows = rows + 2 * size + first_row * 2
                out_rows = out_ptr + tl.cast(begin + group, tl.int64) * size + first_column
                gates = tl.zeros((G, N), dtype=tl.float32)
                ups = tl.zeros((G, N), dtype=tl.float32)
                for r in range(0, rank, R):
                    gate_b = load_b(gate_b_ptr + first_column, first_row + r, size, inside, R, N)
                    up_b = load_b(up_b_ptr + first_column, first_row + r, size, inside, R, N)
                    for t in range(num_members):
                        row = tl.cast(t, tl.int64) * product_stride
                        h = _load_h(h_rows + row + r * 2, 2, R, F)
                        gate_h = _of_slice(h, 0, 2, gate_rank - r, gate_scaling, R, F)
                        up_h = _of_slice(h, 1, 2, up_rank - r, up_scaling, R, F)
                        # From its own rank on, a half's rows may be nobody's.
                        gate = tl.where(r < gate_rank, tl.sum(gate_b * gate_h[:, None], axis=0), 0.0)  # [N]
                        up = tl.where(r < up_rank, tl.sum(up_b * up_h[:, None], axis=0), 0.0)
                        if is_summed:
                            gates += tl.where((members == t)[:, None], gate[None, :], 0.0)
                            ups += tl.where((members == t)[:, None], up[None, :], 0.0)
                        else:
                            here = gate_rows + row + columns
                            _store_gated(gate, up, here, here + size, out_rows + t * size + columns, inside)
                if is_summed:
                    here = gate_rows + (members[:, None] * product_stride + columns[None, :])
                    out_here = out_rows + (members[:, None] * size + columns[None, :])
                    valid = (members < num_members)[:, None] & inside[None, :]
                    _store_gated(gates, ups, here, here + size, out_here, valid)
            begin = end
            segment += 1
