"""Paged attention against its float64 reference: mixed lengths, blocks in and out of order, windows, shared heads.

Runs the implementation of the device that `--device` names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.paged_attention import gathered, sdpa
from kernels.paged_attention.cache_layout import as_lines, is_heads_first, line_slots, made
from kernels.paged_attention.ops import paged_attention, warm_up
from tests.support.ops.attention_cases import SCALE, Case, Step, check, float64_truth, make_step

# (tokens in this step, tokens in the cache after it) per sequence.
STEPS = {
    "one-token-sequence": ((1, 1),),
    "decode": ((1, 5), (1, 16), (1, 17), (1, 40)),
    "prefill": ((7, 7), (16, 16), (33, 33)),
    "chunks-and-decode": ((1, 9), (5, 21), (1, 1), (20, 35), (2, 3)),
    "several-tiles": ((300, 300), (130, 210), (1, 64)),
}


def attend(step: Step, out: torch.Tensor) -> None:
    result = paged_attention(step.q, step.k_cache, step.v_cache, step.maps, scale=SCALE, **step.options, out=out)
    assert result is out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sliding_window", [None, 1, 6, 150])
@pytest.mark.parametrize("scatter", [False, True], ids=["in-order", "scattered"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("num_heads", "kv_heads", "head_dim", "block_size"), [(6, 2, 20, 4), (3, 3, 16, 16)])
def test_equals_float64(
    dtype: torch.dtype,
    sliding_window: int | None,
    scatter: bool,
    step: str,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    device: str,
) -> None:
    case = Case(STEPS[step], num_heads, kv_heads, head_dim, block_size, dtype, sliding_window, scatter=scatter)
    check(case, device, attend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sliding_window", [None, 6])
@pytest.mark.parametrize("score_cap", [0.7, 5.0])
@pytest.mark.parametrize("step", ["decode", "chunks-and-decode", "several-tiles"])
def test_capped_scores_equal_float64(
    dtype: torch.dtype, sliding_window: int | None, score_cap: float, step: str, device: str
) -> None:
    case = Case(STEPS[step], 6, 2, 20, 4, dtype, sliding_window, score_cap)
    check(case, device, attend)
    without = float64_truth(make_step(replace(case, score_cap=None)))
    assert (float64_truth(make_step(case)) - without).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sliding_window", [None, 6])
@pytest.mark.parametrize("score_cap", [None, 0.7])
@pytest.mark.parametrize("step", ["decode", "chunks-and-decode", "several-tiles"])
def test_sinks_equal_float64(
    dtype: torch.dtype, sliding_window: int | None, score_cap: float | None, step: str, device: str
) -> None:
    case = Case(STEPS[step], 6, 2, 20, 4, dtype, sliding_window, score_cap, has_sinks=True)
    check(case, device, attend)
    check(case, device, attend_gathered)
    without = float64_truth(replace(make_step(case), sinks=None))
    assert (float64_truth(make_step(case)) - without).abs().max() > 0.01


def attend_gathered(step: Step, out: torch.Tensor, *, heads_first: bool = False) -> None:
    maps = replace(step.maps, block_tables=())
    caches = [made(cache.new_empty, tuple(cache.shape), heads_first=heads_first).copy_(cache)
              for cache in (step.k_cache, step.v_cache)]  # fmt: skip
    gathered.paged_attention(step.q, *caches, maps, scale=SCALE, **step.options, out=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sliding_window", [None, 1, 6, 150])
@pytest.mark.parametrize("score_cap", [None, 0.7])
@pytest.mark.parametrize("max_bytes", [gathered.MAX_BYTES, 1], ids=["together", "one-by-one"])
@pytest.mark.parametrize("heads_first", [False, True], ids=["token-by-token", "head-by-head"])
@pytest.mark.parametrize("step", STEPS)
def test_gathered_equals_float64(
    dtype: torch.dtype,
    heads_first: bool,
    sliding_window: int | None,
    max_bytes: int,
    score_cap: float | None,
    step: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fallback of an NPU, which looks up no block by a list of the host's."""
    monkeypatch.setattr(gathered, "MAX_BYTES", max_bytes)
    attend = partial(attend_gathered, heads_first=heads_first)
    check(Case(STEPS[step], 6, 2, 20, 4, dtype, sliding_window, score_cap), device, attend)


