"""The Triton paged attention: in Triton's interpreter on a CPU, on a GPU with `--device cuda`.

tests/ops/test_paged_attention.py covers the op by itself, and this kernel too with `--device cuda`. Here are tests of
what only the kernel has: tiles, splits, padding of captured steps, plans, warm-up, replay.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kernels.paged_attention.triton_cuda_configs import (
    MAX_SPLITS,
    TABLES,
    WORKSPACE_BYTES,
    Heads,
    LaunchPlan,
    TileConfig,
    TileKind,
    plan_for,
    tile_for,
)
from kernels.platform import Platform
from tests.support.npu.triton_interpreter import multiply_bfloat16, multiply_rows_alike
from tests.support.ops.attention_cases import SCALE, Case, Step, check, check_step, make_step
from tests.support.tiers import examples

pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
H200 = Platform("cuda", "NVIDIA H200", 132, 232448, 16, {})
# Small tiles and splits, so that small cases have several of each.
PLANS = (
    LaunchPlan(TileConfig(16, 16, 2, 4), 1, 1),
    LaunchPlan(TileConfig(16, 32, 2, 4), 3, 1),
    LaunchPlan(TileConfig(32, 16, 2, 4), 8, 2),
    LaunchPlan(TileConfig(64, 32, 2, 4), 2, 1),
    LaunchPlan(TileConfig(16, 16, 2, 4), 3, 1, max_programs=2),
)


@pytest.fixture(scope="module")
def triton_cuda(device: str) -> Iterator[ModuleType]:
    """The implementation; in the interpreter with bfloat16 products made right."""
    from kernels.paged_attention import triton_cuda as module

    patch = pytest.MonkeyPatch()
    if device == "cpu":
        multiply_bfloat16(patch)
    yield module
    patch.undo()


def run(module: ModuleType, step: Step, out: torch.Tensor, plan: LaunchPlan | None = None) -> None:
    module.paged_attention(
        step.q,
        step.k_cache,
        step.v_cache,
        step.maps,
        scale=SCALE,
        **step.options,
        out=out,
        plan=plan,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chunks, decode tokens, first tokens and empty sequences, in any order."""
    sequence = st.one_of(
        st.builds(lambda kv_len: (1, kv_len), st.integers(1, 70)),
        st.builds(lambda num_new, past: (num_new, past + num_new), st.integers(1, 20), st.integers(0, 40)),
        st.builds(lambda kv_len: (0, kv_len), st.sampled_from([0, 1, 20])),
    )
    kv_heads = draw(st.integers(1, 2))
    return Case(
        sequences=tuple(draw(st.lists(sequence, min_size=1, max_size=4))),
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 3, 7, 16])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 16, 20, 64, 80, 128, 192, 256])),
        block_size=draw(st.sampled_from([4, 16, 32, 128])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        sliding_window=draw(st.sampled_from([None, None, 1, 5, 16, 37])),
        score_cap=draw(st.sampled_from([None, None, 0.7, 20.0])),
        has_sinks=draw(st.booleans()),
        num_spare_columns=draw(st.sampled_from([0, 3])),
        num_spare_tokens=draw(st.sampled_from([0, 0, 5])),
        seed=draw(st.integers(0, 2**16)),
    )


