"""The model families that are served: one file of data each. Torch-free.

A family's `read` makes a `ModelSpec` of a parsed config.json, and raises ModelError for what could not be honoured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from service.models.errors import ModelError
from service.models.families import (
    gemma2,
    gemma3,
    glm,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mistral,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    smollm3,
)
from service.models.spec.config_json import check_kinds
from service.models.spec.model_spec import ModelSpec
from service.models.spec.quantisation import quantisation_of

_READERS: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = MappingProxyType(
    {
        "llama": llama.read,
        "mistral": mistral.read,
        "qwen2": qwen2.read,
        "qwen3": qwen3.read,
        "qwen3_moe": qwen3.read_moe,
        "lfm2": lfm2.read,
        "phi3": phi3.read,
        "gemma2": gemma2.read,
        "gemma3_text": gemma3.read,
        "smollm3": smollm3.read,
        "olmo3": olmo3.read,
        "granite": granite.read,
        "granitemoehybrid": granite.read_hybrid,
        "glm": glm.read,
        "glm4": glm.read_sandwiched,
        "glm4_moe": glm.read_moe,
        "gpt_oss": gpt_oss.read,
        "ministral3": mistral.read_ministral,
        "mistral3": mistral.read_whole,
        "qwen2_vl": qwen2.read_whole,
        "qwen2_5_vl": qwen2.read_whole_2_5,
        "qwen3_vl": qwen3.read_whole,
        "qwen3_vl_moe": qwen3.read_whole_moe,
        "glm4v": glm.read_whole,
        "glm46v": glm.read_whole,
        "lfm2_vl": lfm2.read_whole,
        "gemma3": gemma3.read_whole,
        "qwen3_5": qwen3_5.read_whole,
        "qwen3_5_text": qwen3_5.read_text,
        "qwen3_5_moe": qwen3_5.read_whole_moe,
        "qwen3_5_moe_text": qwen3_5.read_text_moe,
    }
)
FAMILIES = tuple(_READERS)


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The model that `config` (a parsed config.json) describes. Raises ModelError."""
    family = config.get("model_type")
    read = _READERS.get(str(family))
    if read is None:
        raise ModelError(f"config.json names the model_type {family!r}; served are {', '.join(FAMILIES)}")
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        check_kinds(part)
    quantisation_of(config)
    spec = read(config)
    if not spec.attentions:
        raise ModelError("config.json has no attention layer; served are models with at least one")
    for window in (attention.sliding_window for attention in spec.attentions):
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise ModelError(f"config.json must give sliding_window as a positive integer or null, and has {window!r}")
    return spec
