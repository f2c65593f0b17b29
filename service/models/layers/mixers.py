"""Mixers across tokens in the layers of a `ModelSpec`, and norms.

Shapes: hidden [tokens, hidden_size], the tokens of all sequences of the step one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kernels.causal_conv1d import ops as causal_conv1d_ops
from kernels.causal_conv1d.ops import causal_conv1d_prefill, causal_conv1d_update
from kernels.gated_delta import ops as gated_delta_ops
from kernels.gated_delta.ops import gated_delta_decode, gated_delta_prefill, gated_norm
from kernels.lora.maps import LoraMaps
from kernels.lora.non_lora import own_norm
from kernels.mamba2.ops import mamba2_decode, mamba2_prefill
from kernels.paged_attention import ops as paged_attention_ops
from kernels.paged_attention.ops import paged_attention
from kernels.platform import in_use
from kernels.rms_norm import ops as rms_norm_ops
from kernels.rms_norm.ops import add_rms_norm, rms_norm
from kernels.rotary_kv import ops as rotary_kv_ops
from kernels.rotary_kv.ops import rotary_kv
from kernels.rotary_kv.reference import rotated
from service.models.layers.caches import ConvStates, DeltaStates, KvCache
from service.models.layers.projection import RowSource, side_of
from service.models.layers.rope import HeadNorms, Rotation
from service.models.layers.weights import Weights
from service.models.spec.model_spec import AttentionSpec, GatedDeltaSpec, Mamba2Spec, ModelSpec, ShortConvSpec
from service.models.step_batch import StepBatch


def _norm_weight(weights: Weights, name: str, spec: ModelSpec) -> torch.Tensor:
    """[width], as it multiplies."""
    return weights.norm(name, zero_centred=spec.zero_centred_norms, exact=spec.exact_norms)


class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * weight, over the last dimension."""

    def __init__(self, weights: Weights, name: str, spec: ModelSpec) -> None:
        self.name = name
        self.weight = _norm_weight(weights, name, spec)
        self._eps = spec.norm_eps
        # Weights of adapters, by line, and the weight that a norm has before theirs; see `kernels.lora.non_lora`.
        self._own: torch.Tensor | None = None
        self._ones: torch.Tensor | None = None

    def bind_rows(self, rows: RowSource) -> None:
        """Bind the weights with which adapters replace its own."""
        if rows.side is not None and self.name in rows.side.norms:
            self._own, self._ones = rows.side.norms[self.name], torch.ones_like(self.weight)

    def __call__(self, x: torch.Tensor, lora: LoraMaps | None = None) -> torch.Tensor:
        side = side_of(lora)
        if side is None or side.norms is None:
            return rms_norm(x, self.weight, self._eps)
        return self._with_own(rms_norm(x, self._ones_like_own, self._eps), x, side.norms)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what steps of any size need here; the same for all norms of a model."""
        rms_norm_ops.warm_up(self.weight, dtype)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, lora: LoraMaps | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum) of x and the residual stream, which is spent: its memory may hold the sum."""
        side = side_of(lora)
        if side is None or side.norms is None:
            return add_rms_norm(x, residual, self.weight, self._eps)
        unit, stream = add_rms_norm(x, residual, self._ones_like_own, self._eps)
        return self._with_own(unit, stream, side.norms), stream

    @property
    def _ones_like_own(self) -> torch.Tensor:
        assert self._ones is not None, f"{self.name} has no room for adapters' weights"
        return self._ones

    def _with_own(self, unit: torch.Tensor, x: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
        """unit, which is x normed without a weight, times the weights of each token's adapter, or the norm's own."""
        assert self._own is not None
        normed = own_norm(unit, self._own, lines)
        if not in_use(x.device).batch_invariant:
            return normed
        # Rounded once for the others, as in steps without such adapters.
        return torch.where((lines > 0).unsqueeze(1), normed, rms_norm(x, self.weight, self._eps))


class Attention:
    """Grouped-query attention over the paged cache."""

    def __init__(self, weights: Weights, prefix: str, attention: AttentionSpec, spec: ModelSpec) -> None:
        """prefix  of its modules' names, "model.layers.3.self_attn" for example"""
        self._qkv = weights.projection(f"{prefix}.qkv_proj")
        self._out = weights.projection(f"{prefix}.{attention.output}")
        self._spec, self._head_eps = attention, spec.norm_eps
        self.head_norms = HeadNorms(weights, prefix, attention, spec) if attention.head_norms is not None else None
        self._sinks = weights.exact(f"{prefix}.sinks") if attention.has_sinks else None
        self._whole_weights: list[torch.Tensor] = []  # of all queries, of all keys
        if attention.whole_norms is not None:
            self._whole_weights = [_norm_weight(weights, f"{prefix}.{name}", spec) for name in attention.whole_norms]

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        spec = self._spec
        return "attention", spec.sliding_window, spec.score_cap, spec.rotary, spec.head_dim, spec.num_kv_heads

    def warm_up(self, cache: KvCache, rotary_dims: Sequence[int]) -> None:
        """Compile what steps of any size need here.

        rotary_dims  elements of a head that each of the model's rotations turns
        """
        rotary_dim = rotary_dims[self._spec.rotary]
        num_heads, norms = self._spec.num_heads, self.head_norms
        columns, first = (num_heads + 2 * self._spec.num_kv_heads) * self._spec.head_dim, 0
        for weight in self._whole_weights:
            rms_norm_ops.warm_up(weight, cache.k.dtype, columns=columns, first=first)
            first += weight.shape[0]
        head_weight = None if norms is None else norms.weight
        has_gates = self._spec.has_output_gate
        rotary_kv_ops.warm_up(cache.k, num_heads, head_weight=head_weight, rotary_dim=rotary_dim, has_gates=has_gates)
        if norms is not None and norms.has_own:
            rotary_kv_ops.warm_up(cache.k, num_heads, rotary_dim=rotary_dim)
        window, cap, has_sinks = self._spec.sliding_window, self._spec.score_cap, self._spec.has_sinks
        paged_attention_ops.warm_up(cache.k, num_heads, sliding_window=window, score_cap=cap, has_sinks=has_sinks)

    def __call__(
        self, x: torch.Tensor, batch: StepBatch, rotations: tuple[Rotation, ...], cache: KvCache
    ) -> torch.Tensor:
        spec, rotation = self._spec, rotations[self._spec.rotary]
        # [tokens, heads + kv_heads + kv_heads, head_dim], with output gates one behind each of the first heads
        qkv = self._qkv(x, batch.lora, batch.window_rows).view(x.shape[0], -1, spec.head_dim)
        gate = qkv[:, 1 : 2 * spec.num_heads : 2] if spec.has_output_gate else None
        if spec.values_are_keys:
            qkv = torch.cat((qkv, qkv[:, -spec.num_kv_heads :]), dim=1)
        if spec.norms_values:
            values = qkv[:, -spec.num_kv_heads :]
            values.copy_(functional.rms_norm(values.float(), values.shape[-1:], None, self._head_eps))
        if self._whole_weights:
            self._norm_whole(qkv)
        if spec.turns_neighbours:
            self._part_neighbours(qkv, rotation.cos.shape[2])
        q = self._rotated(qkv, batch, rotation, cache)
        if rotation.query_factors is not None:
            q.mul_(rotation.query_factors)
        scale = rotation.score_factor * spec.scale
        mixed = paged_attention(
            q,
            cache.k,
            cache.v,
            batch.attention,
            scale=scale,
            sliding_window=spec.sliding_window,
            score_cap=spec.score_cap,
            sinks=self._sinks,
        )
        if gate is not None:
            mixed = mixed * torch.sigmoid(gate)
        return self._out(mixed.view(x.shape[0], -1), batch.lora, batch.window_rows)

    def _rotated(self, qkv: torch.Tensor, batch: StepBatch, rotation: Rotation, cache: KvCache) -> torch.Tensor:
        """Queries, normed and turned, [tokens, heads, head_dim]; keys and values go into the cache."""
        norms, slots, side = self.head_norms, batch.attention.slot_mapping, side_of(batch.lora)
        normed, head_weight = (qkv, None) if norms is None else norms.apply(qkv, batch.lora)
        if norms is None or side is None or side.norms is None or not in_use(qkv.device).batch_invariant:
            return self._rotate(normed, rotation, cache, slots, head_weight)
        # Tokens without such an adapter are rounded as in steps without one.
        has_own = side.norms > 0
        q = self._rotate(qkv, rotation, cache, slots, norms.weight)
        own = self._rotate(normed, rotation, cache, torch.where(has_own, slots, -1), head_weight)
        return torch.where(has_own[:, None, None], own, q)

    def _rotate(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        cache: KvCache,
        slots: torch.Tensor,
        head_weight: torch.Tensor | None,
    ) -> torch.Tensor:
        turn = (rotation.cos, rotation.sin)
        if self._spec.cache_of is not None:
            return rotated(qkv, *turn, 0, head_weight, self._head_eps)[0]
        return rotary_kv(
            *(qkv, *turn, cache.k, cache.v, slots),
            head_weight=head_weight,
            eps=self._head_eps,
            has_gates=qkv.shape[1] > self._spec.num_heads + 2 * self._spec.num_kv_heads,
        )

    def _part_neighbours(self, qkv: torch.Tensor, rotary_dim: int) -> None:
        """Bring the elements that are turned into the order of rotations by halves, in place: scores do not depend on
        the order of a head's elements. qkv as in `_norm_whole`."""
        turned = qkv[:, : -self._spec.num_kv_heads, :rotary_dim]
        turned.copy_(turned.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2))

    def _norm_whole(self, qkv: torch.Tensor) -> None:
        """Queries and keys of each token, in place; qkv [tokens, heads + kv_heads + kv_heads, head_dim], contiguous."""
        flat, first = qkv.view(qkv.shape[0], -1), 0
        for weight in self._whole_weights:
            part = flat[:, first : first + weight.shape[0]]
            part.copy_(rms_norm(part, weight, self._head_eps))
            first += weight.shape[0]


