"""`kernels.rms_norm.ops` on NVIDIA GPUs: the sum and its norm in one launch, a program for each token.

float32 inside; the sum is rounded before it is normed, as everybody reads it, and the norm is rounded once.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import triton_launch
from kernels.contract import Contract

_MAX_WARPS = 16
# Elements of a row for each thread: 16 bytes of the 16-bit types.
_THREAD_ELEMENTS = 8


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [tokens, SIZE], rows of x_stride
    residual_ptr,  # [tokens, SIZE] or None; holds the sum afterwards
    weight_ptr,  # [SIZE]
    out_ptr,  # [tokens, SIZE]
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tokens)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    # Written by no kernel, so it need not be waited for.
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_ptr += row * SIZE + column
        x += tl.load(residual_ptr, mask=mask, other=0.0).to(tl.float32)
        total = x.to(out_ptr.dtype.element_ty)
        tl.store(residual_ptr, total, mask=mask)
        x = total.to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + column, out, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.add_rms_norm`; the sum is written over the residual."""
    return _launch(x, residual, weight, eps), residual


def warm_up(x: torch.Tensor, weight: torch.Tensor) -> None:
    """See `ops.warm_up`; x [1, size]. The number of tokens is no argument of the kernel."""
    rms_norm(x, weight, 1.0)
    add_rms_norm(x, x.clone(memory_format=torch.contiguous_format), weight, 1.0)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(rms_norm_kernel)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        x.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        DEPENDENT_LAUNCH=triton_launch.launches_dependently(x.device),
        num_warps=min(_MAX_WARPS, max(1, block // (32 * _THREAD_ELEMENTS))),
        **triton_launch.launch_options(x.device),
    )
    return out
