"""Norms, rotation with the cache write, and gate against float64, and what their wrappers refuse.

Each implementation that can run here: the device's own, plain torch, and the Triton kernels of NVIDIA GPUs, in Triton's
interpreter on a CPU. What the ops read has NaN around it: in the columns behind, in rows of padding, in free slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from kernels.paged_attention.cache_layout import made
from kernels.platform import contract, detect, in_use, installed
from kernels.rms_norm import ops as rms_norm_ops
from kernels.rms_norm.ops import add_rms_norm, rms_norm
from kernels.rotary_kv import ops as rotary_kv_ops
from kernels.rotary_kv.ops import rotary_kv
from kernels.shapes import Activation
from kernels.swiglu import ops as swiglu_ops
from kernels.swiglu.ops import swiglu
from tests.support.npu.triton_interpreter import round_floats
from tests.tolerances import OP

pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")

OPS = ("rms_norm", "rotary_kv", "swiglu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
TOKENS = pytest.mark.parametrize("num_tokens", [1, 7, 40])
# Columns behind an input; 5: rows begin at odd addresses.
BEHIND = pytest.mark.parametrize("num_behind", [0, 16, 5])
# For ops whose own implementation is one of these on every device.
OTHERS = pytest.mark.parametrize("serving", ["reference", "triton_cuda"], indirect=True)
NUM_BLOCKS, BLOCK_SIZE = 12, 4


@pytest.fixture(params=["own", "reference", "triton_cuda"])
def serving(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The implementation of all ops, in use for the length of a test."""
    if device == "cpu":
        round_floats(monkeypatch)
    platform = in_use(torch.device(device))
    for op in OPS if request.param != "own" else ():
        platform = platform.with_fallback(op, request.param, "for the test")
    with installed(platform, torch.device(device).type):
        yield request.param


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def with_nan_behind(x: torch.Tensor, num_behind: int) -> torch.Tensor:
    """x [tokens, size] as the first columns of longer rows, with a row of padding behind."""
    packed = x.new_full((len(x) + 1, x.shape[1] + num_behind), torch.nan)
    packed[:-1, : x.shape[1]] = x
    return packed[:, : x.shape[1]]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    absolute, relative = OP[found.dtype]
    torch.testing.assert_close(found.double().cpu(), expected.cpu(), atol=absolute, rtol=relative)


