"""Gemma 3, text: norms before and after each part of a layer, windows in most layers, two rotations."""

from __future__ import annotations

from service.models.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    layer_types,
    model_sizes,
)
from service.models.errors import ModelError
from service.models.rope_facts import RopeFacts, rope_facts
from service.models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec

_DEFAULTS: Config = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_GLOBAL, _LOCAL = 0, 1


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    check_activation(config, ("gelu_pytorch_tanh",), key="hidden_activation")
    if config.get("attn_logit_softcapping") is not None:
        raise ModelError("config.json caps attention scores (attn_logit_softcapping), which is not served")
    if config.get("use_bidirectional_attention"):
        raise ModelError("config.json asks for use_bidirectional_attention; served are models that look back only")
    bias, cap = bool(config.get("attention_bias", False)), config.get("final_logit_softcapping")
    attention = {
        **attention_sizes(config),
        "scale": config["query_pre_attn_scalar"] ** -0.5,
        "input_bias": bias,
        "output_bias": bias,
        "head_norms": ("q_norm", "k_norm"),
    }
    everywhere = AttentionSpec(**attention, rotary=_GLOBAL)
    nearby = AttentionSpec(**attention, rotary=_LOCAL, sliding_window=config["sliding_window"])
    mlp = MlpSpec(size=count(config, "intermediate_size"), activation="gelu_tanh")
    layers = tuple(
        LayerSpec(
            mixer=nearby if is_local else everywhere,
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
        rotations=_rotations(config),
        zero_centred_norms=True,
        embedding_scale=count(config, "hidden_size") ** 0.5,
        logits_cap=None if cap is None else float(cap),
    )


def _local_layers(config: Config) -> list[bool]:
    if "layer_types" in config:
        return [kind == "sliding_attention" for kind in layer_types(config, ("full_attention", "sliding_attention"))]
    pattern = count(config, "sliding_window_pattern")
    return [(index + 1) % pattern != 0 for index in range(count(config, "num_hidden_layers"))]


def _rotations(config: Config) -> tuple[RopeFacts, RopeFacts]:
    """Of global layers, then of local ones. Old config.json scale the global ones only."""
    everywhere = rope_facts({"rope_theta": _GLOBAL_THETA, **config}, "full_attention")
    nearby = {"max_position_embeddings": config["max_position_embeddings"]}
    nearby["rope_theta"] = config.get("rope_local_base_freq", _LOCAL_THETA)
    given = config.get("rope_parameters") or {}
    if "sliding_attention" in given:
        nearby["rope_parameters"] = given["sliding_attention"]
    return everywhere, rope_facts(nearby)
