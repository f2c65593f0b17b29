"""Llama: attention and a gated feed-forward layer; biases where config.json asks for them. Phi-3 and Phi-4: queries,
keys and values come from one module, gate and up from another. SmolLM3: some layers look at no positions, and only
those through a sliding window if asked for."""

from __future__ import annotations

from service.models.spec.config_json import (
    Config,
    ModelError,
    attention_sizes,
    check_activation,
    completed,
    count,
    listed_windows,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import RopeFacts, rope_facts

# The defaults of transformers where config.json is silent; other families build upon them.
DEFAULTS: Config = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, DEFAULTS)
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    attention = AttentionSpec(**attention_sizes(config), input_bias=bias, output_bias=bias)
    mlp = MlpSpec(size=count(config, "intermediate_size"), bias=bool(config.get("mlp_bias", False)))
    layers = (LayerSpec(mixer=attention, mlp=mlp),) * count(config, "num_hidden_layers")
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rope_facts(config),))


_PHI3_DEFAULTS: Config = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
}


def read_phi3(config: Config) -> ModelSpec:
    """Phi-3 and Phi-4; see `families`."""
    config = completed(config, _PHI3_DEFAULTS)
    check_activation(config)
    attention = AttentionSpec(
        **attention_sizes(config), inputs=("qkv_proj",), sliding_window=config.get("sliding_window")
    )
    mlp = MlpSpec(size=count(config, "intermediate_size"), inputs=("gate_up_proj",))
    layers = (LayerSpec(mixer=attention, mlp=mlp),) * count(config, "num_hidden_layers")
    rotation = rope_facts(config, may_turn_a_share=True)
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rotation,))


_SMOLLM3_DEFAULTS: Config = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2_000_000.0,
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}
_ROTATED, _STILL = 0, 1


def read_smollm3(config: Config) -> ModelSpec:
    """SmolLM3; see `families`."""
    config = completed(config, _SMOLLM3_DEFAULTS)
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    sizes = {**attention_sizes(config), "input_bias": bias, "output_bias": bias}
    mlp = MlpSpec(size=count(config, "intermediate_size"), bias=bool(config.get("mlp_bias", False)))
    rotated = _rotated_layers(config)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(**sizes, rotary=_ROTATED if is_rotated else _STILL, sliding_window=window), mlp=mlp
        )
        for is_rotated, window in zip(rotated, _windows(config, rotated), strict=True)
    )
    still = RopeFacts(kind="none", theta=1.0)
    return ModelSpec(**model_sizes(config), layers=layers, rotations=(rope_facts(config), still))


def _rotated_layers(config: Config) -> list[bool]:
    num_layers = count(config, "num_hidden_layers")
    if "no_rope_layers" not in config:
        interval = count(config, "no_rope_layer_interval")
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    listed = list(config["no_rope_layers"])
    if len(listed) < num_layers:
        raise ModelError(f"config.json has {num_layers} layers, and its no_rope_layers speaks of {len(listed)}")
    return [bool(is_rotated) for is_rotated in listed[:num_layers]]


def _windows(config: Config, rotated: list[bool]) -> list[int | None]:
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    if "layer_types" in config:
        return listed_windows(config, window)
    return [None if is_rotated else window for is_rotated in rotated]
