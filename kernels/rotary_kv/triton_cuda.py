"""`kernels.rotary_kv.ops` on NVIDIA GPUs: norm, rotation and the cache write in one launch.

float32 inside, rounded once. Grids follow from the padded number of tokens, and slots are read on the device.
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

# Elements of a program: 16 bytes of a half head for each thread, and enough programs where tokens are few.
_TILE_ELEMENTS = 2048


@triton.jit(do_not_specialize=["slots_ptr"])
def rotary_kv_kernel(
    qkv_ptr,  # [tokens, NUM_HEADS + 2 * KV_HEADS, HEAD_DIM], rows of qkv_stride; a gate behind each query if HAS_GATES
    cos_ptr,  # [tokens, ROTARY_DIM], sin likewise
    sin_ptr,
    weight_ptr,  # [NUM_HEADS + KV_HEADS, HEAD_DIM] or None
    slots_ptr,  # int64 [tokens]
    q_ptr,  # [tokens, NUM_HEADS, HEAD_DIM]
    k_cache_ptr,  # [slots, KV_HEADS, HEAD_DIM], v likewise
    v_cache_ptr,
    qkv_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two that holds half of what is turned
    BLOCK_R: tl.constexpr,  # power of two that holds the rest of a head
    HAS_GATES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Grid (tokens, blocks of BLOCK_H heads). What is turned of a head is held in its two halves, and the rest by
    itself."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HALF
    in_head = head[:, None] * HEAD_DIM + dim[None, :]
    is_qk = (head < NUM_HEADS + KV_HEADS)[:, None] & is_dim[None, :]
    # Weights are written by no kernel, so they need not be waited for.
    if weight_ptr is not None:
        first_weight = tl.load(weight_ptr + in_head, mask=is_qk, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + in_head + HALF, mask=is_qk, other=0.0).to(tl.float32)
    if ROTARY_DIM < HEAD_DIM:
        rest = ROTARY_DIM + tl.arange(0, BLOCK_R)
        is_rest = (rest < HEAD_DIM)[None, :]
        rest_in_head = head[:, None] * HEAD_DIM + rest[None, :]
        is_qk_rest = (head < NUM_HEADS + KV_HEADS)[:, None] & is_rest
        is_head_rest = (head < NUM_HEADS + 2 * KV_HEADS)[:, None] & is_rest
    if DEPENDENT_LAUNCH:
        gdc_wait()
    slot = tl.load(slots_ptr + token)
    cos = tl.load(cos_ptr + token * ROTARY_DIM + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * ROTARY_DIM + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    is_head = (head < NUM_HEADS + 2 * KV_HEADS)[:, None] & is_dim[None, :]
    qkv_ptr += token * qkv_stride
    if HAS_GATES:
        qkv_ptr += tl.minimum(head, NUM_HEADS)[:, None] * HEAD_DIM  # the gates before a head
    first = tl.load(qkv_ptr + in_head, mask=is_head, other=0.0)
    second = tl.load(qkv_ptr + in_head + HALF, mask=is_head, other=0.0)
    if ROTARY_DIM < HEAD_DIM:
        third = tl.load(qkv_ptr + rest_in_head, mask=is_head_rest, other=0.0)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()

    a, b = first.to(tl.float32), second.to(tl.float32)
    if weight_ptr is not None:
        squares = tl.sum(a * a + b * b, 1)
        if ROTARY_DIM < HEAD_DIM:
            c = third.to(tl.float32)
            squares += tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a, b = a * scale * first_weight, b * scale * second_weight
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    first_turned, second_turned = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)

    is_query = (head < NUM_HEADS)[:, None] & is_dim[None, :]
    q_ptr += token * (NUM_HEADS * HEAD_DIM)
    tl.store(q_ptr + in_head, first_turned, mask=is_query)
    tl.store(q_ptr + in_head + HALF, second_turned, mask=is_query)
    line = slot * (KV_HEADS * HEAD_DIM)
    in_cache = line + in_head - NUM_HEADS * HEAD_DIM
    is_key = is_qk & (head >= NUM_HEADS)[:, None] & (slot >= 0)
    tl.store(k_cache_ptr + in_cache, first_turned, mask=is_key)
    tl.store(k_cache_ptr + in_cache + HALF, second_turned, mask=is_key)
    in_cache -= KV_HEADS * HEAD_DIM
    is_value = is_head & (head >= NUM_HEADS + KV_HEADS)[:, None] & (slot >= 0)
    tl.store(v_cache_ptr + in_cache, first, mask=is_value)
    tl.store(v_cache_ptr + in_cache + HALF, second, mask=is_value)
    if ROTARY_DIM < HEAD_DIM:
        third_normed = third
        if weight_ptr is not None:
            third_weight = tl.load(weight_ptr + rest_in_head, mask=is_qk_rest, other=0.0).to(tl.float32)
            third_normed = (c * scale * third_weight).to(dtype)
        tl.store(q_ptr + rest_in_head, third_normed, mask=(head < NUM_HEADS)[:, None] & is_rest)
        rest_in_cache = line + rest_in_head - NUM_HEADS * HEAD_DIM
        is_key_rest = is_qk_rest & (head >= NUM_HEADS)[:, None] & (slot >= 0)
        tl.store(k_cache_ptr + rest_in_cache, third_normed, mask=is_key_rest)
        is_value_rest = is_head_rest & (head >= NUM_HEADS + KV_HEADS)[:, None] & (slot >= 0)
        tl.store(v_cache_ptr + rest_in_cache - KV_HEADS * HEAD_DIM, third, mask=is_value_rest)


def rotary_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    head_weight: torch.Tensor | None,
    eps: float,
    has_gates: bool = False,
) -> torch.Tensor:
    """See `ops.rotary_kv`; q is contiguous."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    kv_heads = k_cache.shape[2]
    num_heads = (num_all_heads - 2 * kv_heads) // (2 if has_gates else 1)
    num_all_heads = num_heads + 2 * kv_heads
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    rotary_dim = cos.shape[-1]
    block_d = triton.next_power_of_2(rotary_dim // 2)
    block_r = triton.next_power_of_2(max(1, head_dim - rotary_dim))
    held = 2 * block_d + (block_r if rotary_dim < head_dim else 0)
    block_h = min(max(1, _TILE_ELEMENTS // triton.next_power_of_2(held)), triton.next_power_of_2(num_all_heads))
    rotary_kv_kernel[num_tokens, triton.cdiv(num_all_heads, block_h)](
        qkv,
        cos,
        sin,
        head_weight,
        slot_mapping,
        q,
        k_cache,
        v_cache,
        qkv.stride(0),
        eps,
        NUM_HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        BLOCK_R=block_r,
        HAS_GATES=has_gates,
        DEPENDENT_LAUNCH=triton_launch.launches_dependently(qkv.device),
        num_warps=4,
        **triton_launch.launch_options(qkv.device),
    )
    return q


def warm_up(
    k_cache: torch.Tensor, num_heads: int, head_weight: torch.Tensor | None, rotary_dim: int, has_gates: bool
) -> None:
    """See `ops.warm_up`: one token, which is padding. The number of tokens is no argument of the kernel."""
    kv_heads, head_dim = k_cache.shape[2:]
    qkv = k_cache.new_zeros(1, num_heads * (2 if has_gates else 1) + 2 * kv_heads, head_dim)
    angles = k_cache.new_zeros(1, 1, rotary_dim)
    slots = torch.full((1,), -1, dtype=torch.int64, device=k_cache.device)
    rotary_kv(qkv, angles, angles, k_cache, k_cache, slots, head_weight, 1.0, has_gates)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(rotary_kv_kernel)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)
