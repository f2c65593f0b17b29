"""Qwen2: Llama with biases on queries, keys and values, and a sliding window in some layers if asked for. Qwen3: query
and key heads normed before rotation in place of these biases. Qwen3 MoE: the same with mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

from service.models.families import llama, whole
from service.models.spec.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    expert_sizes,
    late_windows,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, FeedForward, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from service.models.spec.rope_facts import rope_facts

DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# Defaults of the models with a vision tower.
_DEFAULTS_BESIDE_VISION: Config = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_key_value_heads": 8,
    "max_window_layers": 80,
}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, DEFAULTS, nullable=("sliding_window",))
    check_activation(config)
    sizes, mlp = attention_sizes(config), MlpSpec(size=count(config, "intermediate_size"))
    layers = (
        LayerSpec(mixer=AttentionSpec(**sizes, input_bias=True, sliding_window=window), mlp=mlp)
        for window in late_windows(config)
    )
    return ModelSpec(**model_sizes(config), layers=tuple(layers), rotations=(rope_facts(config),))


def read_whole(config: Config) -> ModelSpec:
    """Qwen2-VL: the same with a vision tower; see `families`."""
    return whole.text_part(config, _read_beside_vision, "qwen2_vl_text", may_be_flat=True)


def read_whole_2_5(config: Config) -> ModelSpec:
    """Qwen2.5-VL: as `read_whole`."""
    return whole.text_part(config, _read_beside_vision, "qwen2_5_vl_text", may_be_flat=True)


def _read_beside_vision(config: Config) -> ModelSpec:
    return read(completed(config, _DEFAULTS_BESIDE_VISION, nullable=("sliding_window",)))


_DEFAULTS_3: Config = {**DEFAULTS, "head_dim": 128}
_MOE_DEFAULTS: Config = {
    **DEFAULTS,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
# Defaults of the model with a vision tower.
_DEFAULTS_3_BESIDE_VISION: Config = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
_MOE_DEFAULTS_BESIDE_VISION: Config = {
    **_DEFAULTS_3_BESIDE_VISION,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}


def read_3(config: Config) -> ModelSpec:
    """Qwen3; see `families`."""
    config = completed(config, _DEFAULTS_3, nullable=("sliding_window",))
    mlp = MlpSpec(size=count(config, "intermediate_size"))
    return _read(config, late_windows(config), [mlp] * count(config, "num_hidden_layers"))


def read_whole_3(config: Config) -> ModelSpec:
    """Qwen3-VL: the same with a vision tower; see `families`."""
    return whole.text_part(config, _read_3_beside_vision, "qwen3_vl_text")


def _read_3_beside_vision(config: Config) -> ModelSpec:
    return read_3(completed(config, _DEFAULTS_3_BESIDE_VISION))


def read_3_moe(config: Config) -> ModelSpec:
    """The same with mixtures of experts in all or some layers; a window, if any, is every layer's."""
    config = completed(_with_num_experts(config), _MOE_DEFAULTS, nullable=("sliding_window",))
    num_layers = count(config, "num_hidden_layers")
    window = config["sliding_window"] if config.get("use_sliding_window", False) else None
    return _read(config, [window] * num_layers, [_feed_forward(config, index) for index in range(num_layers)])


def read_whole_3_moe(config: Config) -> ModelSpec:
    """Qwen3-VL of experts: the same with a vision tower; see `families`."""
    return whole.text_part(config, _read_moe_beside_vision, "qwen3_vl_moe_text", is_tied=False)


def _read_moe_beside_vision(config: Config) -> ModelSpec:
    """Without windows, and with weights of a token's experts that always add up to 1."""
    fixed = {"use_sliding_window": False, "norm_topk_prob": True}
    return read_3_moe({**completed(_with_num_experts(config), _MOE_DEFAULTS_BESIDE_VISION), **fixed})


def _with_num_experts(config: Config) -> Config:
    """config with the name that transformers 5 writes replaced by the older one."""
    if "num_experts" in config or "num_local_experts" not in config:
        return config
    return {**config, "num_experts": config["num_local_experts"]}


def _read(config: Config, windows: Sequence[int | None], feed_forwards: Sequence[FeedForward]) -> ModelSpec:
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    attention = {
        **attention_sizes(config),
        "input_bias": bias,
        "output_bias": bias,
        "head_norms": ("q_norm", "k_norm"),
    }
    layers = (
        LayerSpec(mixer=AttentionSpec(**attention, sliding_window=window), mlp=feed_forward)
        for window, feed_forward in zip(windows, feed_forwards, strict=True)
    )
    return ModelSpec(**model_sizes(config), layers=tuple(layers), rotations=(rope_facts(config),))


def _feed_forward(config: Config, index: int) -> FeedForward:
    is_sparse = (index + 1) % count(config, "decoder_sparse_step") == 0
    if index in config.get("mlp_only_layers", ()) or not is_sparse:
        return MlpSpec(size=count(config, "intermediate_size"))
    sizes = expert_sizes(config)
    return MoeSpec(**sizes, normalises=bool(config["norm_topk_prob"]))
