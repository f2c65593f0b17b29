"""Layers that the model families share. Names of tensors are given by the families.

Shapes: hidden [tokens, hidden_size], the tokens of all sequences of the step one after the other.
"""

from __future__ import annotations

import torch

from kernels.causal_conv1d import ops as causal_conv1d_ops
from kernels.causal_conv1d.ops import causal_conv1d_prefill, causal_conv1d_update
from kernels.lora.maps import LoraMaps
from kernels.paged_attention import ops as paged_attention_ops
from kernels.paged_attention.ops import paged_attention
from kernels.rms_norm import ops as rms_norm_ops
from kernels.rms_norm.ops import add_rms_norm, rms_norm
from kernels.rotary_kv import ops as rotary_kv_ops
from kernels.rotary_kv.ops import rotary_kv
from kernels.swiglu import ops as swiglu_ops
from service.models.batch import StepBatch
from service.models.caches import ConvStates, KvCache
from service.models.facts import ModelFacts
from service.models.projection import Projection
from service.models.rope import Rotation
from service.models.weights import Weights


class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight, over the last dimension."""

    def __init__(self, weights: Weights, name: str, facts: ModelFacts) -> None:
        self._weight = weights.tensor(f"{name}.weight", facts.hidden_size)
        self._eps = facts.norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._weight, self._eps)

    def warm_up(self) -> None:
        """Compile what steps of any size need here; the same for all norms of a model."""
        rms_norm_ops.warm_up(self._weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum) of x and the residual stream, which is spent: its memory may hold the sum."""
        return add_rms_norm(x, residual, self._weight, self._eps)


class HeadNorm:
    """What a norm of each query and key head before rotation needs: one weight for queries and one for keys."""

    def __init__(self, weights: Weights, q_name: str, k_name: str, facts: ModelFacts) -> None:
        q_weight = weights.tensor(f"{q_name}.weight", facts.head_dim).expand(facts.num_heads, -1)
        k_weight = weights.tensor(f"{k_name}.weight", facts.head_dim).expand(facts.num_kv_heads, -1)
        self.weight = torch.cat((q_weight, k_weight))  # [num_heads + kv_heads, head_dim]
        self.eps = facts.norm_eps


class Attention:
    """Grouped-query attention over the paged cache."""

    def __init__(
        self, qkv: Projection, out: Projection, facts: ModelFacts, layer: int, head_norm: HeadNorm | None = None
    ) -> None:
        self._qkv, self._out = qkv, out
        self._head_weight = None if head_norm is None else head_norm.weight
        self._head_eps = 0.0 if head_norm is None else head_norm.eps
        self._num_heads, self._head_dim = facts.num_heads, facts.head_dim
        self._sliding_window = facts.sliding_windows[layer]

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        return "attention", self._sliding_window

    def warm_up(self, cache: KvCache) -> None:
        """Compile what steps of any size need here."""
        rotary_kv_ops.warm_up(cache.k, self._num_heads, head_weight=self._head_weight)
        paged_attention_ops.warm_up(cache.k, self._num_heads, sliding_window=self._sliding_window)

    def __call__(self, x: torch.Tensor, batch: StepBatch, rotation: Rotation, cache: KvCache) -> torch.Tensor:
        # [tokens, heads + kv_heads + kv_heads, head_dim]
        qkv = self._qkv(x, batch.lora, batch.window_rows).view(x.shape[0], -1, self._head_dim)
        q = rotary_kv(
            qkv,
            rotation.cos,
            rotation.sin,
            cache.k,
            cache.v,
            batch.attention.slot_mapping,
            head_weight=self._head_weight,
            eps=self._head_eps,
        )
        scale = rotation.score_factor * self._head_dim**-0.5
        mixed = paged_attention(q, cache.k, cache.v, batch.attention, scale=scale, sliding_window=self._sliding_window)
        return self._out(mixed.view(x.shape[0], -1), batch.lora, batch.window_rows)


class ShortConv:
    """Gated short convolution: out_proj(C * conv(B * x)) with B, C, x = in_proj(hidden)."""

    def __init__(self, weights: Weights, prefix: str, facts: ModelFacts) -> None:
        self._in = weights.projection(f"{prefix}.in_proj", bias=facts.conv_bias)
        self._out = weights.projection(f"{prefix}.out_proj", bias=facts.conv_bias)
        # Checkpoints hold [hidden, 1, width]; the kernels read [width, hidden].
        taps = weights.tensor(f"{prefix}.conv.weight", facts.hidden_size, 1, facts.conv_width)
        self._taps = taps.squeeze(1).t().contiguous()
        self._bias = weights.tensor(f"{prefix}.conv.bias", facts.hidden_size) if facts.conv_bias else None

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        return "conv"

    def warm_up(self, cache: ConvStates) -> None:
        """Compile what steps of any size need here."""
        causal_conv1d_ops.warm_up(self._taps, self._bias, cache.lines, gated=True)

    def __call__(self, hidden: torch.Tensor, batch: StepBatch, _rotation: Rotation, cache: ConvStates) -> torch.Tensor:
        maps = batch.conv
        assert maps is not None, "a model with convolution layers needs ConvMaps"
        gate_in, gate_out, x = self._in(hidden, batch.lora, batch.window_rows).chunk(3, dim=1)
        if maps.all_decode:
            mixed = causal_conv1d_update(
                x, self._taps, self._bias, cache.lines, maps.state_indices, gate_in=gate_in, gate_out=gate_out
            )
        else:
            mixed = causal_conv1d_prefill(
                x,
                self._taps,
                self._bias,
                cache.lines,
                maps.query_start_loc,
                maps.state_indices,
                maps.has_initial_state,
                gate_in=gate_in,
                gate_out=gate_out,
                query_starts=maps.query_starts,
            )
        return self._out(mixed, batch.lora, batch.window_rows)


class GatedMlp:
    """down(silu(gate(x)) * up(x)), gate and up packed."""

    def __init__(self, gate_up: Projection, down: Projection) -> None:
        self._gate_up, self._down = gate_up, down

    def warm_up(self) -> None:
        """Compile what steps of any size need here; the same for all layers of a model."""
        weight = self._down.weight
        swiglu_ops.warm_up(weight.in_features, weight.dtype, weight.data.device)

    @property
    def gate_up(self) -> Projection:
        """The projection whose output the gate reads."""
        return self._gate_up

    def __call__(self, x: torch.Tensor, lora: LoraMaps | None, window_rows: int) -> torch.Tensor:
        return self._down(self._gate_up.swiglu(x, lora, window_rows), lora, window_rows)
