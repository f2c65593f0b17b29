"""Phi-3 and Phi-4: Llama whose queries, keys and values come from one module, and gate and up from another."""

from __future__ import annotations

from service.models.spec.config_json import Config, attention_sizes, check_activation, completed, count, model_sizes
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import rope_facts

_DEFAULTS: Config = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    check_activation(config)
    attention = AttentionSpec(
        **attention_sizes(config), inputs=("qkv_proj",), sliding_window=config.get("sliding_window")
    )
    mlp = MlpSpec(size=count(config, "intermediate_size"), inputs=("gate_up_proj",))
    layers = (LayerSpec(mixer=attention, mlp=mlp),) * count(config, "num_hidden_layers")
    rotation = rope_facts(config, may_turn_a_share=True)
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rotation,))
