"""The kernels of adapters of experts for Ascend, for the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.expert_lora import triton_ascend
from kernels.expert_lora.ops import Pairs
from kernels.platform import detect, installed
from tests.ascend.cases.far import far_apart
from tests.ascend.cases.lora_cases import MAPS, NUM_VECTOR_CORES, ON_CHIP_FRACTION, Data, Step, make_data
from tests.ascend.gate.cases import MAX_TRAFFIC, Case, Launch
from tests.support.models.published import spec_of
from tests.tolerances import OP

PAIR_MAPS = MAPS - {"segment_starts"} | {"experts", "tokens"}
_BLOCK = 16


@dataclass(frozen=True)
class Routed:
    """A step whose tokens each go to some experts.

    step  its ranks are those of one expert
    """

    step: Step
    num_experts: int
    num_chosen: int
    num_cores: int = NUM_VECTOR_CORES

    def rank_of(self, slice_index: int, segment: int) -> int:
        return 0 if segment < 0 else self.step.ranks[slice_index][segment]


def make(routed: Routed) -> tuple[Data, Pairs, torch.Tensor, torch.Tensor]:
    """The step's data with rows for each expert, its pairs, and x and out of them; x of base tokens is NaN."""
    step, num_experts = routed.step, routed.num_experts
    ranks = [[rank * num_experts for rank in of_slice] for of_slice in step.ranks]
    data = make_data(replace(step, ranks=ranks))
    random = torch.Generator().manual_seed(2)
    logits = torch.rand(data.maps.num_tokens, num_experts, generator=random)
    experts, order = logits.topk(routed.num_chosen, dim=1).indices.flatten().sort(stable=True)
    pairs = Pairs(experts, order // routed.num_chosen, num_experts)
    x = torch.randn(len(experts), step.in_features, generator=random).to(step.of_rows)
    x[data.maps.token_segment[pairs.tokens] < 0] = torch.nan
    out = torch.randn(len(experts), sum(step.widths), generator=random).to(step.dtype)
    if step.far:
        x, out = (far_apart(one, 2**31 // (len(experts) - 1) + 1024) for one in (x, out))
    return data, pairs, x, out


def _segments(data: Data, pairs: Pairs) -> list[int]:
    """The segment of each pair's token, -1 for the base's."""
    return data.maps.token_segment[pairs.tokens].tolist()


def _h(routed: Routed, segments: list[int]) -> torch.Tensor:
    """NaN, as wide as needed; zeros in an adapter's blocks of ranks."""
    step = routed.step
    width = -(-max(max(ranks) for ranks in step.ranks) // _BLOCK) * _BLOCK
    h = torch.full((len(step.widths), len(segments), width), torch.nan)
    for s in range(len(step.widths)):
        for pair, segment in enumerate(segments):
            h[s, pair, : -(-routed.rank_of(s, segment) // _BLOCK) * _BLOCK] = 0.0
    return h


def _minimum(routed: Routed, pairs: Pairs, segments: list[int], features: list[int]) -> int:
    """Bytes of h, and of the rows of all experts that adapters meet."""
    met = set(zip(pairs.experts.tolist(), segments, strict=True))
    slices = range(len(features))
    rows = sum(routed.rank_of(s, segment) * features[s] for _, segment in met for s in slices)
    return rows * routed.step.of_rows.itemsize + 4 * sum(routed.rank_of(s, one) for one in segments for s in slices)


def shrink(routed: Routed, *, judge_traffic: bool = False, max_traffic: float = MAX_TRAFFIC) -> Launch:
    """The shrink of a step."""
    data, pairs, x, _ = make(routed)
    step, segments = routed.step, _segments(data, pairs)
    h = torch.full_like(expected := _h(routed, segments), torch.nan)
    with installed(replace(detect("cpu"), num_cores=routed.num_cores)):
        plan = triton_ascend.plan_shrink(x, h, data.stack, data.maps, pairs)
    for pair, segment in enumerate(segments):
        for s, a in enumerate(data.stack.a):
            if rank := routed.rank_of(s, segment):
                of_segment = data.maps.segments[segment]
                first = of_segment.first_rows[0] + int(pairs.experts[pair]) * rank
                scaling = data.stack.host_scalings[s][of_segment.place]
                expected[s, pair, :rank] = scaling * (a[first : first + rank].double() @ x[pair].double())
    num_bytes = sum(one >= 0 for one in segments) * step.in_features * step.of_rows.itemsize
    minimum = num_bytes + _minimum(routed, pairs, segments, [step.in_features] * len(step.widths))
    return Launch(
        plan.arguments,
        plan.grid,
        {"h_ptr": expected},
        PAIR_MAPS,
        reachable={f"a{s}": a for s, a in enumerate(data.stack.a)},
        minimum_bytes=minimum if judge_traffic else None,
        max_traffic=max_traffic,
        tolerance=(1e-4, 1e-4),
    )


def expand(routed: Routed, *, judge_traffic: bool = False, max_traffic: float = MAX_TRAFFIC) -> Launch:
    """The expand of a step,."""
    data, pairs, _, out = make(routed)
    step, segments = routed.step, _segments(data, pairs)
    h = _h(routed, segments)
    random = torch.Generator().manual_seed(3)
    expected = out.double()
    for pair, segment in enumerate(segments):
        for s, (b, column) in enumerate(zip(data.stack.b, data.stack.slice_starts, strict=True)):
            if rank := routed.rank_of(s, segment):
                h[s, pair, :rank] = torch.randn(rank, generator=random)
                first = data.maps.segments[segment].first_rows[0] + int(pairs.experts[pair]) * rank
                delta = h[s, pair, :rank].double() @ b[first : first + rank].double()
                expected[pair, column : column + step.widths[s]] += delta
    with installed(replace(detect("cpu"), num_cores=routed.num_cores)):
        plan = triton_ascend.plan_expand(h, out, data.stack, data.maps, pairs)
    num_bytes = 2 * sum(one >= 0 for one in segments) * sum(step.widths) * step.dtype.itemsize
    minimum = num_bytes + _minimum(routed, pairs, segments, list(step.widths))
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected.to(step.dtype)},
        PAIR_MAPS,
        reachable={f"b{s}": b for s, b in enumerate(data.stack.b)},
        minimum_bytes=minimum if judge_traffic else None,
        max_traffic=max_traffic,
        tolerance=OP[step.dtype],
    )


def _products(model: str) -> list[tuple[int, list[int]]]:
    """Inputs and widths of gate and up, and of down, of an expert."""
    spec = spec_of(model)
    return [(one.in_features, list(one.slices.values())) for one in spec.moes[0].expert_linears(spec.hidden_size)]


# Fewer experts than the model has: which of them a token meets makes no difference.
(GATE_UP, DOWN), _NUM, _CHOSEN = _products("Qwen3-30B-A3B"), 16, 8
ONE = Routed(Step([1], [[16], [16]], *GATE_UP), _NUM, _CHOSEN)
ONE_DOWN = Routed(Step([1], [[16]], *DOWN), _NUM, _CHOSEN)
EIGHT = Routed(Step([1] * 8, [[16] * 8] * 2, *GATE_UP), _NUM, _CHOSEN)
EIGHT_DOWN = Routed(Step([1] * 8, [[16] * 8], *DOWN), _NUM, _CHOSEN)
PROMPT = Routed(Step([24], [[16]], *DOWN), 4, 2)
# Ranks that begin anywhere, of which a slice has none, and base tokens between them and behind.
ODD = Routed(Step([3, 1, 2], [[1, 0, 17], [3, 2, 0]], 1000, [777, 777], num_base=2), 7, 3)
LARGE_RANKS = Routed(Step([2, 1], [[40, 130]], 200, [300], num_base=1), 5, 2)
NO_SPARE = Routed(Step([2, 1], [[16, 5]], 130, [130], num_base=1, num_spare=0), 3, 2)
FIRST_ROWS = Routed(Step([2, 1], [[16, 5]], 130, [130], first_row=0), 3, 2)
# Behind the last expert's rows come no zeros: there the rows end.
WHOLE_BLOCKS = Routed(Step([1], [[6]], 130, [130]), 8, 8)
# Adapters of attention alone have no rows here.
NO_ROWS = Routed(Step([2, 1, 1], [[0, 4, 0], [0, 4, 0]], 64, [96, 96], num_base=1), 4, 2)
FAR = Routed(Step([3], [[16]], 256, [256], far=True), 3, 1, num_cores=2)

_JUDGED: Mapping[str, Mapping[str, Routed]] = {
    "expert_shrink": {"one token": ONE, "one token, down": ONE_DOWN, "8 adapters": EIGHT, "prompt": PROMPT},
    "expert_expand": {"one token": ONE, "one token, down": ONE_DOWN, "8 adapters": EIGHT_DOWN, "prompt": PROMPT},
}
_OTHERS = {
    "odd sizes": ODD, "large ranks": LARGE_RANKS, "no spare": NO_SPARE, "first rows": FIRST_ROWS, "no rows": NO_ROWS,
    "whole blocks": WHOLE_BLOCKS, "far": FAR,
}  # fmt: skip
# Each pair reads its rows, though the tokens of a prompt share them with those of other pairs; the chip's cache, which
# the gate leaves out, has them then.
MAX_TRAFFIC_OF = {"expert_shrink": {"prompt": 7.3}, "expert_expand": {"prompt": 5.5}}
# Of each judged launch, 2 % above what it takes by estimate.
MAX_US_OF = {
    "expert_shrink": {"one token": 3.67, "one token, down": 1.94, "8 adapters": 14.7, "prompt": 3.85},
    "expert_expand": {"one token": 1.09, "one token, down": 1.02, "8 adapters": 7.43, "prompt": 5.3},
}
_DTYPES = (torch.float16, torch.float32)
# (of x and out, of the rows) where they differ.
_MIXED_DTYPES = ((torch.float32, torch.bfloat16), (torch.float16, torch.float32))


def _case(name: str, made: Callable[..., Launch]) -> Case:
    limits = MAX_TRAFFIC_OF[name]
    launches: dict[str, Callable[[], Launch]] = {
        key: partial(made, routed, judge_traffic=True, max_traffic=limits.get(key, MAX_TRAFFIC))
        for key, routed in _JUDGED[name].items()
    }
    launches |= {key: partial(made, routed) for key, routed in _OTHERS.items()}
    for dtype, row_dtype in (*((one, one) for one in _DTYPES), *_MIXED_DTYPES):
        step = replace(ODD.step, dtype=dtype, row_dtype=row_dtype)
        key = " of ".join(str(one).removeprefix("torch.") for one in (row_dtype, dtype))
        launches[key] = partial(made, replace(ODD, step=step))
    kernel = getattr(triton_ascend, name)
    # One loop stands around an item: over those of a core.
    return Case(name, kernel, launches, on_chip_fraction=ON_CHIP_FRACTION, max_us=MAX_US_OF[name])


CASES = [_case("expert_shrink", shrink), _case("expert_expand", expand)]
