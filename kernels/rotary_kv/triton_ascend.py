"""`kernels.rotary_kv.ops` on Ascend NPUs: norm, rotation and the cache write in one launch. Not verified on an NPU.

float32 inside, rounded once. As many programs as the chip has vector cores loop over work items; an item is a block of
heads of one token: queries, keys or values, never two of these. Items are taken block by block, so that a program reads
the norm's weight, which all heads of a block share, once for it. Every transfer is a row of a head's half; the scalar
unit reads slots only.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels import triton_launch
from kernels.ascend_relaunch import AscendLaunch, Relaunch, current_stream, sizes_of
from kernels.contract import Contract
from kernels.paged_attention.cache_layout import is_heads_first
from kernels.platform import in_use
from kernels.rotary_kv.reference import without_gates
from kernels.shapes import ProbeShapes

# Elements of an item: few enough that one token has work for several cores.
_ITEM_ELEMENTS = 1024
# Elements of 16 bits in a block of memory as the device moves it; what begins elsewhere is copied one by one.
_BLOCK_ELEMENTS = 16
# As many tokens as decode steps have; a larger step keeps the device busy for longer than its launch takes.
KEPT_TOKENS = 256
# Arguments of every call, in the kernel's order.
_TENSORS = ("qkv_ptr", "cos_ptr", "sin_ptr", "weight_ptr", "slots_ptr", "q_ptr", "k_cache_ptr", "v_cache_ptr")


@triton.jit
def _first_head(
    slot, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS_FIRST: tl.constexpr
):
    """Element of a cache at which a slot's first head begins."""
    if HEADS_FIRST:
        first = slot // BLOCK_SIZE * (BLOCK_SIZE * KV_HEADS * HEAD_DIM) + slot % BLOCK_SIZE * HEAD_DIM
    else:
        first = slot * (KV_HEADS * HEAD_DIM)
    return first


