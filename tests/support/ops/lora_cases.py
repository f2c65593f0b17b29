"""Random LoRA steps: stacks, maps and activations, for the tests of every implementation and for the benchmarks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import ModuleType

import torch

from kernels.lora.maps import LoraMaps, LoraStack, Segment

ALIGNMENT = 16


@dataclass(frozen=True)
class Case:
    """One step: `ranks[s][i]` and `lengths[i]` of the i-th adapter, widths per slice, base tokens last.

    interleaved  the rows of A stand slice by slice in one buffer, as behind a base weight
    """

    in_features: int
    widths: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    num_base_tokens: int = 0
    dtype: torch.dtype = torch.float32
    row_dtype: torch.dtype | None = None
    seed: int = 0
    interleaved: bool = False


@dataclass(frozen=True)
class Step:
    x: torch.Tensor
    out: torch.Tensor
    stack: LoraStack
    maps: LoraMaps


def make_maps(
    lengths: list[int],
    places: list[int],
    first_rows: list[int],
    num_tokens: int,
    *,
    device: str = "cpu",
    pad_to: int = 0,
) -> LoraMaps:
    """Maps of segments that stand one after another from token 0 on; one group. Empty segments are left out.

    pad_to  number of padded segment entries of the device maps (0: no padding).
    """
    segments, starts, start = [], [0], 0
    for length, place, first_row in zip(lengths, places, first_rows, strict=True):
        if length:
            segments.append(Segment(start, start + length, place, (first_row,)))
            start += length
            starts.append(start)
    assert start <= num_tokens
    token_segment = [i for i, s in enumerate(segments) for _ in range(s.end - s.start)]
    padding = max(pad_to - len(segments), 0)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return LoraMaps(
        segments=tuple(segments),
        num_tokens=num_tokens,
        segment_starts=ints(starts + [start] * padding),
        places=ints([s.place for s in segments] + [-1] * padding),
        first_rows=ints([s.first_rows[0] for s in segments] + [-1] * padding).unsqueeze(0),
        token_segment=ints(token_segment + [-1] * (num_tokens - start)),
        num_segments=ints([len(segments)]),
    )


def make_step(case: Case, *, device: str = "cpu", pad_to: int = 0, shuffle_places: bool = True) -> Step:
    """Random activations and rows; rows that no adapter owns are NaN, so that reading one shows.

    An adapter's rows from its rank on are zero up to the next multiple of 16, as in the row pool, and NaN from there.
    """
    rng = random.Random(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    num = len(case.lengths)
    row_dtype = case.row_dtype or case.dtype
    group_ranks = [max(ranks[i] for ranks in case.ranks) for i in range(num)]
    places = list(range(num))
    order = list(range(num))
    if shuffle_places:
        rng.shuffle(places)
        rng.shuffle(order)
    first_rows, num_rows = [-1] * num, ALIGNMENT * rng.randint(0, 1)
    for i in order:
        if group_ranks[i]:
            first_rows[i] = num_rows
            num_rows += -(-group_ranks[i] // ALIGNMENT) * ALIGNMENT
    num_rows += ALIGNMENT
    a, b, ranks_table, scalings_table, column, starts = [], [], [], [], 0, []
    for ranks, width in zip(case.ranks, case.widths, strict=True):
        a_rows = torch.full((num_rows, case.in_features), float("nan"))
        b_rows = torch.full((num_rows, width), float("nan"))
        rank_of, scaling_of = [0] * num, [0.0] * num
        for i, rank in enumerate(ranks):
            rank_of[places[i]] = rank
            if rank:
                rows = slice(first_rows[i], first_rows[i] + rank)
                zeros = slice(rows.stop, first_rows[i] + -(-rank // ALIGNMENT) * ALIGNMENT)
                a_rows[zeros], b_rows[zeros] = 0.0, 0.0
                scaling_of[places[i]] = rng.choice([0.25, 0.5, 1.0, 2.0, 1.7])
                a_rows[rows] = torch.randn(rank, case.in_features, generator=generator) / case.in_features**0.5
                b_rows[rows] = torch.randn(rank, width, generator=generator) / rank**0.5
        a.append(a_rows.to(device, row_dtype))
        b.append(b_rows.to(device, row_dtype))
        ranks_table.append(rank_of)
        scalings_table.append(scaling_of)
        starts.append(column)
        column += width
    num_tokens = sum(case.lengths) + case.num_base_tokens
    stack = LoraStack(
        a=torch.stack(a, dim=1).unbind(1) if case.interleaved else tuple(a),
        b=tuple(b),
        ranks=torch.tensor(ranks_table, dtype=torch.int32, device=device),
        scalings=torch.tensor(scalings_table, dtype=torch.float32, device=device),
        group=0,
        slice_starts=tuple(starts),
        host_ranks=ranks_table,
        host_scalings=scalings_table,
    )
    maps = make_maps(list(case.lengths), places, first_rows, num_tokens, device=device, pad_to=pad_to)
    x = torch.randn(num_tokens, case.in_features, generator=generator).to(device, case.dtype)
    out = torch.randn(num_tokens, column, generator=generator).to(device, case.dtype)
    return Step(x, out, stack, maps)


def popularity(name: str, num_tokens: int, num_adapters: int, rng: random.Random) -> tuple[int, ...]:
    """Tokens per adapter: "distinct" (one each), "uniform", "zipf", or "identical" (all on one)."""
    if name == "distinct":
        return tuple(1 if i < num_tokens else 0 for i in range(num_adapters))
    if name == "identical":
        return (num_tokens,) + (0,) * (num_adapters - 1)
    weights = [1.0 if name == "uniform" else 1.0 / (i + 1) for i in range(num_adapters)]
    picks = rng.choices(range(num_adapters), weights, k=num_tokens)
    return tuple(picks.count(i) for i in range(num_adapters))


def poison_workspaces(module: ModuleType) -> None:
    """Fill what a LoRA implementation keeps between its launches with NaN (all bits ones, in any type)."""
    with torch.inference_mode():  # a model may have made them, in that mode, in the same process
        for buffer in module.workspace.buffers:
            buffer.fill_(0xFF)
