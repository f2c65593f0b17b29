"""A layer of the decoder, from its `LayerSpec`: a mixer and a feed-forward layer, and the norms around the two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora.maps import LoraMaps
from service.models.layers.caches import LayerCache
from service.models.layers.feed_forward import FeedForwardLayer, build_feed_forward
from service.models.layers.head_norms import HeadNorm
from service.models.layers.mixers import Attention, GatedDeltaNet, RmsNorm, ShortConv
from service.models.layers.rope import Rotation
from service.models.layers.weights import Weights
from service.models.spec.model_spec import GatedDeltaSpec, Mixer, ModelSpec, ShortConvSpec
from service.models.step_batch import StepBatch

LayerMixer = Attention | ShortConv | GatedDeltaNet


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

    def mix(
        self, normed: torch.Tensor, batch: StepBatch, rotations: tuple[Rotation, ...], cache: LayerCache
    ) -> torch.Tensor:
        """normed [tokens, hidden_size], read only -> fresh, same shape, to be added to the residual stream."""
        mixed = self.mixer(normed, batch, rotations, cache)  # type: ignore[arg-type]
        return self._end(mixed, self.mixer_end_norm, batch.lora)

    def feed(self, normed: torch.Tensor, lora: LoraMaps | None, window_rows: int) -> torch.Tensor:
        """The same for the feed-forward layer."""
        return self._end(self.mlp(normed, lora, window_rows), self.mlp_end_norm, lora)

    @property
    def norms(self) -> list[RmsNorm | HeadNorm]:
        """Norms whose weights adapters may replace: of the hidden states, and of the heads of attention."""
        of_heads = self.mixer.head_norms if isinstance(self.mixer, Attention) else None
        each = (self.mixer_norm, self.mixer_end_norm, self.mlp_norm, self.mlp_end_norm)
        return [norm for norm in each if norm is not None] + list(of_heads.each if of_heads is not None else ())

    def _end(self, x: torch.Tensor, norm: RmsNorm | None, lora: LoraMaps | None) -> torch.Tensor:
        if norm is not None:
            x = norm(x, lora)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def build_layer(weights: Weights, spec: ModelSpec, index: int) -> DecoderLayer:
    """Reads the layer's tensors. Raises ModelError for one that is missing or misshapen."""
    layer, prefix = spec.layers[index], f"{spec.layer_prefix}{index}."

    def norm(name: str | None) -> RmsNorm | None:
        return None if name is None else RmsNorm(weights, prefix + name, spec)

    return DecoderLayer(
        mixer_norm=norm(layer.mixer_norm),
        mixer=_build_mixer(weights, prefix + layer.mixer.name, layer.mixer, spec),
        mixer_end_norm=norm(layer.mixer_end_norm),
        mlp_norm=norm(layer.mlp_norm),
        mlp=build_feed_forward(weights, prefix, layer.mlp, spec),
        mlp_end_norm=norm(layer.mlp_end_norm),
        residual_scale=spec.residual_scale,
    )


def _build_mixer(weights: Weights, prefix: str, mixer: Mixer, spec: ModelSpec) -> LayerMixer:
    if isinstance(mixer, ShortConvSpec):
        return ShortConv(weights, prefix, mixer)
    if isinstance(mixer, GatedDeltaSpec):
        return GatedDeltaNet(weights, prefix, mixer, spec)
    return Attention(weights, prefix, mixer, spec)
