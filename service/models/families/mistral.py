"""Mistral: Llama without biases, and with a sliding window in every layer. Mixtral: the same with mixtures of experts.
Ministral 3: a stretched rotation, and queries that grow with their positions."""

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
    expert_sizes,
    is_positive_number,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, FeedForward, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_MIXTRAL_DEFAULTS: Config = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
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
    config = completed(config, _DEFAULTS, nullable=("sliding_window",))
    return _read(config, MlpSpec(size=count(config, "intermediate_size")))


def read_mixtral(config: Config) -> ModelSpec:
    """Mixtral, whose modules are called as transformers 5 calls them; see `families`."""
    config = completed(config, _MIXTRAL_DEFAULTS)
    renamed = {"num_experts": config["num_local_experts"], "moe_intermediate_size": config.get("intermediate_size")}
    sizes = expert_sizes({**config, **renamed})
    return _read(config, MoeSpec(**sizes, normalises=True, router_inner="block_sparse_moe.gate"))


def read_ministral(config: Config) -> ModelSpec:
    """Ministral 3; see `families`."""
    config = completed(config, _MINISTRAL_DEFAULTS)
    spec = _read(config, MlpSpec(size=count(config, "intermediate_size")))
    beta = config["rope_parameters"].get("llama_4_scaling_beta") or 0.0
    if not is_positive_number(beta) and beta != 0.0:
        raise ModelError(f"config.json must give llama_4_scaling_beta as a number above 0, and has {beta!r}")
    return replace(spec, rotations=tuple(replace(rope, query_beta=float(beta)) for rope in spec.rotations))


def _read(config: Config, mlp: FeedForward) -> ModelSpec:
    check_activation(config)
    attention = AttentionSpec(**attention_sizes(config), sliding_window=config["sliding_window"])
    layers = (LayerSpec(mixer=attention, mlp=mlp),) * count(config, "num_hidden_layers")
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rope_facts(config),))


def read_whole(config: Config) -> ModelSpec:
    """Mistral 3: either of them with a vision tower; see `families`."""
    text = config.get("text_config")
    if isinstance(text, dict) and text.get("model_type") == "ministral3":
        return whole.text_part(config, read_ministral, "ministral3", is_tied=True)
    return whole.text_part(config, read, "mistral", is_tied=True)
