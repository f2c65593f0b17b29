"""gpt-oss: attention with sinks, windows in every second layer and biases everywhere; experts with biases and a clamped
gate, stored column by column."""

from __future__ import annotations

from service.models.spec.config_json import (
    Config,
    ModelError,
    attention_sizes,
    check_activation,
    completed,
    count,
    expert_sizes,
    listed_windows,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "attention_bias": True,
}
# What the gate of the experts is clamped to and sharpened by (`kernels.shapes`).
_GATE = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    check_activation(config)
    for key, value in _GATE.items():
        if config.get(key, value) != value:
            raise ModelError(f"config.json has a {key} of {config[key]!r}; served is {value}")
    num_experts = config.get("num_experts", config["num_local_experts"])
    sizes = {"num_experts": num_experts, "moe_intermediate_size": count(config, "intermediate_size")}
    num_chosen = config.get("experts_per_token", config["num_experts_per_tok"])
    moe = MoeSpec(
        **expert_sizes({**config, **sizes, "num_experts_per_tok": num_chosen}),
        normalises=True,
        bias=True,
        activation="clamped",
        interleaved=True,
        router="mlp.router",
    )
    bias = bool(config["attention_bias"])
    attention = {**attention_sizes(config), "input_bias": bias, "output_bias": bias, "has_sinks": True}
    if "layer_types" not in config:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[index % 2] for index in range(count(config, "num_hidden_layers"))]
    layers = (
        LayerSpec(mixer=AttentionSpec(**attention, sliding_window=window), mlp=moe)
        for window in listed_windows(config, config["sliding_window"])
    )
    return ModelSpec(**model_sizes(config), layers=tuple(layers), rotations=(rope_facts(config),), exact_norms=True)
