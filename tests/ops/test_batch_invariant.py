"""Torch's calls within `batch_invariant_mode`: rows are equal to the bit beside any number of others, with several
threads, whatever divides the sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.batch_invariant.mode import batch_invariant_mode, install_batch_invariance, refuse_model
from kernels.causal_conv1d.ops import causal_conv1d_prefill
from kernels.gated_delta.ops import gated_delta_decode, gated_delta_prefill, gated_norm
from kernels.linear.ops import linear, pack_weight
from kernels.platform import BackendError, Platform, in_use, installed
from kernels.shapes import ProbeShapes
from tests.tolerances import OP

# Some are as many as tiles of a GPU hold, some more than it sums in parts.
NUM_ROWS = {"cpu": 70, "cuda": 300}
SIZES = (48, 100, 576, 2048, 4100)


@pytest.fixture(autouse=True)
def _installed(device: str) -> Iterator[None]:
    """With as many threads as divide no size evenly."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    install_batch_invariance(device, wanted=True)
    with torch.device(device):
        yield
    install_batch_invariance(device, wanted=False)
    torch.set_num_threads(before)


def packed(size: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = pack_weight(torch.randn(size // 2 + 7, size).to(dtype), torch.randn(size // 2 + 7).to(dtype))
    return lambda x: linear(x, weight)


def plain(size: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = torch.randn(33, size).to(dtype)
    return lambda x: torch.cat((functional.linear(x, weight), x @ weight.t()), dim=1)


def with_bias(size: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = torch.randn(size, 33).to(dtype), torch.randn(33).to(dtype)
    return lambda x: torch.addmm(bias, x, weight)


def fused(size: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    one = torch.randn(size).to(dtype)
    return lambda x: torch.addcmul(x, x, one, value=0.3)


def of(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Callable[[torch.Tensor], torch.Tensor]]:
    return lambda _size, _dtype: function


CALLS = {
    "packed": packed,
    "plain": plain,
    "with_bias": with_bias,
    "addcmul": fused,
    "silu": of(functional.silu),
    "exp_": of(lambda x: x.clone().exp_()),
    "tanh": of(torch.tanh),
    "sigmoid": of(torch.sigmoid),
    "gelu": of(lambda x: functional.gelu(x, approximate="tanh")),
    "softplus": of(functional.softplus),
    "rms_norm": of(lambda x: functional.rms_norm(x, x.shape[-1:])),
    "log_softmax": of(lambda x: x.float().log_softmax(-1)),
    "sum": of(lambda x: x.float().square().sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_rows_do_not_depend_on_their_neighbours(name: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    num_rows = NUM_ROWS[device]
    for size in SIZES:
        call, x = CALLS[name](size, dtype), (3 * torch.randn(num_rows, size)).to(dtype)
        with batch_invariant_mode(torch.device(device)):
            whole = call(x)
            for first, last in ((0, 1), (num_rows - 1, num_rows), (3, 8), (20, 53), (16, 32), (2, num_rows // 2)):
                assert torch.equal(call(x[first:last].clone()), whole[first:last]), (size, first, last)
                assert torch.equal(call(x[first:last]), whole[first:last]), (size, first, last)


def test_products_are_those_without_it_but_for_rounding(device: str) -> None:
    torch.manual_seed(0)
    x, call = torch.randn(37, 96), packed(96, torch.float32)
    with batch_invariant_mode(torch.device(device)):
        own = call(x)
    torch.testing.assert_close(own, call(x))


OF_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:], None, 1e-6),
}


def test_kernels_of_a_gpu_are_right() -> None:
    """In Triton's interpreter without one: products whose parts are summed by one program and by several, of weights in
    both orders, and functions of rows of more than one block."""
    from kernels.batch_invariant import cuda

    torch.manual_seed(0)
    weight, bias = torch.randn(130, 2100) * 2100**-0.5, torch.randn(130)
    assert cuda.parts_of(*weight.shape)[0] == 2
    atol, rtol = OP[torch.float32]
    for num_rows in (1, 33, 257):
        x = torch.randn(num_rows, 2100)
        truth = (x.double() @ weight.double().t()).float()
        torch.testing.assert_close(cuda.product(x, weight), truth, rtol=rtol, atol=atol)
        own = cuda.product(x, weight.t().contiguous().t(), bias)
        torch.testing.assert_close(own, truth + bias, rtol=rtol, atol=atol)
    rows = 3 * torch.randn(3, 5000)
    for kind, function in OF_ROWS.items():
        truth = function(rows.double()).float()
        torch.testing.assert_close(cuda.of_rows(kind, rows, eps=1e-6), truth, rtol=1e-5, atol=1e-3)


def test_groups_of_rows_have_products_of_their_own_weights() -> None:
    """To the bit those that each has by itself, some groups being empty."""
    from kernels.batch_invariant import cuda

    torch.manual_seed(0)
    weights = torch.randn(5, 40, 48)
    for counts in ((3, 0, 40, 1, 0), (0, 0, 0, 0, 7), (33, 32, 31, 64, 1)):
        x, ends = torch.randn(sum(counts), 48), torch.tensor(counts).cumsum(0)
        out = cuda.product(x, weights, ends=ends.to(torch.int32))
        parts = zip(x.split(counts), weights, strict=True)
        assert torch.equal(out, torch.cat([cuda.product(part, weight) for part, weight in parts]))


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6, 7, 8), (4, 5), (3, 8)], ids=str)
def test_delta_rule_of_a_gpu_does_not_depend_on_how_a_sequence_is_cut(cuts: tuple[int, ...], device: str) -> None:
    """Tokens alone are decode steps, others prompts; states and outputs are equal to the bit."""
    torch.manual_seed(0)
    length, heads, sizes = 9, (2, 4), (16, 32)
    num_values = heads[1] * sizes[1]
    num_channels = 2 * heads[0] * sizes[0] + num_values
    qkv, z, gates = (
        torch.randn(length, num_channels),
        torch.randn(length, num_values),
        torch.randn(length, 2 * heads[1]),
    )
    taps, of_heads, norm = torch.randn(4, num_channels), torch.randn(2, heads[1]), torch.randn(sizes[1])

    def computed(ends: list[int]) -> tuple[torch.Tensor, ...]:
        conv_states, states = torch.zeros(3, 3, num_channels), torch.zeros(3, heads[1], *sizes)
        line, start, outputs = torch.ones(1, dtype=torch.int32), 0, []
        for end in ends:
            part = slice(start, end)
            b, a = gates[part].chunk(2, dim=1)
            if start and end == start + 1:
                args = (qkv[part], z[part], b, a, taps, conv_states, *of_heads, norm, states, line)
                outputs.append(gated_delta_decode(*args, eps=1e-6, source_state_indices=line))
            else:
                where = (torch.tensor([0, end - start], dtype=torch.int32), line, torch.tensor([start > 0]))
                options: dict[str, Any] = {"source_state_indices": line, "query_starts": (0, end - start)}
                mixed = causal_conv1d_prefill(qkv[part], taps, None, conv_states, *where, activation="silu", **options)
                mixed = gated_delta_prefill(mixed, b, a, *of_heads, states, *where, **options)
                outputs.append(gated_norm(mixed, z[part], norm, 1e-6))
            start = end
        return torch.cat(outputs), states, conv_states

    served = {
        **in_use(torch.device(device)).implementations,
        "gated_delta": "triton_cuda",
        "causal_conv1d": "triton_cuda",
    }
    platform = replace(in_use(torch.device(device)), implementations=served)
    with installed(platform, device), batch_invariant_mode(torch.device(device)):
        for one, other in zip(computed([length]), computed([*cuts, length]), strict=True):
            assert torch.equal(one, other)


def test_models_that_a_gpu_does_not_serve_are_refused_by_name() -> None:
    gpu = Platform("cuda", "some GPU", 100, 2**17, 16, {}, batch_invariant=True)
    dense = ProbeShapes(delta=None, mamba2=None, experts=None)  # may be quantised
    refuse_model(gpu, dense)
    with pytest.raises(BackendError, match="for models with quantised experts and state-space layers"):
        refuse_model(gpu, replace(dense, experts=(6, 2, 48), mamba2=(2, 4, 16, 32)))
    refuse_model(replace(gpu, batch_invariant=False), ProbeShapes())
