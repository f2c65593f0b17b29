"""Llama: attention and a gated feed-forward layer; biases where config.json asks for them."""

from __future__ import annotations

from service.models.spec.config_json import Config, attention_sizes, check_activation, completed, count, model_sizes
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import rope_facts

# The defaults of transformers where config.json is silent; other families build upon them.
DEFAULTS: Config = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, DEFAULTS)
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    attention = AttentionSpec(**attention_sizes(config), input_bias=bias, output_bias=bias)
    mlp = MlpSpec(size=count(config, "intermediate_size"), bias=bool(config.get("mlp_bias", False)))
    layers = (LayerSpec(mixer=attention, mlp=mlp),) * count(config, "num_hidden_layers")
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rope_facts(config),))
