"""Small calls of every op that the NPU serves, each against float64: what tells a mutant from the real thing.

Sizes differ from one another, so that no exchanged axis or argument goes unnoticed. The tensors lie on the CPU; the
platform installed there says which implementation is called (see `conftest.npu`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.attention_maps import AttentionMaps
from kernels.experts.ops import experts, pack_experts
from kernels.linear.ops import append_rows, linear, pack_quantised
from kernels.linear.quantised import Quantised, dequantise
from kernels.paged_attention import npu
from kernels.paged_attention import reference as attention_reference
from kernels.paged_attention.cache_layout import made
from kernels.paged_attention.ops import paged_attention
from kernels.platform import in_use, installed
from kernels.rms_norm.ops import add_rms_norm, rms_norm
from kernels.rotary_kv.ops import rotary_kv
from kernels.swiglu.ops import swiglu
from service.models.layers.projection import Projection
from tests.ascend.twin.stand_ins import stand_ins
from tests.tolerances import OP

BLOCK_SIZE, NUM_BLOCKS = 128, 9
NUM_HEADS, KV_HEADS, HEAD_DIM = 6, 3, 64
# (tokens in this step, tokens in the cache after it): a decode token, a chunk over the end of a block, a new prompt.
STEP = ((1, 40), (5, 131), (3, 3))
DECODE = tuple((1, kv_len) for _, kv_len in STEP)
EPS = 1e-5


def attend(dtype: torch.dtype, sliding_window: int | None, is_decode: bool, name: str = "npu_heads_first") -> None:
    """name: of the implementation, which has caches in a layout of its own."""
    random, step = _Random(dtype), DECODE if is_decode else STEP
    maps = attention_maps(step)
    shape = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    # What no position of a sequence has is never to be read.
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    for blocks, (_, kv_len) in zip(maps.block_tables, step, strict=True):
        slots = [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(kv_len)]
        for cache in (k_cache, v_cache):
            cache.view(-1, KV_HEADS, HEAD_DIM)[slots] = random(kv_len, KV_HEADS, HEAD_DIM)
    q = random(maps.query_starts[-1], NUM_HEADS + KV_HEADS, HEAD_DIM)[:, :NUM_HEADS]
    expected = torch.empty(q.shape, dtype=torch.float64)
    attention_reference.paged_attention(
        q, k_cache, v_cache, maps, scale=0.3, sliding_window=sliding_window, out=expected
    )
    platform = in_use(q.device).with_fallback("paged_attention", name, "for the check")
    k_cache, v_cache = (laid_out(cache, platform.kv_heads_first) for cache in (k_cache, v_cache))
    # Nothing that was asked for, or lies ready, from before.
    stand_ins.asked_workspaces.clear()
    stand_ins.writes.clear()
    npu.call_memory.cache_clear()
    for _ in range(2):
        out = torch.full(q.shape, torch.nan, dtype=dtype)
        with installed(platform, q.device.type):
            paged_attention(q, k_cache, v_cache, maps, scale=0.3, sliding_window=sliding_window, out=out)
        assert_close(out, expected, dtype)
    if is_decode:
        first, second = ([tensor.data_ptr() for tensor in places] for places in stand_ins.writes)
        assert first == second, "captured calls write again where they wrote"


def laid_out(cache: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """A copy of a cache in one of the two layouts."""
    return made(cache.new_empty, tuple(cache.shape), heads_first=heads_first).copy_(cache)


def attention_maps(step: tuple[tuple[int, int], ...]) -> AttentionMaps:
    """Blocks in no order; rows of the table are padded with the null block."""
    starts = [sum(new for new, _ in step[:i]) for i in range(len(step) + 1)]
    free = [5, 7, 3, 1, 8, 2]
    tables = tuple(tuple(free.pop() for _ in range(-(-kv_len // BLOCK_SIZE))) for _, kv_len in step)
    width = max(len(table) for table in tables)
    kv_lens = [kv_len for _, kv_len in step]
    positions = [(s, kv_len - new + t) for s, (new, kv_len) in enumerate(step) for t in range(new)]
    return AttentionMaps(
        query_starts=tuple(starts),
        kv_lens=tuple(kv_lens),
        block_tables=tables,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        kv_lens_device=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=torch.tensor([[*table, 0, 0][:width] for table in tables], dtype=torch.int32),
        slot_mapping=torch.tensor([tables[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in positions]),
        is_decode=all(new == 1 for new, _ in step),
    )


def norm(dtype: torch.dtype) -> None:
    x, weight = _small_and_large(dtype, 5, 48), _Random(dtype)(48)
    assert_close(rms_norm(x, weight, EPS), _norm(x, weight), dtype)


def norm_of_sum(dtype: torch.dtype) -> None:
    x, residual, weight = _small_and_large(dtype, 5, 48), _small_and_large(dtype, 5, 48, seed=1), _Random(dtype)(48)
    # The sum is rounded before anybody reads it.
    total = x + residual
    normed, stream = add_rms_norm(x, residual, weight, EPS)
    assert_close(normed, _norm(total, weight), dtype)
    assert_close(stream, total.double(), dtype)


def rotate_and_write(dtype: torch.dtype, has_norm: bool, heads_first: bool = False) -> None:
    """Of tokens in no order of slots, one of which is padding; what is not named keeps its bits."""
    random = _Random(dtype)
    caches = [random(NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2)]
    slots = torch.tensor([255, 256, 899, -1, 640])
    num_qk_heads = NUM_HEADS + KV_HEADS
    qkv = (
        _small_and_large(dtype, 5, num_qk_heads + KV_HEADS, HEAD_DIM)
        if has_norm
        else random(5, num_qk_heads + KV_HEADS, HEAD_DIM)
    )
    weight = random(num_qk_heads, HEAD_DIM) if has_norm else None
    angles = 10.0 * random(5, 1, HEAD_DIM // 2).float()
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    qk, v = qkv[:, :num_qk_heads].double(), qkv[:, num_qk_heads:]
    if weight is not None:
        qk = _norm(qk, weight)
    first, second = qk.chunk(2, -1)
    turned = qk * cos.double() + torch.cat((-second, first), -1) * sin.double()
    expected = [cache.double() for cache in caches]
    for cache, values in zip(expected, (turned[:, NUM_HEADS:], v.double()), strict=True):
        for slot, value in zip(slots.tolist(), values, strict=True):
            if slot >= 0:
                cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = value
    caches = [laid_out(cache, heads_first) for cache in caches]
    # The second choice; the first calls nothing of torch_npu.
    with installed(in_use(qkv.device).with_fallback("rotary_kv", "npu", "for the check"), qkv.device.type):
        q = rotary_kv(qkv, cos, sin, *caches, slots, head_weight=weight, eps=EPS)
    is_real = slots >= 0
    assert_close(q[is_real], turned[is_real, :NUM_HEADS], dtype)
    assert_close(caches[0], expected[0], dtype)
    assert torch.equal(caches[1].double(), expected[1]), "the cache does not hold what was written"


def gate(dtype: torch.dtype) -> None:
    gate_up = 3.0 * _Random(dtype)(6, 96)
    first, second = gate_up.double().chunk(2, -1)
    assert_close(swiglu(gate_up), first * first.sigmoid() * second, dtype)


def choose_experts(dtype: torch.dtype) -> None:
    """Experts with no token, one and several; a row of padding harms no other."""
    random = _Random(dtype)
    num_experts, hidden, size = 5, 48, 32
    gate_up, down = random(num_experts, 2 * size, hidden) / 4, random(num_experts, hidden, size) / 4
    x, weights = random(6, hidden), random(6, 2).abs()
    x[4] = torch.nan
    chosen = torch.tensor([[4, 1], [1, 0], [1, 4], [0, 1], [3, 1], [4, 0]])
    expected = torch.zeros(6, hidden, dtype=torch.float64)
    for token, (row, factors) in enumerate(zip(chosen.tolist(), weights.double(), strict=True)):
        for expert, factor in zip(row, factors, strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += factor * (down[expert].double() @ (gate * gate.sigmoid() * up))
    packed = pack_experts(gate_up, down)
    assert packed.implementation == "npu"
    real = [0, 1, 2, 3, 5]
    assert_close(experts(x, chosen, weights, packed)[real], expected[real], dtype)


def multiply_rounded(dtype: torch.dtype) -> None:
    """A weight of a W8A8 checkpoint: the bits of sums in int32, beside rows of A that read inputs as they are."""
    random = _Random(dtype)
    codes, scales = (random(40, 48).float() * 40).clamp(-127, 127).to(torch.int8), random(40, 1).float().abs() / 64
    x, bias, rows = random(6, 48), random(40), random(12, 48)
    if dtype == torch.bfloat16:
        x[0] *= 2.0**20  # what float16 does not hold
    weight = Quantised(codes, scales, None, None, 48, None, rounds_inputs=True)
    packed, behind = append_rows(pack_quantised(weight, bias, dtype), num_rows=6, num_slices=2)
    assert packed.rounds_inputs and packed.holds_codes
    behind.copy_(rows)
    largest = x.float().abs().amax(1, keepdim=True) / 127
    sums = (x.float() / largest).round().to(torch.int32) @ codes.int().t()
    expected = (sums.float() * scales.t() * largest + bias.float()).to(dtype)
    for num_rows in (0, 3):
        for out in (None, torch.full((6, 40 + 2 * num_rows), torch.nan, dtype=dtype)):
            found = linear(x, packed, window_rows=num_rows, out=out)
            assert torch.equal(found[:, :40], expected), "other bits than those of sums in int32"
            if num_rows:
                assert_close(found[1:, 40:], x[1:].double() @ rows[:6].double().t(), dtype)
    assert linear(x[:0], packed).shape == (0, 40)
    # What DoRA divides by, whose product is not rounded.
    a, b = random(2, 48).float(), random(2, 40).float()
    a[:, 0] *= 100
    squares = Projection("q_proj", packed).delta_squares(0, a, b, 0.5)
    changed = dequantise(weight, torch.float32).double() + 0.5 * (b.double().t() @ a.double())
    torch.testing.assert_close(squares.double(), changed.square().sum(1), atol=0, rtol=OP[dtype][1])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the table of tolerances, relative to the size of the expected values; `actual` is in `dtype`."""
    assert actual.dtype == dtype, f"{actual.dtype} instead of {dtype}"
    atol, rtol = OP[dtype]
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol * scale, rtol=rtol)