def test_blocks_of_a_cache_lie_head_by_head() -> None:
    cache = made(torch.zeros, (3, 4, 2, 8), heads_first=True)
    assert cache.shape == (3, 4, 2, 8) and cache.stride() == (64, 8, 32, 1)
    assert is_heads_first(cache) and not is_heads_first(cache[:, :2])
    assert not is_heads_first(made(torch.zeros, (3, 4, 2, 8), heads_first=False))
    # Of one head there is one layout.
    assert not is_heads_first(made(torch.zeros, (3, 4, 1, 8), heads_first=True))
    slots = torch.tensor([6, -1, 11])
    lines = as_lines(cache).view(-1, 8)
    assert lines.data_ptr() == cache.data_ptr()
    assert line_slots(cache, slots).tolist() == [10, 14, -1, -1, 19, 23]
    lines[line_slots(cache, slots[:1])] = torch.tensor([[1.0], [2.0]])
    assert cache[1, 2, :, 0].tolist() == [1.0, 2.0] and cache.count_nonzero() == 16


def test_a_cache_that_lies_as_no_platform_of_its_kind_has_it_is_refused() -> None:
    step = make_step(Case(STEPS["decode"]))
    caches = [made(cache.new_empty, tuple(cache.shape), heads_first=True).copy_(cache)
              for cache in (step.k_cache, step.v_cache)]  # fmt: skip
    with pytest.raises(AssertionError, match="as the platform has them"):
        paged_attention(step.q, *caches, step.maps, scale=1.0)
    with pytest.raises(AssertionError, match="disagree"):
        paged_attention(step.q, caches[0], step.v_cache, step.maps, scale=1.0)


def test_gathered_serves_decode_tokens_together() -> None:
    """Neighbours of one query each, as far as memory goes; padding and chunks by themselves."""
    step = make_step(Case(((1, 5), (1, 16), (7, 9), (1, 17), (1, 40)), block_size=16))
    maps = replace(step.maps, query_starts=(*step.maps.query_starts, 11), kv_lens=(*step.maps.kv_lens, 0))
    assert gathered.runs_of(maps, 1, 16) == [(0, 2), (2, 3), (3, 5)]
    assert gathered.runs_of(maps, gathered.MAX_BYTES // 2, 16) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_makes_out_where_none_is_given(device: str) -> None:
    step = make_step(Case(STEPS["decode"])).to(device)
    out = torch.empty_like(step.q, memory_format=torch.contiguous_format)
    attend(step, out)
    made = paged_attention(step.q, step.k_cache, step.v_cache, step.maps, scale=SCALE)
    torch.testing.assert_close(made, out, atol=0, rtol=0)


def test_adjoining_blocks_are_read_without_a_copy() -> None:
    cache = torch.randn(10, 4, 2, 8)
    view = sdpa.positions_of(cache, (3, 4, 5), 1, 10)
    assert view.data_ptr() == cache[3, 1].data_ptr()
    copy = sdpa.positions_of(cache, (3, 5, 4), 1, 10)
    assert copy.data_ptr() != cache[3, 1].data_ptr()
    torch.testing.assert_close(copy[0, :, :3], view[0, :, :3], atol=0, rtol=0)
    torch.testing.assert_close(copy[0, :, 3:7], cache[5].transpose(0, 1), atol=0, rtol=0)


def test_refuses_what_does_not_fit() -> None:
    step = make_step(Case(STEPS["decode"], num_heads=4))
    with pytest.raises(AssertionError, match="fit the cache"):
        paged_attention(torch.randn(4, 3, 16), step.k_cache, step.v_cache, step.maps, scale=1.0)
    with pytest.raises(AssertionError, match="cover"):
        paged_attention(torch.randn(5, 4, 16), step.k_cache, step.v_cache, step.maps, scale=1.0)


def test_a_cpu_has_nothing_to_compile(device: str) -> None:
    if device != "cpu":
        pytest.skip("NOT RUN: this is about the CPU")
    assert warm_up(make_step(Case(STEPS["decode"])).k_cache, 6) == 0