@triton.jit(do_not_specialize=[*_TENSORS, "qkv_stride", "eps", "num_tokens"])
def rotary_kv_kernel(
    qkv_ptr,  # [tokens, NUM_HEADS + 2 * KV_HEADS, HEAD_DIM], rows of qkv_stride
    cos_ptr,  # [tokens, ROTARY_DIM], sin likewise
    sin_ptr,
    weight_ptr,  # [NUM_HEADS + KV_HEADS, HEAD_DIM] or None; rows of queries are alike, and rows of keys
    slots_ptr,  # int64 [tokens]
    q_ptr,  # [tokens, NUM_HEADS, HEAD_DIM]
    k_cache_ptr,  # [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM], with HEADS_FIRST [blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM];
    v_cache_ptr,  # v likewise
    qkv_stride,
    eps,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two that holds half of what is turned
    BLOCK_R: tl.constexpr,  # power of two that holds the rest of a head
    BLOCK_V: tl.constexpr,  # power of two that holds a head
):
    """The rotated part of a head is held in its two halves, and the rest by itself."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    # In a cache, from a head of a token to its next one.
    HEAD_STRIDE: tl.constexpr = BLOCK_SIZE * HEAD_DIM if HEADS_FIRST else HEAD_DIM
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    num_items = (Q_BLOCKS + 2 * KV_BLOCKS) * num_tokens
    share = tl.cdiv(num_items, tl.num_programs(0))
    first_item = tl.program_id(0) * share
    last_item = tl.minimum(first_item + share, num_items)
    dim = tl.arange(0, BLOCK_D)
    rest = ROTARY_DIM + tl.arange(0, BLOCK_R)
    for block in range(first_item // num_tokens, tl.cdiv(last_item, num_tokens)):
        first_token = tl.maximum(first_item - block * num_tokens, 0)
        last_token = tl.minimum(last_item - block * num_tokens, num_tokens)
        if block < Q_BLOCKS + KV_BLOCKS:
            is_query = block < Q_BLOCKS
            # The block's first head among queries and keys, and the ones behind its last.
            first = tl.where(is_query, block * BLOCK_H, NUM_HEADS + (block - Q_BLOCKS) * BLOCK_H)
            num = tl.where(is_query, NUM_HEADS, NUM_HEADS + KV_HEADS) - first
            head = tl.arange(0, BLOCK_H)
            in_block = head[:, None] * HEAD_DIM + dim[None, :]
            valid = (head < num)[:, None] & (dim < HALF)[None, :]
            rest_in_block = head[:, None] * HEAD_DIM + rest[None, :]
            rest_valid = (head < num)[:, None] & (rest < HEAD_DIM)[None, :]
            if weight_ptr is not None:
                weight = weight_ptr + first * HEAD_DIM
                first_weight = tl.load(weight + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
                second_weight = tl.load(weight + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
                if ROTARY_DIM < HEAD_DIM:
                    rest_weight = tl.load(weight + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
            for token in range(first_token, last_token):
                heads = qkv_ptr + (tl.cast(token, tl.int64) * qkv_stride + first * HEAD_DIM)
                angles = tl.cast(token, tl.int64) * ROTARY_DIM
                cos = tl.load(cos_ptr + angles + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
                sin = tl.load(sin_ptr + angles + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
                a = tl.load(heads + in_block, mask=valid, other=0.0).to(tl.float32)
                b = tl.load(heads + HALF + in_block, mask=valid, other=0.0).to(tl.float32)
                if ROTARY_DIM < HEAD_DIM:
                    c = tl.load(heads + rest_in_block, mask=rest_valid, other=0.0).to(tl.float32)
                if weight_ptr is not None:
                    squares = tl.sum(a * a + b * b, 1)
                    if ROTARY_DIM < HEAD_DIM:
                        squares += tl.sum(c * c, 1)
                    scale = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
                    a, b = a * scale * first_weight, b * scale * second_weight
                    if ROTARY_DIM < HEAD_DIM:
                        c = c * scale * rest_weight
                turned_a = (a * cos - b * sin).to(q_ptr.dtype.element_ty)
                turned_b = (b * cos + a * sin).to(q_ptr.dtype.element_ty)
                if is_query:
                    out = q_ptr + (tl.cast(token, tl.int64) * (NUM_HEADS * HEAD_DIM) + first * HEAD_DIM)
                    tl.store(out + in_block, turned_a, mask=valid)
                    tl.store(out + HALF + in_block, turned_b, mask=valid)
                    if ROTARY_DIM < HEAD_DIM:
                        tl.store(out + rest_in_block, c.to(q_ptr.dtype.element_ty), mask=rest_valid)
                else:
                    slot = tl.load(slots_ptr + token)
                    if slot >= 0:
                        key_line = _first_head(slot, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HEADS_FIRST)
                        key = k_cache_ptr + (key_line + (first - NUM_HEADS) * HEAD_STRIDE)
                        in_cache = head[:, None] * HEAD_STRIDE + dim[None, :]
                        tl.store(key + in_cache, turned_a, mask=valid)
                        tl.store(key + HALF + in_cache, turned_b, mask=valid)
                        if ROTARY_DIM < HEAD_DIM:
                            rest_in_cache = head[:, None] * HEAD_STRIDE + rest[None, :]
                            tl.store(key + rest_in_cache, c.to(q_ptr.dtype.element_ty), mask=rest_valid)
        else:
            first_value = (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_H
            value_head = tl.arange(0, BLOCK_H)
            value_dim = tl.arange(0, BLOCK_V)
            value_in_block = value_head[:, None] * HEAD_DIM + value_dim[None, :]
            value_valid = (value_head < KV_HEADS - first_value)[:, None] & (value_dim < HEAD_DIM)[None, :]
            for token in range(first_token, last_token):
                slot = tl.load(slots_ptr + token)
                if slot >= 0:
                    values = qkv_ptr + (
                        tl.cast(token, tl.int64) * qkv_stride + (NUM_HEADS + KV_HEADS + first_value) * HEAD_DIM
                    )
                    value_line = _first_head(slot, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HEADS_FIRST)
                    line = v_cache_ptr + (value_line + first_value * HEAD_STRIDE)
                    tl.store(
                        line + (value_head[:, None] * HEAD_STRIDE + value_dim[None, :]),
                        tl.load(values + value_in_block, mask=value_valid, other=0.0),
                        mask=value_valid,
                    )


def refuses(shapes: ProbeShapes) -> str | None:
    """Why the kernel cannot serve a model, as part of a sentence; None if it can."""
    rotary_dim = shapes.rotary_dim or shapes.head_dim
    if rotary_dim % (2 * _BLOCK_ELEMENTS) or shapes.head_dim % _BLOCK_ELEMENTS:
        return f"it turns halves of a multiple of {_BLOCK_ELEMENTS} elements, not {rotary_dim} of {shapes.head_dim}"
    return None


kept_launches: dict[tuple[object, ...], Relaunch] = {}


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
    """See `ops.rotary_kv`; q is contiguous. What `refuses` names must have been kept away."""
    if has_gates:
        qkv = without_gates(qkv, k_cache.shape[2])
    num_tokens, num_all_heads, head_dim = qkv.shape
    q = qkv.new_empty(num_tokens, num_all_heads - 2 * k_cache.shape[2], head_dim)
    if not num_tokens:
        return q
    tensors = (qkv, cos, sin, head_weight, slot_mapping, q, k_cache, v_cache)
    key = sizes_of(*tensors), eps, qkv.device
    kept = kept_launches.get(key)
    if kept is not None:
        others = tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors[1:])
        kept(current_stream()(), qkv.data_ptr(), others)
        return q
    launch = plan(*tensors, eps)
    compiled = launch.run()
    if compiled is not None and num_tokens <= KEPT_TOKENS:
        kept_launches[key] = launch.repeated(compiled, changing=_TENSORS[0], following=_TENSORS[1:])
    return q


def plan(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head_weight: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float,
) -> AscendLaunch:
    """The launch for at least one token; looks at sizes, never at values. Arguments as in `ops.rotary_kv`, and q."""
    tensors = (qkv, cos, sin, head_weight, slot_mapping, q, k_cache, v_cache)
    head_dim, rotary_dim = qkv.shape[2], cos.shape[-1]
    block_d = triton.next_power_of_2(rotary_dim // 2)
    block_r = triton.next_power_of_2(max(1, head_dim - rotary_dim))
    held = triton.next_power_of_2(2 * block_d + (block_r if rotary_dim < head_dim else 0))
    arguments = dict(zip(_TENSORS, tensors, strict=True)) | {
        "qkv_stride": qkv.stride(0),
        "eps": eps,
        "num_tokens": qkv.shape[0],
        "NUM_HEADS": q.shape[1],
        "KV_HEADS": k_cache.shape[2],
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "BLOCK_SIZE": k_cache.shape[1],
        "HEADS_FIRST": is_heads_first(k_cache),
        "BLOCK_H": min(max(1, _ITEM_ELEMENTS // held), triton.next_power_of_2(q.shape[1])),
        "BLOCK_D": block_d,
        "BLOCK_R": block_r,
        "BLOCK_V": triton.next_power_of_2(head_dim),
    }
    return AscendLaunch(rotary_kv_kernel, (in_use(qkv.device).num_cores,), arguments)


def warm_up(
    k_cache: torch.Tensor, num_heads: int, head_weight: torch.Tensor | None, rotary_dim: int, has_gates: bool
) -> None:
    """See `ops.warm_up`: one token, which is padding. The number of tokens is no constant of the kernel."""
    kv_heads, head_dim = k_cache.shape[2:]
    qkv = k_cache.new_zeros(1, num_heads * (2 if has_gates else 1) + 2 * kv_heads, head_dim)
    angles = k_cache.new_zeros(1, 1, rotary_dim)
    slots = torch.full((1,), -1, dtype=torch.int64, device=k_cache.device)
    rotary_kv(qkv, angles, angles, k_cache, k_cache, slots, head_weight, 1.0, has_gates)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(rotary_kv_kernel)


CONTRACT = Contract(refuses=refuses, warm_up=warm_up, compiled_count=compiled_count, replayable=True)
