"""The window's kernels for Ascend in the configurations that their launcher can choose, for the gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from kernels.lora import triton_ascend as lora
from kernels.lora.ascend.tiles import TABLES, Regime
from kernels.lora_window import reference, triton_ascend, triton_ascend_kernels
from tests.ascend.cases.far import far_apart
from tests.ascend.cases.lora_cases import (
    CANCELLED,
    COLUMN,
    CONV,
    DELTA,
    MAPS,
    NUM_VECTOR_CORES,
    ON_CHIP_BYTES,
    ON_CHIP_FRACTION,
    OUT,
    Data,
    Step,
    make_data,
)
from tests.ascend.gate.cases import MAX_TRAFFIC, Case, Launch
from tests.support.models.published import product_of
from tests.tolerances import OP

# Rows that the window has behind the last adapter's.
NUM_SPARE_ROWS = 16


def _make(step: Step) -> tuple[Data, torch.Tensor]:
    """The step's data and its product. Far away are rows of the product alone: those of B lie in the window."""
    data = make_data(dataclasses.replace(step, far=False))
    product = _product(data)
    # A visit's tokens are counted with 32 bits no further than a group.
    return data, far_apart(product, 2**31 // 16 + 16) if step.far else product


def _product(data: Data, seed: int = 1) -> torch.Tensor:
    """A base output, then h: of each token in the columns of its own adapter's ranks, NaN elsewhere."""
    stack, num_slices = data.stack, len(data.stack.b)
    random = torch.Generator().manual_seed(seed)
    num_rows = max((one.first_rows[0] for one in data.maps.segments), default=0) + 256 + NUM_SPARE_ROWS
    num_columns = stack.output_width
    product = torch.full((data.maps.num_tokens, num_columns + num_rows * num_slices), torch.nan, dtype=data.step.dtype)
    product[:, :num_columns] = data.out
    for segment in data.maps.segments:
        for s, ranks in enumerate(stack.host_ranks):
            first = num_columns + max(segment.first_rows[0], 0) * num_slices + s
            h = product[segment.start : segment.end, first::num_slices][:, : ranks[segment.place]]
            h.copy_(torch.randn(h.shape, generator=random))
            if data.step.cancels:
                h[:, :16] *= CANCELLED
                h[:, 16:32] = h[:, :16]
    return product


def _regime(columns: tuple[int, ...] = (), num_cores: int = NUM_VECTOR_CORES) -> Regime:
    with mock.patch.object(lora, "chip_sizes", return_value=(num_cores, ON_CHIP_BYTES)):
        regime = triton_ascend.regime_of("npu")
    tiles = regime.tiles
    return dataclasses.replace(regime, tiles=dataclasses.replace(tiles, columns=columns or tiles.columns))


def _read_bytes(step: Step) -> int:
    """Bytes of h, and of the active adapters' rows."""
    h = sum(rank * length for ranks in step.ranks for rank, length in zip(ranks, step.lengths, strict=True))
    rows = sum(sum(ranks) * width for ranks, width in zip(step.ranks, step.widths, strict=True))
    return (h + rows) * step.dtype.itemsize


def expand(
    step: Step,
    regime: Regime | None = None,
    *,
    judge_traffic: bool = False,
    max_traffic: float = MAX_TRAFFIC,
) -> Launch:
    """The expand of a step."""
    data, product = _make(step)
    plan = triton_ascend.plan_expand(product, data.stack, data.maps, regime or _regime())
    expected = product.clone()
    reference.lora_expand_window(expected, data.stack, data.maps)
    minimum = _read_bytes(step) + 2 * sum(step.lengths) * sum(step.widths) * step.dtype.itemsize
    return Launch(
        plan.arguments,
        plan.grid,
        {"product_ptr": expected},
        MAPS,
        reachable={f"b{s}": b for s, b in enumerate(data.stack.b)},
        minimum_bytes=minimum if judge_traffic else None,
        max_traffic=max_traffic,
        tolerance=OP[step.dtype],
    )


def swiglu(
    step: Step,
    regime: Regime | None = None,
    *,
    judge_traffic: bool = False,
    max_traffic: float = MAX_TRAFFIC,
) -> Launch:
    """The gate of a step of two slices."""
    data, product = _make(step)
    num_tokens, size = data.maps.num_tokens, step.widths[0]
    out = torch.full((num_tokens, size), torch.nan, dtype=step.dtype)
    plan = triton_ascend.plan_swiglu(product, out, data.stack, data.maps, regime or _regime())
    expected = torch.empty_like(out)
    reference.swiglu_window(product, data.stack, data.maps, out=expected)
    minimum = _read_bytes(step) + 3 * num_tokens * size * step.dtype.itemsize
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected},
        MAPS,
        minimum_bytes=minimum if judge_traffic else None,
        max_traffic=max_traffic,
        tolerance=OP[step.dtype],
    )


