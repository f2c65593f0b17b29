"""Gemma 2: norms before and after each part of a layer, windows in every second layer, capped scores and logits."""

from __future__ import annotations

from typing import Any

from service.models.errors import ModelError
from service.models.spec.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    is_positive_number,
    layer_types,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import RopeFacts, rope_facts

DEFAULTS: Config = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_DEFAULTS: Config = {
    **DEFAULTS,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS, nullable=_CAPS)
    attention = attention_of(config)
    return spec_of(config, attention, attention, (rope_facts(config),))


def attention_of(config: Config) -> dict[str, Any]:
    """Fields of an `AttentionSpec` that all layers share."""
    bias = bool(config.get("attention_bias", False))
    return {
        **attention_sizes(config),
        "scale": config["query_pre_attn_scalar"] ** -0.5,
        "input_bias": bias,
        "output_bias": bias,
        "score_cap": cap_of(config, "attn_logit_softcapping"),
    }


def spec_of(
    config: Config, everywhere: dict[str, Any], nearby: dict[str, Any], rotations: tuple[RopeFacts, ...]
) -> ModelSpec:
    """The model of Gemma 2 and 3 around attention of the two kinds. Raises ModelError.

    nearby  fields of the layers with a sliding window, which this adds
    """
    check_activation(config, ("gelu_pytorch_tanh",), key="hidden_activation")
    if config.get("use_bidirectional_attention"):
        raise ModelError("config.json asks for use_bidirectional_attention; served are models that look back only")
    mlp = MlpSpec(size=count(config, "intermediate_size"), activation="gelu_tanh")
    kinds = {
        False: AttentionSpec(**everywhere),
        True: AttentionSpec(**nearby, sliding_window=count(config, "sliding_window")),
    }
    layers = tuple(
        LayerSpec(
            mixer=kinds[is_local],
            mlp=mlp,
            mixer_end_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_end_norm="post_feedforward_layernorm",
        )
        for is_local in _local_layers(config)
    )
    return ModelSpec(
        **model_sizes(config),
        layers=layers,
        rotations=rotations,
        zero_centred_norms=True,
        embedding_scale=count(config, "hidden_size") ** 0.5,
        logits_cap=cap_of(config, "final_logit_softcapping"),
    )


def cap_of(config: Config, key: str) -> float | None:
    """A cap of scores or logits, None for none. Raises ModelError."""
    cap = config[key]
    if cap is None:
        return None
    if not is_positive_number(cap):
        raise ModelError(f"config.json must give {key} as a number above 0, or null for none, and has {cap!r}")
    return float(cap)


def _local_layers(config: Config) -> list[bool]:
    if "layer_types" in config:
        return [kind == "sliding_attention" for kind in layer_types(config, ("full_attention", "sliding_attention"))]
    pattern = count(config, "sliding_window_pattern")
    return [(index + 1) % pattern != 0 for index in range(count(config, "num_hidden_layers"))]
