"""GLM-4: Llama with packed gate and up, biases on queries, keys and values, and half of each head turned, in pairs of
neighbours; in the releases of 2025 with norms before and after each part of a layer. GLM-4.5, 4.6 and 4.7: mixtures of
experts behind the first layers, and rotations by halves."""

from __future__ import annotations

from typing import Any

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
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-07,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
}
_DEFAULTS_BESIDE_VISION: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 2,
}
_MOE_DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
_END_NORMS = {"mixer_end_norm": "post_self_attn_layernorm", "mlp_end_norm": "post_mlp_layernorm"}


def read(config: Config) -> ModelSpec:
    """GLM-4 of 2024 and GLM-Edge; see `families`."""
    return _read(completed(config, _DEFAULTS), {})


def read_sandwiched(config: Config) -> ModelSpec:
    """GLM-4-0414; see `families`."""
    return _read(completed(config, _DEFAULTS), _END_NORMS)


def _read(config: Config, norms: dict[str, Any]) -> ModelSpec:
    check_activation(config)
    attention = AttentionSpec(
        **attention_sizes(config), input_bias=bool(config["attention_bias"]), turns_neighbours=True
    )
    mlp = MlpSpec(size=count(config, "intermediate_size"), inputs=("gate_up_proj",))
    layers = (LayerSpec(mixer=attention, mlp=mlp, **norms),) * count(config, "num_hidden_layers")
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rope_facts(config, may_turn_a_share=True),))


def read_whole(config: Config) -> ModelSpec:
    """GLM-4.1V and GLM-4.6V-Flash: GLM-4-0414 with a vision tower; see `families`."""
    return whole.text_part(config, _read_beside_vision, "glm4v_text")


def _read_beside_vision(config: Config) -> ModelSpec:
    """Always with biases."""
    return _read({**completed(config, _DEFAULTS_BESIDE_VISION), "attention_bias": True}, _END_NORMS)


def read_moe(config: Config) -> ModelSpec:
    """GLM-4.5, 4.6 and 4.7; see `families`. Layers for multi-token prediction, behind the others, are left."""
    config = completed(config, _MOE_DEFAULTS)
    check_activation(config)
    if config["topk_group"] != config["n_group"]:
        raise ModelError(
            f"config.json chooses experts of {config['topk_group']!r} of {config['n_group']!r} groups (topk_group); "
            "served are routers that choose among all"
        )
    norms = ("q_norm", "k_norm") if config.get("use_qk_norm") else None
    bias = bool(config.get("attention_bias", False))
    attention = AttentionSpec(**attention_sizes(config), input_bias=bias, head_norms=norms)
    dense, num_dense = MlpSpec(size=count(config, "intermediate_size")), config["first_k_dense_replace"]
    moe = _experts(config)
    num_layers = count(config, "num_hidden_layers")
    beyond = range(num_layers, num_layers + (config["num_nextn_predict_layers"] or 0))
    return ModelSpec(
        **model_sizes(config),
        layers=tuple(
            LayerSpec(mixer=attention, mlp=dense if index < num_dense else moe) for index in range(num_layers)
        ),
        rotations=(rope_facts(config, may_turn_a_share=True),),
        unused=tuple(f"model.layers.{index}." for index in beyond),
    )


def _experts(config: Config) -> MoeSpec:
    scale = config["routed_scaling_factor"]
    if not is_positive_number(scale):
        raise ModelError(f"config.json must give routed_scaling_factor as a number above 0, and has {scale!r}")
    sizes = expert_sizes({**config, "num_experts": config["n_routed_experts"]})
    num_shared = config["n_shared_experts"]
    return MoeSpec(
        **sizes,
        normalises=bool(config["norm_topk_prob"]),
        scale=float(scale),
        correction="mlp.gate.e_score_correction_bias",
        shared=MlpSpec(size=sizes["size"] * num_shared, name="mlp.shared_experts") if num_shared else None,
        shared_gate=None,
    )
