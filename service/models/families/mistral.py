"""Mistral: Llama without biases, and with a sliding window in every layer."""

from __future__ import annotations

from service.models.families import llama, whole
from service.models.spec.config_json import Config, attention_sizes, check_activation, completed, count, model_sizes
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS, nullable=("sliding_window",))
    check_activation(config)
    attention = AttentionSpec(**attention_sizes(config), sliding_window=config["sliding_window"])
    layer = LayerSpec(mixer=attention, mlp=MlpSpec(size=count(config, "intermediate_size")))
    layers = (layer,) * count(config, "num_hidden_layers")
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rope_facts(config),))


def read_whole(config: Config) -> ModelSpec:
    """Mistral 3: with a vision tower; see `families`."""
    return whole.text_part(config, read, "mistral", is_tied=True)