def norm_of(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@OTHERS
@pytest.mark.usefixtures("serving")
@DTYPES
@TOKENS
@BEHIND
@pytest.mark.parametrize("size", [96, 129])
@pytest.mark.parametrize("exact_weight", [False, True], ids=["", "float32-weight"])
def test_rms_norm_equals_float64(
    exact_weight: bool, size: int, num_behind: int, num_tokens: int, dtype: torch.dtype, device: str
) -> None:
    x = random(num_tokens, size, dtype=dtype, device=device)
    weight = random(size, dtype=torch.float32 if exact_weight else dtype, device=device, seed=1)
    rows = with_nan_behind(x, num_behind)
    normed = rms_norm(rows, weight, 1e-2)
    assert normed.is_contiguous() and normed.shape == rows.shape
    assert_close(normed[:-1], norm_of(x, weight, 1e-2))
    assert torch.equal(rows[:-1], x)


@OTHERS
@pytest.mark.usefixtures("serving")
@DTYPES
@TOKENS
@BEHIND
@pytest.mark.parametrize("size", [80, 129])
def test_add_rms_norm_gives_the_sum_and_its_norm(
    size: int, num_behind: int, num_tokens: int, dtype: torch.dtype, device: str
) -> None:
    x, residual = (random(num_tokens, size, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = random(size, dtype=dtype, device=device, seed=2)
    expected, rows = x + residual, with_nan_behind(x, num_behind)
    exact, _ = add_rms_norm(rows, torch.cat((residual, residual[:1])), weight.float() + 1e-4, 1e-5)
    assert_close(exact[:-1], norm_of(expected, weight.float() + 1e-4, 1e-5))
    normed, total = add_rms_norm(rows, torch.cat((residual, residual[:1])), weight, 1e-5)
    assert normed.is_contiguous() and total.is_contiguous()
    assert torch.equal(total[:-1], expected)
    assert_close(normed[:-1], norm_of(expected, weight, 1e-5))
    # The sum that is normed is the rounded one.
    assert torch.equal(normed[:-1], rms_norm(expected, weight, 1e-5))
    assert torch.equal(rows[:-1], x)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Of each head its first elements, as many as there are angles."""
    rest = x[..., cos.shape[-1] :].double()
    x = x[..., : cos.shape[-1]].double()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((x * cos.double() + torch.cat((-second, first), dim=-1) * sin.double(), rest), dim=-1)


def angles_of(num_tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    angles = random(num_tokens, 1, head_dim // 2, dtype=torch.float32, device=device, seed=9).repeat(1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def head_weight_of(num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Of the norm of query heads, which all have one weight, and of key heads."""
    query, key = random(2, head_dim, dtype=dtype, device=device, seed=1)
    return torch.cat((query.expand(num_heads, -1), key.expand(kv_heads, -1)))


def check_rotary_kv(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    is_normed: bool,
    num_behind: int = 16,
    num_padding: int = 2,
    rotary_dim: int | None = None,
    weight_dtype: torch.dtype | None = None,
    has_gates: bool = False,
    heads_first: bool = False,
) -> None:
    """Padding first and last: rows of NaN, of which no slot may hear."""
    num_heads, kv_heads = heads
    num_real, num_gated = num_tokens - num_padding, num_heads * (2 if has_gates else 1)
    num_all_heads = num_gated + 2 * kv_heads
    packed = random(num_tokens, num_all_heads * head_dim + num_behind, dtype=dtype, device=device)
    padding = [0, num_tokens - 1][:num_padding]
    packed[padding] = torch.nan
    packed[:, num_all_heads * head_dim :] = torch.nan
    qkv = packed[:, : num_all_heads * head_dim].view(num_tokens, num_all_heads, head_dim)
    weight_dtype = weight_dtype or dtype
    weight = head_weight_of(num_heads, kv_heads, head_dim, weight_dtype, device) if is_normed else None
    cos, sin = angles_of(num_tokens, rotary_dim or head_dim, dtype, device)
    free = torch.randperm((NUM_BLOCKS - 1) * BLOCK_SIZE, generator=torch.Generator().manual_seed(3)) + BLOCK_SIZE
    real = torch.tensor([token for token in range(num_tokens) if token not in padding], dtype=torch.int64)
    slots = torch.full((num_tokens,), -1)
    slots[real] = free[:num_real]
    if has_gates:
        qkv[:, 1:num_gated:2] = torch.nan
    heads_of_qk = [*range(0, num_gated, 2 if has_gates else 1), *range(num_gated, num_gated + kv_heads)]
    qk = qkv[:, heads_of_qk]
    turned = rotated(qk if weight is None else norm_of(qk, weight, 1e-3), cos, sin)[real]
    cache_shape = (NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim)
    caches = [made(qkv.new_empty, cache_shape, heads_first=heads_first).fill_(torch.nan) for _ in range(2)]
    before = packed.clone()
    q = rotary_kv(qkv, cos, sin, *caches, slots.to(device), head_weight=weight, eps=1e-3, has_gates=has_gates)
    assert q.shape == (num_tokens, num_heads, head_dim) and q.stride()[1:] == (head_dim, 1)
    assert_close(q[real], turned[:, :num_heads])
    k, v = (cache.reshape(-1, kv_heads, head_dim) for cache in caches)
    assert_close(k[slots[real]], turned[:, num_heads:])
    assert torch.equal(v[slots[real]], qkv[real, num_gated + kv_heads :])
    rest = torch.ones(len(k), dtype=torch.bool).index_fill_(0, slots[real], False)
    assert bool(k[rest].isnan().all()) and bool(v[rest].isnan().all()), "a slot of nobody was written"
    assert torch.equal(packed.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.usefixtures("serving")
@DTYPES
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_heads_of_every_size(head_dim: int, is_normed: bool, dtype: torch.dtype, device: str) -> None:
    check_rotary_kv(5, (6, 2), head_dim, dtype, device, is_normed=is_normed)


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (7, 1)], ids=str)
def test_caches_of_an_npu_lie_head_by_head(heads: tuple[int, int]) -> None:
    """The last of its fallbacks, on this host."""
    npu = dataclasses.replace(detect("cpu"), device="npu").with_fallback("rotary_kv", "reference", "for the test")
    with installed(npu, "cpu"):
        check_rotary_kv(5, heads, 16, torch.float32, "cpu", is_normed=True, heads_first=True)


@pytest.mark.usefixtures("serving")
@DTYPES
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(2, 8), (6, 8), (48, 64), (60, 80), (64, 256)])
def test_a_share_of_each_head_is_turned(
    rotary_dim: int, head_dim: int, is_normed: bool, dtype: torch.dtype, device: str
) -> None:
    check_rotary_kv(5, (6, 2), head_dim, dtype, device, is_normed=is_normed, rotary_dim=rotary_dim)


