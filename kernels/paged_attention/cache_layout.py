"""How a paged cache lies in memory: token by token, or head by head within each block.

Everybody names a cache [num_blocks, block_size, kv_heads, head_dim]. Token by token it is contiguous; head by head it
is a view of a contiguous [num_blocks, kv_heads, block_size, head_dim], in which a head's keys of a block adjoin.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def made(make: Callable[..., torch.Tensor], shape: tuple[int, ...], *, heads_first: bool) -> torch.Tensor:
    """A cache of that shape.

    make         makes a contiguous tensor of a shape
    shape        [num_blocks, block_size, kv_heads, head_dim]
    heads_first  head by head
    """
    num_blocks, block_size, kv_heads, head_dim = shape
    if heads_first:
        return make((num_blocks, kv_heads, block_size, head_dim)).transpose(1, 2)
    return make(shape)


def is_heads_first(cache: torch.Tensor) -> bool:
    """Whether a cache lies head by head. One of a single head lies both ways, and is said not to."""
    _, block_size, kv_heads, head_dim = cache.shape
    by_token, by_head = head_dim, block_size * head_dim
    return kv_heads > 1 and cache.stride() == (kv_heads * by_head, by_token, by_head, 1) and not cache.is_contiguous()


def as_lines(cache: torch.Tensor) -> torch.Tensor:
    """A cache for writers that know caches token by token alone: the same memory as such a one, contiguous.

    cache  [num_blocks, block_size, kv_heads, head_dim]

    Returns the cache where it lies token by token; else [num_blocks * kv_heads, block_size, 1, head_dim].
    """
    if not is_heads_first(cache):
        return cache
    num_blocks, block_size, kv_heads, head_dim = cache.shape
    return cache.transpose(1, 2).view(num_blocks * kv_heads, block_size, 1, head_dim)


def line_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Where tokens stand in `as_lines(cache)`.

    slots  int64 [tokens], contiguous; -1 is none

    Returns the slots where the cache lies token by token; else int64 [tokens * kv_heads], one for each head of a token.
    """
    if not is_heads_first(cache):
        return slots
    block_size, kv_heads = cache.shape[1:3]
    blocks = slots.div(block_size, rounding_mode="floor")
    heads = torch.arange(kv_heads, device=slots.device)
    lines = (blocks[:, None] * kv_heads + heads) * block_size + (slots - blocks * block_size)[:, None]
    return lines.masked_fill_((slots < 0)[:, None], -1).view(-1)
