"""Mistral: Llama without biases, and with a sliding window in every layer (`facts.sliding_windows`)."""

from __future__ import annotations

from service.models.decoder import DecoderLayer
from service.models.facts import ModelFacts
from service.models.layers import Attention, GatedMlp, RmsNorm
from service.models.weights import Weights

FINAL_NORM = "model.norm"


def build_layer(weights: Weights, facts: ModelFacts, index: int) -> DecoderLayer:
    """Read the layer's tensors. Raises ModelError for one that is missing or misshapen."""
    layer = f"model.layers.{index}"
    attention = f"{layer}.self_attn"
    return DecoderLayer(
        mixer_norm=RmsNorm(weights, f"{layer}.input_layernorm", facts),
        mixer=Attention(
            weights.projection(f"{attention}.qkv_proj"),
            weights.projection(f"{attention}.o_proj"),
            facts,
            index,
        ),
        mlp_norm=RmsNorm(weights, f"{layer}.post_attention_layernorm", facts),
        mlp=GatedMlp(
            weights.projection(f"{layer}.mlp.gate_up_proj"),
            weights.projection(f"{layer}.mlp.down_proj"),
        ),
    )
