"""Two ways to one delta, shrink and expand as kernels or the shrink inside the base product, against the same float64.

On a CPU the window's kernels run in Triton's interpreter, with `--device cuda` on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora import ops as lora_ops
from kernels.lora_window import ops, reference
from kernels.lora_window.ops import LENGTHS, window_for, window_lengths
from kernels.lora_window.triton_cuda_configs import TABLE, OpConfig, TokenConfig, WindowTileConfig
from tests.ops.lora.test_lora import expected_linear
from tests.ops.lora.test_lora_triton import run_compiling
from tests.support.engine.serving import serving
from tests.support.npu.triton_interpreter import multiply_bfloat16
from tests.support.ops.lora_cases import Case, Step, make_step, popularity
from tests.tolerances import OP

pytest.importorskip("triton", reason="Triton is not installed")

# Small tiles, so that small cases have several.
SMALL = (
    WindowTileConfig(16, 16, 4, stages=1),
    WindowTileConfig(32, 32, 4),
    WindowTileConfig(32, 16, 2),
    TokenConfig(16, 1),
)
CHOSEN = sorted(
    {one for table in TABLE.values() for op in (table.expand, table.swiglu) for one in (op.token, op.tile)}, key=str
)
Config = WindowTileConfig | TokenConfig
PATHS = ("two kernels", "window", "window, reference")


@pytest.fixture(scope="module")
def triton_cuda(device: str) -> Iterator[ModuleType]:
    """The implementation; in the interpreter with bfloat16 products made right."""
    from kernels.lora_window import triton_cuda as module

    patch = pytest.MonkeyPatch()
    if device == "cpu":
        multiply_bfloat16(patch)
    yield module
    patch.undo()


def with_h(step: Step) -> torch.Tensor:
    """What the base product over all rows gives: the step's output, then h of every row, NaN of rows of nobody."""
    h = torch.stack([step.x.double() @ a.double().t() for a in step.stack.a], dim=2)  # [tokens, rows, slices]
    return torch.cat((step.out, h.flatten(1).to(step.out.dtype)), dim=1)


def deltas(step: Step, path: str, module: ModuleType, config: Config | None = None) -> torch.Tensor:
    """The step's output with the adapters' deltas."""
    out = step.out.clone()
    if path == "two kernels":
        lora_ops.lora_linear(step.x, out, step.stack, step.maps)
        return out
    product = with_h(step)
    before = product.clone()
    if path == "window":
        module.lora_expand_window(product, step.stack, step.maps, config=config)
    else:
        reference.lora_expand_window(product, step.stack, step.maps)
    columns = out.shape[1]
    torch.testing.assert_close(product[:, columns:], before[:, columns:], rtol=0, atol=0, equal_nan=True)
    base = step.maps.token_segment < 0
    assert torch.equal(product[base, :columns], step.out[base]), "rows of base tokens changed"
    return product[:, :columns]


def gated(step: Step, path: str, module: ModuleType, config: Config | None = None) -> torch.Tensor:
    size = step.stack.b[0].shape[1]
    if path == "two kernels":
        gate, up = deltas(step, path, module).split(size, dim=1)
        return torch.nn.functional.silu(gate) * up
    out = torch.full_like(step.out[:, :size], float("nan"))
    if path == "window":
        module.swiglu_window(with_h(step), step.stack, step.maps, out=out, config=config)
    else:
        reference.swiglu_window(with_h(step), step.stack, step.maps, out=out)
    return out


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    absolute, relative = OP[found.dtype]
    torch.testing.assert_close(found.double().cpu(), expected, atol=absolute, rtol=relative)


def expected_gated(step: Step) -> torch.Tensor:
    gate, up = expected_linear(step).chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


@st.composite
def steps(draw: st.DrawFn, num_slices: int | None = None) -> tuple[Case, int]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    num_adapters = draw(st.integers(0, 5))
    slices = num_slices or draw(st.integers(1, 3))
    name = draw(st.sampled_from(["distinct", "uniform", "zipf", "identical"]))
    lengths = popularity(name, draw(st.integers(1, 40)), num_adapters, rng) if num_adapters else ()
    largest = draw(st.sampled_from([4, 16, 40, 256]))
    widths = tuple(draw(st.sampled_from([8, 32, 50])) for _ in range(slices))
    case = Case(
        in_features=draw(st.sampled_from([8, 96, 129])),
        widths=widths[:1] * 2 if num_slices == 2 else widths,
        ranks=tuple(tuple(rng.choice([0, rng.randint(1, largest), largest]) for _ in lengths) for _ in range(slices)),
        lengths=lengths,
        num_base_tokens=draw(st.sampled_from([0, 1, 20])) if lengths else 3,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        seed=rng.randrange(2**32),
        interleaved=True,
    )
    return case, draw(st.sampled_from([0, 5, 17]))


