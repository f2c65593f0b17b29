"""Norms of each query and key head before rotation, which an adapter may have weights of its own for."""

from __future__ import annotations

import torch

from kernels.lora.maps import LoraMaps
from kernels.lora.non_lora import own_head_norms
from kernels.rotary_kv.reference import without_gates
from service.models.layers.projection import RowSource, side_of
from service.models.layers.weights import Weights
from service.models.spec.model_spec import AttentionSpec, ModelSpec


class HeadNorm:
    """The weight that all query heads, or all key heads, of a layer are multiplied with: [head_dim]."""

    def __init__(self, name: str, weight: torch.Tensor) -> None:
        self.name = name
        self.weight = weight
        self.own: torch.Tensor | None = None  # of adapters, by line; see `kernels.lora.non_lora`

    def bind_rows(self, rows: RowSource) -> None:
        """Bind the weights with which adapters replace its own."""
        if rows.side is not None:
            self.own = rows.side.norms.get(self.name)


class HeadNorms:
    """Norms of queries and, unless another layer has them, of keys. `weight` holds the base's, [num_heads + kv_heads,
    head_dim], for the rotating op.

    A step in which an adapter has its own is normed here, in plain torch operations, and rotated without a norm.
    """

    def __init__(self, weights: Weights, prefix: str, attention: AttentionSpec, spec: ModelSpec) -> None:
        """prefix  of the attention's modules"""
        assert attention.head_norms is not None
        self._num_heads = (attention.num_heads, attention.num_kv_heads if attention.cache_of is None else 0)
        self._eps, self._has_gates = spec.norm_eps, attention.has_output_gate
        names = [f"{prefix}.{name}" for name in attention.head_norms]
        zero_centred, exact = spec.zero_centred_norms, spec.exact_norms
        self.each = tuple(HeadNorm(name, weights.norm(name, zero_centred=zero_centred, exact=exact)) for name in names)
        self.weight = torch.cat(
            [norm.weight.expand(num, -1) for norm, num in zip(self.each, self._num_heads, strict=False)]
        )

    @property
    def has_own(self) -> bool:
        """Whether there is room for adapters' weights."""
        return self.each[0].own is not None

    def apply(self, qkv: torch.Tensor, lora: LoraMaps | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """qkv as the projection yields it and the weight to norm it with. Where a token has an adapter with norms:
        fresh, normed and without output gates, [tokens, heads + 2 * kv_heads, head_dim], and None."""
        side = side_of(lora)
        if side is None or side.norms is None:
            return qkv, self.weight
        own = tuple(norm.own for norm in self.each if norm.own is not None)
        assert len(own) == len(self.each), f"{self.each[0].name} has no room for adapters' weights"
        if self._has_gates:
            qkv = without_gates(qkv, self._num_heads[1])
        return own_head_norms(qkv, own, self._num_heads, side.norms, self._eps), None
