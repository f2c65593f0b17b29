"""`kernels.swiglu.ops` on NVIDIA GPUs: one launch; float32 inside, rounded once."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import triton_launch
from kernels.contract import Contract
from kernels.shapes import CLAMP, CLAMPED_SLOPE, Activation

# Columns of a program: 16 bytes for each thread, and many programs where tokens are few.
_BLOCK = 1024


@triton.jit
def swiglu_kernel(
    gate_up_ptr,  # [tokens, 2 * SIZE], rows of stride
    out_ptr,  # [tokens, SIZE]
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    SLOPE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tokens, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    if DEPENDENT_LAUNCH:
        gdc_wait()
    gate_up_ptr += row * stride + column
    gate = tl.load(gate_up_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + SIZE, mask=mask, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    inner = gate
    if ACTIVATION == "gelu_tanh":
        # x * sigmoid(2 * its argument), since (1 + tanh(y)) / 2 = sigmoid(2 y)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, CLAMP)
        up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP) + 1.0
        inner = SLOPE * gate
    out = gate / (1.0 + tl.exp(-inner)) * up
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def swiglu(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """See `ops.swiglu`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    swiglu_kernel[num_tokens, triton.cdiv(size, block)](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
        ACTIVATION=activation,
        CLAMP=CLAMP,
        SLOPE=CLAMPED_SLOPE,
        DEPENDENT_LAUNCH=triton_launch.launches_dependently(gate_up.device),
        num_warps=4,
        **triton_launch.launch_options(gate_up.device),
    )
    return out


def warm_up(size: int, dtype: torch.dtype, device: torch.device, activation: Activation) -> None:
    """See `ops.warm_up`. The number of tokens is no argument of the kernel."""
    swiglu(torch.zeros(1, 2 * size, dtype=dtype, device=device), activation)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(swiglu_kernel)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
