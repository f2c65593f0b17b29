"""Gemma 2: norms before and after each part of a layer, windows in every second layer, capped scores and logits.
Gemma 3, text: the same with normed heads, fewer layers that look at everything, a rotation for each kind of layer."""

from __future__ import annotations

from typing import Any

from service.models.families import whole
from service.models.spec.config_json import (
    Config,
    ModelError,
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

_COMMON: Config = {
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
    **_COMMON,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
# Sizes too, of which published text_configs leave some out.
_DEFAULTS_3: Config = {
    **_COMMON,
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_GLOBAL, _LOCAL = 0, 1
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS, nullable=_CAPS)
    attention = _attention_of(config)
    return _spec_of(config, attention, attention, (rope_facts(config),))


def read_3(config: Config) -> ModelSpec:
    """Gemma 3; see `families`."""
    # A cap of attention's scores is Gemma 2's; transformers takes none here, whatever a config.json says.
    config = {**completed(config, _DEFAULTS_3), "attn_logit_softcapping": None}
    attention = {**_attention_of(config), "head_norms": ("q_norm", "k_norm")}
    everywhere, nearby = {**attention, "rotary": _GLOBAL}, {**attention, "rotary": _LOCAL}
    return _spec_of(config, everywhere, nearby, _rotations_3(config))


def read_whole_3(config: Config) -> ModelSpec:
    """Gemma 3 with a vision tower; see `families`."""
    return whole.text_part(config, read_3, "gemma3_text")


def _attention_of(config: Config) -> dict[str, Any]:
    """Fields of an `AttentionSpec` that all layers share."""
    bias = bool(config.get("attention_bias", False))
    return {
        **attention_sizes(config),
        "scale": config["query_pre_attn_scalar"] ** -0.5,
        "input_bias": bias,
        "output_bias": bias,
        "score_cap": cap_of(config, "attn_logit_softcapping"),
    }


def _spec_of(
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


def _rotations_3(config: Config) -> tuple[RopeFacts, RopeFacts]:
    """Rotations of global layers, then of local ones. Old config.json scale the global ones only."""
    everywhere = rope_facts({"rope_theta": _GLOBAL_THETA, **config}, "full_attention")
    nearby = {"max_position_embeddings": config["max_position_embeddings"]}
    nearby["rope_theta"] = config.get("rope_local_base_freq", _LOCAL_THETA)
    given = config.get("rope_parameters") or {}
    if "sliding_attention" in given:
        nearby["rope_parameters"] = given["sliding_attention"]
    return everywhere, rope_facts(nearby)
