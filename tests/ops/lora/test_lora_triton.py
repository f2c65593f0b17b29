"""The Triton LoRA kernels for NVIDIA GPUs: in Triton's interpreter on a CPU, on a GPU with `--device cuda`.

tests/ops/lora/test_lora.py covers the ops by themselves, and these kernels too with `--device cuda`. Here are tests
of what only the kernels have: splits, persistent grids, padding of the maps, configurations, replay.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora import cublas, ops
from kernels.lora.cuda.configs import (
    TABLES,
    UNBOUNDED,
    ExpandConfig,
    LoraConfig,
    OneTokenExpand,
    OneTokenShrink,
    ShrinkConfig,
    config_for,
)
from kernels.lora.maps import LoraMaps, LoraStack
from tests.ops.lora.test_lora import assert_right, expected_linear
from tests.support.engine.serving import serving
from tests.support.npu.triton_interpreter import multiply_bfloat16
from tests.support.ops.lora_cases import Case, Step, make_step, poison_workspaces, popularity

pytest.importorskip("triton", reason="Triton is not installed")

# Small tiles and grids, so that small cases have several tiles, blocks, splits, and items per program.
SMALL = (
    LoraConfig(UNBOUNDED, ShrinkConfig(3, 16, 32, 16, 2, 2, 2, 1), ExpandConfig(16, 32, 16, 1, 4, 1)),
    LoraConfig(UNBOUNDED, ShrinkConfig(1, 16, 64, 32, 1, 2, 4, 2), ExpandConfig(32, 64, 64, 2, 4, 2)),
)
TABLE = sorted({config for table in TABLES.values() for config in table}, key=lambda config: config.max_tokens)
SMALL_ONE_TOKEN = LoraConfig(1, OneTokenShrink(8, 16, 2, 1), OneTokenExpand((16, 32), 1, 2))


@pytest.fixture(scope="module")
def triton_cuda(device: str) -> Iterator[ModuleType]:
    """The implementation; in the interpreter with bfloat16 products made right."""
    from kernels.lora import triton_cuda as module

    patch = pytest.MonkeyPatch()
    if device == "cpu":
        multiply_bfloat16(patch)
    yield module
    patch.undo()


def reserve(module: ModuleType, step: Step, config: LoraConfig) -> None:
    """The workspace that `lora_linear` will take, so that it can be poisoned before."""
    num_splits = config.shrink.splits(step.stack.a[0].shape[1])
    # The table's own configurations may have no splits, and h then in 16 bits.
    module.reserve_workspace(step.stack, max(1, 2 * num_splits * step.maps.num_tokens))


def run(module: ModuleType, step: Step, config: LoraConfig, **options: Any) -> None:
    out = step.out.clone()
    if options.get("overwrite"):
        out[step.maps.token_segment >= 0] = float("nan")
    reserve(module, step, config)
    poison_workspaces(module)
    num_buffers = len(module.workspace.buffers)
    module.lora_linear(step.x, out, step.stack, step.maps, config=config, **options)
    assert len(module.workspace.buffers) == num_buffers, "what was poisoned is what was used"
    assert_right(out, expected_linear(step, overwrite=options.get("overwrite", False)), step, step.out)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Case, int]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    num_adapters, num_slices = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    name = draw(st.sampled_from(["distinct", "uniform", "zipf", "identical"]))
    lengths = popularity(name, draw(st.integers(1, 24)), num_adapters, rng) if num_adapters else ()
    largest = draw(st.sampled_from([4, 16, 40, 200]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    case = Case(
        in_features=draw(st.sampled_from([8, 96, 129])),
        widths=tuple(draw(st.sampled_from([8, 32, 50])) for _ in range(num_slices)),
        ranks=tuple(
            tuple(rng.choice([0, rng.randint(1, largest), largest]) for _ in lengths) for _ in range(num_slices)
        ),
        lengths=lengths,
        num_base_tokens=draw(st.integers(1, 3)),
        dtype=dtype,
        row_dtype=draw(st.sampled_from([dtype, torch.bfloat16])),
        seed=rng.randrange(2**32),
        interleaved=draw(st.booleans()),
    )
    return case, draw(st.sampled_from([0, 5, 17]))


@st.composite
def one_token_steps(draw: st.DrawFn) -> Case:
    rng = random.Random(draw(st.integers(0, 2**32)))
    num_adapters, num_slices = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    active = draw(st.integers(0, num_adapters))  # none of them: a base token
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Case(
        in_features=draw(st.sampled_from([8, 96, 129, 700])),
        widths=tuple(draw(st.sampled_from([8, 32, 50])) for _ in range(num_slices)),
        ranks=tuple(tuple(rng.choice([0, 1, 16, 17, 40]) for _ in range(num_adapters)) for _ in range(num_slices)),
        lengths=tuple(int(i == active) for i in range(num_adapters)),
        num_base_tokens=int(active == num_adapters),
        dtype=dtype,
        row_dtype=draw(st.sampled_from([dtype, torch.bfloat16])),
        seed=rng.randrange(2**32),
        interleaved=draw(st.booleans()),
    )


@settings(max_examples=12, deadline=None)
@given(case=one_token_steps(), overwrite=st.booleans(), by_index=st.booleans(), in_two=st.booleans())
def test_one_token_equals_float64(
    case: Case, overwrite: bool, by_index: bool, in_two: bool, triton_cuda: ModuleType, device: str
) -> None:
    """In one op or two, in the token's own row or another one's."""
    step = make_step(case, device=device, pad_to=5)
    x, out = step.x.repeat(3, 1), step.out.repeat(3, 1)
    row = 2 if by_index else 0
    index = torch.tensor([row], dtype=torch.int64, device=device) if by_index else None
    if overwrite and not case.num_base_tokens:
        out[row] = float("nan")
    options: dict[str, Any] = {"overwrite": overwrite, "row_index": index}
    if in_two:
        h = torch.full((len(case.widths), 1, ops.shrink_width(step.stack)), float("nan"), device=device)
        triton_cuda.lora_shrink(x, step.stack, step.maps, out=h, row_index=index)
        triton_cuda.lora_expand(h, out, step.stack, step.maps, **options)
    else:
        reserve(triton_cuda, step, SMALL_ONE_TOKEN)
        poison_workspaces(triton_cuda)
        triton_cuda.lora_linear(x, out, step.stack, step.maps, config=SMALL_ONE_TOKEN, **options)
    assert_right(out[row : row + 1], expected_linear(step, overwrite=overwrite), step, step.out)
    assert torch.equal(out[1], step.out[0])


@settings(max_examples=12, deadline=None)
@given(step=steps(), config=st.sampled_from(SMALL), overwrite=st.booleans())
def test_kernels_equal_float64(
    step: tuple[Case, int], config: LoraConfig, overwrite: bool, triton_cuda: ModuleType, device: str
) -> None:
    case, pad_to = step
    run(triton_cuda, make_step(case, device=device, pad_to=pad_to), config, overwrite=overwrite)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("in_features", "widths", "dtype"),
    [
        (160, (40, 8), torch.float32),
        (512, (256, 128), torch.bfloat16),
        (512, (192, 48), torch.float16),  # masked columns, of several alignments
        (512, (256, 72), torch.bfloat16),
        (129, (50, 9), torch.bfloat16),
    ],
)
@pytest.mark.parametrize("config", [config for config in TABLE if config.max_tokens > 1])
def test_every_table_entry_is_right(
    config: LoraConfig,
    in_features: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    triton_cuda: ModuleType,
    device: str,
) -> None:
    """Two slices, each way to multiply ranks (16, 32, 64, 128, others), segments of several tiles and of one token."""
    assert isinstance(config.shrink, ShrinkConfig)
    block_m = config.shrink.block_m
    ranks = ((16, 40, 120, 200, 64), (3, 0, 70, 20, 31))
    lengths = (block_m + 3, 2, block_m, 1, 5)
    case = Case(in_features, widths, ranks, lengths, num_base_tokens=1, dtype=dtype, seed=block_m)
    run(triton_cuda, make_step(case, device=device), config)


WIDE = (1030, (72, 300), torch.bfloat16)
ALIGNED = (160, (40,), torch.float32)
ODD = (129, (50, 9, 130), torch.float16)


@pytest.mark.parametrize(
    ("rank", "shape"),
    [(0, ODD), (1, WIDE), (16, ALIGNED), (17, ODD), (64, WIDE), (100, ALIGNED), (256, ODD)],
)
@pytest.mark.parametrize("config", [config for config in TABLE if config.max_tokens == 1] + [SMALL_ONE_TOKEN])
@pytest.mark.parametrize("overwrite", [False, True])
def test_one_token(
    rank: int,
    shape: tuple[int, tuple[int, ...], torch.dtype],
    config: LoraConfig,
    overwrite: bool,
    triton_cuda: ModuleType,
    device: str,
) -> None:
    """A step of one token: of the second of two resident adapters, whose slices differ in rank."""
    in_features, widths, dtype = shape
    ranks = tuple((7, max(0, rank - i)) for i in range(len(widths)))
    case = Case(in_features, widths, ranks, (0, 1), dtype=dtype, seed=rank)
    run(triton_cuda, make_step(case, device=device, pad_to=5), config, overwrite=overwrite)


def test_one_token_without_adapter(triton_cuda: ModuleType, device: str) -> None:
    case = Case(64, (24, 40), ((16,), (3,)), (0,), num_base_tokens=1)
    step = make_step(case, device=device)
    for overwrite in (False, True):
        out = step.out.clone()
        triton_cuda.lora_linear(step.x, out, step.stack, step.maps, config=SMALL_ONE_TOKEN, overwrite=overwrite)
        assert torch.equal(out, step.out)


@pytest.mark.parametrize("in_features", [4096, 2 * 512 * 32 + 90])
def test_one_token_of_many_inputs(in_features: int, triton_cuda: ModuleType, device: str) -> None:
    """As many parts as the table makes, of one block and of several."""
    case = Case(in_features, (40,), ((18,),), (1,), dtype=torch.bfloat16)
    run(triton_cuda, make_step(case, device=device), config_for("any", 1))


def test_one_token_of_the_embedding(triton_cuda: ModuleType, device: str) -> None:
    step = make_step(Case(50, (24,), ((130,),), (1,)), device=device)
    token_ids = torch.tensor([7], device=device)
    one_hot = torch.nn.functional.one_hot(token_ids, 50).to(step.x.dtype)
    out = step.out.clone()
    triton_cuda.lora_embedding(token_ids, out, step.stack, step.maps)
    assert_right(out, expected_linear(Step(one_hot, step.out, step.stack, step.maps)), step, step.out)


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_tokens(overwrite: bool, triton_cuda: ModuleType, device: str) -> None:
    step = make_step(Case(40, (24,), ((16,),), (0,), num_base_tokens=0), device=device)
    triton_cuda.lora_linear(step.x, step.out, step.stack, step.maps, overwrite=overwrite)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    triton_cuda.lora_embedding(ids, step.out, step.stack, step.maps, overwrite=overwrite)


def test_one_token_where_no_adapter_fits(triton_cuda: ModuleType, device: str) -> None:
    """A pool without places has no ranks that could be read."""
    step = make_step(Case(64, (24, 40), ((16,), (3,)), (0,), num_base_tokens=1), device=device)
    nothing = replace(step.stack, ranks=step.stack.ranks[:, :0], scalings=step.stack.scalings[:, :0])
    before = step.out.clone()
    triton_cuda.lora_linear(step.x, step.out, nothing, step.maps, config=SMALL_ONE_TOKEN)
    assert torch.equal(step.out, before)


def test_shares_of_one_token() -> None:
    """By hand: how an H200 shares out the one token of an 8B model, and of smaller and larger projections."""
    config = config_for("NVIDIA H200", 1)
    assert isinstance(config.shrink, OneTokenShrink)
    assert isinstance(config.expand, OneTokenExpand)
    assert [config.shrink.splits(inputs) for inputs in (64, 129, 2048, 4096, 14336)] == [1, 1, 16, 32, 32]
    assert [config.shrink.part(inputs, 32) for inputs in (4096, 14336, 17408)] == [128, 448, 576]
    assert config.shrink.splits(17408) == 31
    assert config.expand.columns((4096, 1024, 1024), 528) == (64, 96)
    assert config.expand.columns((14336, 14336), 528) == (64, 448)
    assert config.expand.columns((152064,), 528) == (128, 1188)


@pytest.mark.parametrize("max_tokens", [128, 1024])
@pytest.mark.parametrize("rank", [1, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256])
def test_ranks_are_computed_up_to_the_next_multiple_of_16(
    rank: int, max_tokens: int, triton_cuda: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiplications of one tile, as the interpreter is asked for them."""
    if device != "cpu":
        pytest.skip("NOT RUN: products are counted in the interpreter")
    from triton.runtime.interpreter import InterpreterBuilder

    config, products = config_for("any", max_tokens), []
    create_dot = InterpreterBuilder.create_dot

    def counted(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        products.append(left.data.size * right.data.shape[-1])
        return create_dot(builder, left, right, *rest)

    step = make_step(Case(512, (256,), ((rank,),), (3,), dtype=torch.float32))
    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", counted)
        triton_cuda.lora_linear(step.x, step.out, step.stack, step.maps, config=config)
    assert isinstance(config.shrink, ShrinkConfig)
    assert sum(products) == config.shrink.block_m * -(-rank // 16) * 16 * (512 + 256)


def test_configuration_follows_from_the_token_count() -> None:
    table = TABLES["any"]
    for config, following in pairwise(table):
        assert config_for("unknown", config.max_tokens) is config
        assert config_for("unknown", config.max_tokens + 1) is following
    assert config_for("NVIDIA H200", 1) is TABLES["NVIDIA H200"][0]


LONG = {
    "one adapter": Case(40, (24,), ((40,),), (9,), num_base_tokens=3),
    "slices that it leaves alone": Case(64, (24, 8, 40), ((130,), (0,), (16,)), (7,), num_base_tokens=2),
    "behind a base weight": Case(96, (32, 8), ((80,), (66,)), (12,), interleaved=True, dtype=torch.bfloat16),
    "several": Case(96, (50,), ((140, 16, 7),), (5, 8, 4), num_base_tokens=1, seed=3),
}


@pytest.mark.parametrize("name", LONG)
def test_long_prompts_are_products_of_the_library(name: str, triton_cuda: ModuleType, device: str) -> None:
    """Of steps that run once only, since a captured one serves other adapters when it is replayed."""
    config, step = replace(SMALL[1], min_plain_tokens=4), make_step(LONG[name], device=device, pad_to=8)
    assert not cublas.serves(config, step.x, step.stack, step.maps)
    step = replace(step, maps=replace(step.maps, runs_once=True))
    assert cublas.serves(config, step.x, step.stack, step.maps)
    assert not cublas.serves(replace(config, min_plain_tokens=10_000), step.x, step.stack, step.maps)
    run(triton_cuda, step, config)
    run(triton_cuda, step, config, overwrite=True)


def test_largest_rank(triton_cuda: ModuleType, device: str) -> None:
    run(triton_cuda, make_step(Case(64, (8,), ((256, 250),), (2, 1)), device=device), SMALL[0])


@pytest.mark.wide
def test_largest_step(triton_cuda: ModuleType, device: str) -> None:
    """16,384 tokens in the tiles that the table chooses for them."""
    case = Case(64, (24,), ((16, 8, 20),), (9001, 1, 7380), num_base_tokens=2, dtype=torch.float16)
    run(triton_cuda, make_step(case, device=device), config_for("any", 16384))


@pytest.mark.parametrize("overwrite", [False, True])
def test_one_program_takes_many_blocks(overwrite: bool, triton_cuda: ModuleType, device: str) -> None:
    """Runs of column blocks, with few ranks, tall ones, and none in a slice."""
    case = Case(40, (150, 33), ((16, 20), (3, 0)), (3, 2), num_base_tokens=1)
    run(triton_cuda, make_step(case, device=device), SMALL[0], overwrite=overwrite)


def test_row_index(triton_cuda: ModuleType, device: str) -> None:
    step = make_step(Case(40, (24,), ((16, 4),), (3, 2), num_base_tokens=1), device=device)
    order = torch.tensor([4, 0, 5, 1, 3, 2], device=device)
    x, out = torch.empty_like(step.x), torch.empty_like(step.out)
    x[order], out[order] = step.x, step.out
    triton_cuda.lora_linear(x, out, step.stack, step.maps, row_index=order.int(), config=SMALL[0])
    assert_right(out[order], expected_linear(step), step, step.out)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6], [4, 0, 6, 1, 3, 5, 2]], ids=["in order", "row index"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_embedding(overwrite: bool, order: list[int], triton_cuda: ModuleType, device: str) -> None:
    step = make_step(Case(50, (24,), ((16, 130),), (4, 1), num_base_tokens=2), device=device)
    token_ids, rows = torch.tensor([0, 49, 7, 7, 3, 2, 1], device=device), torch.tensor(order, device=device)
    one_hot = torch.nn.functional.one_hot(token_ids[rows], 50).to(step.x.dtype)
    expected = expected_linear(Step(one_hot, step.out, step.stack, step.maps), overwrite=overwrite)
    out = torch.empty_like(step.out)
    out[rows] = step.out
    triton_cuda.reserve_workspace(step.stack, 7)
    poison_workspaces(triton_cuda)
    index = None if order == sorted(order) else rows.int()
    triton_cuda.lora_embedding(token_ids, out, step.stack, step.maps, overwrite=overwrite, row_index=index)
    assert_right(out[rows], expected, step, step.out)


def test_shrink_then_expand(triton_cuda: ModuleType, device: str) -> None:
    step = make_step(Case(70, (24, 8), ((16, 3), (0, 20)), (3, 1), num_base_tokens=1), device=device)
    h = torch.full((2, 5, ops.shrink_width(step.stack)), float("nan"), device=device)
    out = step.out.clone()
    triton_cuda.lora_shrink(step.x, step.stack, step.maps, out=h)
    triton_cuda.lora_expand(h, out, step.stack, step.maps)
    assert_right(out, expected_linear(step), step, step.out)


def test_warm_up_changes_no_result_and_reserves_the_workspace(triton_cuda: ModuleType, device: str) -> None:
    step = make_step(Case(64, (24, 8), ((16, 40), (0, 7)), (30, 2), num_base_tokens=1), device=device)
    with serving("lora", triton_cuda, step.x.device.type):
        ops.warm_up([step.stack], 33, step.x.dtype, max_segments=2)
        before = [buffer.data_ptr() for buffer in triton_cuda.workspace.buffers]
        assert before
        poison_workspaces(triton_cuda)
        out = step.out.clone()
        ops.lora_linear(step.x, out, step.stack, step.maps)
    assert [buffer.data_ptr() for buffer in triton_cuda.workspace.buffers] == before
    assert_right(out, expected_linear(step), step, step.out)


def test_tables_are_usable() -> None:
    for table in TABLES.values():
        bounds = [config.max_tokens for config in table]
        assert bounds == sorted(bounds)
        assert bounds[-1] == UNBOUNDED
        for config in table:
            if isinstance(config.shrink, ShrinkConfig):
                assert config.shrink.block_k % config.shrink.groups == 0
            if isinstance(config.expand, ExpandConfig):
                assert config.expand.block_n % config.expand.block_n_tall == 0


def test_compiles_for_hopper_without_a_gpu(device: str) -> None:
    """Every kernel in every configuration of the tables, down to machine code within the shared memory of a core."""
    if device != "cpu":
        pytest.skip("NOT RUN: on a GPU the other tests compile for that GPU")
    sizes = [int(line.split()[-1]) for line in run_compiling("compile_lora.py").splitlines()]
    tiled = [config.shrink for config in TABLE if isinstance(config.shrink, ShrinkConfig)]
    one_token = [config.expand for config in TABLE if isinstance(config.expand, OneTokenExpand)]
    num_large = sum(shrink.block_m >= 64 for shrink in tiled)
    assert len(sizes) == 3 * len(tiled) + 4 * num_large + 14 * len(one_token) + 1
    assert max(sizes) <= 227 * 1024


def test_nothing_is_compiled_after_warm_up(device: str) -> None:
    """As Triton's launch path sees it; the test of captured graphs counts what really is compiled, on a GPU."""
    if device != "cpu":
        pytest.skip("NOT RUN: the count is made for the machine without a GPU")
    num_warm, num_later = map(int, run_compiling("count_lora_variants.py").split())
    assert num_warm > 10
    assert num_later == 0


def run_compiling(script: str, *arguments: str) -> str:
    """Standard output of a script of tests/support, in a process whose Triton compiles rather than interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    file = Path(__file__).parents[2] / "support" / "ops" / script
    result = subprocess.run(
        [sys.executable, file, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


MAP_TENSORS = ("segment_starts", "places", "first_rows", "token_segment", "num_segments")


def copy_into(target: LoraMaps, source: LoraMaps) -> None:
    for name in MAP_TENSORS:
        getattr(target, name).copy_(getattr(source, name))


def mixed_step(seed: int, num_tokens: int, device: str) -> Step:
    """A random mix of up to 8 adapters, always of the same padded size."""
    rng = random.Random(seed)
    num_adapters = rng.randint(1, min(8, num_tokens))
    active = rng.randint(num_adapters, num_tokens)
    lengths = [1] * num_adapters
    if num_tokens == 1 and seed % 4 == 3:
        active, lengths = 0, [0]  # a base token
    for _ in range(active - num_adapters):
        lengths[rng.randrange(num_adapters)] += 1
    lengths += [0] * (8 - len(lengths))
    ranks = tuple(tuple(rng.choice([0, 1, 8, 16, 64, 100]) for _ in lengths) for _ in range(2))
    case = Case(512, (256, 72), ranks, tuple(lengths), num_tokens - active, torch.bfloat16, seed=seed)
    return make_step(case, device=device, pad_to=8)


def fill(rows: LoraStack, step: Step) -> None:
    """Copy a step's rows and tables into tensors that a graph reads."""
    for target, source in zip((*rows.a, *rows.b), (*step.stack.a, *step.stack.b), strict=True):
        target[: len(source)].copy_(source)
    rows.ranks.copy_(step.stack.ranks)
    rows.scalings.copy_(step.stack.scalings)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 200, 400, 2000, 16384])
