"""OLMo 3: norms behind each part of a layer and none before, normed queries and keys, windows in most layers, and a
stretched rotation in the others."""

from __future__ import annotations

from typing import Any

from service.models.spec.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    layer_types,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import RopeFacts, rope_facts

_DEFAULTS: Config = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "sliding_window": 4096,
    "eos_token_id": 50_279,
}
_INTERVAL = 4
_GLOBAL, _LOCAL = 0, 1


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    attention: dict[str, Any] = {
        **attention_sizes(config),
        "input_bias": bias,
        "output_bias": bias,
        "whole_norms": ("q_norm", "k_norm"),
    }
    kinds = {
        "full_attention": AttentionSpec(**attention, rotary=_GLOBAL),
        "sliding_attention": AttentionSpec(**attention, rotary=_LOCAL, sliding_window=count(config, "sliding_window")),
    }
    mlp = MlpSpec(size=count(config, "intermediate_size"))
    layers = tuple(
        LayerSpec(
            mixer=kinds[kind],
            mlp=mlp,
            mixer_norm=None,
            mixer_end_norm="post_attention_layernorm",
            mlp_norm=None,
            mlp_end_norm="post_feedforward_layernorm",
        )
        for kind in _kinds(config)
    )
    return ModelSpec(**model_sizes(config), layers=layers, rotations=_rotations(config), exact_norms=True)


def _kinds(config: Config) -> list[str]:
    if "layer_types" in config:
        return layer_types(config, ("full_attention", "sliding_attention"))
    num_layers = count(config, "num_hidden_layers")
    return ["sliding_attention" if (index + 1) % _INTERVAL else "full_attention" for index in range(num_layers)]


def _rotations(config: Config) -> tuple[RopeFacts, RopeFacts]:
    """Rotations of layers with full attention, then of those with windows, which `rope_scaling` never stretches."""
    everywhere = rope_facts(config, "full_attention")
    nearby = {name: config[name] for name in ("rope_theta", "max_position_embeddings")}
    given = config.get("rope_parameters") or {}
    if "sliding_attention" in given:
        nearby["rope_parameters"] = given["sliding_attention"]
    elif "rope_type" in given:
        nearby["rope_theta"] = given.get("rope_theta", nearby["rope_theta"])
    return everywhere, rope_facts(nearby)
