"""Qwen3: Llama with query and key heads normed before rotation, and a sliding window in some layers if asked for."""

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
from service.models.families import qwen2
from service.models.rope_facts import rope_facts
from service.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec

_DEFAULTS: Config = {**qwen2.DEFAULTS, "head_dim": 128}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS, nullable=("sliding_window",))
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    attention = {
        **attention_sizes(config),
        "input_bias": bias,
        "output_bias": bias,
        "head_norms": ("q_norm", "k_norm"),
    }
    mlp = MlpSpec(size=count(config, "intermediate_size"))
    layers = (
        LayerSpec(mixer=AttentionSpec(**attention, sliding_window=window), mlp=mlp) for window in late_windows(config)
    )
    return ModelSpec(**model_sizes(config), layers=tuple(layers), rotations=(rope_facts(config),))
