"""Gemma 3, text: Gemma 2 with normed heads, fewer layers that look at everything, a rotation for each kind of layer."""

from __future__ import annotations

from service.models.families import gemma2, whole
from service.models.spec.config_json import Config, completed
from service.models.spec.model_spec import ModelSpec
from service.models.spec.rope_facts import RopeFacts, rope_facts

# Sizes too, of which published text_configs leave some out.
_DEFAULTS: Config = {
    **gemma2.DEFAULTS,
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_GLOBAL, _LOCAL = 0, 1


def read(config: Config) -> ModelSpec:
    """See `families`."""
    # A cap of attention's scores is Gemma 2's; transformers takes none here, whatever a config.json says.
    config = {**completed(config, _DEFAULTS), "attn_logit_softcapping": None}
    attention = {**gemma2.attention_of(config), "head_norms": ("q_norm", "k_norm")}
    everywhere, nearby = {**attention, "rotary": _GLOBAL}, {**attention, "rotary": _LOCAL}
    return gemma2.spec_of(config, everywhere, nearby, _rotations(config))


def read_whole(config: Config) -> ModelSpec:
    """With a vision tower; see `families`."""
    return whole.text_part(config, read, "gemma3_text")


def _rotations(config: Config) -> tuple[RopeFacts, RopeFacts]:
    """Rotations of global layers, then of local ones. Old config.json scale the global ones only."""
    everywhere = rope_facts({"rope_theta": _GLOBAL_THETA, **config}, "full_attention")
    nearby = {"max_position_embeddings": config["max_position_embeddings"]}
    nearby["rope_theta"] = config.get("rope_local_base_freq", _LOCAL_THETA)
    given = config.get("rope_parameters") or {}
    if "sliding_attention" in given:
        nearby["rope_parameters"] = given["sliding_attention"]
    return everywhere, rope_facts(nearby)
