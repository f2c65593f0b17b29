"""Gemma 4, text: Gemma 3 with larger heads in layers that look at everything, keys and values that late layers read of
earlier ones, and inputs of each layer by token; in 26B-A4B a mixture of experts beside each feed-forward.
"""

from __future__ import annotations

from typing import Any

from service.models.families import gemma, whole
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
    LayerInputs,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    StreamSpec,
)
from service.models.spec.rope_facts import RopeFacts, rope_facts

_DEFAULTS: Config = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_KINDS = (_GLOBAL, _LOCAL)
_UNUSED = ("model.audio_tower.", "model.embed_vision.", "model.embed_audio.")


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    check_activation(config, ("gelu_pytorch_tanh",), key="hidden_activation")
    if config.get("use_bidirectional_attention") not in (None, "vision"):
        raise ModelError("config.json asks for use_bidirectional_attention; served are models that look back only")
    kinds, num_shared = _layer_kinds(config), config["num_kv_shared_layers"]
    if not isinstance(num_shared, int) or not 0 <= num_shared < len(kinds):
        raise ModelError(f"config.json has {num_shared!r} num_kv_shared_layers; served is 0 to {len(kinds) - 1}")
    layers = tuple(_layer(config, kinds, index, len(kinds) - num_shared) for index in range(len(kinds)))
    return ModelSpec(
        **model_sizes(config),
        layers=layers,
        rotations=tuple(_rotation(config, kind) for kind in _KINDS),
        exact_norms=True,
        embedding_scale=count(config, "hidden_size") ** 0.5,
        logits_cap=gemma.cap_of(config, "final_logit_softcapping"),
    )


def read_whole(config: Config) -> ModelSpec:
    """With a vision tower, and perhaps one for sounds; see `families`."""
    return whole.text_part(config, read, "gemma4_text", unused=_UNUSED)


def _layer_kinds(config: Config) -> list[str]:
    num_layers = count(config, "num_hidden_layers")
    kinds = [_LOCAL if (index + 1) % 6 else _GLOBAL for index in range(num_layers)]
    if "layer_types" in config:
        kinds = layer_types(config, _KINDS)
    kinds[-1] = _GLOBAL  # as transformers has it, whatever config.json says
    return kinds


def _layer(config: Config, kinds: list[str], index: int, first_shared: int) -> LayerSpec:
    """first_shared  the first of the layers that read an earlier layer's keys and values"""
    is_shared, size = index >= first_shared, count(config, "intermediate_size")
    if is_shared and kinds[index] not in kinds[:first_shared]:
        raise ModelError(f"config.json has num_kv_shared_layers, but no {kinds[index]} before these")
    is_wide = is_shared and bool(config.get("use_double_wide_mlp", False))
    inputs, input_size = None, config["hidden_size_per_layer_input"]
    if input_size != 0:
        inputs = LayerInputs(count(config, "hidden_size_per_layer_input"), count(config, "vocab_size_per_layer_input"))
        if inputs.vocab_size < count(config, "vocab_size"):
            raise ModelError("config.json has a vocab_size_per_layer_input below its vocab_size")
    attention = _attention(config, kinds[index], index, is_shared=is_shared)
    if is_shared:  # with the last layer of its kind that has keys and values
        attention["cache_of"] = max(at for at in range(first_shared) if kinds[at] == kinds[index])
    return LayerSpec(
        mixer=AttentionSpec(**attention),
        mlp=_feed_forward(config, 2 * size if is_wide else size),
        mixer_end_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_end_norm="post_feedforward_layernorm",
        inputs=inputs,
        scalar="layer_scalar",
    )


def _feed_forward(config: Config, size: int) -> FeedForward:
    dense = MlpSpec(size=size, activation="gelu_tanh")
    if not config.get("enable_moe_block", False):
        return dense
    return MoeSpec(
        **expert_sizes({**config, "num_experts_per_tok": config.get("top_k_experts")}),
        normalises=True,
        activation="gelu_tanh",
        shared=dense,
        shared_gate=None,
        router="router.proj",
        experts="experts",
        stream=StreamSpec(
            norm="pre_feedforward_layernorm_2",
            end_norm="post_feedforward_layernorm_2",
            shared_end_norm="post_feedforward_layernorm_1",
            router_scale="router.scale",
            expert_scales="router.per_expert_scale",
        ),
    )


def _attention(config: Config, kind: str, index: int, *, is_shared: bool) -> dict[str, Any]:
    """Fields of the layer's `AttentionSpec`."""
    is_global, bias = kind == _GLOBAL, bool(config.get("attention_bias", False))
    values_are_keys = is_global and bool(config.get("attention_k_eq_v", False))
    own: dict[str, Any] = {}
    name = str(index).lstrip("0")
    if "per_layer_config" in config:  # as transformers writes it, its indices padded with zeros
        own = next((of_layer for key, of_layer in config["per_layer_config"].items() if key.lstrip("0") == name), {})
        if not isinstance(own, dict):
            raise ModelError(f"config.json must give per_layer_config of layer {index} as an object, and has {own!r}")
        if others := sorted(set(own) - {"head_dim", "num_key_value_heads"}):
            raise ModelError(f"config.json gives {others[0]} by layer in per_layer_config, which is not served")
    elif is_global:
        own = {"head_dim": count(config, "global_head_dim")}
        if values_are_keys and config.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = count(config, "num_global_key_value_heads")
    inputs = ("q_proj",) if is_shared else ("q_proj", "k_proj") if values_are_keys else ("q_proj", "k_proj", "v_proj")
    return {
        **attention_sizes({**config, **own}),
        "scale": 1.0,
        "inputs": inputs,
        "input_bias": bias,
        "output_bias": bias,
        "rotary": _KINDS.index(kind),
        "sliding_window": None if is_global else count(config, "sliding_window"),
        "head_norms": ("q_norm",) if is_shared else ("q_norm", "k_norm"),
        "norms_values": not is_shared,
    }


def _rotation(config: Config, kind: str) -> RopeFacts:
    parameters = config["rope_parameters"].get(kind)
    if not isinstance(parameters, dict):
        raise ModelError(f"config.json must give rope_parameters of {kind}, and has {parameters!r}")
    facts = rope_facts({**config, "rope_parameters": parameters}, may_turn_a_share=True)
    if facts.kind == "default" and facts.share != 1:
        raise ModelError("config.json gives a partial_rotary_factor with the rope type 'default'; served is none")
    return facts
