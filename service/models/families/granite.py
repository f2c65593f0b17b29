"""Granite: Llama with factors of its own on embedded tokens, attention scores, what joins the residual stream, and
logits. Granite 4: the same with packed gate and up, perhaps experts beside these, Mamba-2 in most layers, and no
positions. Bamba: Mamba-2 in most layers, and half of each head turned in the others."""

from __future__ import annotations

import math

from service.models.families import llama
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
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
)
from service.models.spec.rope_facts import RopeFacts, rope_facts

_DEFAULTS: Config = {
    **llama.DEFAULTS,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA_DEFAULTS: Config = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, math.inf],
}
_UNLIMITED = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # as JSON has it, and as transformers writes it
_HYBRID_DEFAULTS: Config = {
    **_DEFAULTS,
    **_MAMBA_DEFAULTS,
    "intermediate_size": 11_008,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
}
_BAMBA_DEFAULTS: Config = {
    **_MAMBA_DEFAULTS,
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "attn_layer_indices": [],
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_KINDS = {"attention": False, "full_attention": False, "mamba": True, "linear_attention": True}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    mlp = MlpSpec(size=count(config, "intermediate_size"), bias=bool(config.get("mlp_bias", False)))
    return _read(config, mlp, rope_facts(config), [None] * count(config, "num_hidden_layers"))


def read_hybrid(config: Config) -> ModelSpec:
    """Granite 4; see `families`."""
    config = completed(config, _HYBRID_DEFAULTS)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    kinds = kinds or ["mamba"] * count(config, "num_hidden_layers")
    kinds = layer_types({**config, "layer_types": kinds}, tuple(_KINDS))
    mambas = [_mamba(config) if _KINDS[kind] else None for kind in kinds]
    size, packed = count(config, "shared_intermediate_size"), ("input_linear",)
    mlp = _with_experts(config, MlpSpec(size=size, name="shared_mlp", inputs=packed, output="output_linear"))
    is_turned = config.get("position_embedding_type") == "rope"
    return _read(config, mlp, rope_facts(config) if is_turned else RopeFacts(kind="none", theta=1.0), mambas)


def read_bamba(config: Config) -> ModelSpec:
    """Bamba; see `families`."""
    config = completed(config, _BAMBA_DEFAULTS)
    check_activation(config)
    bias, mlp_bias = (bool(config.get(name, False)) for name in ("attention_bias", "mlp_bias"))
    attention = AttentionSpec(**attention_sizes(config), input_bias=bias, output_bias=bias)
    mlp = MlpSpec(size=count(config, "intermediate_size"), name="feed_forward", bias=mlp_bias)
    mamba, attends = _mamba(config), config["attn_layer_indices"]
    layers = (
        LayerSpec(mixer=attention if index in attends else mamba, mlp=mlp, mlp_norm="pre_ff_layernorm")
        for index in range(count(config, "num_hidden_layers"))
    )
    return ModelSpec(
        **model_sizes(config),
        layers=tuple(layers),
        rotations=(rope_facts({**config, "partial_rotary_factor": 0.5}, may_turn_a_share=True),),
        final_norm="final_layernorm",
    )


def _with_experts(config: Config, shared: MlpSpec) -> FeedForward:
    if config["num_local_experts"] == 0 and not isinstance(config["num_local_experts"], bool):
        return shared
    sizes = {"num_experts": count(config, "num_local_experts"), "moe_intermediate_size": config["intermediate_size"]}
    return MoeSpec(
        **expert_sizes({**config, **sizes}),
        normalises=True,
        shared=shared,
        shared_gate=None,
        router="block_sparse_moe.router",
        router_inner="block_sparse_moe.router.layer",
        experts="block_sparse_moe.experts",
    )


def _mamba(config: Config) -> Mamba2Spec:
    sizes = {name: count(config, f"mamba_{name}") for name in ("n_heads", "n_groups", "d_state", "d_conv", "expand")}
    inner_size, num_heads = sizes["expand"] * count(config, "hidden_size"), sizes["n_heads"]
    head_dim = inner_size // num_heads if config["mamba_d_head"] == "auto" else count(config, "mamba_d_head")
    if head_dim * num_heads != inner_size or num_heads % sizes["n_groups"] or not 2 <= sizes["d_conv"] <= 8:
        raise ModelError(
            f"config.json has Mamba-2 layers of {num_heads} heads of {head_dim} in {sizes['n_groups']} groups behind a "
            f"convolution of {sizes['d_conv']} taps; the heads must fill mamba_expand * hidden_size = {inner_size} and "
            "be a multiple of the groups, and the taps 2 to 8"
        )
    limits = config["time_step_limit"]
    if limits not in _UNLIMITED:
        raise ModelError(f"config.json has a time_step_limit of {limits!r}; served is [0.0, Infinity]")
    return Mamba2Spec(
        num_heads=num_heads,
        num_groups=sizes["n_groups"],
        head_dim=head_dim,
        state_size=sizes["d_state"],
        width=sizes["d_conv"],
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
    )


def _read(config: Config, mlp: FeedForward, rotation: RopeFacts, mambas: list[Mamba2Spec | None]) -> ModelSpec:
    """mambas  of the layers without attention, None for the others"""
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    sizes = {**attention_sizes(config), "scale": float(config["attention_multiplier"])}
    attention = AttentionSpec(**sizes, input_bias=bias, output_bias=bias)
    return ModelSpec(
        **model_sizes(config),
        layers=tuple(LayerSpec(mixer=mamba or attention, mlp=mlp) for mamba in mambas),
        rotations=(rotation,),
        embedding_scale=float(config["embedding_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        logits_scale=1.0 / float(config["logits_scaling"]),
    )
