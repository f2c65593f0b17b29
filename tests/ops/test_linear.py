"""The base projection against float64, in every dtype, for the shapes a step brings."""

from __future__ import annotations

import importlib

import pytest
import torch

from kernels.linear import ops, reference
from kernels.linear.ops import linear, pack_weight
from tests.tolerances import OP

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def expected_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 33])
@pytest.mark.parametrize(("out_features", "in_features"), [(7, 5), (64, 48), (130, 257)])
def test_equals_float64(
    implementation: str, dtype: torch.dtype, has_bias: bool, num_tokens: int, out_features: int, in_features: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens + out_features)
    weight = (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_tokens, in_features, generator=generator).to(dtype)
    packed = importlib.import_module(f"kernels.linear.{implementation}").pack_weight(weight, bias)
    out = linear(x, packed)
    assert out.dtype == dtype
    assert out.is_contiguous()
    atol, rtol = OP[dtype]
    torch.testing.assert_close(out.double(), expected_product(x, weight, bias), atol=atol, rtol=rtol)


def test_keeps_nothing_of_the_callers_memory() -> None:
    weight, bias = torch.randn(16, 8), torch.randn(16)
    x = torch.randn(3, 8)
    expected = expected_product(x, weight, bias)
    packed = pack_weight(weight, bias)
    weight.zero_()
    bias.zero_()
    torch.testing.assert_close(linear(x, packed).double(), expected, atol=1e-5, rtol=1e-5)


def test_takes_a_slice_of_wider_rows() -> None:
    x = torch.randn(6, 40)[:, 8:24]
    weight = torch.randn(10, 16)
    out = linear(x, pack_weight(weight))
    torch.testing.assert_close(out.double(), expected_product(x, weight, None), atol=1e-5, rtol=1e-5)


def test_refuses_what_does_not_fit() -> None:
    packed = pack_weight(torch.randn(4, 3))
    with pytest.raises(AssertionError, match="fit"):
        linear(torch.randn(2, 4), packed)
    with pytest.raises(AssertionError, match="bfloat16"):
        linear(torch.randn(2, 3, dtype=torch.bfloat16), packed)


def test_says_what_it_holds() -> None:
    packed = ops.pack_weight(torch.randn(6, 4), torch.randn(6))
    assert (packed.out_features, packed.in_features, packed.nbytes) == (6, 4, (24 + 6) * 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_a_window_adds_the_products_of_the_rows_behind(dtype: torch.dtype, has_bias: bool) -> None:
    """One truth: what is written to the rows afterwards is multiplied, for every length of the window."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(40, 24, generator=generator) * 0.2).to(dtype)
    bias = torch.randn(40, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(5, 24, generator=generator).to(dtype)
    plain = reference.pack_weight(weight, bias)
    packed, rows = ops.append_rows(plain, num_rows=4, num_slices=3)
    assert rows.shape == (12, 24)
    assert (packed.nbytes, packed.out_features) == (plain.nbytes, 40)
    rows.copy_(torch.randn(12, 24, generator=generator))
    rows[9:] = torch.nan  # the last row of each slice
    atol, rtol = OP[dtype]
    for window_rows in range(4):
        out = linear(x, packed, window_rows=window_rows)
        assert out.is_contiguous()
        torch.testing.assert_close(out[:, :40].double(), expected_product(x, weight, bias), atol=atol, rtol=rtol)
        behind = expected_product(x, rows[: 3 * window_rows], None)
        torch.testing.assert_close(out[:, 40:].double(), behind, atol=atol, rtol=rtol)
    with_nan = linear(x, packed, window_rows=4)
    torch.testing.assert_close(with_nan[:, :49], out, atol=atol, rtol=rtol)
    assert with_nan[:, 49:].isnan().all()
    with pytest.raises(AssertionError, match="longer"):
        linear(x, packed, window_rows=5)
    with pytest.raises(AssertionError, match="already"):
        ops.append_rows(packed, 4, 3)
