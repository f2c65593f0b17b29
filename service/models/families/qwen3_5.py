"""Qwen3.5, text: three layers of gated delta nets for each one of gated attention; dense, or of experts.

Checkpoints hold a vision tower and layers for multi-token prediction beside it; neither is served. The three sections
of the rotation's positions are equal for text, so that it is a plain one.
"""

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
    expert_sizes,
    layer_types,
    model_sizes,
)
from service.models.spec.model_spec import (
    AttentionSpec,
    FeedForward,
    GatedDeltaSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
)
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MOE_DEFAULTS: Config = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}


def read_whole(config: Config) -> ModelSpec:
    """A config.json whose text_config describes what is served; see `families`."""
    return whole.text_part(config, read_text, "qwen3_5_text")


def read_text(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    return _read(config, MlpSpec(size=count(config, "intermediate_size")))


def read_whole_moe(config: Config) -> ModelSpec:
    """As `read_whole`."""
    return whole.text_part(config, read_text_moe, "qwen3_5_moe_text")


def read_text_moe(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _MOE_DEFAULTS)
    shared = MlpSpec(size=count(config, "shared_expert_intermediate_size"), name="mlp.shared_expert")
    return _read(config, MoeSpec(**expert_sizes(config), normalises=True, shared=shared))


def _read(config: Config, feed_forward: FeedForward) -> ModelSpec:
    check_activation(config)
    check_activation(config, key="output_gate_type")
    if not config.get("attn_output_gate", True):
        raise ModelError("config.json turns attn_output_gate off; served is attention whose output is gated")
    bias = bool(config.get("attention_bias", False))
    attention = AttentionSpec(
        **attention_sizes(config),
        input_bias=bias,
        output_bias=bias,
        head_norms=("q_norm", "k_norm"),
        has_output_gate=True,
    )
    delta = _delta(config)
    layers = tuple(
        LayerSpec(mixer=delta if kind == "linear_attention" else attention, mlp=feed_forward) for kind in _kinds(config)
    )
    return ModelSpec(
        **model_sizes(config),
        layers=layers,
        rotations=(rope_facts(config, may_turn_a_share=True),),
        zero_centred_norms=True,
        unused=whole.UNUSED,
    )


def _delta(config: Config) -> GatedDeltaSpec:
    sizes: dict[str, Any] = {
        "num_key_heads": count(config, "linear_num_key_heads"),
        "num_value_heads": count(config, "linear_num_value_heads"),
        "key_dim": count(config, "linear_key_head_dim"),
        "value_dim": count(config, "linear_value_head_dim"),
        "width": count(config, "linear_conv_kernel_dim"),
    }
    if sizes["num_value_heads"] % sizes["num_key_heads"] or not 2 <= sizes["width"] <= 8:
        raise ModelError(
            f"config.json has gated delta nets of {sizes['num_value_heads']} value heads over {sizes['num_key_heads']} "
            f"key heads behind a convolution of {sizes['width']} taps; the value heads must be a multiple of the key "
            "heads, and the taps 2 to 8"
        )
    return GatedDeltaSpec(**sizes)


def _kinds(config: Config) -> list[str]:
    if "layer_types" in config:
        return layer_types(config, ("linear_attention", "full_attention"))
    interval = count(config, "full_attention_interval")
    num_layers = count(config, "num_hidden_layers")
    return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
