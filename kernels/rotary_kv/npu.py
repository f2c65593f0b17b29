"""`kernels.rotary_kv.ops` with torch_npu's fused rotation and its scatter into a paged cache. Not verified on an NPU.

Queries and keys are turned apart, since what reads them next wants contiguous tensors: two launches instead of one
launch and two copies. The scatter takes contiguous tensors too: keys come so from the rotation; values are a slice of
the packed projection and are copied. It skips slots of -1, which torch_npu does not document, but vllm-ascend tests.
A cache that lies head by head is told to it as one of a single head, with a slot for each head of a token.
"""

from __future__ import annotations

from functools import cache

import torch
import torch_npu

from kernels.contract import Contract
from kernels.paged_attention.cache_layout import as_lines, line_slots
from kernels.rotary_kv import reference
from kernels.rotary_kv.reference import without_gates
from kernels.shapes import ProbeShapes

# Limits that torch_npu documents for the mode "half": fewer heads and a smaller head than these.
_HEADS_END = 1000
_HEAD_DIM_END = 896


def refuses(shapes: ProbeShapes) -> str | None:
    """Why the rotation cannot serve a model, as part of a sentence; None if it can."""
    if shapes.num_heads >= _HEADS_END or shapes.head_dim >= _HEAD_DIM_END:
        return f"it turns fewer than {_HEADS_END} heads, of fewer than {_HEAD_DIM_END} elements"
    return None


CONTRACT = Contract(refuses=refuses, replayable=True)


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
    """See `ops.rotary_kv`. What `refuses` names must have been kept away."""
    if has_gates:
        qkv = without_gates(qkv, k_cache.shape[2])
    kv_heads = k_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * kv_heads
    qk, v = qkv[:, : num_heads + kv_heads], qkv[:, num_heads + kv_heads :]
    if cos.shape[-1] < qkv.shape[2] or (head_weight is not None and head_weight.dtype is not qkv.dtype):
        # Cases that torch_npu does not document for its rotation and norm.
        return reference.rotary_kv(qkv, cos, sin, k_cache, v_cache, slot_mapping, head_weight, eps)
    if head_weight is not None:
        # One norm for all heads, whose weights differ, and one product.
        ones = _ones(qk.shape[-1], qk.dtype, qk.device)
        qk = torch_npu.npu_rms_norm(qk, gamma=ones, epsilon=eps)[0].mul_(head_weight)
    # [1, tokens, 1, head_dim]: the documented layout with a batch of one.
    cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    k = _turn(qk[:, num_heads:].unsqueeze(0), cos, sin)
    keys, values = as_lines(k_cache), as_lines(v_cache)
    # "Norm" is the plain layout [num_blocks, block_size, kv_heads, head_dim]; the default is another one.
    torch_npu.npu_scatter_pa_kv_cache(
        key=k.reshape(-1, *keys.shape[2:]),
        value=v.reshape(-1, *values.shape[2:]).contiguous(),
        key_cache=keys,
        value_cache=values,
        slot_mapping=line_slots(k_cache, slot_mapping),
        cache_mode="Norm",
    )
    return _turn(qk[:, :num_heads].unsqueeze(0), cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [1, tokens, heads, head_dim] -> fresh [tokens, heads, head_dim]"""
    return torch_npu.npu_rotary_mul(x, r1=cos, r2=sin, rotary_mode="half").squeeze(0)


@cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, device=device)
