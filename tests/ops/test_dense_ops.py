"""Norms, rotation, gate and the cache write against float64, and what their wrappers refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.kv_write.ops import write_kv
from kernels.rms_norm.ops import add_rms_norm, rms_norm, rms_norm_heads
from kernels.rotary.ops import rotary
from kernels.swiglu.ops import swiglu
from tests.tolerances import OP

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
TOKENS = pytest.mark.parametrize("num_tokens", [1, 7, 130])


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    absolute, relative = OP[found.dtype]
    torch.testing.assert_close(found.double().cpu(), expected.cpu(), atol=absolute, rtol=relative)


def norm_of(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@DTYPES
@TOKENS
def test_rms_norm_equals_float64(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    x = random(num_tokens, 96, dtype=dtype, device=device)
    weight = random(96, dtype=dtype, device=device, seed=1)
    before = x.clone()
    assert_close(rms_norm(x, weight, 1e-2), norm_of(x, weight, 1e-2))
    assert torch.equal(x, before)


@DTYPES
@TOKENS
def test_add_rms_norm_gives_the_sum_and_its_norm(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    x, residual = (random(num_tokens, 80, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = random(80, dtype=dtype, device=device, seed=2)
    expected, before = x + residual, x.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected)
    assert_close(normed, norm_of(expected, weight, 1e-5))
    assert torch.equal(x, before)


@DTYPES
@TOKENS
def test_heads_are_normed_one_by_one(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    """Queries and keys are a part of the packed projection, so tokens stand apart."""
    packed = random(num_tokens, 8, 32, dtype=dtype, device=device)
    weight = random(6, 32, dtype=dtype, device=device, seed=1)
    found = rms_norm_heads(packed[:, :6], weight, 1e-6)
    assert found.is_contiguous()
    assert_close(found, norm_of(packed[:, :6], weight, 1e-6))


@DTYPES
@TOKENS
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1)])
def test_rotation_equals_float64(
    num_heads: int, num_kv_heads: int, num_tokens: int, dtype: torch.dtype, device: str
) -> None:
    packed = random(num_tokens, num_heads + 2 * num_kv_heads, 32, dtype=dtype, device=device)
    qk = packed[:, : num_heads + num_kv_heads]
    angles = random(num_tokens, 1, 16, dtype=torch.float32, device=device, seed=1).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = qk.double().chunk(2, dim=-1)
    expected = qk.double() * cos.double() + torch.cat((-second, first), dim=-1) * sin.double()
    before = packed.clone()
    q, k = rotary(qk, cos, sin, num_heads)
    assert_close(q, expected[:, :num_heads])
    assert_close(k, expected[:, num_heads:])
    assert q.stride()[1:] == k.stride()[1:] == (32, 1)
    assert torch.equal(packed, before)


@DTYPES
@TOKENS
def test_swiglu_equals_float64(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    gate_up = random(num_tokens, 96, dtype=dtype, device=device) * 3
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(swiglu(gate_up), gate * gate.sigmoid() * up)


@DTYPES
def test_keys_and_values_reach_their_slots(dtype: torch.dtype, device: str) -> None:
    """Block size 4; values are a strided part of the packed projection; what is not named keeps its bits."""
    k = random(3, 2, 8, dtype=dtype, device=device)
    v = random(3, 6, 8, dtype=dtype, device=device, seed=1)[:, 4:]
    k_cache, v_cache = (torch.full((3, 4, 2, 8), 7.0, dtype=dtype, device=device) for _ in range(2))
    slots = torch.tensor([9, 4, 11], device=device)
    write_kv(k, v, k_cache, v_cache, slots)
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache.view(12, 2, 8)[slots], new)
        rest = [slot for slot in range(12) if slot not in (9, 4, 11)]
        assert bool((cache.view(12, 2, 8)[rest] == 7.0).all())


X, W, HEADS = torch.zeros(2, 8), torch.zeros(8), torch.zeros(2, 4, 8)
ANGLES = torch.zeros(2, 1, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(X, W.double(), 1e-6), "its weight"),
        (lambda: rms_norm(X, W[:4], 1e-6), "shape of one token"),
        (lambda: rms_norm(torch.zeros(8, 2).t(), W, 1e-6), "unit stride"),
        (lambda: rms_norm_heads(HEADS, W, 1e-6), "shape of one token"),
        (lambda: add_rms_norm(X, X.double(), W, 1e-6), "alike"),
        (lambda: add_rms_norm(X, torch.zeros(2, 9)[:, :8], W, 1e-6), "contiguous"),
        (lambda: rotary(HEADS, ANGLES[..., :4], ANGLES[..., :4], 2), "cos, sin"),
        (lambda: rotary(HEADS, ANGLES, ANGLES.double(), 2), "rotation"),
        (lambda: rotary(HEADS, ANGLES, ANGLES, 4), "before keys"),
        (lambda: rotary(HEADS.transpose(0, 1), ANGLES, ANGLES, 1), "heads of a token"),
        (lambda: swiglu(torch.zeros(2, 7)), "2 \\* size"),
        (lambda: swiglu(torch.zeros(8, 2).t()), "contiguous"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        call()
