"""LFM2: layers mix tokens either by attention with normed heads or by a gated short convolution."""

from __future__ import annotations

from collections.abc import Collection

from service.models.families import whole
from service.models.spec.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    layer_types,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, ShortConvSpec
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS, nullable=("block_ffn_dim_multiplier",))
    check_activation(config)
    config["rms_norm_eps"] = config["norm_eps"]
    config["tie_word_embeddings"] = config.get("tie_embedding", config["tie_word_embeddings"])
    attention = AttentionSpec(**attention_sizes(config), output="out_proj", head_norms=("q_layernorm", "k_layernorm"))
    conv = ShortConvSpec(
        size=count(config, "hidden_size"),
        width=count(config, "conv_L_cache"),
        bias=bool(config.get("conv_bias", False)),
    )
    mlp = MlpSpec(size=_feed_forward_size(config), name="feed_forward", inputs=("w1", "w3"), packed="w13", output="w2")
    attending = _attention_layers(config)
    layers = (
        LayerSpec(
            mixer=attention if index in attending else conv,
            mlp=mlp,
            mixer_norm="operator_norm",
            mlp_norm="ffn_norm",
        )
        for index in range(count(config, "num_hidden_layers"))
    )
    return ModelSpec(
        **model_sizes(config), layers=tuple(layers), rotations=(rope_facts(config),), final_norm="embedding_norm"
    )


def read_whole(config: Config) -> ModelSpec:
    """With a vision tower; see `families`."""
    return whole.text_part(config, read, "lfm2")


def _feed_forward_size(config: Config) -> int:
    size = count(config, "block_ff_dim" if "block_ff_dim" in config else "intermediate_size")
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if config["block_ffn_dim_multiplier"] is None:
        return size
    multiple = count(config, "block_multiple_of")
    return multiple * -(-int(config["block_ffn_dim_multiplier"] * size) // multiple)


def _attention_layers(config: Config) -> Collection[int]:
    every = range(count(config, "num_hidden_layers"))
    if "layer_types" not in config:
        attending: Collection[int] = config.get("full_attn_idxs", every)
        return attending
    kinds = layer_types(config, ("conv", "full_attention"))
    return [index for index, kind in enumerate(kinds) if kind == "full_attention"]
