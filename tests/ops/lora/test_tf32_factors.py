"""Factors that tensor cores read as TF32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gated_delta.triton_cuda_chunks import as_factor


@triton.jit
def _factors(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    tl.store(out_ptr + place, as_factor(tl.load(x_ptr + place), "tf32"))


def test_a_factor_is_the_nearest_of_tf32(device: str) -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    values[:6] = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000, 0x3F801000]).int().view(torch.float32)
    x = values.to(device)
    out = torch.empty_like(x)
    _factors[1,](x, out, SIZE=1024)
    found, digits = out.cpu(), 2.0**-10  # of a number between 1 and 2
    assert bool(found[:3].isnan().all()), "NaN stays NaN"
    assert found[3:6].tolist() == [torch.inf, -torch.inf, 1.0 + digits]
    step = digits * torch.exp2(values[6:].abs().log2().floor())
    assert torch.equal(found[6:] / step, (found[6:] / step).round()), "no digits that TF32 has not"
    assert bool(((found[6:] - values[6:]).abs() <= step / 2).all())