def _packed(step: Step, num_slices: int, widths: list[int]) -> Step:
    """The step with these slices, each with the ranks of its first."""
    return dataclasses.replace(step, ranks=[step.ranks[0]] * num_slices, widths=widths)


ONE = Step([1], [[16]], 16, OUT[1])
FOUR = Step([16] * 4, [[16] * 4], 16, OUT[1])
UNEVEN = Step([10, 23, 14, 17], [[16] * 4], 16, OUT[1])
EIGHT = Step([1] * 8, [[16] * 8], 16, OUT[1])
SIXTY_FOUR = Step([1] * 64, [[16] * 64], 16, OUT[1])
WIDE_RANK = Step([1], [[64]], 16, OUT[1])
_, QKV = product_of("Llama-3-8B", "self_attn.qkv_proj")
GATES = [4096, 4096]
# For steps of many adapters, which take the simulator long; with fewer columns h is more beside B.
FEW_QKV = [1024, 256, 256]
FEW_GATES = [1024, 1024]
ODD = Step([3, 20, 1], [[16, 5, 40]], 16, [777], num_base=4)
PACKED = Step([2, 1, 5], [[16, 8, 0], [16, 0, 0], [3, 33, 0]], 16, [300, 40, 8], num_base=1)
LARGE_RANKS = Step([18, 1, 5], [[40, 130, 33]], 16, [300])
# A tile of tokens that has no adapter's.
BASE_TILE = Step([3], [[16]], 16, [130], num_base=70)
NO_SPARE = Step([3, 2], [[16, 5]], 16, [130], num_base=4, num_spare=0)
# Qwen3.5 and LFM2, as in `lora_cases`.
QWEN35 = Step([2, 1, 1], [[16, 8, 0], [16, 5, 24], [8, 0, 16], [0, 16, 3]], 16, DELTA[1], num_base=1)
ONE_COLUMN = Step([3, 1], [[24, 5]], 16, COLUMN[1], num_base=1)
LFM2 = Step([3, 1], [[24, 5]], 16, CONV[1], num_base=1)
THREE_SLICES = Step([3, 1], [[24, 5], [16, 0], [8, 16]], 16, [1024, 1024, 1024], num_base=1)
# The window's first adapter: rows may begin at row 0, which is also what stands for those of adapters without any.
FIRST_ROWS = Step([3, 2], [[16, 5]], 16, [130], num_base=1, first_row=0)
CANCELLING = Step([3, 9], [[40, 48]], 16, [130], cancels=True)
# Far are both a token of a visit and the first of another.
FAR = Step([18, 1], [[16, 40]], 16, [256], far=True)

# Three groups of at most 8 tokens: B is read once for each, and h of a token in its own alone. Groups of 16 would move
# less, but the gate's take 89 % of the unified buffer, and each token of a rank above 16
# pays for masks over all rows of a group.
GROUPS = Step([20], [[64]], 16, [512])

GATE_ODD = Step([3, 20, 1], [[16, 5, 40], [0, 16, 3]], 16, [777, 777], num_base=4)
GATE_UNTARGETED = Step([2, 1, 17], [[16, 0, 33], [0, 0, 130]], 16, [130, 130], num_base=1)
# Tokens of an adapter that has no rows here, in the middle of those that have.
GATE_BASE = Step([40], [[0], [0]], 16, [300, 300], num_base=3)
GATE_NO_SPARE = Step([3, 2], [[16, 5], [8, 16]], 16, [130, 130], num_spare=0)
GATE_BEHIND = Step([3, 2], [[16, 5], [8, 16]], 16, [130, 130], num_base=63, num_spare=0)
# An adapter's tokens in two tiles.
TILES = Step([60, 9, 1], [[16, 5, 40]], 16, [130], num_base=3)