HALVES = (torch.float16, torch.bfloat16)
CHECKS: dict[str, Callable[[], None]] = {
    f"{check.__name__} {name} {str(dtype).removeprefix('torch.')}".replace("  ", " "): (
        lambda check=check, dtype=dtype, options=options: check(dtype, *options)
    )
    for check, name, options in (
        (attend, "all", (None, False)),
        (attend, "window", (7, False)),
        (attend, "all of a decode step", (None, True)),
        (attend, "window of a decode step", (7, True)),
        (attend, "all, token by token", (None, False, "npu")),
        (attend, "window of a decode step, token by token", (7, True, "npu")),
        (norm, "", ()),
        (norm_of_sum, "", ()),
        (rotate_and_write, "", (False,)),
        (rotate_and_write, "normed", (True,)),
        (rotate_and_write, "head by head", (False, True)),
        (gate, "", ()),
        (choose_experts, "", ()),
        (multiply_rounded, "", ()),
    )
    for dtype in HALVES
}


class _Random:
    """Standard normal values of one dtype, the same in each run."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)


def _small_and_large(dtype: torch.dtype, num_rows: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Rows whose squares are far above, about as large as, and far below the epsilon of a norm."""
    sizes = torch.tensor([1.0, 30.0, 3e-3, 1e-3, 3e-4])[:num_rows].view(-1, *(1 for _ in shape))
    return _Random(torch.float32, seed)(num_rows, *shape).mul_(sizes).to(dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