class ShortConv:
    """Gated short convolution: out_proj(C * conv(B * x)) with B, C, x = in_proj(hidden)."""

    def __init__(self, weights: Weights, prefix: str, conv: ShortConvSpec) -> None:
        """prefix  of its modules' names, "model.layers.3.conv" for example"""
        self._in = weights.projection(f"{prefix}.in_proj")
        self._out = weights.projection(f"{prefix}.out_proj")
        self._taps = weights.taps(f"{prefix}.conv")
        self._bias = weights.tensor(f"{prefix}.conv.bias") if conv.bias else None

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        return "conv"

    def warm_up(self, cache: ConvStates, _rotary_dims: Sequence[int]) -> None:
        """Compile what steps of any size need here."""
        causal_conv1d_ops.warm_up(self._taps, self._bias, cache.lines, gated=True)

    def __call__(
        self, hidden: torch.Tensor, batch: StepBatch, _rotations: tuple[Rotation, ...], cache: ConvStates
    ) -> torch.Tensor:
        maps = batch.conv
        assert maps is not None, "a model with convolution layers needs ConvMaps"
        gate_in, gate_out, x = self._in(hidden, batch.lora, batch.window_rows).chunk(3, dim=1)
        if maps.all_decode:
            mixed = causal_conv1d_update(
                x,
                self._taps,
                self._bias,
                cache.lines,
                maps.state_indices,
                gate_in=gate_in,
                gate_out=gate_out,
                source_state_indices=maps.source_state_indices,
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
                source_state_indices=maps.source_state_indices,
                query_starts=maps.query_starts,
            )
        return self._out(mixed, batch.lora, batch.window_rows)