# The interpreter is too slow for many steps, and for shrinking one that fails.
@settings(
    max_examples=examples(40 if INTERPRETED else 400),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(case=cases(), plan=st.sampled_from([None, *PLANS]))
def test_kernels_equal_float64(case: Case, plan: LaunchPlan | None, triton_cuda: ModuleType, device: str) -> None:
    check(case, device, lambda step, out: run(triton_cuda, step, out, plan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, pytest.param(512, marks=pytest.mark.wide)])
@pytest.mark.parametrize("kind", ["decode", "mixed", "chunks"])
def test_every_tile_of_the_table_is_right(
    kind: TileKind, head_dim: int, dtype: torch.dtype, triton_cuda: ModuleType, device: str
) -> None:
    """With one split and with three, over several blocks of keys."""
    heads = Heads(4, 1, head_dim, dtype.itemsize, None)
    tile = tile_for(TABLES["any"], heads, kind)
    sequences = ((1, 1), (1, 150)) if kind == "decode" else ((tile.block_m // 4 + 3, 100), (1, 131))
    case = Case(sequences, 4, 1, head_dim, dtype=dtype)
    for num_splits in (1, 3):
        check(case, device, lambda step, out, n=num_splits: run(triton_cuda, step, out, LaunchPlan(tile, n, 1)))


def test_more_heads_share_a_key_than_a_tile_has_rows(triton_cuda: ModuleType, device: str) -> None:
    check(Case(((1, 40), (3, 9)), num_heads=71, kv_heads=1), device, lambda step, out: run(triton_cuda, step, out))


@pytest.mark.parametrize("plan", PLANS[:2])
def test_large_scores_do_not_overflow(plan: LaunchPlan, triton_cuda: ModuleType, device: str) -> None:
    """Sums of weights beyond what float32 holds, and below it, in some splits and in all."""
    step = make_step(Case(((1, 1), (1, 70), (9, 40)), dtype=torch.float16))
    check_step(replace(step, q=100 * step.q), device, lambda there, out: run(triton_cuda, there, out, plan))


def test_a_step_without_tokens_does_nothing(triton_cuda: ModuleType, device: str) -> None:
    check(Case(((0, 7), (0, 0))), device, lambda step, out: run(triton_cuda, step, out))


@pytest.mark.parametrize("plan", PLANS)
def test_neighbours_do_not_change_a_bit(plan: LaunchPlan, triton_cuda: ModuleType, device: str) -> None:
    """A sequence's tokens are the same beside any other sequences, under one plan."""
    case = Case(((5, 60), (1, 50), (7, 20)), sliding_window=40)
    step = make_step(case).to(device)
    together = torch.empty_like(step.q, memory_format=torch.contiguous_format)
    run(triton_cuda, step, together, plan)
    starts, kv_lens = step.maps.query_starts, step.maps.kv_lens
    for i, (start, end) in enumerate(pairwise(starts)):
        maps = replace(
            step.maps,
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            kv_lens_device=torch.tensor([kv_lens[i]], dtype=torch.int32, device=device),
            block_table=step.maps.block_table[i : i + 1].contiguous(),
        )
        alone = torch.empty_like(together[start:end])
        run(triton_cuda, replace(step, q=step.q[start:end], maps=maps), alone, plan)
        assert torch.equal(alone, together[start:end])


HEADS = st.builds(
    lambda kv_heads, groups, head_dim, size, window: Heads(kv_heads * groups, kv_heads, head_dim, size, window),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([1, 3, 4, 8]),
    st.sampled_from([64, 96, 128, 256, 512]),
    st.sampled_from([2, 4]),
    st.sampled_from([None, 1024]),
)


@settings(deadline=None)
@given(
    heads=HEADS,
    num_tokens=st.integers(1, 8192),
    num_sequences=st.integers(1, 300),
    max_kv_tokens=st.integers(0, 200_000),
    is_decode=st.booleans(),
)
def test_plans_fit_the_workspace(
    heads: Heads, num_tokens: int, num_sequences: int, max_kv_tokens: int, is_decode: bool
) -> None:
    plan = plan_for(H200, heads, num_tokens, num_sequences, max_kv_tokens, is_decode=is_decode)
    assert 1 <= plan.num_splits <= MAX_SPLITS
    assert plan.tile.block_m >= heads.num_heads // heads.kv_heads
    rows = plan.num_splits * num_tokens * heads.num_heads
    assert plan.num_splits == 1 or 4 * rows * (heads.head_dim + 1) <= WORKSPACE_BYTES


def test_plans_by_hand() -> None:
    heads = Heads(32, 8, 128, 2, None)
    decode, chunks = (partial(plan_for, H200, is_decode=one) for one in (True, False))
    # One long sequence: 8 heads times 64 splits are about four programs for each of 132 multiprocessors.
    assert decode(heads, 1, 1, 131072).num_splits == 64
    assert decode(heads, 1, 1, 200).num_splits == 1
    assert decode(heads, 1, 1, 1024).num_splits == 4
    # Many sequences fill the GPU; only very long ones among them are split, and a window makes them short.
    assert decode(heads, 256, 256, 8192).num_splits == 1
    assert decode(heads, 64, 64, 131072).num_splits == 8
    assert decode(replace(heads, sliding_window=4096), 64, 64, 131072).num_splits == 1
    # A long prompt alone, and the end of one.
    assert chunks(heads, 2048, 1, 4096).num_splits == 1
    assert chunks(heads, 64, 1, 4096).num_splits == 4
    # A chunk behind a long prefix, in a step that has room for 63 other sequences: 32 tiles times 8 splits are about
    # two programs for each multiprocessor, and keys are shared by fewer where there are few.
    assert [chunks(heads, 64, 64, width).num_splits for width in (1024, 8192, 16384, 131072)] == [1, 8, 8, 8]
    assert chunks(heads, 64, 64, 16384).min_split_blocks * 64 == 1024
    assert [chunks(heads, size, 64, 16384).num_splits for size in (32, 128, 256, 512)] == [16, 4, 2, 1]
    # The 63 others could need 3,840 programs more, for which a launch loops; not over tables of very long sequences.
    assert [chunks(heads, 64, 64, width).max_programs for width in (1024, 16384, 131072)] == [None, 132, None]
    assert [chunks(heads, size, size, 16384).max_programs for size in (16, 32)] == [None, 132]
    assert decode(heads, 64, 64, 8192).num_splits == 1
    # Its sixteen queries a tile read the keys four times; decode tokens beside it leave most rows of theirs empty.
    assert chunks(heads, 64, 64, 8192).tile.block_m == 64
    # A chunk of a very long one: eight splits would be worth it, and their results take eight times 64 MiB.
    assert chunks(heads, 4096, 1, 131072).num_splits == 1
    assert chunks(heads, 1000, 1, 131072).num_splits == 4
    assert decode(heads, 8, 8, 64).tile.block_m == 16
    assert [chunks(heads, size, 8, 64).tile.block_m for size in (9, 64, 65)] == [64, 64, 128]
    # Of heads of 256 the tile of mixed steps is that of decode steps, which reads a chunk's keys often.
    assert [chunks(replace(heads, head_dim=256), size, 8, 64).tile.block_m for size in (8, 9)] == [16, 64]


def test_heads_that_no_tile_serves_are_refused() -> None:
    with pytest.raises(AssertionError, match="no tile for heads of 576"):
        plan_for(H200, Heads(8, 8, 576, 2, None), 1, 1, 64, is_decode=True)


@pytest.mark.parametrize(("score_cap", "has_sinks"), [(None, False), (5.0, False), (None, True)])
@pytest.mark.parametrize("sliding_window", [None, 9])
def test_warm_up_launches_every_variant(
    sliding_window: int | None,
    score_cap: float | None,
    has_sinks: bool,
    triton_cuda: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What distinguishes compilations (constants, and whether integers are divisible by 16), after and before."""
    launched: list[set[Any]] = [set()]
    for name in ("paged_attention_kernel", "sum_splits_kernel"):
        monkeypatch.setattr(triton_cuda, name, Recorded(getattr(triton_cuda, name), launched))
    options = {"sliding_window": sliding_window, "score_cap": score_cap, "has_sinks": has_sinks}
    case = Case(((1, 30), (1, 300)), head_dim=20, **options)
    triton_cuda.warm_up(make_step(case).to(device).k_cache, case.num_heads, **options)
    warmed, before = launched[0], triton_cuda.compiled_count()
    launched[0] = set()
    mixes: tuple[tuple[tuple[int, int], ...], ...] = (
        ((1, 30), (1, 300)),
        ((1, 12),),
        ((1, 300),),
        ((40, 40), (1, 7)),
        ((9, 300),),
        ((16, 16),) * 3,
    )
    for sequences in mixes:
        step = make_step(replace(case, sequences=sequences)).to(device)
        step = replace(step, q=step.q.clone(memory_format=torch.contiguous_format))
        run(triton_cuda, step, torch.empty_like(step.q, memory_format=torch.contiguous_format))
        heads, is_decode = Heads(6, 2, 20, 4, sliding_window), step.maps.is_decode
        plan = plan_for(H200, heads, len(step.q), len(sequences), 304, is_decode=is_decode)
        run(triton_cuda, step, torch.empty_like(step.q, memory_format=torch.contiguous_format), plan)
    assert launched[0] <= warmed
    assert len(warmed) == 6
    assert triton_cuda.compiled_count() == before


def specialised(argument: Any) -> Any:
    """What Triton compiles for, of an argument that is no constant."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument % 16 == 0 if isinstance(argument, int) else type(argument)


class Recorded:
    """A kernel that is launched as ever, and whose variants are written down."""

    def __init__(self, kernel: Any, launched: list[set[Any]]) -> None:
        self._kernel, self._launched = kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            free = getattr(self._kernel, "do_not_specialize", None) or self._kernel.kwargs["do_not_specialize"]
            names = self._kernel.arg_names
            seen = [specialised(arg) for name, arg in zip(names, args, strict=False) if name not in free]
            self._launched[0].add((*seen, *sorted(constants.items())))
            self._kernel[grid](*args, **constants)

        return launch

    @property
    def device_caches(self) -> Any:
        return getattr(self._kernel, "device_caches", {})


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}, {"has_sinks": True, "score_cap": 2.0}], ids=str)
def test_fixed_splits_do_not_depend_on_the_step(
    options: dict[str, Any], triton_cuda: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's result is the same to the bit in a whole prompt, in chunks and among decode tokens, whether one program
    or several take its keys, and it is the right one."""
    if device == "cpu":
        multiply_rows_alike(monkeypatch)
    length, plan = 70, LaunchPlan(TileConfig(16, 16, 2, 4), 1, 1, fixed_blocks=2)
    step = make_step(Case(((length, length),), **{**options, "sliding_window": None}))
    step = replace(step, sliding_window=options.get("sliding_window"))
    check_step(step, device, partial(run, triton_cuda, plan=plan))
    check_step(step, device, partial(run, triton_cuda, plan=replace(plan, num_splits=4)))
    step = step.to(device)
    whole = torch.empty_like(step.q).contiguous()
    run(triton_cuda, step, whole, plan=plan)
    cuts = (
        [(0, 7), (7, 39), (39, length)],
        [(p, p + 1) for p in (0, 15, 33, 64, 69)],
        [(5, 6), (30, length), (69, 70)],
    )
    for parts in cuts:
        for num_splits in (1, 4):
            cut = _cut(step, parts)
            out = torch.full(cut.q.shape, torch.nan, device=device)
            run(triton_cuda, cut, out, plan=replace(plan, num_splits=num_splits))
            wanted = torch.cat([whole[first:end] for first, end in parts])
            assert torch.equal(out, wanted), (parts, num_splits)


def _cut(step: Step, parts: list[tuple[int, int]]) -> Step:
    """Tokens [first, end) of the step's only sequence, each as a sequence of its own."""
    starts = [0]
    for first, end in parts:
        starts.append(starts[-1] + end - first)
    ends, device = [end for _, end in parts], step.q.device
    maps = replace(
        step.maps,
        query_starts=tuple(starts),
        kv_lens=tuple(ends),
        block_tables=step.maps.block_tables * len(parts),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lens_device=torch.tensor(ends, dtype=torch.int32, device=device),
        block_table=step.maps.block_table.expand(len(parts), -1).contiguous(),
        slot_mapping=torch.full((starts[-1],), -1, device=device),
    )
    return replace(step, q=torch.cat([step.q[first:end] for first, end in parts]), maps=maps)


def test_compiles_for_hopper_without_a_gpu(device: str) -> None:
    """Every tile of the table, down to machine code within the shared memory of a core."""
    if device != "cpu":
        pytest.skip("NOT RUN: on a GPU the other tests compile for that GPU")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "support" / "ops" / "compile_attention.py"
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    sizes = [int(line.split()[-1]) for line in result.stdout.splitlines()]
    assert len(sizes) == 61
    assert max(sizes) <= 227 * 1024


@pytest.mark.parametrize("num_spare_columns", [0, 2000])
@pytest.mark.parametrize("shape", [(8, 8), (64, 4)], ids=["decode", "mixed"])
def test_captured_once_replayed_with_other_steps(
    shape: tuple[int, int], num_spare_columns: int, triton_cuda: ModuleType, device: str
) -> None:
    """One capture; other lengths, blocks and padding of its size: bit-equal to eager, and nothing is compiled."""
    if device == "cpu":
        pytest.skip("NOT RUN: no NVIDIA GPU, and graphs need one")
    num_tokens, num_sequences = shape
    mixes = [
        ((1, 100),) * num_sequences,
        ((1, 7),) * (num_sequences - 1) + ((num_tokens - num_sequences + 1, 300),),
        ((1, 1), (1, 513)) + ((0, 0),) * (num_sequences - 2),
    ]
    base = Case((), 8, 2, 128, dtype=torch.bfloat16, num_spare_columns=num_spare_columns)
    buffers: Step | None = None
    graph = torch.cuda.CUDAGraph()
    out = torch.empty(num_tokens, 8, 128, dtype=torch.bfloat16, device=device)
    compiled = 0
    for sequences in mixes:
        used = sum(num_new for num_new, _ in sequences)
        step = make_step(replace(base, sequences=sequences, num_spare_tokens=num_tokens - used)).to(device)
        width = 40 + num_spare_columns
        table = torch.zeros(num_sequences, width, dtype=torch.int32, device=device)
        table[:, : step.maps.block_table.shape[1]] = step.maps.block_table[:, :width]
        caches = [torch.full((200, 16, 2, 128), torch.nan, dtype=torch.bfloat16, device=device) for _ in range(2)]
        for target, source in zip(caches, (step.k_cache, step.v_cache), strict=True):
            target[: len(source)] = source
        step = Step(step.q, *caches, replace(step.maps, block_table=table), None)
        eager = torch.empty_like(out)
        run(triton_cuda, step, eager)
        if buffers is None:
            buffers = step
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run(triton_cuda, buffers, out)
            compiled = triton_cuda.compiled_count()
        for name in ("q", "k_cache", "v_cache"):
            getattr(buffers, name).copy_(getattr(step, name))
        for name in ("query_start_loc", "kv_lens_device", "block_table"):
            getattr(buffers.maps, name).copy_(getattr(step.maps, name))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager)
    assert triton_cuda.compiled_count() == compiled
