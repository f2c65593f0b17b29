"""LFM2: layers mix tokens either by attention with normed heads or by a gated short convolution."""

from __future__ import annotations

from service.models.decoder import DecoderLayer
from service.models.facts import ModelFacts
from service.models.layers import Attention, GatedMlp, HeadNorm, RmsNorm, ShortConv
from service.models.weights import Weights

FINAL_NORM = "model.embedding_norm"


def build_layer(weights: Weights, facts: ModelFacts, index: int) -> DecoderLayer:
    """Read the layer's tensors. Raises ModelError for one that is missing or misshapen."""
    layer = f"model.layers.{index}"
    return DecoderLayer(
        mixer_norm=RmsNorm(weights, f"{layer}.operator_norm", facts),
        mixer=_build_mixer(weights, facts, index),
        mlp_norm=RmsNorm(weights, f"{layer}.ffn_norm", facts),
        mlp=GatedMlp(
            weights.projection(f"{layer}.feed_forward.w13"),
            weights.projection(f"{layer}.feed_forward.w2"),
        ),
    )


def _build_mixer(weights: Weights, facts: ModelFacts, index: int) -> Attention | ShortConv:
    layer = f"model.layers.{index}"
    if facts.layer_kinds[index] == "conv":
        return ShortConv(weights, f"{layer}.conv", facts)
    attention = f"{layer}.self_attn"
    return Attention(
        weights.projection(f"{attention}.qkv_proj"),
        weights.projection(f"{attention}.out_proj"),
        facts,
        index,
        HeadNorm(weights, f"{attention}.q_layernorm", f"{attention}.k_layernorm", facts),
    )