@settings(max_examples=20, deadline=None)
@given(step=steps(), config=st.sampled_from(SMALL))
@pytest.mark.parametrize("path", PATHS)
def test_projection_equals_float64(
    path: str, step: tuple[Case, int], config: Config, triton_cuda: ModuleType, device: str
) -> None:
    case, pad_to = step
    made = make_step(case, device=device, pad_to=pad_to)
    assert_close(deltas(made, path, triton_cuda, config), expected_linear(made))


@settings(max_examples=20, deadline=None)
@given(step=steps(num_slices=2), config=st.sampled_from(SMALL))
@pytest.mark.parametrize("path", PATHS)
def test_gate_equals_float64(
    path: str, step: tuple[Case, int], config: Config, triton_cuda: ModuleType, device: str
) -> None:
    case, pad_to = step
    made = make_step(case, device=device, pad_to=pad_to)
    assert_close(gated(made, path, triton_cuda, config), expected_gated(made))


@pytest.mark.parametrize("config", CHOSEN, ids=str)
@pytest.mark.parametrize(("widths", "dtype"), [((256, 256), torch.bfloat16), ((72, 72), torch.float32)])
def test_every_table_entry_is_right(
    config: Config, widths: tuple[int, int], dtype: torch.dtype, triton_cuda: ModuleType, device: str
) -> None:
    """Tiles of one adapter, of several, of as many as tokens, and with base tokens; slices that are not targeted."""
    ranks = ((16, 40, 0, 200, 64) + (16,) * 16, (3, 0, 70, 20, 31) + (16,) * 16)
    lengths = (35, 2, 1, 1, 5) + (1,) * 16
    step = make_step(Case(64, widths, ranks, lengths, 37, dtype, interleaved=True), device=device, pad_to=40)
    assert_close(deltas(step, "window", triton_cuda, config), expected_linear(step))
    assert_close(gated(step, "window", triton_cuda, config), expected_gated(step))


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_others_do_no_harm(path: str, triton_cuda: ModuleType, device: str) -> None:
    """NaN in the rows of an adapter that has no token in the step, and in the tokens of the base."""
    case = Case(64, (32, 32), ((16, 20, 16), (16, 20, 3)), (3, 0, 2), 2, interleaved=True)
    step = make_step(case, device=device)
    clean = expected_gated(step)
    others = torch.ones(step.stack.a[0].shape[0], dtype=torch.bool)
    for segment in step.maps.segments:
        largest = max(ranks[segment.place] for ranks in step.stack.host_ranks)
        others[segment.first_rows[0] : segment.first_rows[0] + largest] = False
    for rows in (*step.stack.a, *step.stack.b):
        rows[others] = torch.nan
    assert_close(gated(step, path, triton_cuda), clean)
    step.x[-2:] = torch.nan
    assert_close(gated(step, path, triton_cuda), clean)


def test_a_step_of_base_tokens_and_an_empty_one(triton_cuda: ModuleType, device: str) -> None:
    step = make_step(Case(32, (48, 48), ((), ()), (), 5, interleaved=True), device=device, pad_to=3)
    stack = replace(step.stack, ranks=step.stack.ranks[:, :0], scalings=step.stack.scalings[:, :0])
    step = replace(step, stack=stack)
    assert torch.equal(deltas(step, "window", triton_cuda), step.out)
    assert_close(gated(step, "window", triton_cuda), expected_gated(step))


def test_public_ops_check_and_serve(device: str) -> None:
    step = make_step(Case(64, (32, 32), ((16, 3), (5, 0)), (3, 2), 1, interleaved=True), device=device)
    product = with_h(step)
    assert_close(ops.swiglu_window(product, step.stack, step.maps), expected_gated(step))
    ops.lora_expand_window(product, step.stack, step.maps)
    assert_close(product[:, :64], expected_linear(step))
    with pytest.raises(AssertionError, match="one column per row"):
        ops.lora_expand_window(product[:, :64], step.stack, step.maps)
    with pytest.raises(AssertionError, match="one column per row"):
        ops.lora_expand_window(product[:, :-1], step.stack, step.maps)
    with pytest.raises(AssertionError, match="cover"):
        ops.swiglu_window(product[:-1], step.stack, step.maps)


def test_warm_up_changes_nothing(triton_cuda: ModuleType, device: str) -> None:
    step = make_step(Case(64, (32, 32), ((16, 3), (5, 0)), (3, 2), 1, interleaved=True), device=device)
    with serving("lora_window", triton_cuda, step.x.device.type):
        ops.warm_up([step.stack], 70, step.x.dtype, gated=[step.stack], max_segments=8)
    assert_close(deltas(step, "window", triton_cuda), expected_linear(step))


