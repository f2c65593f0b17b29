"""Probe cases of the LoRA ops: mixed ranks, one of them 0, base tokens that must not be touched, rows out of order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from kernels.lora import ops
from kernels.lora.maps import LoraMaps, LoraStack, Segment
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

# Tokens of each adapter in the step: decode tokens and a chunk; chunks that make the step large, since there are other
# kernels and tiles for it (on an NPU beyond 64 tokens, on a GPU beyond 128); and one alone (other kernels on a GPU).
FEW, MANY, ONE = (1, 7, 2, 1), (100, 1, 49, 5), (1,)
# Per adapter: place, first row of its range.
_PLACES, _FIRST_ROWS = (2, 0, 3, 1), (32, 0, 96, 64)
_NUM_BASE_TOKENS = 3
_MAX_SEGMENTS = 6
_NUM_ROWS = 128
# Rank of each adapter in each of the three slices; a slice with rank 0 is not targeted. Largest: 21 of a range of 32.
_RANKS = ((16, 5, 1, 21), (3, 0, 16, 8), (16, 21, 0, 2))
_SCALINGS = (2.0, 0.25, 1.0, 1.7)
# For repeats: ranks that are no multiples of 16, whose tails nobody may read; with the base tokens 64 tokens, in equal
# segments and in one large one.
_RACE_RANKS = ((5, 8, 24, 16),) * 3
_RACE_LENGTHS = ((16, 16, 16, 13), (1, 58, 1, 1))
_VOCABULARY = 83
_Ranks = tuple[tuple[int, ...], ...]


def shrink(shapes: ProbeShapes, place: Place, lengths: tuple[int, ...] = FEW, ranks: _Ranks = _RANKS) -> Prepared:
    """x @ A.T of three slices, of which only the columns below each rank are defined."""
    stack = make_stack(shapes, place, qkv_widths(shapes), shapes.hidden_size, ranks)
    maps, x = make_maps(place, lengths), _activations(place, shapes.hidden_size, lengths)

    def call() -> tuple[torch.Tensor, ...]:
        h = ops.lora_shrink(x, stack, maps)
        return tuple(
            h[s, segment.start : segment.end, : stack.host_ranks[s][segment.place]]
            for s in range(len(stack.a))
            for segment in maps.segments
        )

    return call


def expand(shapes: ProbeShapes, place: Place, lengths: tuple[int, ...] = FEW, ranks: _Ranks = _RANKS) -> Prepared:
    """h @ B, added to an output whose base rows stay as they are."""
    widths = qkv_widths(shapes)
    stack, maps = make_stack(shapes, place, widths, shapes.hidden_size, ranks), make_maps(place, lengths)
    h = place.random(len(widths), maps.num_tokens, 32)
    for s in range(len(widths)):
        for segment in maps.segments:
            h[s, segment.start : segment.end, stack.host_ranks[s][segment.place] :] = torch.nan
    h[:, sum(lengths) :] = torch.nan
    h, out = h.to(place.device), _output(place, sum(widths), lengths)

    def call() -> tuple[torch.Tensor, ...]:
        ops.lora_expand(h, out, stack, maps)
        return (out,)

    return call


def linear(shapes: ProbeShapes, place: Place) -> Prepared:
    """Shrink and expand in one op, over a packed projection, for few tokens."""
    return _linear(shapes, place, FEW)


def linear_many(shapes: ProbeShapes, place: Place) -> Prepared:
    """The same for many."""
    return _linear(shapes, place, MANY)


def linear_one(shapes: ProbeShapes, place: Place) -> Prepared:
    """The same for one token, with no base token beside it."""
    return _linear(shapes, place, ONE, num_base_tokens=0)


def _linear(
    shapes: ProbeShapes,
    place: Place,
    lengths: tuple[int, ...],
    num_base_tokens: int = _NUM_BASE_TOKENS,
    ranks: _Ranks = _RANKS,
) -> Prepared:
    widths = qkv_widths(shapes)
    stack, maps = (
        make_stack(shapes, place, widths, shapes.hidden_size, ranks),
        make_maps(place, lengths, num_base_tokens),
    )
    x = _activations(place, shapes.hidden_size, lengths, num_base_tokens)
    out = _output(place, sum(widths), lengths, num_base_tokens)

    def call() -> tuple[torch.Tensor, ...]:
        ops.lora_linear(x, out, stack, maps)
        return (out,)

    return call


def embedding(shapes: ProbeShapes, place: Place) -> Prepared:
    """Columns of A by token id, times B."""
    stack, maps = make_stack(shapes, place, (shapes.hidden_size,), _VOCABULARY), make_maps(place, FEW)
    token_ids = place.ints([(17 * token) % _VOCABULARY for token in range(maps.num_tokens)], torch.int64)
    out = _output(place, shapes.hidden_size, FEW)

    def call() -> tuple[torch.Tensor, ...]:
        ops.lora_embedding(token_ids, out, stack, maps)
        return (out,)

    return call


def race_cases() -> Mapping[str, Callable[[ProbeShapes, Place], Prepared]]:
    """Cases whose repeats show whether programs disturb one another: 64 tokens with ranks 5, 8, 24 and 16, the two
    halves of the op apart, NaN in h behind every rank."""
    cases: dict[str, Callable[[ProbeShapes, Place], Prepared]] = {}
    for lengths in _RACE_LENGTHS:
        told = "-".join(map(str, lengths))
        cases[f"ranks_5_8_24 shrink {told}"] = partial(shrink, lengths=lengths, ranks=_RACE_RANKS)
        cases[f"ranks_5_8_24 expand {told}"] = partial(expand, lengths=lengths, ranks=_RACE_RANKS)
        cases[f"ranks_5_8_24 linear {told}"] = partial(_linear, lengths=lengths, ranks=_RACE_RANKS)
    return cases


def qkv_widths(shapes: ProbeShapes) -> tuple[int, ...]:
    kv_size = shapes.num_kv_heads * shapes.head_dim
    return shapes.num_heads * shapes.head_dim, kv_size, kv_size


def _activations(
    place: Place, width: int, lengths: tuple[int, ...], num_base_tokens: int = _NUM_BASE_TOKENS
) -> torch.Tensor:
    """Rows of base tokens are NaN: nobody may read them into the row of another token."""
    x = place.random(sum(lengths) + num_base_tokens, width)
    x[sum(lengths) :] = torch.nan
    return place.put(x)


def _output(
    place: Place, width: int, lengths: tuple[int, ...], num_base_tokens: int = _NUM_BASE_TOKENS
) -> torch.Tensor:
    return place.put(place.random(sum(lengths) + num_base_tokens, width))


def make_maps(place: Place, lengths: tuple[int, ...], num_base_tokens: int = _NUM_BASE_TOKENS) -> LoraMaps:
    """One segment for each length, padded to six, then base tokens."""
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    segments = tuple(
        Segment(start, start + length, place_, (first_row,))
        for start, length, place_, first_row in zip(starts, lengths, _PLACES, _FIRST_ROWS, strict=False)
    )
    token_segment = [i for i, length in enumerate(lengths) for _ in range(length)]
    num_idle = _MAX_SEGMENTS - len(lengths)
    return LoraMaps(
        segments=segments,
        num_tokens=starts[-1] + num_base_tokens,
        segment_starts=place.ints(starts + [starts[-1]] * num_idle),
        places=place.ints([segment.place for segment in segments] + [-1] * num_idle),
        first_rows=place.ints([[segment.first_rows[0] for segment in segments] + [-1] * num_idle]),
        token_segment=place.ints(token_segment + [-1] * num_base_tokens),
        num_segments=place.ints([len(segments)]),
    )


def make_stack(
    shapes: ProbeShapes, place: Place, widths: tuple[int, ...], in_features: int, given: _Ranks = _RANKS
) -> LoraStack:
    """Rows of four adapters. As in the row pool, a range is zero past an adapter's rank; other rows are unwritten.

    given  rank of each adapter in each of the slices, at most 32
    """
    ranks = [[0] * len(_PLACES) for _ in widths]
    scalings = [[0.0] * len(_PLACES) for _ in widths]
    a, b = [], []
    for s, width in enumerate(widths):
        a_rows, b_rows = place.fresh(_NUM_ROWS, in_features), place.fresh(_NUM_ROWS, width)
        for adapter, (where, first_row) in enumerate(zip(_PLACES, _FIRST_ROWS, strict=True)):
            rank, largest = given[s][adapter], max(given[i][adapter] for i in range(len(widths)))
            end = first_row + -(-largest // 16) * 16
            a_rows[first_row:end], b_rows[first_row:end] = 0.0, 0.0
            a_rows[first_row : first_row + rank] = place.random(rank, in_features) / in_features**0.5
            b_rows[first_row : first_row + rank] = place.random(rank, width) / max(rank, 1) ** 0.5
            ranks[s][where] = rank
            scalings[s][where] = _SCALINGS[adapter] if rank else 0.0
        a.append(place.put(a_rows, shapes.torch_row_dtype))
        b.append(place.put(b_rows, shapes.torch_row_dtype))
    return LoraStack(
        a=tuple(a),
        b=tuple(b),
        ranks=place.ints(ranks),
        scalings=torch.tensor(scalings, dtype=torch.float32).to(place.device),
        group=0,
        slice_starts=tuple(sum(widths[:s]) for s in range(len(widths))),
        host_ranks=ranks,
        host_scalings=scalings,
    )
