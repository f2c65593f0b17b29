"""Tiny random models of text with a vision tower beside it, as they are published: written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.models.tiny_models import VOCAB_SIZE, make_tokenizer, shake_vectors, tiny_fields

_VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24}
_SIGLIP = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
_GEMMA4_TOWER = {**_VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
_QWEN = {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
# By model_type, with the text's behind a hyphen where there are several: the family of the text, what its text_config
# has of its own, and the rest of config.json.
_WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"final_logit_softcapping": None},  # which transformers would not apply here
        {
            "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": 300,
            "boi_token_index": 301,
            "eoi_token_index": 302,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {},
        {
            "vision_config": {**_GEMMA4_TOWER, "pooling_kernel_size": 2, "position_embedding_size": 16},
            "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            # None of the vocabulary: their inputs of layers are those of padding.
            **dict.fromkeys(("image_token_id", "video_token_id", "boi_token_id", "eoi_token_id"), VOCAB_SIZE),
            **dict.fromkeys(("audio_token_id", "boa_token_id", "eoa_token_index"), VOCAB_SIZE),
        },
    ),
    "mistral3": (
        "mistral",
        {"sliding_window": None},
        {
            "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
            "image_token_index": 300,
            "tie_word_embeddings": False,
        },
    ),
    "mistral3-ministral3": (
        "ministral3",
        {},
        {
            "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
            "image_token_index": 300,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_vl": (
        "qwen2",
        {"model_type": "qwen2_vl_text", "rope_parameters": {"rope_theta": 1000.0, "mrope_section": [2, 2, 2]}},
        {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2}},
    ),
    "qwen2_5_vl": (
        "qwen2",
        {
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]},
            "tie_word_embeddings": False,
        },
        {"vision_config": {**_QWEN, "fullatt_block_indexes": [0]}},
    ),
    "qwen3_vl": (
        "qwen3",
        {
            "model_type": "qwen3_vl_text",
            "rope_parameters": {"rope_theta": 1000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
        {
            "vision_config": {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": (
        "qwen3_moe",
        {
            "model_type": "qwen3_vl_moe_text",
            "rope_parameters": {"rope_theta": 1000.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
        },
        {
            "vision_config": {**_QWEN, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            "tie_word_embeddings": False,
        },
    ),
    "glm4v": (
        "glm4",
        {
            "model_type": "glm4v_text",
            "head_dim": 12,
            "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
        },
        {"vision_config": {**_QWEN, "image_size": 16, "patch_size": 8}, "tie_word_embeddings": False},
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "head_dim": 64,  # 8 frequencies, one after the other of 3, 3 and 2 of each kind of position
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        {"vision_config": _QWEN, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {},
        {"vision_config": _QWEN, "tie_word_embeddings": False},
    ),
    "lfm2_vl": (
        "lfm2",
        {},
        {
            "vision_config": {**_SIGLIP, "model_type": "siglip2_vision_model"},
            "image_token_id": 300,
            "projector_hidden_size": 20,
        },
    ),
}
WHOLE_FAMILIES = tuple(_WHOLES)


def whole_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """Of a tiny model; overrides are fields of config.json beside text_config."""
    text_family, text, rest = _WHOLES[family]
    inner = {"model_type": text_family, **tiny_fields(text_family), **text}
    return transformers.AutoConfig.for_model(family.partition("-")[0], **{"text_config": inner, **rest, **overrides})


def text_family_of(family: str) -> str:
    return _WHOLES[family][0]


def make_whole_model(family: str, directory: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a random model under the names of published ones, and its tokenizer, into `directory`, and return it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(whole_config(family, **overrides))
        shake_vectors(model)
    model.to(dtype).save_pretrained(directory)
    make_tokenizer(directory)
    return directory
