"""What the model remembers of its sequences between steps: paged keys and values, and lines of convolution state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from service.models.spec import AttentionSpec, GatedDeltaSpec, Mixer, ModelSpec, ShortConvSpec


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
class DeltaStates:
    """States of one gated delta net; line 0 is null in both.

    lines     [num_lines, width - 1, channels], of its convolution
    matrices  float32 [num_lines, value_heads, key_dim, value_dim]
    """

    lines: torch.Tensor
    matrices: torch.Tensor


LayerCache = KvCache | ConvStates | DeltaStates


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """One cache per layer, in order."""

    layers: tuple[LayerCache, ...]

    @property
    def num_bytes(self) -> int:
        return sum(getattr(cache, name).nbytes for cache in self.layers for name in cache.__slots__)


def allocate_caches(
    spec: ModelSpec, num_blocks: int, block_size: int, num_lines: int, dtype: torch.dtype, device: torch.device
) -> Caches:
    """Caches of all layers, not initialised: a sequence reads what it has written and nothing else.

    But for keys and values on an NPU, which begin as zeros: NaN that happened to lie in a block behind a sequence's end
    have been seen to reach the result of its fused attention.

    num_blocks, num_lines  the null block and the null line included; num_lines is unused without states
    block_size             tokens per block
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def of(mixer: Mixer) -> LayerCache:
        if isinstance(mixer, ShortConvSpec):
            return ConvStates(empty(num_lines, mixer.width - 1, mixer.size))
        if isinstance(mixer, GatedDeltaSpec):
            shape = (num_lines, mixer.num_value_heads, mixer.key_dim, mixer.value_dim)
            matrices = torch.empty(shape, dtype=torch.float32, device=device)
            return DeltaStates(empty(num_lines, mixer.width - 1, mixer.size), matrices)
        shape = (num_blocks, block_size, mixer.num_kv_heads, mixer.head_dim)
        make = torch.zeros if device.type == "npu" else torch.empty
        return KvCache(*(make(shape, dtype=dtype, device=device) for _ in range(2)))

    return Caches(tuple(of(layer.mixer) for layer in spec.layers))


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that one cached token takes in all attention layers."""
    return sum(2 * attention.kv_size for attention in spec.attentions) * dtype.itemsize


def state_bytes_per_line(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of one line of state in all layers; 0 without layers that have states."""
    return sum(_state_bytes(layer.mixer, dtype) for layer in spec.layers)


def _state_bytes(mixer: Mixer, dtype: torch.dtype) -> int:
    if isinstance(mixer, AttentionSpec):
        return 0
    conv_bytes = (mixer.width - 1) * mixer.size * dtype.itemsize
    if isinstance(mixer, GatedDeltaSpec):
        return conv_bytes + mixer.num_value_heads * mixer.key_dim * mixer.value_dim * torch.float32.itemsize
    return conv_bytes
