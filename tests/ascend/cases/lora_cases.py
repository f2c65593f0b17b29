"""The LoRA kernels in every configuration that their launcher can choose, for the gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kernels.lora import reference, triton_ascend
from kernels.lora.ascend import kernels
from kernels.lora.ascend import tiles as triton_ascend_tiles
from kernels.lora.ascend.tiles import Regime
from kernels.lora.maps import LoraMaps, LoraStack, Segment
from tests.ascend.cases.far import far_apart, far_down
from tests.ascend.gate.cases import MAX_TRAFFIC, Case, Launch
from tests.support.models.published import product_of
from tests.tolerances import OP

NUM_VECTOR_CORES = 40
ON_CHIP_BYTES = 192 * 1024
# Of a place that no segment has.
NOBODYS_RANK = 7
# How many times as large as others what cancels is.
CANCELLED = 256.0
MAPS = frozenset({"token_segment", "segment_starts", "places", "first_rows", "ranks", "scalings", "a_table", "chunks"})


@dataclasses.dataclass(frozen=True)
class Step:
    """An example step, in sizes.

    lengths      tokens of each segment; num_base tokens of the base model follow
    ranks        [slice][segment]; 0 = the slice is not targeted
    widths       output columns of each slice
    num_spare    padding segments of the maps
    first_row    of the first adapter; rows before it are nobody's
    dtype        of x and out; row_dtype of the rows, None = the same
    interleaved  the rows of A stand slice by slice in one buffer, as behind a base weight
    cancels      ranks 0 to 15 of an adapter add much, which ranks 16 to 31 take away again: what is left is right only
                 where deltas of all ranks are added up in more bits than out has
    far          32 bits do not count the elements before a tile of x or out, nor those before the rows of A or B
    """

    lengths: Sequence[int]
    ranks: Sequence[Sequence[int]]
    in_features: int
    widths: Sequence[int]
    num_base: int = 0
    num_spare: int = 2
    first_row: int = 16
    dtype: torch.dtype = torch.bfloat16
    row_dtype: torch.dtype | None = None
    interleaved: bool = False
    cancels: bool = False
    far: bool = False

    @property
    def of_rows(self) -> torch.dtype:
        return self.row_dtype or self.dtype


@dataclasses.dataclass(frozen=True)
class Data:
    """A step with its tensors; rows that no adapter owns are NaN, so that reading one shows."""

    step: Step
    x: torch.Tensor
    out: torch.Tensor
    stack: LoraStack
    maps: LoraMaps


def make_maps(step: Step, first_rows: Sequence[int]) -> LoraMaps:
    """Maps of the step, whose segments are at `places_of`."""
    starts = [0]
    for length in step.lengths:
        starts.append(starts[-1] + length)
    num_segments = len(step.lengths)
    places = places_of(step)
    segments = tuple(Segment(starts[i], starts[i + 1], places[i], (first_rows[i],)) for i in range(num_segments))
    token_segment = [i for i, length in enumerate(step.lengths) for _ in range(length)] + [-1] * step.num_base
    spare = [-1] * step.num_spare
    return LoraMaps(
        segments=segments,
        num_tokens=len(token_segment),
        segment_starts=torch.tensor(starts + [starts[-1]] * step.num_spare, dtype=torch.int32),
        places=torch.tensor([*places, *spare], dtype=torch.int32),
        first_rows=torch.tensor([[*first_rows, *spare]], dtype=torch.int32),
        token_segment=torch.tensor(token_segment, dtype=torch.int32),
        num_segments=torch.tensor([num_segments], dtype=torch.int32),
    )


def places_of(step: Step) -> list[int]:
    """Each segment's place has another number; one place more than there are segments stays unused."""
    num = len(step.lengths)
    return [(i + 1 + num // 2) % (num + 1) for i in range(num)]


def by_place(step: Step, values: Sequence[Any], nobodys: Any) -> list[Any]:
    """Values of the segments in the order of their places."""
    ordered = [nobodys] * (len(values) + 1)
    for place, value in zip(places_of(step), values, strict=True):
        ordered[place] = value
    return ordered


def make_data(step: Step, seed: int = 0) -> Data:
    """Random tensors; an adapter's rows are as many as its largest rank, rounded up to 16.

    From its rank in a slice up to the next multiple of 16 they are zero, as in the row pool; from there on NaN.
    """
    random = torch.Generator().manual_seed(seed)
    largest = [max(of_slices) for of_slices in zip(*step.ranks, strict=True)]
    first_rows, num_rows = [-1] * len(largest), step.first_row
    for i, rank in reversed([*enumerate(largest)]):
        if rank:
            first_rows[i] = num_rows
        num_rows += -(-rank // 16) * 16
    maps = make_maps(step, first_rows)
    a = tuple(torch.full((num_rows, step.in_features), torch.nan, dtype=step.of_rows) for _ in step.widths)
    b = tuple(torch.full((num_rows, width), torch.nan, dtype=step.of_rows) for width in step.widths)
    for s, of_segments in enumerate(step.ranks):
        for first_row, rank in zip(first_rows, of_segments, strict=True):
            for rows, features in ((a[s], step.in_features), (b[s], step.widths[s])):
                values = torch.randn(rank, features, generator=random) * features**-0.25
                first = max(first_row, 0)
                rows[first : first + rank] = values.to(step.of_rows)
                rows[first + rank : first + -(-rank // 16) * 16] = 0.0
    if step.cancels:
        for rows in b:
            for first_row in first_rows:
                rows[first_row + 16 : first_row + 32] = -rows[first_row : first_row + 16]
    if step.interleaved:
        a = torch.stack(a, dim=1).unbind(1)
    random_scalings = (torch.rand(len(step.widths), len(step.lengths), generator=random) + 0.5).tolist()
    scalings = torch.tensor([by_place(step, of_segments, torch.nan) for of_segments in random_scalings])
    ranks = [by_place(step, of_segments, NOBODYS_RANK) for of_segments in step.ranks]
    starts = [sum(step.widths[:s]) for s in range(len(step.widths))]
    stack = LoraStack(
        a, b, torch.tensor(ranks, dtype=torch.int32), scalings, 0, tuple(starts), ranks, scalings.tolist(),
    )  # fmt: skip
    x = torch.randn(maps.num_tokens, step.in_features, generator=random).to(step.dtype)
    out = torch.randn(maps.num_tokens, sum(step.widths), generator=random).to(step.dtype)
    return _far(Data(step, x, out, stack, maps)) if step.far else Data(step, x, out, stack, maps)


def _far(data: Data) -> Data:
    """The same far away. In-tile offsets have 32 bits and must fit: rows are far apart from tile to tile only."""
    tile = triton_ascend_tiles.TABLES[0].few.expand_tokens if _regime(data).name == "few" else 128
    stride, num_rows = 2**31 // tile + 16, 2**31 // min(data.step.in_features, *data.step.widths)
    maps = dataclasses.replace(data.maps, first_rows=data.maps.first_rows + num_rows)
    maps = dataclasses.replace(
        maps,
        segments=tuple(
            dataclasses.replace(one, first_rows=tuple(row + num_rows for row in one.first_rows))
            for one in maps.segments
        ),
    )
    a, b = (tuple(far_down(rows, num_rows) for rows in of_slices) for of_slices in (data.stack.a, data.stack.b))
    stack = dataclasses.replace(data.stack, a=a, b=b)
    return Data(data.step, far_apart(data.x, stride), far_apart(data.out, stride), stack, maps)


def _blocks(step: Step, data: Data) -> Iterator[tuple[int, slice, slice, slice]]:
    """Of each slice and segment: (slice, its tokens, its ranks, the columns from there to the end of the block)."""
    for i, segment in enumerate(data.maps.segments):
        for s, of_segments in enumerate(step.ranks):
            rank = of_segments[i]
            end = -(-rank // 16) * 16
            yield s, slice(segment.start, segment.end), slice(0, rank), slice(rank, end)


def _width(step: Step) -> int:
    return max(16, -(-max(max(ranks) for ranks in step.ranks) // 16) * 16)


def _row_bytes(step: Step, features: Sequence[int]) -> int:
    """Bytes of the active adapters' rows, ranks rounded up to nothing."""
    ranks = zip(step.ranks, features, strict=True)
    return sum(sum(of_segments) * wide for of_segments, wide in ranks) * step.of_rows.itemsize


def _h_bytes(step: Step) -> int:
    """Bytes of h, float32, without a split."""
    return sum(r * n for ranks in step.ranks for r, n in zip(ranks, step.lengths, strict=True)) * 4


def _regime(data: Data) -> Regime:
    return triton_ascend_tiles.choose(data.maps.num_tokens, data.step.in_features, NUM_VECTOR_CORES, ON_CHIP_BYTES)


def _partials(data: Data, regime: Regime, in_float32: bool) -> torch.Tensor:
    """h as the launcher makes it, but only as wide as needed, and NaN; float32, unsplit as between two public ops."""
    step = data.step
    shape = triton_ascend.partials_shape(step.in_features, data.maps.num_tokens, len(step.widths), _width(step), regime)
    if in_float32:
        return torch.full((*shape[:2], 1, *shape[3:]), torch.nan)
    return torch.full(shape, torch.nan, dtype=step.of_rows)


def shrink(
    step: Step,
    regime: Regime | None = None,
    *,
    in_float32: bool = False,
    judge_traffic: bool = False,
    max_traffic: float = MAX_TRAFFIC,
) -> Launch:
    """A shrink of the step, against the reference split by split."""
    data = make_data(step)
    regime = regime or _regime(data)
    h = _partials(data, regime, in_float32)
    plan = triton_ascend.plan_shrink(data.x.to(step.of_rows), h, data.stack, data.maps, regime)
    split_size = plan.arguments["split_size"]
    expected = h.clone()
    for split in range(h.shape[2]):
        part = slice(split * split_size, (split + 1) * split_size)
        stack = dataclasses.replace(data.stack, a=tuple(a[:, part] for a in data.stack.a))
        columns = torch.full(h.shape[:2] + h.shape[3:], torch.nan)
        reference.lora_shrink(data.x[:, part], stack, data.maps, out=columns)
        for s, tokens, _, rest in _blocks(step, data):
            columns[s, tokens, rest] = 0.0
        expected[:, :, split] = columns
    num_tokens = sum(step.lengths)
    minimum = num_tokens * step.in_features * step.of_rows.itemsize + _h_bytes(step)
    minimum += _row_bytes(step, [step.in_features] * len(step.widths))
    return Launch(
        plan.arguments,
        plan.grid,
        {"h_ptr": expected},
        MAPS,
        reachable={f"a{s}": a for s, a in enumerate(data.stack.a)},
        minimum_bytes=minimum if judge_traffic else None,
        max_traffic=max_traffic,
        tolerance=(1e-4, 1e-4) if h.dtype == torch.float32 else OP[h.dtype],
    )


def expand(
    step: Step,
    regime: Regime | None = None,
    *,
    overwrite: bool = False,
    in_float32: bool = False,
    judge_traffic: bool = False,
    max_traffic: float = MAX_TRAFFIC,
) -> Launch:
    """An expand of the step from partial sums that are NaN wherever it has no business."""
    data = make_data(step)
    regime = regime or _regime(data)
    h = _partials(data, regime, in_float32)
    random = torch.Generator().manual_seed(1)
    for s, tokens, ranks, rest in _blocks(step, data):
        mine = h[s, tokens, :, ranks]
        mine.copy_(torch.randn(mine.shape, generator=random))
        if step.cancels:
            mine[..., :16] *= CANCELLED
            mine[..., 16:32] = mine[..., :16]
        h[s, tokens, :, rest] = 0.0
    plan = triton_ascend.plan_expand(h, data.out, data.stack, data.maps, regime, overwrite=overwrite)
    expected = data.out.clone()
    reference.lora_expand(h.double().sum(2), expected, data.stack, data.maps, overwrite=overwrite)
    out_bytes = sum(step.lengths) * sum(step.widths) * step.dtype.itemsize
    minimum = _h_bytes(step) + _row_bytes(step, step.widths) + out_bytes * (1 if overwrite else 2)
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected},
        MAPS,
        reachable={f"b{s}": b for s, b in enumerate(data.stack.b)},
        minimum_bytes=minimum if judge_traffic else None,
        max_traffic=max_traffic,
        tolerance=OP[step.dtype],
    )


# Of an 8B model: what reads the heads of its attention.
OUT = product_of("Llama-3-8B", "self_attn.o_proj")
FOUR = Step([16] * 4, [[16] * 4], *OUT)
UNEVEN = Step([10, 23, 14, 17], [[16] * 4], *OUT)
SKEWED = Step([61, 1, 1, 1], [[16] * 4], *OUT)
UNEVEN_QKV = Step([10, 23, 14, 17], [[16] * 4] * 3, *product_of("Llama-3-8B", "self_attn.qkv_proj"))
SIXTY_FOUR = Step([1] * 64, [[16] * 64], *OUT)
ODD = Step([3, 20, 1], [[16, 5, 40]], 1000, [777], num_base=4)
PACKED = Step([2, 1, 5], [[16, 8, 0], [16, 0, 0], [3, 33, 0]], 500, [300, 40, 8], num_base=1, interleaved=True)
ONE = Step([1], [[16]], *OUT)
LARGE_RANKS = Step([18, 1, 5], [[40, 130, 33]], 200, [300])
# Deltas that round to out's type after each block of ranks lose what is left.
CANCELLING = Step([3, 17], [[40, 48]], 200, [130], cancels=True)
CANCELLING_PREFILL = Step([70, 30], [[40, 48]], 128, [130], cancels=True)
# Two groups of 16 tokens: B is read once for each, and h of a token in its own alone.
GROUPS = Step([32], [[64]], 16, [512])
# Every part of the ranks has work in both tiles.
TWO_TILES = Step([33], [[64]], 200, [130])
# A tile of tokens that has no adapter's.
BASE_TILE = Step([3], [[16]], 256, [130], num_base=40)
PREFILL = Step([100, 3, 60, 1], [[16, 40, 8, 16]], 1024, [600], num_base=8)
LONG = Step([256], [[16]], 2048, [2048])
PACKED_PREFILL = Step([70, 9], [[16, 0], [3, 33]], 192, [300, 40], num_base=1, interleaved=True)
# 896 inputs in parts of 256: the last part has 128, and so has a block.
SHORT_LAST_PART = Step([70, 9], [[16, 3]], 896, [130], num_base=21)
BASE_TILE_PREFILL = Step([20], [[16]], 128, [130], num_base=140)
# As many segments as the maps have, and base tokens behind the last one: nothing behind the maps may be read.
NO_SPARE = Step([3, 2], [[16, 5]], 200, [130], num_base=4, num_spare=0)
NO_SPARE_PREFILL = Step([70, 30], [[16, 5]], 128, [130], num_base=9, num_spare=0)
# Decode of an 8B model; of Qwen3.5 (inputs of a delta net, gates and queries of an attention, the gate of the expert of
# all tokens, which is one column) and LFM2 (a short convolution's inputs); with ranks that are no multiple of 16.
EIGHT = Step([1] * 8, [[16] * 8], *OUT)
WIDE_RANK = Step([1], [[64]], *OUT)
DELTA = product_of("Qwen3.5-9B", "linear_attn.in_proj")
QWEN35 = Step([2, 1, 1], [[16, 8, 0], [16, 5, 24], [8, 0, 16], [0, 16, 3]], *DELTA, num_base=1)
QKV = product_of("Qwen3.5-4B", "self_attn.qkv_proj")
QWEN35_QKV = Step([1, 3], [[16, 24], [8, 16], [16, 5]], *QKV, interleaved=True)
COLUMN = product_of("Qwen3.5-35B-A3B", "mlp.shared_expert_gate")
ONE_COLUMN = Step([3, 1], [[24, 5]], *COLUMN, num_base=1)
CONV = product_of("LFM2-350M", "conv.in_proj")
LFM2 = Step([3, 1], [[24, 5]], *CONV, num_base=1)
THREE_SLICES = Step([3, 1], [[24, 5], [16, 0], [8, 16]], 1024, [1024, 1024, 1024], num_base=1)

FAR = Step([33], [[16]], 256, [256], far=True)
FAR_PREFILL = Step([130], [[16]], 256, [256], far=True)

# Whatever way 64 tokens are shared out between adapters, no more tiles meet a segment than in the uneven mix. Its
# shrink may move this much because tiles are chosen by time: with 32 tokens in place of 16 it moves 1.25 times the
# minimum, and takes 19.7 us in place of 16.0. That of q, k and v reads x once for each slice. Where few adapters have
# many tokens, every core's partial sums, which every chunk of columns reads, are much beside their rows: of a rank of
# 16 they are 32 bytes, and the chip moves 128. Fewer splits would leave cores idle. At rank 64 a chunk reads the sums
# of 11 splits block by block of 16 ranks, each time the same piece.
MAX_TRAFFIC_OF = {
    "lora_shrink_few": {"4 uneven": 1.46, "4 skewed": 1.46, "4 uneven q, k, v": 2.1},
    "lora_expand_few": {
        "4 adapters": 1.26, "4 uneven": 1.34, "4 skewed": 1.34, "rank 64": 1.34, "4 uneven q, k, v": 1.22,
    },
}  # fmt: skip
# Of each judged launch, 2 % above what the tiles of the table take by estimate.
MAX_US_OF = {
    "lora_shrink_few": {
        "4 adapters": 15.9, "4 uneven": 16.3, "4 skewed": 16.6, "64 adapters": 19.2, "one token": 1.22,
        "8 adapters": 9.6, "rank 64": 2.41, "4 uneven q, k, v": 47.6,
    },
    "lora_expand_few": {
        "4 adapters": 21.1, "4 uneven": 21.3, "4 skewed": 21.4, "64 adapters": 24.6, "one token": 0.58,
        "8 adapters": 4.3, "rank 64": 3.4, "4 uneven q, k, v": 42.3, "two groups": 81.6,
    },
}  # fmt: skip
JUDGED = {
    "4 adapters": FOUR, "4 uneven": UNEVEN, "4 skewed": SKEWED, "64 adapters": SIXTY_FOUR, "one token": ONE,
    "8 adapters": EIGHT, "rank 64": WIDE_RANK, "4 uneven q, k, v": UNEVEN_QKV,
}  # fmt: skip
_FEW = JUDGED | {
    "odd sizes": ODD, "packed": PACKED, "large ranks": LARGE_RANKS, "base tile": BASE_TILE, "no spare": NO_SPARE,
    "two tiles": TWO_TILES, "qwen3.5": QWEN35, "qwen3.5 qkv": QWEN35_QKV, "lfm2": LFM2, "far": FAR,
    "three slices": THREE_SLICES, "one column": ONE_COLUMN,
}  # fmt: skip
_MANY = {
    "no spare": NO_SPARE_PREFILL, "far": FAR_PREFILL,
    "long": LONG, "mixed": PREFILL, "packed": PACKED_PREFILL, "base tile": BASE_TILE_PREFILL,
    "short last part": SHORT_LAST_PART,
}  # fmt: skip
# Small steps for trying one configuration: several ranks, an untargeted slice, base tokens, odd widths.
_SMALL = {
    "few": Step([3, 14, 1], [[16, 5, 24], [0, 16, 8]], 600, [333, 9], num_base=2),
    "many": Step([30, 101], [[16, 24], [0, 7]], 512, [130, 24], num_base=3),
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (of x and out, of the rows) where they differ.
_MIXED_DTYPES = ((torch.float32, torch.bfloat16), (torch.float16, torch.float32))
# Two loops stand around a visit: over the tiles of a core, and over the segments of a tile.
_DEPTH = 2
# A compiler of another version may want somewhat more than the one that the gate compiles with.
ON_CHIP_FRACTION = 0.85


def _kernel(name: str) -> Any:
    return getattr(kernels, name)


def _case(name: str, make: Callable[..., Launch], steps: dict[str, Step]) -> Case:
    limits = MAX_TRAFFIC_OF.get(name, {})
    launches: dict[str, Callable[[], Launch]] = {key: partial(make, step) for key, step in steps.items()}
    for key in JUDGED.keys() & steps:
        limit = limits.get(key, MAX_TRAFFIC)
        launches[key] = partial(make, steps[key], judge_traffic=True, max_traffic=limit)
    return _made(name, launches)


def _made(name: str, launches: dict[str, Callable[[], Launch]]) -> Case:
    max_us = {key: us for key, us in MAX_US_OF.get(name, {}).items() if key in launches}
    return Case(name, _kernel(name), launches, work_loop_depth=_DEPTH, on_chip_fraction=ON_CHIP_FRACTION, max_us=max_us)


def _variants() -> list[Case]:
    """What the tiles do not decide: overwriting, h in float32 between two public ops, rows of another type."""
    cases: list[Case] = []
    for regime, steps in (("few", _FEW), ("many", _MANY)):
        shrinks: dict[str, Callable[[], Launch]] = {}
        expands: dict[str, Callable[[], Launch]] = {}
        for key in ("packed", "base tile"):
            expands[f"{key}, overwrite"] = partial(expand, steps[key], overwrite=True)
        if regime == "few":  # the cube gets h in the rows' type
            expands["float32 h"] = partial(expand, steps["packed"], in_float32=True)
            expands["two groups"] = partial(expand, GROUPS, in_float32=True, judge_traffic=True, max_traffic=2.4)
            expands["cancelling"] = partial(expand, CANCELLING)
            expands["cancelling, overwrite"] = partial(expand, CANCELLING, overwrite=True)
            expands["large ranks, overwrite"] = partial(expand, steps["large ranks"], overwrite=True)
        else:
            expands["cancelling"] = partial(expand, CANCELLING_PREFILL)
        shrinks["float32 h"] = partial(shrink, steps["packed"], in_float32=True)
        for dtype, row_dtype in _MIXED_DTYPES:
            step = dataclasses.replace(_SMALL[regime], dtype=dtype, row_dtype=row_dtype)
            key = f"{str(row_dtype).removeprefix('torch.')} rows, {str(dtype).removeprefix('torch.')} x and out"
            shrinks[key], expands[key] = partial(shrink, step), partial(expand, step)
        for name, launches in ((f"lora_shrink_{regime}", shrinks), (f"lora_expand_{regime}", expands)):
            cases.append(_made(name, launches))
    return cases


def _configurations() -> list[Case]:
    """Each kernel with each block that a launch table holds, in each type, adding and overwriting."""
    cases: list[Case] = []
    for table in triton_ascend_tiles.TABLES:
        for chosen in (Regime("few", table.few, 2), Regime("many", table.many, 2)):
            for dtype in _DTYPES:
                step = dataclasses.replace(_SMALL[chosen.name], dtype=dtype)
                makers: dict[str, Callable[[], Launch]] = {}
                for block in chosen.tiles.inputs:
                    tiles = dataclasses.replace(chosen.tiles, inputs=(block,))
                    regime = dataclasses.replace(chosen, tiles=tiles)
                    makers[f"shrink_{chosen.name}-{block}"] = partial(shrink, step, regime)
                for block in chosen.tiles.columns:
                    tiles = dataclasses.replace(chosen.tiles, columns=(block,))
                    regime = dataclasses.replace(chosen, tiles=tiles)
                    for mode, overwrite in (("add", False), ("overwrite", True)):
                        makers[f"expand_{chosen.name}-{block}-{mode}"] = partial(
                            expand, step, regime, overwrite=overwrite
                        )
                for key, make in makers.items():
                    name = f"lora_{key.partition('-')[0]}"
                    launches = {f"{key.partition('-')[2]} {str(dtype).removeprefix('torch.')}": make}
                    cases.append(_made(name, launches))
    return cases


CASES = [
    _case("lora_shrink_few", shrink, _FEW),
    _case("lora_expand_few", expand, _FEW),
    _case("lora_shrink_many", shrink, _MANY),
    _case("lora_expand_many", expand, _MANY),
    *_variants(),
    *_configurations(),
]
