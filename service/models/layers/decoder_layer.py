"""A layer of the decoder, from its `LayerSpec`: a mixer and a feed-forward layer, and the norms around the two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.lora.maps import LoraMaps
from service.models.layers.caches import LayerCache
from service.models.layers.feed_forward import FeedForwardLayer, build_feed_forward
from service.models.layers.mixers import Attention, GatedDeltaNet, Mamba2, RmsNorm, ShortConv
from service.models.layers.rope import HeadNorm, Rotation
from service.models.layers.weights import Weights
from service.models.spec.model_spec import GatedDeltaSpec, LayerInputs, Mamba2Spec, Mixer, ModelSpec, ShortConvSpec
from service.models.step_batch import StepBatch

LayerMixer = Attention | ShortConv | GatedDeltaNet | Mamba2


class AllLayerInputs:
    """Inputs of all layers from a step's tokens: half by token id, half projected from their embedding."""

    def __init__(self, weights: Weights, spec: ModelSpec, inputs: LayerInputs) -> None:
        self._table = weights.tensor(f"{spec.prefix}embed_tokens_per_layer.weight")
        linear = inputs.model_linear(spec.hidden_size, spec.num_layers)
        self._projection = weights.projection(spec.prefix + linear.name)
        self.norm = RmsNorm(weights, f"{spec.prefix}per_layer_projection_norm", spec)
        self._shape = (spec.num_layers, inputs.size)
        # As transformers has it: rounded to the model's dtype before it multiplies.
        self._table_scale = float(torch.tensor(inputs.size**0.5, dtype=self._table.dtype))
        self._scale = spec.hidden_size**-0.5

    def __call__(
        self, token_ids: torch.Tensor, embedded: torch.Tensor, lora: LoraMaps | None, window_rows: int
    ) -> tuple[torch.Tensor, ...]:
        """token_ids int64 [tokens] and their embedding [tokens, hidden_size], read only -> [tokens, size] by layer"""
        projected = (self._projection(embedded, lora, window_rows) * self._scale).view(-1, self._shape[1])
        of_tokens = functional.embedding(token_ids, self._table) * self._table_scale
        given = (self.norm(projected) + of_tokens.view(-1, self._shape[1])) * 2**-0.5
        return given.view(-1, *self._shape).unbind(1)


class GatedInputs:
    """norm(projection(gelu(gate(stream)) * inputs))"""

    def __init__(self, weights: Weights, prefix: str, norm: RmsNorm) -> None:
        """prefix  of the layer's modules"""
        self._gate = weights.projection(f"{prefix}per_layer_input_gate")
        self._projection = weights.projection(f"{prefix}per_layer_projection")
        self.norm = norm

    def __call__(
        self, stream: torch.Tensor, given: torch.Tensor, lora: LoraMaps | None, window_rows: int
    ) -> torch.Tensor:
        """stream [tokens, hidden_size], given [tokens, size], both read only -> fresh, as stream"""
        gated = functional.gelu(self._gate(stream, lora, window_rows), approximate="tanh") * given
        return self.norm(self._projection(gated, lora, window_rows), lora)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """A mixer across tokens, then a feed-forward on each token; see `LayerSpec` for the norms around the two."""

    mixer_norm: RmsNorm | None
    mixer: LayerMixer
    mixer_end_norm: RmsNorm | None
    mlp_norm: RmsNorm | None
    mlp: FeedForwardLayer
    mlp_end_norm: RmsNorm | None
    residual_scale: float
    inputs: GatedInputs | None = None
    scalar: torch.Tensor | None = None

    def mix(
        self, normed: torch.Tensor, batch: StepBatch, rotations: tuple[Rotation, ...], cache: LayerCache
    ) -> torch.Tensor:
        """normed [tokens, hidden_size], read only -> fresh, same shape, to be added to the residual stream."""
        mixed = self.mixer(normed, batch, rotations, cache)  # type: ignore[arg-type]
        return self._end(mixed, self.mixer_end_norm, batch.lora)

    def feed(self, normed: torch.Tensor, stream: torch.Tensor, lora: LoraMaps | None, window_rows: int) -> torch.Tensor:
        """The same for the feed-forward layer, of the norm of the residual stream and the stream."""
        return self._end(self.mlp(normed, stream, lora, window_rows), self.mlp_end_norm, lora)

    @property
    def has_end(self) -> bool:
        """Whether `end` changes the residual stream."""
        return self.inputs is not None or self.scalar is not None

    def end(
        self, stream: torch.Tensor, given: torch.Tensor | None, lora: LoraMaps | None, window_rows: int
    ) -> torch.Tensor:
        """The residual stream behind the feed-forward, fresh [tokens, hidden_size], at the end of the layer.

        given  [tokens, size] of `AllLayerInputs`, None where the layer has no inputs
        """
        if self.inputs is not None:
            assert given is not None, "a layer with inputs is given them"
            stream = stream + self.inputs(stream, given, lora, window_rows)
        return stream if self.scalar is None else stream * self.scalar

    @property
    def norms(self) -> list[RmsNorm | HeadNorm]:
        """Norms whose weights adapters may replace: of the hidden states, and of the heads of attention."""
        of_heads = self.mixer.head_norms if isinstance(self.mixer, Attention) else None
        of_inputs = None if self.inputs is None else self.inputs.norm
        each = (self.mixer_norm, self.mixer_end_norm, self.mlp_norm, self.mlp_end_norm, of_inputs)
        of_heads_each = () if of_heads is None else of_heads.each
        return [*(norm for norm in each if norm is not None), *self.mlp.norms, *of_heads_each]

    def _end(self, x: torch.Tensor, norm: RmsNorm | None, lora: LoraMaps | None) -> torch.Tensor:
        if norm is not None:
            x = norm(x, lora)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def build_layer(weights: Weights, spec: ModelSpec, index: int) -> DecoderLayer:
    """Reads the layer's tensors. Raises ModelError for one that is missing or misshapen."""
    layer, prefix = spec.layers[index], f"{spec.layer_prefix}{index}."

    def norm(name: str | None) -> RmsNorm | None:
        return None if name is None else RmsNorm(weights, prefix + name, spec)

    inputs = None
    if layer.inputs is not None:
        inputs = GatedInputs(weights, prefix, RmsNorm(weights, prefix + layer.inputs_norm, spec))
    return DecoderLayer(
        mixer_norm=norm(layer.mixer_norm),
        mixer=_build_mixer(weights, prefix + layer.mixer.name, layer.mixer, spec),
        mixer_end_norm=norm(layer.mixer_end_norm),
        mlp_norm=norm(layer.mlp_norm),
        mlp=build_feed_forward(weights, prefix, layer.mlp, spec),
        mlp_end_norm=norm(layer.mlp_end_norm),
        residual_scale=spec.residual_scale,
        inputs=inputs,
        scalar=None if layer.scalar is None else weights.tensor(prefix + layer.scalar),
    )


def _build_mixer(weights: Weights, prefix: str, mixer: Mixer, spec: ModelSpec) -> LayerMixer:
    if isinstance(mixer, ShortConvSpec):
        return ShortConv(weights, prefix, mixer)
    if isinstance(mixer, GatedDeltaSpec):
        return GatedDeltaNet(weights, prefix, mixer, spec)
    if isinstance(mixer, Mamba2Spec):
        return Mamba2(weights, prefix, mixer, spec)
    return Attention(weights, prefix, mixer, spec)
