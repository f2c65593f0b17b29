"""The Ascend rotation and cache write in triton-ascend's interpreter, through the public op, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernels.platform import in_use, installed
from kernels.rotary_kv.ops import rotary_kv
from tests.ops.test_dense_ops import BLOCK_SIZE, angles_of, check_rotary_kv
from tests.support.npu.triton_interpreter import round_floats

NORMED = pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])


@pytest.fixture(autouse=True)
def _pretend_npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few cores, so that a program has several items, and items of several blocks of heads."""
    round_floats(monkeypatch)
    platform = replace(in_use(torch.device("cpu")), num_cores=3)
    with installed(platform.with_fallback("rotary_kv", "triton_ascend", "for the test"), "cpu"):
        yield


@NORMED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_heads_of_every_size(head_dim: int, dtype: torch.dtype, is_normed: bool) -> None:
    check_rotary_kv(5, (6, 2), head_dim, dtype, "cpu", is_normed=is_normed)


@NORMED
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(32, 64), (64, 80), (64, 256)])
def test_a_share_of_each_head_is_turned(rotary_dim: int, head_dim: int, is_normed: bool) -> None:
    check_rotary_kv(5, (6, 2), head_dim, torch.float32, "cpu", is_normed=is_normed, rotary_dim=rotary_dim)


@pytest.mark.parametrize("rotary_dim", [32, 64])
def test_heads_are_normed_by_weights_of_float32(rotary_dim: int) -> None:
    options = {"rotary_dim": rotary_dim, "weight_dtype": torch.float32}
    check_rotary_kv(5, (6, 2), 64, torch.float16, "cpu", is_normed=True, **options)


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (40, 8)], ids=str)
def test_heads_of_every_number(heads: tuple[int, int], num_tokens: int) -> None:
    check_rotary_kv(num_tokens, heads, 32, torch.float32, "cpu", is_normed=heads == (6, 2), num_padding=0)


@pytest.mark.parametrize("rotary_dim", [32, 64])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (40, 8)], ids=str)
def test_caches_lie_head_by_head(heads: tuple[int, int], rotary_dim: int) -> None:
    with installed(replace(in_use(torch.device("cpu")), device="npu"), "cpu"):
        check_rotary_kv(7, heads, 64, torch.float32, "cpu", is_normed=True, rotary_dim=rotary_dim, heads_first=True)


def test_a_step_of_padding_writes_nothing() -> None:
    caches = [torch.arange(2.0 * BLOCK_SIZE * 64).view(2, BLOCK_SIZE, 2, 32) for _ in range(2)]
    qkv, slots = torch.full((3, 8, 32), torch.nan), torch.full((3,), -1)
    rotary_kv(qkv, *angles_of(3, 32, torch.float32, "cpu"), *caches, slots)
    for cache in caches:
        assert torch.equal(cache.flatten(), torch.arange(2.0 * BLOCK_SIZE * 64))


def test_a_step_without_tokens_is_none() -> None:
    caches = [torch.zeros(2, BLOCK_SIZE, 2, 32) for _ in range(2)]
    angles = angles_of(0, 32, torch.float32, "cpu")
    q = rotary_kv(torch.empty(0, 8, 32), *angles, *caches, torch.empty(0, dtype=torch.int64))
    assert q.shape == (0, 4, 32)
