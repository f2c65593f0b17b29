"""Mistral: Llama without biases, and with a sliding window in every layer. Ministral 3: a stretched rotation, and
queries that grow with their positions."""

from __future__ import annotations

from dataclasses import replace

from service.models.families import llama, whole
from service.models.spec.config_json import (
    Config,
    ModelError,
    attention_sizes,
    check_activation,
    completed,
    count,
    is_positive_number,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_MINISTRAL_DEFAULTS: Config = {
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
    "rope_theta": 1_000_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    return _read(completed(config, _DEFAULTS, nullable=("sliding_window",)))


def read_ministral(config: Config) -> ModelSpec:
    """Ministral 3; see `families`."""
    config = completed(config, _MINISTRAL_DEFAULTS)
    spec = _read(config)
    beta = config["rope_parameters"].get("llama_4_scaling_beta") or 0.0
    if not is_positive_number(beta) and beta != 0.0:
        raise ModelError(f"config.json must give llama_4_scaling_beta as a number above 0, and has {beta!r}")
    return replace(spec, rotations=tuple(replace(rope, query_beta=float(beta)) for rope in spec.rotations))


def _read(config: Config) -> ModelSpec:
    check_activation(config)
    attention = AttentionSpec(**attention_sizes(config), sliding_window=config["sliding_window"])
    layer = LayerSpec(mixer=attention, mlp=MlpSpec(size=count(config, "intermediate_size")))
    layers = (layer,) * count(config, "num_hidden_layers")
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rope_facts(config),))


def read_whole(config: Config) -> ModelSpec:
    """Mistral 3: either of them with a vision tower; see `families`."""
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("model_type") == "ministral3":
        return whole.text_part(config, read_ministral, "ministral3", is_tied=True)
    return whole.text_part(config, read, "mistral", is_tied=True)