class GatedDeltaNet:
    """A convolution over queries, keys and values, the gated delta rule, and a gated norm of each value head."""

    def __init__(self, weights: Weights, prefix: str, delta: GatedDeltaSpec, spec: ModelSpec) -> None:
        """prefix  of its modules' names, "model.layers.3.linear_attn" for example"""
        self._in = weights.projection(f"{prefix}.in_proj")
        self._out = weights.projection(f"{prefix}.out_proj")
        self._taps = weights.taps(f"{prefix}.conv1d")
        self.a_log = weights.exact(f"{prefix}.A_log")
        self.dt_bias = weights.exact(f"{prefix}.dt_bias")
        self.norm_weight = weights.exact(f"{prefix}.norm.weight")
        self._spec, self._eps = delta, spec.norm_eps

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        return "gated delta"

    def warm_up(self, cache: DeltaStates, _rotary_dims: Sequence[int]) -> None:
        """Compile what steps of any size need here."""
        columns = sum(self._spec.input_sizes)
        causal_conv1d_ops.warm_up(self._taps, None, cache.lines, activation="silu", x_columns=columns)
        gated_delta_ops.warm_up(cache.matrices, cache.lines)

    def __call__(
        self, hidden: torch.Tensor, batch: StepBatch, _rotations: tuple[Rotation, ...], cache: DeltaStates
    ) -> torch.Tensor:
        maps = batch.conv
        assert maps is not None, "a model with states needs ConvMaps"
        qkv, z, b, a = self._in(hidden, batch.lora, batch.window_rows).split(self._spec.input_sizes, dim=1)
        weights, sources = (self.a_log, self.dt_bias), maps.source_state_indices
        if maps.all_decode:
            gated = gated_delta_decode(
                *(qkv, z, b, a, self._taps, cache.lines, *weights, self.norm_weight, cache.matrices),
                maps.state_indices,
                eps=self._eps,
                source_state_indices=sources,
            )
        else:
            where = (maps.query_start_loc, maps.state_indices, maps.has_initial_state)
            starts = maps.query_starts
            qkv = causal_conv1d_prefill(
                *(qkv, self._taps, None, cache.lines, *where),
                activation="silu",
                source_state_indices=sources,
                query_starts=starts,
            )
            mixed = gated_delta_prefill(
                *(qkv, b, a, *weights, cache.matrices, *where), source_state_indices=sources, query_starts=starts
            )
            gated = gated_norm(mixed, z, self.norm_weight, self._eps)
        return self._out(gated, batch.lora, batch.window_rows)


