"""Qwen2: Llama with biases on queries, keys and values, and a sliding window in some layers if asked for."""

from __future__ import annotations

from service.models.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    late_windows,
    model_sizes,
)
from service.models.families import llama
from service.models.rope_facts import rope_facts
from service.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec

DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, DEFAULTS, nullable=("sliding_window",))
    check_activation(config)
    sizes, mlp = attention_sizes(config), MlpSpec(size=count(config, "intermediate_size"))
    layers = (
        LayerSpec(mixer=AttentionSpec(**sizes, input_bias=True, sliding_window=window), mlp=mlp)
        for window in late_windows(config)
    )
    return ModelSpec(**model_sizes(config), layers=tuple(layers), rotations=(rope_facts(config),))