def test_captured_once_replayed_with_other_mixes(num_tokens: int, triton_cuda: ModuleType, device: str) -> None:
    """One capture, 50 random mixes of adapters, ranks and tokens: bit-equal to eager, and nothing is compiled."""
    if device == "cpu":
        pytest.skip("NOT RUN: no NVIDIA GPU, and graphs need one")
    step = mixed_step(0, num_tokens, device)
    num_rows, group = 8 * 112 + 32, step.stack.group
    rows = LoraStack(
        tuple(a.new_zeros(num_rows, a.shape[1]) for a in step.stack.a),
        tuple(b.new_zeros(num_rows, b.shape[1]) for b in step.stack.b),
        step.stack.ranks.clone(),
        step.stack.scalings.clone(),
        group,
        step.stack.slice_starts,
        step.stack.host_ranks,
        step.stack.host_scalings,
    )
    x, out, maps = step.x.clone(), step.out.clone(), step.maps
    fill(rows, step)
    triton_cuda.lora_linear(x, out, rows, maps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_cuda.lora_linear(x, out, rows, maps)
    compiled = triton_cuda.compiled_count()
    for seed in range(50):
        other = mixed_step(seed, num_tokens, device)
        eager = other.out.clone()
        triton_cuda.lora_linear(other.x, eager, other.stack, other.maps)
        x.copy_(other.x)
        out.copy_(other.out)
        copy_into(maps, other.maps)
        fill(rows, other)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager), seed
        assert_right(out, expected_linear(other), other, other.out)
    assert triton_cuda.compiled_count() == compiled


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("overwrite", [False, True])
def test_captured_idle_replayed_with_adapters_and_back(num_tokens: int, overwrite: bool, device: str) -> None:
    """A graph captured through the public op in a step without adapters serves those with some, and none again."""
    if device == "cpu":
        pytest.skip("NOT RUN: no NVIDIA GPU, and graphs need one")
    step = mixed_step(5, num_tokens, device)
    fills = {"segment_starts": 0, "num_segments": 0}
    idle = replace(
        step.maps,
        segments=(),
        **{name: torch.full_like(getattr(step.maps, name), fills.get(name, -1)) for name in MAP_TENSORS},
    )
    maps = replace(idle, **{name: getattr(idle, name).clone() for name in MAP_TENSORS})
    out = step.out.clone()
    ops.lora_linear(step.x, out, step.stack, step.maps, overwrite=overwrite)
    eager, out = out, step.out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.lora_linear(step.x, out, step.stack, maps, overwrite=overwrite)
    graph.replay()
    assert torch.equal(out, step.out)
    copy_into(maps, step.maps)
    graph.replay()
    assert torch.equal(out, eager)
    out.copy_(step.out)
    copy_into(maps, idle)
    graph.replay()
    assert torch.equal(out, step.out)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 2000])
def test_two_launches_no_allocation_and_no_wait(num_tokens: int, device: str) -> None:
    if device == "cpu":
        pytest.skip("NOT RUN: launches are counted on an NVIDIA GPU")
    step = mixed_step(1, num_tokens, device)
    ops.lora_linear(step.x, step.out, step.stack, step.maps)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ops.lora_linear(step.x, step.out, step.stack, step.maps)
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    launched = [event.name for event in profile.events() if "Synchronize" not in event.name and event.device_time > 0]
    kernel = "one_token_kernel" if num_tokens == 1 else "kernel"
    assert sorted(launched) == [f"lora_expand_{kernel}", f"lora_shrink_{kernel}"]
