"""The base projection against float64, in every dtype, for the shapes a step brings."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kernels.linear import ops, reference
from kernels.linear.ops import linear, pack_weight
from kernels.linear.quantised import Quantised, dequantise
from kernels.linear.triton_cuda_configs import MAX_TOKENS
from kernels.platform import detect, installed
from tests.ops.lora.test_lora_triton import run_compiling
from tests.support.npu.triton_interpreter import multiply_bfloat16, round_floats
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


# Inputs of a group, offsets, order of the inputs.
SMALL = {"groups": (32, True, False), "rows": (512, True, False), "symmetric": (128, False, False)}
SMALL |= {"ordered": (64, True, True), "minima": (32, None, False)}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("out_features", [16, 1072])
def test_codes_of_4_bits_may_be_held_on_a_cpu(name: str, out_features: int) -> None:
    """Scales and zero points are rounded to bfloat16, and each token's product is the same in every step."""
    group, has_zeros, has_order = SMALL[name]
    generator, inputs = torch.Generator().manual_seed(0), 512
    codes = torch.randint(0, 256, (out_features, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand(out_features, inputs // group, generator=generator) * inputs**-0.5 / 8
    zeros = torch.randint(0, 16, scales.shape, generator=generator) * scales
    offsets = -zeros if has_zeros else -8 * scales if has_zeros is False else -torch.rand_like(scales) / 8
    order = torch.randperm(inputs, generator=generator).int() if has_order else None
    weight = Quantised(codes, scales, offsets, None, group, order)
    bias = torch.randn(out_features, generator=generator).bfloat16()
    packed = ops.pack_quantised(weight, bias, torch.bfloat16, saves_memory=True)
    assert packed.holds_codes and packed.nbytes < out_features * inputs * 0.65 + 4 * inputs
    values, (atol, rtol) = dequantise(weight, torch.bfloat16), OP[torch.bfloat16]
    x = torch.randn(33, inputs + 8, generator=generator).bfloat16()[:, 8:]
    out = linear(x, packed)
    torch.testing.assert_close(out.double(), expected_product(x, values, bias), atol=atol, rtol=rtol)
    assert torch.equal(linear(x[4:5], packed), out[4:5]) and linear(x[:0], packed).shape == (0, out_features)
    written = torch.empty_like(out)
    assert linear(x, packed, out=written) is written and torch.equal(written, out)


def test_only_what_is_small_and_asked_for_is_held_in_codes_on_a_cpu() -> None:
    weight = Quantised(torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 1), None, None, 64, None)
    assert ops.pack_quantised(weight, None, torch.bfloat16, saves_memory=True).holds_codes
    others = [replace(weight, table=torch.zeros(16)), weight.rows(slice(8)), replace(weight, group=16)]
    others[2] = replace(others[2], scales=torch.ones(16, 4))
    assert not any(ops.pack_quantised(one, None, torch.bfloat16, saves_memory=True).holds_codes for one in others)
    assert not ops.pack_quantised(weight, None, torch.float32, saves_memory=True).holds_codes
    assert not ops.pack_quantised(weight, None, torch.bfloat16).holds_codes


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


# Codes, inputs of a group (0: all), offsets, order of the inputs; odd numbers of outputs and inputs.
QUANTISED: dict[str, tuple[str, int, bool, bool, int, int]] = {
    "fp8 rows": ("fp8", 0, False, False, 70, 210),
    "fp8 blocks": ("fp8", 128, False, False, 33, 256),
    "int8 rows": ("int8", 0, False, False, 320, 1024),
    "int8 zeros": ("int8", 32, True, False, 66, 96),
    "int4 zeros ordered": ("int4", 64, True, True, 70, 192),
    "int4 rows": ("int4", 0, True, False, 20, 144),
    "nf4": ("nf4", 32, False, False, 70, 160),
    "nf4 odd groups": ("nf4", 48, False, False, 20, 96),
}


def quantised(name: str) -> Quantised:
    codes_of, group, has_offsets, has_order, out_features, in_features = QUANTISED[name]
    generator = torch.Generator().manual_seed(len(name))
    if codes_of == "fp8":
        codes = torch.randn(out_features, in_features, generator=generator).to(torch.float8_e4m3fn)
    elif codes_of == "int8":
        codes = torch.randint(-128, 128, (out_features, in_features), generator=generator, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (out_features, in_features // 2), generator=generator, dtype=torch.uint8)
    group = group or in_features
    largest = 64 if codes_of == "int8" else 1
    scales = torch.rand(out_features, in_features // group, generator=generator) * in_features**-0.5 / largest
    return Quantised(
        codes,
        scales,
        -torch.randint(0, 16, scales.shape, generator=generator) * scales if has_offsets else None,
        torch.randn(16, generator=generator) if codes_of == "nf4" else None,
        group,
        torch.randperm(in_features, generator=generator).int() if has_order else None,
    )


@pytest.fixture(scope="module")
def triton_cuda(device: str) -> Iterator[ModuleType]:
    """The implementation of NVIDIA GPUs, where a CPU with so many cores is one: in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kernels.linear import triton_cuda as module

    patch = pytest.MonkeyPatch()
    if device == "cpu":
        multiply_bfloat16(patch)
        round_floats(patch)
    platform = detect(device)
    platform = replace(
        platform, implementations={**platform.implementations, "linear": "triton_cuda"}, num_cores=NUM_CORES
    )
    with installed(platform):
        yield module
    patch.undo()


# Enough for narrow weights to be split.
NUM_CORES = 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_weight_means_its_dequantised_values(
    name: str, dtype: torch.dtype, triton_cuda: ModuleType, device: str
) -> None:
    """In steps of all sizes, with rows of A behind it of which those past the window are NaN."""
    weight = quantised(name)
    expected = dequantise(weight, dtype).to(device)
    bias = torch.randn(weight.out_features, device=device).to(dtype)
    packed = ops.pack_quantised(weight.to(torch.device(device)), bias, dtype)
    assert packed.implementation == "triton_cuda"
    last = weight.out_features - 3
    assert torch.equal(triton_cuda.dequantised(packed, 5, last), expected[5:last])
    packed, rows = ops.append_rows(packed, num_rows=8, num_slices=2)
    assert rows.nbytes == 16 * weight.in_features * dtype.itemsize
    rows.copy_(torch.randn(rows.shape) * weight.in_features**-0.5)
    rows[10:] = torch.nan
    atol, rtol = OP[dtype]
    for num_tokens in (0, 1, 20, MAX_TOKENS + 1):
        x = torch.randn(num_tokens, weight.in_features + 8, device=device).to(dtype)[:, 8:]
        for window_rows in (0, 5):
            out = linear(x, packed, window_rows=window_rows)
            assert out.is_contiguous()
            base = expected_product(x, expected, bias)
            behind = expected_product(x, rows[: 2 * window_rows], None)
            torch.testing.assert_close(out.double(), torch.cat((base, behind), 1), atol=atol, rtol=rtol)


def rounded_values(x: torch.Tensor) -> torch.Tensor:
    """float32: inputs in float8, with a scale for each token."""
    scales = x.float().abs().amax(-1, keepdim=True) / 448
    scales = torch.where(scales > 0, scales, 1.0)
    return (x.float() / scales).to(torch.float8_e4m3fn).float() * scales


# Outputs and inputs.
ROUNDED = {"odd": (48, 208), "in parts": (512, 256)}


@pytest.mark.parametrize("name", ROUNDED)
def test_products_of_many_tokens_round_their_inputs(
    name: str, triton_cuda: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is rounded alone, whatever is beside it; rows of A and decode steps read inputs as they are."""
    out_features, in_features = ROUNDED[name]
    if name == "in parts":
        monkeypatch.setattr(triton_cuda, "_SCRATCH_BYTES", 1)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(out_features, in_features, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(out_features, 1, generator=generator) * in_features**-0.5
    weight = Quantised(codes, scales, None, None, in_features, None)
    bias = torch.randn(out_features, generator=generator).bfloat16().to(device)
    packed = ops.round_prompts(ops.pack_quantised(weight.to(torch.device(device)), bias, torch.bfloat16))
    assert packed.rounds_prompts
    packed, rows = ops.append_rows(packed, num_rows=2, num_slices=2)
    rows.copy_(torch.randn(rows.shape, generator=generator))
    x = torch.randn(MAX_TOKENS + 3, in_features + 8, generator=generator).bfloat16().to(device)[:, 8:]
    x[1], x[2], x[3, 5] = 0, 1e-4 * x[2], torch.nan
    values, (atol, rtol) = dequantise(weight, torch.float32).to(device), OP[torch.bfloat16]
    base, behind = expected_product(rounded_values(x), values, bias), expected_product(x, rows, None)
    assert (base - expected_product(x, values, bias)).nan_to_num().abs().max() > 2 * atol, "rounding is not seen"
    for window_rows in (0, 2):
        out = linear(x, packed, window_rows=window_rows)
        expected = torch.cat((base, behind), 1) if window_rows else base
        torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol, equal_nan=True)
    written = torch.empty(x.shape[0], out_features, dtype=x.dtype, device=device)
    assert linear(x, packed, out=written).nan_to_num().equal(linear(x, packed).nan_to_num())
    few = linear(x[:20], packed).double()
    exact = expected_product(x[:20], dequantise(weight, torch.bfloat16).to(device), bias)
    torch.testing.assert_close(few, exact, atol=atol, rtol=rtol, equal_nan=True)


def test_weights_that_round_no_prompts(triton_cuda: ModuleType) -> None:  # noqa: ARG001
    """Other codes, groups and dtypes, odd numbers of outputs, and what is held in floats."""
    fp8 = Quantised(torch.zeros(16, 256).to(torch.float8_e4m3fn), torch.ones(16, 1), None, None, 256, None)
    others = [
        replace(fp8, codes=fp8.codes.to(torch.int8)),
        replace(fp8, scales=torch.ones(16, 4), group=64),
        fp8.rows(slice(15)),
    ]
    packed = [ops.pack_quantised(weight, None, torch.bfloat16) for weight in others]
    packed += [ops.pack_quantised(fp8, None, torch.float16), pack_weight(torch.zeros(16, 256))]
    assert not any(ops.round_prompts(weight).rounds_prompts for weight in packed)


def test_a_narrow_weight_is_split_and_summed_in_one_order(triton_cuda: ModuleType, device: str) -> None:
    """Twice, since the parts of the first call are still in the workspace."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (40, 1100), generator=generator, dtype=torch.int8)
    weight = Quantised(codes, torch.full((40, 1), 2.0**-12), None, None, 1100, None).to(torch.device(device))
    packed = ops.pack_quantised(weight, None, torch.bfloat16)
    assert triton_cuda.splits_of(packed) == 2
    packed, rows = ops.append_rows(packed, num_rows=2, num_slices=1)
    rows.fill_(0.5)
    atol, rtol = OP[torch.bfloat16]
    full = torch.cat((dequantise(weight, torch.bfloat16), rows))
    for _ in range(2):
        x = torch.randn(18, 1100, generator=generator).bfloat16().to(device)
        out = linear(x, packed, window_rows=2)
        torch.testing.assert_close(out.double(), expected_product(x, full, None), atol=atol, rtol=rtol)


def test_odd_groups_and_float32_are_held_dequantised(triton_cuda: ModuleType) -> None:  # noqa: ARG001
    weight = replace(quantised("fp8 rows"), group=6, scales=torch.rand(70, 35))
    for dtype, one in ((torch.bfloat16, weight), (torch.float32, quantised("fp8 rows"))):
        packed = ops.pack_quantised(one, None, dtype)
        assert (packed.tiled, packed.nbytes) == (None, 70 * 210 * dtype.itemsize)
        assert torch.equal(linear(torch.eye(210, dtype=dtype), packed).t(), dequantise(one, dtype))


@pytest.mark.wide
def test_products_of_codes_compile_for_hopper_without_a_gpu(device: str) -> None:
    """Their codes' values stay in registers, which reach; two programs fit a core, and three of those with three stages
    of 64 outputs."""
    if device != "cpu":
        pytest.skip("NOT RUN: on a GPU the other tests compile for that GPU")
    for line in run_compiling("compile_codes.py").splitlines():
        num_programs = 3 if "block_out=64" in line and "stages=3" in line else 2
        assert num_programs * (int(line.split()[-1]) + 1024) <= 228 * 1024, line
