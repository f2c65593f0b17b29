"""Rotary position embedding: wavelengths by rope type, cosines once per step, rotation of queries and keys;
and the norms of each query and key head before it, which an adapter may have weights of its own for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.lora.maps import LoraMaps
from kernels.lora.non_lora import own_head_norms
from kernels.rotary_kv.reference import without_gates
from service.models.layers.projection import RowSource, side_of
from service.models.layers.weights import Weights
from service.models.spec.config_json import ModelError
from service.models.spec.model_spec import AttentionSpec, ModelSpec
from service.models.spec.rope_facts import RopeFacts


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """How far each token of a step is turned: cos, sin [tokens, 1, rotary_dim], both halves of a row being the same.

    score_factor  what attention scores are to be multiplied with: some scalings sharpen attention over a stretched
                  context. Here rather than in cos and sin, which fused rotations want within [-1, 1]; there only where
                  part of a head is not turned, and not sharpened either.
    query_factors factors of the queries in their dtype, [tokens, 1, 1]; None: none
    """

    cos: torch.Tensor
    sin: torch.Tensor
    score_factor: float
    query_factors: torch.Tensor | None = None


class RotaryEmbedding:
    """Rotations of a step's tokens by their positions."""

    def __init__(self, facts: RopeFacts, head_dim: int, max_position_embeddings: int, device: torch.device) -> None:
        """Raises ModelError if the facts do not fit the heads."""
        self._facts = facts
        self._max_position_embeddings = max_position_embeddings
        self.rotary_dim = facts.rotary_dim(head_dim)
        # [rotary_dim / 2], in (0, 1]
        self._exponents = (torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim).to(device)
        self._frequencies = _frequencies(facts, self._exponents)
        factor = _attention_factor(facts)
        self._turn_factor, self._score_factor = (1.0, factor**2) if self.rotary_dim == head_dim else (factor, 1.0)
        if facts.kind == "longrope":
            self._short = self._stretched(facts.short_factors)
            self._long = self._stretched(facts.long_factors)

    def rotation(self, positions: torch.Tensor, limits: torch.Tensor | None, dtype: torch.dtype) -> Rotation:
        """positions int64 [tokens]; limits float32 [tokens] (`StepBatch.rope_limits`), where the facts depend on it."""
        frequencies = self._frequencies
        if self._facts.depends_on_limit:
            assert limits is not None, "this rope scaling needs each token's length limit"
            by_kind = self._dynamic_frequencies if self._facts.kind == "dynamic" else self._longrope_frequencies
            frequencies = by_kind(limits)
        angles = positions.unsqueeze(1).float() * frequencies
        angles = torch.cat((angles, angles), dim=1).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self._turn_factor != 1.0:
            cos, sin = cos * self._turn_factor, sin * self._turn_factor
        return Rotation(cos.to(dtype), sin.to(dtype), self._score_factor, self._query_factors(positions, dtype))

    def _query_factors(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """See `Rotation`."""
        if self._facts.query_beta == 0.0:
            return None
        lengths = 1 + torch.floor(positions / self._facts.original_max_position_embeddings)
        return (1 + self._facts.query_beta * torch.log(lengths)).to(dtype)[:, None, None]

    def _dynamic_frequencies(self, limits: torch.Tensor) -> torch.Tensor:
        """NTK scaling by a request's own limit, from its first token on: [tokens, rotary_dim / 2]."""
        factor, context = self._facts.factor, self._max_position_embeddings
        stretch = factor * limits.clamp(min=context) / context - (factor - 1)
        theta = self._facts.theta * stretch ** (self.rotary_dim / (self.rotary_dim - 2))
        return 1.0 / theta.unsqueeze(1) ** self._exponents

    def _longrope_frequencies(self, limits: torch.Tensor) -> torch.Tensor:
        """One set of wavelengths for requests within the original context, another for longer ones, from their first
        token on: [tokens, rotary_dim / 2]."""
        is_long = limits > self._facts.original_max_position_embeddings
        return torch.where(is_long.unsqueeze(1), self._long, self._short)

    def _stretched(self, factors: tuple[float, ...]) -> torch.Tensor:
        if len(factors) != len(self._exponents):
            raise ModelError(
                f"config.json gives {len(factors)} factors of wavelengths, and its heads have {len(self._exponents)}"
            )
        stretched = torch.tensor(factors, dtype=torch.float32, device=self._exponents.device)
        return 1.0 / (stretched * self._facts.theta**self._exponents)


def _frequencies(facts: RopeFacts, exponents: torch.Tensor) -> torch.Tensor:
    """Radians per position, [rotary_dim / 2]; dynamic scaling starts from the default's."""
    if facts.kind == "none":
        return torch.zeros_like(exponents)
    frequencies = 1.0 / facts.theta**exponents
    if facts.kind == "proportional":
        num_turned = int(facts.share * len(exponents))
        frequencies[num_turned:] = 0.0
        return frequencies / facts.factor
    if facts.kind == "linear":
        return frequencies / facts.factor
    if facts.kind == "llama3":
        return _llama3_frequencies(facts, frequencies)
    if facts.kind == "yarn":
        return _yarn_frequencies(facts, frequencies)
    return frequencies


def _llama3_frequencies(facts: RopeFacts, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    context = facts.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - facts.low_freq_factor) / (facts.high_freq_factor - facts.low_freq_factor)
    smoothed = (1 - smooth) * frequencies / facts.factor + smooth * frequencies
    scaled = torch.where(wavelengths > context / facts.low_freq_factor, frequencies / facts.factor, smoothed)
    return torch.where(wavelengths < context / facts.high_freq_factor, frequencies, scaled)


def _yarn_frequencies(facts: RopeFacts, frequencies: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often are kept, those that turn rarely stretched, with a linear ramp between."""
    head_dim = 2 * len(frequencies)

    def dimension(num_rotations: float) -> float:
        """The dimension that makes so many rotations over the original context."""
        turns = facts.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(facts.theta))

    low, high = dimension(facts.beta_fast), dimension(facts.beta_slow)
    if facts.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1).to(frequencies.device)
    return frequencies / facts.factor * stretched + frequencies * (1 - stretched)


def _attention_factor(facts: RopeFacts) -> float:
    """Factor of rotated queries and keys: some scalings sharpen attention over a stretched context."""
    if facts.kind not in ("yarn", "longrope"):
        return 1.0
    if facts.attention_factor is not None:
        return facts.attention_factor
    if facts.kind == "longrope":
        context = facts.original_max_position_embeddings
        return 1.0 if facts.factor <= 1 else math.sqrt(1 + math.log(facts.factor) / math.log(context))

    def sharpness(mscale: float) -> float:
        return 1.0 if facts.factor <= 1 else 0.1 * mscale * math.log(facts.factor) + 1.0

    if facts.mscale and facts.mscale_all_dim:
        return sharpness(facts.mscale) / sharpness(facts.mscale_all_dim)
    return sharpness(1.0)


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