class Mamba2:
    """A convolution over x, B and C, the state-space recurrence, and a gated norm by groups."""

    def __init__(self, weights: Weights, prefix: str, mamba: Mamba2Spec, spec: ModelSpec) -> None:
        """prefix  of its modules' names, "model.layers.3.mamba" for example"""
        self._in = weights.projection(f"{prefix}.in_proj")
        self._out = weights.projection(f"{prefix}.out_proj")
        self._taps = weights.taps(f"{prefix}.conv1d")
        self._bias = weights.tensor(f"{prefix}.conv1d.bias") if mamba.conv_bias else None
        self._scalars = [weights.exact(f"{prefix}.{name}") for name in ("A_log", "dt_bias", "D")]
        self._norm_weight = weights.exact(f"{prefix}.norm.weight")
        self._spec, self._eps = mamba, spec.norm_eps

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        return "mamba2"

    def warm_up(self, cache: DeltaStates, _rotary_dims: Sequence[int]) -> None:
        """Compile what steps of any size need here."""
        columns = sum(self._spec.input_sizes)
        causal_conv1d_ops.warm_up(self._taps, self._bias, cache.lines, activation="silu", x_columns=columns)

    def __call__(
        self, hidden: torch.Tensor, batch: StepBatch, _rotations: tuple[Rotation, ...], cache: DeltaStates
    ) -> torch.Tensor:
        maps = batch.conv
        assert maps is not None, "a model with states needs ConvMaps"
        gate, xbc, dt = self._in(hidden, batch.lora, batch.window_rows).split(self._spec.input_sizes, dim=1)
        sources, states = maps.source_state_indices, cache.matrices
        a_log, dt_bias, d = self._scalars
        if maps.all_decode:
            lines = maps.state_indices
            xbc = causal_conv1d_update(
                *(xbc, self._taps, self._bias, cache.lines, lines), activation="silu", source_state_indices=sources
            )
            mixed = mamba2_decode(xbc, dt, a_log, dt_bias, d, states, lines, source_state_indices=sources)
        else:
            where, starts = (maps.query_start_loc, maps.state_indices, maps.has_initial_state), maps.query_starts
            xbc = causal_conv1d_prefill(
                *(xbc, self._taps, self._bias, cache.lines, *where),
                activation="silu",
                source_state_indices=sources,
                query_starts=starts,
            )
            mixed = mamba2_prefill(
                *(xbc, dt, a_log, dt_bias, d, states, *where), source_state_indices=sources, query_starts=starts
            )
        return self._out(self._gated(mixed.flatten(1), gate), batch.lora, batch.window_rows)

    def _gated(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[tokens, inner_size] in the dtype of the gate: gated before it is normed, group by group."""
        groups = (mixed * functional.silu(gate.float())).unflatten(1, (self._spec.num_groups, -1))
        normed = functional.rms_norm(groups, groups.shape[-1:], None, self._eps).flatten(1)
        return (normed * self._norm_weight).to(gate.dtype)