JUDGED_EXPANDS = {
    "one token": ONE, "8 adapters": EIGHT, "4 adapters": FOUR, "4 uneven": UNEVEN, "64 adapters": SIXTY_FOUR,
    "rank 64": WIDE_RANK, "q, k, v of one token": _packed(ONE, 3, QKV),
    "q, k, v of 64": _packed(SIXTY_FOUR, 3, FEW_QKV), "three groups": GROUPS,
}  # fmt: skip
_EXPANDS = {
    "odd sizes": ODD, "packed": PACKED, "large ranks": LARGE_RANKS, "base tile": BASE_TILE, "no spare": NO_SPARE,
    "two tiles": TILES, "qwen3.5": QWEN35, "lfm2": LFM2, "far": FAR,
    "three slices": THREE_SLICES, "one column": ONE_COLUMN, "first rows": FIRST_ROWS, "cancelling": CANCELLING,
}  # fmt: skip
JUDGED_GATES = {
    "one token": _packed(ONE, 2, GATES), "8 adapters": _packed(EIGHT, 2, GATES),
    "4 uneven": _packed(UNEVEN, 2, GATES), "64 adapters": _packed(SIXTY_FOUR, 2, FEW_GATES),
    "three groups": _packed(GROUPS, 2, [512, 512]),
}  # fmt: skip
_GATES = {
    "odd sizes": GATE_ODD, "untargeted": GATE_UNTARGETED, "no rows": GATE_BASE, "no spare": GATE_NO_SPARE,
    "base tile": GATE_BEHIND, "two tiles": _packed(TILES, 2, [130, 130]), "far": _packed(FAR, 2, [256, 256]),
    "first rows": _packed(FIRST_ROWS, 2, [130, 130]), "cancelling": _packed(CANCELLING, 2, [130, 130]),
}  # fmt: skip
# h of a token's rank of 16 is 32 bytes of its row of the product, for which the chip moves 128 in each chunk of
# columns: much beside B where few adapters have many tokens, or the output has few columns. Tiles of 32 tokens read B
# twice where an adapter has tokens in both, but take less time than one of 64: an expand has half the chunks, and the
# gate, which has no larger ones, an item for more cores.
MAX_TRAFFIC_OF = {
    "lora_expand_window_few": {"4 adapters": 1.22, "4 uneven": 1.31, "three groups": 3.15},
    "swiglu_window_few": {"4 uneven": 1.31, "three groups": 2.75},
}
# Of each judged launch, 2 % above what the tiles of the table take by estimate.
MAX_US_OF = {
    "lora_expand_window_few": {
        "one token": 0.79, "8 adapters": 6.2, "4 adapters": 21.1, "4 uneven": 21.4, "64 adapters": 31.7,
        "rank 64": 3.44, "q, k, v of one token": 1.21, "q, k, v of 64": 28.6, "three groups": 50.4,
    },
    "swiglu_window_few": {
        "one token": 1.71, "8 adapters": 12.4, "4 uneven": 68.7, "64 adapters": 51.6, "three groups": 94.5,
    },
}  # fmt: skip
# Small, for trying each block in each type.
_SMALL = Step([3, 14, 1], [[16, 5, 24], [0, 16, 8]], 16, [333, 333], num_base=2)


def _configurations(make: Callable[..., Launch], blocks: tuple[int, ...]) -> dict[str, Callable[[], Launch]]:
    return {
        f"{block} {str(dtype).removeprefix('torch.')}": partial(
            make, dataclasses.replace(_SMALL, dtype=dtype), _regime((block,), 2)
        )
        for block in blocks
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }


def _case(name: str, make: Callable[..., Launch], judged: dict[str, Step], others: dict[str, Step]) -> Case:
    limits = MAX_TRAFFIC_OF[name]
    launches: dict[str, Callable[[], Launch]] = {
        **{
            key: partial(make, step, judge_traffic=True, max_traffic=limits.get(key, MAX_TRAFFIC))
            for key, step in judged.items()
        },
        **{key: partial(make, step) for key, step in others.items()},
        **_configurations(make, TABLES[0].few.columns if make is expand else (triton_ascend.SWIGLU_COLUMNS,)),
    }
    kernel = getattr(triton_ascend_kernels, name)
    # Two loops stand around a visit: over the tiles of a core, and over the segments of a tile.
    return Case(name, kernel, launches, work_loop_depth=2, on_chip_fraction=ON_CHIP_FRACTION, max_us=MAX_US_OF[name])


CASES = [
    _case("lora_expand_window_few", expand, JUDGED_EXPANDS, _EXPANDS),
    _case("swiglu_window_few", swiglu, JUDGED_GATES, _GATES),
]
