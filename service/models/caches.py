"""What the model remembers of its sequences between steps: paged keys and values, and lines of convolution state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from service.models.facts import ModelFacts


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """Keys and values of one attention layer, each [num_blocks, block_size, kv_heads, head_dim]; block 0 is null."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ConvStates:
    """States of one convolution layer, [num_lines, width - 1, hidden]; line 0 is null."""

    lines: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """One cache per layer, in order."""

    layers: tuple[KvCache | ConvStates, ...]

    @property
    def num_bytes(self) -> int:
        tensors = [t for c in self.layers for t in ((c.k, c.v) if isinstance(c, KvCache) else (c.lines,))]
        return sum(tensor.nbytes for tensor in tensors)


def allocate_caches(
    facts: ModelFacts, num_blocks: int, block_size: int, num_lines: int, dtype: torch.dtype, device: torch.device
) -> Caches:
    """Caches of all layers, not initialised: a sequence reads what it has written and nothing else.

    num_blocks, num_lines  the null block and the null line included; num_lines is unused without convolution layers
    block_size             tokens per block
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    kv_shape = (num_blocks, block_size, facts.num_kv_heads, facts.head_dim)
    state_shape = (num_lines, facts.conv_width - 1, facts.hidden_size)
    return Caches(
        tuple(
            KvCache(empty(*kv_shape), empty(*kv_shape)) if kind == "attention" else ConvStates(empty(*state_shape))
            for kind in facts.layer_kinds
        )
    )


def kv_bytes_per_token(facts: ModelFacts, dtype: torch.dtype) -> int:
    """Bytes that one cached token takes in all attention layers."""
    return 2 * len(facts.attention_layers) * facts.num_kv_heads * facts.head_dim * dtype.itemsize


def state_bytes_per_line(facts: ModelFacts, dtype: torch.dtype) -> int:
    """Bytes of one line of convolution state in all layers; 0 without convolution layers."""
    return len(facts.conv_layers) * max(facts.conv_width - 1, 0) * facts.hidden_size * dtype.itemsize
