"""Paged attention against its float64 reference: mixed lengths, blocks in and out of order, windows, shared heads."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.kv_write.ops import write_kv
from kernels.paged_attention import reference, sdpa
from kernels.paged_attention.maps import AttentionMaps
from kernels.paged_attention.ops import paged_attention
from tests.tolerances import OP

# (tokens in this step, tokens in the cache after it) per sequence.
STEPS = {
    "one-token-sequence": ((1, 1),),
    "decode": ((1, 5), (1, 16), (1, 17), (1, 40)),
    "prefill": ((7, 7), (16, 16), (33, 33)),
    "chunks-and-decode": ((1, 9), (5, 21), (1, 1), (20, 35), (2, 3)),
    "several-tiles": ((300, 300), (130, 210), (1, 64)),
}


def make_maps(step: tuple[tuple[int, int], ...], block_size: int, num_blocks: int, scatter: bool) -> AttentionMaps:
    """Blocks in order, with a hole between sequences, or drawn at random; the maps' device half is not read here."""
    free = list(range(1, num_blocks))
    if scatter:
        random.Random(0).shuffle(free)
    starts, tables = [0], []
    for num_new, kv_len in step:
        starts.append(starts[-1] + num_new)
        tables.append(tuple(free.pop(0) for _ in range(-(-kv_len // block_size))))
        free.pop(0)
    unread = torch.empty(0, dtype=torch.int32)
    kv_lens = tuple(kv_len for _, kv_len in step)
    return AttentionMaps(tuple(starts), kv_lens, tuple(tables), unread, unread, unread, unread)


def slots_of(maps: AttentionMaps, block_size: int) -> list[list[int]]:
    """Per sequence the slot of each of its positions."""
    return [
        [table[p // block_size] * block_size + p % block_size for p in range(kv_len)]
        for table, kv_len in zip(maps.block_tables, maps.kv_lens, strict=True)
    ]


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
) -> None:
    generator = torch.Generator().manual_seed(1)
    num_blocks = 40 + sum(kv_len for _, kv_len in STEPS[step]) // block_size
    maps = make_maps(STEPS[step], block_size, num_blocks, scatter)
    # Slots that no position of a sequence has keep the NaN of fresh memory: reading one shows.
    shape = (num_blocks, block_size, kv_heads, head_dim)
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    for slots in slots_of(maps, block_size):
        k, v = (torch.randn(len(slots), kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        write_kv(k, v, k_cache, v_cache, torch.tensor(slots))
    num_tokens = maps.query_starts[-1]
    # Queries come as a slice of a packed product, so the rows are wider than the heads.
    packed = torch.randn(num_tokens, num_heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    q = packed[:, :num_heads]
    out = paged_attention(q, k_cache, v_cache, maps, scale=0.3, sliding_window=sliding_window)
    expected = torch.empty_like(out)
    reference.paged_attention(q, k_cache, v_cache, maps, scale=0.3, sliding_window=sliding_window, out=expected)
    atol, rtol = OP[dtype]
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


def test_writes_only_the_slots_of_the_step() -> None:
    k_cache, v_cache = torch.zeros(5, 4, 2, 3), torch.zeros(5, 4, 2, 3)
    packed = torch.randn(3, 4, 3)
    slots = torch.tensor([7, 12, 8])
    write_kv(packed[:, :2], packed[:, 2:], k_cache, v_cache, slots)
    torch.testing.assert_close(k_cache.view(20, 2, 3)[slots], packed[:, :2], atol=0, rtol=0)
    torch.testing.assert_close(v_cache.view(20, 2, 3)[slots], packed[:, 2:], atol=0, rtol=0)
    others = torch.ones(20, dtype=torch.bool).index_fill_(0, slots, False)
    assert not k_cache.view(20, 2, 3)[others].any()
    assert not v_cache.view(20, 2, 3)[others].any()


def test_writes_into_the_given_out() -> None:
    maps = make_maps(STEPS["decode"], 4, 60, False)
    k_cache, v_cache = torch.randn(60, 4, 2, 8), torch.randn(60, 4, 2, 8)
    q, out = torch.randn(4, 4, 8), torch.empty(4, 4, 8)
    result = paged_attention(q, k_cache, v_cache, maps, scale=1.0, out=out)
    assert result is out
    torch.testing.assert_close(out, paged_attention(q, k_cache, v_cache, maps, scale=1.0), atol=0, rtol=0)


def test_adjoining_blocks_are_read_without_a_copy() -> None:
    cache = torch.randn(10, 4, 2, 8)
    view = sdpa._positions(cache, (3, 4, 5), 1, 10)
    assert view.data_ptr() == cache[3, 1].data_ptr()
    copy = sdpa._positions(cache, (3, 5, 4), 1, 10)
    assert copy.data_ptr() != cache[3, 1].data_ptr()
    torch.testing.assert_close(copy[0, :, :3], view[0, :, :3], atol=0, rtol=0)
    torch.testing.assert_close(copy[0, :, 3:7], cache[5].transpose(0, 1), atol=0, rtol=0)


def test_refuses_what_does_not_fit() -> None:
    maps = make_maps(STEPS["decode"], 4, 60, False)
    k_cache, v_cache = torch.randn(60, 4, 2, 8), torch.randn(60, 4, 2, 8)
    with pytest.raises(AssertionError, match="fit the cache"):
        paged_attention(torch.randn(4, 3, 8), k_cache, v_cache, maps, scale=1.0)
    with pytest.raises(AssertionError, match="cover"):
        paged_attention(torch.randn(5, 4, 8), k_cache, v_cache, maps, scale=1.0)
