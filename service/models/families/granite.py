"""Granite: Llama with factors of its own on embedded tokens, attention scores, what joins the residual stream, and
logits. Granite 4 without Mamba layers and experts: the same with packed gate and up, and perhaps without positions."""

from __future__ import annotations

from service.models.errors import ModelError
from service.models.families import llama
from service.models.spec.config_json import (
    Config,
    attention_sizes,
    check_activation,
    completed,
    count,
    layer_types,
    model_sizes,
)
from service.models.spec.model_spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
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
_HYBRID_DEFAULTS: Config = {**_DEFAULTS, "num_local_experts": 8, "shared_intermediate_size": 1024}


def read(config: Config) -> ModelSpec:
    """See `families`."""
    config = completed(config, _DEFAULTS)
    mlp = MlpSpec(size=count(config, "intermediate_size"), bias=bool(config.get("mlp_bias", False)))
    return _read(config, mlp, rope_facts(config))


def read_hybrid(config: Config) -> ModelSpec:
    """Granite 4; see `families`."""
    config = completed(config, _HYBRID_DEFAULTS)
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    if others := sorted({str(kind) for kind in kinds} - {"attention", "full_attention"}):
        raise ModelError(f"config.json has layers of type {', '.join(others)}; served is attention in all layers")
    if config["num_local_experts"] != 0:
        raise ModelError(f"config.json has {config['num_local_experts']!r} num_local_experts; served is 0")
    layer_types({**config, "layer_types": kinds}, ("attention", "full_attention"))
    size, packed = count(config, "shared_intermediate_size"), ("input_linear",)
    mlp = MlpSpec(size=size, name="shared_mlp", inputs=packed, output="output_linear")
    is_turned = config.get("position_embedding_type") == "rope"
    return _read(config, mlp, rope_facts(config) if is_turned else RopeFacts(kind="none", theta=1.0))


def _read(config: Config, mlp: MlpSpec, rotation: RopeFacts) -> ModelSpec:
    check_activation(config)
    bias = bool(config.get("attention_bias", False))
    sizes = {**attention_sizes(config), "scale": float(config["attention_multiplier"])}
    attention = AttentionSpec(**sizes, input_bias=bias, output_bias=bias)
    return ModelSpec(
        **model_sizes(config),
        layers=(LayerSpec(mixer=attention, mlp=mlp),) * count(config, "num_hidden_layers"),
        rotations=(rotation,),
        embedding_scale=float(config["embedding_multiplier"]),
        residual_scale=float(config["residual_multiplier"]),
        logits_scale=1.0 / float(config["logits_scaling"]),
    )