@pytest.mark.usefixtures("serving")
@DTYPES
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("num_behind", [16, 5])
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(48, 48), (64, 256)])
@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (16, 4)], ids=str)
def test_gates_behind_queries_are_passed_over(
    heads: tuple[int, int],
    rotary_dim: int,
    head_dim: int,
    num_behind: int,
    is_normed: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    options = {"is_normed": is_normed, "rotary_dim": rotary_dim, "num_behind": num_behind}
    check_rotary_kv(5, heads, head_dim, dtype, device, **options, has_gates=True)


@pytest.mark.usefixtures("serving")
@DTYPES
@pytest.mark.parametrize("rotary_dim", [32, 80])
def test_heads_are_normed_by_weights_of_float32(rotary_dim: int, dtype: torch.dtype, device: str) -> None:
    check_rotary_kv(5, (6, 2), 80, dtype, device, is_normed=True, rotary_dim=rotary_dim, weight_dtype=torch.float32)


@pytest.mark.usefixtures("serving")
@DTYPES
@TOKENS
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (40, 8)], ids=str)
def test_heads_of_every_number(heads: tuple[int, int], num_tokens: int, dtype: torch.dtype, device: str) -> None:
    check_rotary_kv(num_tokens, heads, 32, dtype, device, is_normed=heads == (6, 2), num_padding=0)


@pytest.mark.usefixtures("serving")
@BEHIND
def test_rows_of_any_stride(num_behind: int, device: str) -> None:
    check_rotary_kv(6, (6, 2), 64, torch.bfloat16, device, is_normed=True, num_behind=num_behind)


@pytest.mark.usefixtures("serving")
def test_a_step_of_padding_writes_nothing(device: str) -> None:
    caches = [torch.arange(2.0 * BLOCK_SIZE * 16, device=device).view(2, BLOCK_SIZE, 2, 8) for _ in range(2)]
    qkv, slots = torch.full((3, 8, 8), torch.nan, device=device), torch.full((3,), -1, device=device)
    rotary_kv(qkv, *angles_of(3, 8, torch.float32, device), *caches, slots)
    for cache in caches:
        assert torch.equal(cache.flatten(), torch.arange(2.0 * BLOCK_SIZE * 16, device=device))


@OTHERS
@pytest.mark.usefixtures("serving")
@DTYPES
@TOKENS
@BEHIND
@pytest.mark.parametrize("size", [48, 1100])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped"])
def test_swiglu_equals_float64(
    activation: Activation, size: int, num_behind: int, num_tokens: int, dtype: torch.dtype, device: str
) -> None:
    gate_up = random(num_tokens, 2 * size, dtype=dtype, device=device) * 3
    gate_up[0, :2] = torch.tensor([100.0, -100.0])
    rows = with_nan_behind(gate_up, num_behind)
    found = swiglu(rows, activation)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert found.is_contiguous() and found.shape == (num_tokens + 1, size)
    if activation == "clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        gated = gate * (1.702 * gate).sigmoid()
    else:
        gated = gate * gate.sigmoid() if activation == "silu" else functional.gelu(gate, approximate="tanh")
    assert_close(found[:-1], gated * up)
    assert torch.equal(rows[:-1], gate_up)


@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
def test_nothing_is_compiled_after_warm_up(is_normed: bool, device: str) -> None:
    """For steps of any number of tokens, in rows with columns behind and without."""
    kv_heads, num_heads, head_dim, dtype = 2, 6, 64, torch.bfloat16
    weight = torch.ones(num_heads + kv_heads, head_dim, dtype=dtype, device=device) if is_normed else None
    cache = torch.full((3, BLOCK_SIZE, kv_heads, head_dim), 3.0, dtype=dtype, device=device)
    norm_weight = torch.ones(96, dtype=dtype, device=device)
    compiled = [
        rms_norm_ops.warm_up(norm_weight),
        rotary_kv_ops.warm_up(cache, num_heads, head_weight=weight),
        swiglu_ops.warm_up(128, dtype, torch.device(device)),
    ]
    assert bool((cache == 3.0).all())
    contracts = [contract(op, torch.device(device)) for op in OPS]
    before = [one.compiled_count() for one in contracts]
    assert device != "cpu" or compiled == before == [0, 0, 0]
    for num_tokens in (1, 2, 16, 33):
        for num_behind in (0, 64):
            rows = torch.zeros(num_tokens, 640 + num_behind, dtype=dtype, device=device)
            rms_norm(rows[:, :96], norm_weight, 1e-6)
            add_rms_norm(rows[:, :96], torch.zeros(num_tokens, 96, dtype=dtype, device=device), norm_weight, 1e-6)
            swiglu(rows[:, :256])
            slots = torch.full((num_tokens + 1,), -1, device=device)[1:]
            qkv = rows[:, :640].view(num_tokens, 10, head_dim)
            cos, sin = angles_of(num_tokens, head_dim, dtype, device)
            rotary_kv(qkv, cos, sin, cache, cache, slots, head_weight=weight, eps=1e-6)
    assert [one.compiled_count() for one in contracts] == before


