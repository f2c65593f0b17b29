"""Caches of sequences between steps, as the model's mixers declare them: paged keys and values, and lines of state."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields

import torch

from kernels.paged_attention import cache_layout
from kernels.platform import in_use
from service.models.spec.mixer_specs import MixerState
from service.models.spec.model_spec import AttentionSpec, ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """Keys and values of one attention layer, each [num_blocks, block_size, kv_heads, head_dim]; block 0 is null.

    They lie in memory as attention wants them on this device (`kernels/paged_attention/cache_layout.py`).
    """

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ConvStates:
    """States of one convolution layer, [num_lines, width - 1, hidden]; line 0 is null."""

    lines: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeltaStates:
    """States of one gated delta net or Mamba-2 layer; line 0 is null in both.

    lines     [num_lines, width - 1, channels], of its convolution
    matrices  float32 [num_lines, value_heads, key_dim, value_dim], or [num_lines, heads, state_size, head_dim]
    """

    lines: torch.Tensor
    matrices: torch.Tensor


LayerCache = KvCache | ConvStates | DeltaStates
# By what a mixer's states are called.
_BY_NAMES = {tuple(field.name for field in fields(kind)): kind for kind in (KvCache, ConvStates, DeltaStates)}


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """One cache per layer, in order; the same one in layers that share theirs."""

    layers: tuple[LayerCache, ...]

    @property
    def each(self) -> list[LayerCache]:
        """Each cache once."""
        return list({id(cache): cache for cache in self.layers}.values())

    def copy_blocks(self, blocks: torch.Tensor) -> None:
        """Copy keys and values of the blocks blocks[0] to blocks[1], int64 [2, n] on the device, none written twice."""
        for cache in self.each:
            if isinstance(cache, KvCache):
                for tensor in (cache.k, cache.v):
                    tensor.index_copy_(0, blocks[1], tensor.index_select(0, blocks[0]))

    @property
    def num_bytes(self) -> int:
        return sum(getattr(cache, name).nbytes for cache in self.each for name in cache.__slots__)


def allocate_caches(
    spec: ModelSpec, num_blocks: int, block_size: int, num_lines: int, dtype: torch.dtype, device: torch.device
) -> Caches:
    """Caches of all layers, not initialised: a sequence reads what it has written and nothing else.

    But for keys and values on an NPU, which begin as zeros: NaN that happened to lie in a block behind a sequence's end
    have been seen to reach the result of its fused attention.

    num_blocks, num_lines  the null block and the null line included; num_lines is unused without states
    block_size             tokens per block
    """

    def tensor(state: MixerState) -> torch.Tensor:
        is_paged = state.per == "token"
        make = torch.zeros if is_paged and device.type == "npu" else torch.empty
        of_shape = functools.partial(make, dtype=_dtype_of(state, dtype), device=device)
        if not is_paged:
            return of_shape((num_lines, *state.shape))
        shape = (num_blocks, block_size, *state.shape)
        return cache_layout.made(of_shape, shape, heads_first=in_use(device).kv_heads_first)

    def cache(states: tuple[MixerState, ...]) -> LayerCache:
        return _BY_NAMES[tuple(state.name for state in states)](*map(tensor, states))

    caches: list[LayerCache] = []
    for layer in spec.layers:
        shared = layer.mixer.cache_of if isinstance(layer.mixer, AttentionSpec) else None
        caches.append(cache(layer.mixer.states) if shared is None else caches[shared])
    return Caches(tuple(caches))


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that one cached token takes in all attention layers."""
    return _line_bytes(spec, "token", dtype)


def state_bytes_per_line(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of one line of state in all layers; 0 without layers that have states."""
    return _line_bytes(spec, "sequence", dtype)


def _line_bytes(spec: ModelSpec, per: str, dtype: torch.dtype) -> int:
    states = (state for layer in spec.layers for state in layer.mixer.states if state.per == per)
    return sum(math.prod(state.shape) * _dtype_of(state, dtype).itemsize for state in states)


def _dtype_of(state: MixerState, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if state.in_float32 else dtype
