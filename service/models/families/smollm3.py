"""SmolLM3: Llama some of whose layers look at no positions, and only those through a sliding window if asked for."""

from __future__ import annotations

from service.models.errors import ModelError
from service.models.spec.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    listed_windows,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from service.models.spec.rope_facts import RopeFacts, rope_facts

_DEFAULTS: Config = {
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


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
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