def test_captured_once_replayed_with_other_slots(device: str) -> None:
    """One capture of all ops; other values, slots and padding of its size: bit-equal to eager."""
    if device == "cpu":
        pytest.skip("NOT RUN: no NVIDIA GPU, and graphs need one")
    num_tokens, head_dim, dtype = 9, 128, torch.bfloat16
    cos, sin = angles_of(num_tokens, head_dim, dtype, device)
    weight = head_weight_of(7, 1, head_dim, dtype, device)
    norm_weight = random(10 * head_dim, dtype=dtype, device=device)

    def step(
        x: torch.Tensor, slots: torch.Tensor, residual: torch.Tensor, caches: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        qkv = x.view(num_tokens, 10, head_dim)
        q = rotary_kv(qkv, cos, sin, *caches, slots, head_weight=weight, eps=1e-6)
        return [q, swiglu(x), *add_rms_norm(x, residual, norm_weight, 1e-6), rms_norm(x, norm_weight, 1e-6)]

    def fresh(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        x, residual = (random(num_tokens, 10 * head_dim, dtype=dtype, device=device, seed=seed + n) for n in (0, 1))
        slots = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:num_tokens] + BLOCK_SIZE
        slots[seed % num_tokens :] = -1
        caches = [torch.zeros(11, BLOCK_SIZE, 2, head_dim, dtype=dtype, device=device) for _ in range(2)]
        return x, slots.to(device), residual, caches

    x, slots, residual, caches = fresh(8)
    step(x, slots, residual.clone(), caches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step(x, slots, residual, caches)
    for seed in range(20):
        other = fresh(seed)
        for held, new in zip((x, slots, residual, *caches), (*other[:3], *other[3]), strict=True):
            held.copy_(new)
        eager = step(*other)
        graph.replay()
        torch.cuda.synchronize()
        real = slice(0, seed % num_tokens)
        for found, right in zip(outs, eager, strict=True):
            assert torch.equal(found[real], right[real])
        for found, right in zip(caches, other[3], strict=True):
            assert torch.equal(found, right)


X, W, HEADS = torch.zeros(2, 8), torch.zeros(8), torch.zeros(2, 4, 8)
ANGLES, CACHE, SLOTS = torch.zeros(2, 1, 8), torch.zeros(2, 4, 1, 8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(X, W.double(), 1e-6), "its weight"),
        (lambda: rms_norm(X, W[:4], 1e-6), "shape of one token"),
        (lambda: rms_norm(torch.zeros(8, 2).t(), W, 1e-6), "unit stride"),
        (lambda: add_rms_norm(X, X.double(), W, 1e-6), "alike"),
        (lambda: add_rms_norm(X, torch.zeros(2, 9)[:, :8], W, 1e-6), "contiguous"),
        (lambda: add_rms_norm(torch.zeros(8, 2).t(), X, W, 1e-6), "unit stride"),
        (lambda: rotary_kv(HEADS, ANGLES[..., :4], ANGLES, CACHE, CACHE, SLOTS), "cos, sin"),
        (lambda: rotary_kv(HEADS, ANGLES[..., :3], ANGLES[..., :3], CACHE, CACHE, SLOTS), "two halves"),
        (lambda: rotary_kv(HEADS, ANGLES.repeat(1, 1, 2), ANGLES.repeat(1, 1, 2), CACHE, CACHE, SLOTS), "two halves"),
        (lambda: rotary_kv(HEADS, ANGLES, ANGLES.double(), CACHE, CACHE, SLOTS), "rotation"),
        (lambda: rotary_kv(HEADS[:, :2], ANGLES, ANGLES, CACHE, CACHE, SLOTS), "then kv_heads"),
        (lambda: rotary_kv(HEADS[:, :3], ANGLES, ANGLES, CACHE, CACHE, SLOTS, has_gates=True), "before its gate"),
        (
            lambda: rotary_kv(torch.zeros(4, 2, 8).transpose(0, 1), ANGLES, ANGLES, CACHE, CACHE, SLOTS),
            "heads of a token",
        ),
        (lambda: rotary_kv(HEADS, ANGLES, ANGLES, CACHE, CACHE[:1], SLOTS), "num_blocks"),
        (lambda: rotary_kv(HEADS, ANGLES, ANGLES, CACHE.double(), CACHE.double(), SLOTS), "caches hold"),
        (lambda: rotary_kv(HEADS, ANGLES, ANGLES, CACHE, CACHE, SLOTS[:1]), "slot_mapping"),
        (lambda: rotary_kv(HEADS, ANGLES, ANGLES, CACHE, CACHE, SLOTS, head_weight=W), "head_weight"),
        (lambda: swiglu(torch.zeros(2, 7)), "2 \\* size"),
        (lambda: swiglu(torch.zeros(8, 2).t()), "unit stride"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        call()
