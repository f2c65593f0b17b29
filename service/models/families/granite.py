"""Granite: Llama with factors of its own on embedded tokens, attention scores, what joins the residual stream, and
logits."""

from __future__ import annotations

from service.models.families import llama
from service.models.spec.config_json import Config, attention_sizes, check_activation, completed, count, model_sizes
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    **llama.DEFAULTS,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    sizes = {**attention_sizes(config), "scale": float(config["attention_multiplier"])}
    attention = AttentionSpec(**sizes, input_bias=bias, output_bias=bias)
    mlp = MlpSpec(size=count(config, "intermediate_size"), bias=bool(config.get("mlp_bias", False)))
    return ModelSpec(
        **model_sizes(config),
        layers=(LayerSpec(mixer=attention, mlp=mlp),) * count(config, "num_hidden_layers"),
        rotations=(rope_facts(config),),
        embedding_scale=float(config["embedding_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        logits_scale=1.0 / float(config["logits_scaling"]),
    )
