"""Qwen2: Llama with biases on queries, keys and values, and a sliding window in some layers if asked for."""

from __future__ import annotations

from service.models.families import llama, whole
from service.models.spec.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    late_windows,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import rope_facts

DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# Defaults of the models with a vision tower.
_DEFAULTS_BESIDE_VISION: Config = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
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


def read_whole(config: Config) -> ModelSpec:
    """Qwen2-VL: the same with a vision tower; see `families`."""
    return whole.text_part(config, _read_beside_vision, "qwen2_vl_text", may_be_flat=True)


def read_whole_2_5(config: Config) -> ModelSpec:
    """Qwen2.5-VL: as `read_whole`."""
    return whole.text_part(config, _read_beside_vision, "qwen2_5_vl_text", may_be_flat=True)


def _read_beside_vision(config: Config) -> ModelSpec:
    return read(completed(config, _DEFAULTS_BESIDE_VISION, nullable=("sliding_window",)))
