"""Torch's calls within `batch_invariant_mode`: rows are equal to the bit beside any number of others, with several
threads, whatever divides the sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from kernels.batch_invariant.mode import batch_invariant_mode, install_batch_invariance
from kernels.linear.ops import linear, pack_weight

CPU = torch.device("cpu")
NUM_ROWS = 70
SIZES = (48, 100, 576, 2048, 4100)


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    """With as many threads as divide no size evenly."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    install_batch_invariance("cpu", wanted=True)
    yield
    install_batch_invariance("cpu", wanted=False)
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
def test_rows_do_not_depend_on_their_neighbours(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in SIZES:
        call, x = CALLS[name](size, dtype), (3 * torch.randn(NUM_ROWS, size)).to(dtype)
        with batch_invariant_mode(CPU):
            whole = call(x)
            for first, last in ((0, 1), (69, 70), (3, 8), (20, 53), (16, 32)):
                assert torch.equal(call(x[first:last].clone()), whole[first:last]), (size, first, last)
                assert torch.equal(call(x[first:last]), whole[first:last]), (size, first, last)


def test_products_are_those_without_it_but_for_rounding() -> None:
    torch.manual_seed(0)
    x, call = torch.randn(37, 96), packed(96, torch.float32)
    with batch_invariant_mode(CPU):
        own = call(x)
    torch.testing.assert_close(own, call(x))