def mixed_step(seed: int, num_tokens: int, device: str) -> Step:
    """A random mix of up to 8 adapters and base tokens, always of the same padded size."""
    rng = random.Random(seed)
    lengths = [0] * 8
    for _ in range(rng.randint(0, num_tokens)):
        lengths[rng.randrange(rng.randint(1, 8))] += 1
    ranks = tuple(tuple(rng.choice([0, 1, 8, 16, 64, 100]) for _ in lengths) for _ in range(2))
    num_base = num_tokens - sum(lengths)
    case = Case(64, (256, 256), ranks, tuple(lengths), num_base, torch.bfloat16, seed=seed, interleaved=True)
    return make_step(case, device=device, pad_to=8)


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 200])
def test_captured_once_replayed_with_other_mixes(num_tokens: int, triton_cuda: ModuleType, device: str) -> None:
    """One capture, 50 random mixes of adapters, ranks and tokens: bit-equal to eager, and nothing is compiled."""
    if device == "cpu":
        pytest.skip("NOT RUN: no NVIDIA GPU, and graphs need one")
    num_rows, first = 8 * 112 + 32, mixed_step(0, num_tokens, device)
    stack = replace(
        first.stack,
        a=(),
        b=tuple(torch.zeros(num_rows, 256, dtype=torch.bfloat16, device=device) for _ in range(2)),
        ranks=first.stack.ranks.clone(),
        scalings=first.stack.scalings.clone(),
    )
    product = torch.zeros(num_tokens, 512 + 2 * num_rows, dtype=torch.bfloat16, device=device)
    gate = torch.zeros(num_tokens, 256, dtype=torch.bfloat16, device=device)

    def run() -> None:
        triton_cuda.swiglu_window(product, stack, first.maps, out=gate)
        triton_cuda.lora_expand_window(product, stack, first.maps)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(50):
        other = mixed_step(seed, num_tokens, device)
        columns = with_h(other)
        product[:, : columns.shape[1]] = columns
        for name in ("segment_starts", "places", "first_rows", "token_segment", "num_segments"):
            getattr(first.maps, name).copy_(getattr(other.maps, name))
        for target, source in zip(stack.b, other.stack.b, strict=True):
            target[: len(source)].copy_(source)
        stack.ranks.copy_(other.stack.ranks)
        stack.scalings.copy_(other.stack.scalings)
        eager, eager_gate = product.clone(), torch.empty_like(gate)
        compiled = triton_cuda.compiled_count()
        triton_cuda.swiglu_window(eager, stack, first.maps, out=eager_gate)
        triton_cuda.lora_expand_window(eager, stack, first.maps)
        graph.replay()
        assert triton_cuda.compiled_count() == compiled
        assert torch.equal(gate, eager_gate), seed
        assert torch.equal(product[:, :512], eager[:, :512]), seed
        if seed < 5:  # the truth is computed token by token
            assert_close(product[:, :512], expected_linear(other))


def test_window_lengths_hold_every_row_and_no_more_than_needed() -> None:
    assert window_lengths(0) == ()
    assert window_lengths(16) == (16,)
    assert window_lengths(96) == (16, 64, 128)
    assert window_lengths(10**6) == tuple(length.rows for length in LENGTHS)


def test_the_shortest_window_that_holds_the_rows_is_taken() -> None:
    assert [window_for(end, 64) for end in (16, 17, 128, 1024, 1025)] == [16, 64, 128, 1024, None]
    assert window_for(16, LENGTHS[0].max_tokens + 1) is None
    assert window_for(1024, 1) is None  # the rows of one adapter, far up: two kernels read less
    assert window_for(0, 64) == LENGTHS[0].rows  # adapters that target no projection: the shortest will do


def test_compiles_for_hopper_without_a_gpu(device: str) -> None:
    """Every kernel in every configuration of the tables, down to machine code within the shared memory of a core."""
    if device != "cpu":
        pytest.skip("NOT RUN: on a GPU the other tests compile for that GPU")
    sizes = [int(line.split()[-1]) for line in run_compiling("compile_window.py").splitlines()]
    assert len(sizes) == 12 * len(set(TABLE.values()))
    assert max(sizes) <= 227 * 1024


def test_tokens_that_may_have_an_adapter_each_are_taken_one_by_one() -> None:
    token, tile = TokenConfig(64, 4), WindowTileConfig(16, 64, 4)
    op = OpConfig(token, tile, min_rows_per_token=4)
    assert [op.choose(64, rows) for rows in (16, 128, 256, 1024)] == [tile, tile, token, token]
    assert (op.choose(1, 16), op.choose(256, 512)) == (token, tile)
    assert [tile.turns(64, rows) for rows in (16, 64, 128, 512, 1024)] == [1, 1, 2, 8, 16]
    assert (tile.turns(1, 1024), tile.num_programs(65, 16), token.num_programs(65, 16)) == (1, 5, 65)
