"""Rotary position embedding of queries and keys: shapes and dtypes are checked here."""

from __future__ import annotations

import torch

from kernels.platform import implementation


def rotary(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x * cos + rotate_half(x) * sin for each head x of qk; rotate_half((a, b)) = (-b, a) for the two halves.

    qk        [tokens, num_heads + kv_heads, head_dim], unit stride along head_dim, head_dim stride between heads
    cos, sin  [tokens, 1, head_dim], dtype of qk, values in [-1, 1]; both halves of a row are the same
    num_heads number of query heads, which come first

    Returns q [tokens, num_heads, head_dim] and k [tokens, kv_heads, head_dim] with the strides of qk's last two
    dimensions; they may be views of one fresh tensor, or two.
    """
    num_tokens, num_qk_heads, head_dim = qk.shape
    assert head_dim % 2 == 0 and 0 < num_heads < num_qk_heads, "heads have two halves; queries stand before keys"
    assert qk.stride()[1:] == (head_dim, 1), "the heads of a token are contiguous"
    assert cos.shape == sin.shape == (num_tokens, 1, head_dim), "cos, sin: [tokens, 1, head_dim]"
    assert cos.dtype == sin.dtype == qk.dtype, f"qk is {qk.dtype}, its rotation {cos.dtype} and {sin.dtype}"
    both: tuple[torch.Tensor, torch.Tensor] = implementation("rotary", qk.device).rotary(qk, cos, sin, num_heads)
    return both
