"""The common first part of all torch implementations: splitting and norming the heads, and computing their gates."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.gated_delta.ops import num_key_heads_of

_EPS = 1e-6


def heads_of(
    qkv: torch.Tensor, states: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v): q and k [tokens, num_value_heads, key_dim], normed, q scaled too; v [tokens, num_value_heads,
    value_dim]."""
    _, num_value_heads, key_dim, value_dim = states.shape
    num_key_heads = num_key_heads_of(qkv, states)
    sizes = (num_key_heads * key_dim, num_key_heads * key_dim, num_value_heads * value_dim)
    q, k, v = qkv.to(dtype).split(sizes, dim=1)
    q, k = (_normed(x.unflatten(1, (num_key_heads, key_dim))) for x in (q, k))
    num_shared = num_value_heads // num_key_heads
    if num_shared > 1:
        q, k = (x.repeat_interleave(num_shared, dim=1) for x in (q, k))
    return q * key_dim**-0.5, k, v.unflatten(1, (num_value_heads, value_dim))


def gates_of(
    b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(beta, the logarithm of the decay), each [tokens, num_value_heads]; the latter is at most 0."""
    decay_log = -a_log.to(dtype).exp() * functional.softplus(a.to(dtype) + dt_bias.to(dtype))
    return b.to(dtype).sigmoid(), decay_log


def gated_norm(
    out: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[tokens, num_value_heads * value_dim] of out [tokens, num_value_heads, value_dim] and z of the same size: normed
    head by head before it is gated, computed in `dtype`, rounded where transformers rounds."""
    wide = out.to(dtype)
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(out.dtype)
    gated = normed.to(dtype) * weight.to(dtype) * functional.silu(z.unflatten(1, out.shape[1:]).to(dtype))
    return gated.to(out.dtype).flatten(1)


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
