"""GLM-4: Llama with packed gate and up, biases on queries, keys and values, and half of each head turned, in pairs of
neighbours; in the releases of 2025 with norms before and after each part of a layer."""

from __future__ import annotations

from typing import Any

from service.models.families import llama
from service.models.spec.config_json import Config, attention_sizes, check_activation, completed, count, model_sizes
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
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
