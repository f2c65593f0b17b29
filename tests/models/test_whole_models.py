"""Checkpoints of text with a vision tower beside it, as they are published: the text is served, the rest is left."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from service.models.families import model_spec
from service.models.layouts import layout_of
from service.models.loader import load_model
from service.models.spec.config_json import ModelError, read_config
from service.text.tokenizer import TextTokenizer
from tests.models.test_parity import assert_parity
from tests.support.engine.engine_parity import (
    Oracle,
    assert_greedy,
    build_engine,
    config_of,
    make_requests,
    make_world,
    run_engine,
)
from tests.support.models.tiny_models import LINEAR_MODULES, make_tokenizer
from tests.support.models.whole_models import WHOLE_FAMILIES, make_whole_model, text_family_of, whole_config

# Cases of the wide tier: what they show is shown by others too.
WIDE = {"mistral3-ministral3", "qwen3_vl_moe", "glm4v", "Ministral-3-8B-Instruct-2512-BF16", "GLM-4.1V-9B-Thinking",
        "Qwen3-VL-30B-A3B", "gemma4", "gemma-4-E2B", "gemma-4-31B", "gemma-4-26B-A4B"}  # fmt: skip


def with_wide(names: Iterable[str]) -> list[Any]:
    """Cases of a parametrised test."""
    return [pytest.param(name, marks=pytest.mark.wide) if name in WIDE else name for name in names]


def config_json(family: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads(whole_config(family).to_json_string(use_diff=False)), **changes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", with_wide(WHOLE_FAMILIES))
def test_the_text_equals_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_whole_model(family, tmp_path, dtype=dtype)
    with caplog.at_level(logging.INFO, "service.models.loader"):
        assert_parity(model_dir, device, dtype, family=text_family_of(family))
    assert caplog.text.count("parts of the checkpoint that are not served") == 1
    assert "visual.*" in caplog.text or "vision_tower.*, " in caplog.text
    assert "does not use" not in caplog.text


def published(name: str) -> str:
    """The name as the first checkpoints of these models have it."""
    parts = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    before = next((before for before in parts if name.startswith(before)), None)
    return name if before is None else parts[before] + name.removeprefix(before)


def called_now(name: str) -> str:
    for before, now in (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("visual.", "model.visual."),
    ):
        if name.startswith(before):
            return now + name.removeprefix(before)
    is_text = name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual."))
    return name.replace("model.", "model.language_model.", 1) if is_text else name


@pytest.mark.parametrize(
    "family",
    with_wide(("gemma3", "mistral3", "mistral3-ministral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v")),
)
def test_names_of_all_times_are_read(family: str, tmp_path: Path, device: str) -> None:
    model_dir = make_whole_model(family, tmp_path)
    file = model_dir / "model.safetensors"
    tensors = {called_now(name): tensor for name, tensor in load_file(file).items()}
    assert "model.language_model.norm.weight" in tensors
    for rename in (str, published):
        save_file({rename(name): tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
        load_model(model_dir, device=device)


def test_a_tensor_of_two_models_in_one_file_is_not_guessed(tmp_path: Path) -> None:
    file = make_whole_model("gemma3", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    norm = tensors.pop("language_model.model.norm.weight")
    tensors |= {"language_model.norm.weight": norm, "text_model.norm.weight": norm.clone()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no tensor model\.language_model\.norm\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("family", with_wide(WHOLE_FAMILIES))
def test_adapters_of_the_whole_model_equal_peft(family: str, tmp_path: Path, device: str) -> None:
    """Trained as PEFT trains the class with the vision tower; mixed with the base, in chunks."""
    linear = "|".join(LINEAR_MODULES[text_family_of(family)])
    specs: dict[str, dict[str, Any]] = {
        "all": {"rank": 5, "target_modules": rf"model\.language_model\..*\.({linear})"},
        "dora": {"rank": 3, "target_modules": rf".*language_model.*\.({linear})", "use_dora": True},
        "tower": {"rank": 4, "target_modules": "all-linear"},
        "embedding": {"rank": 4, "target_modules": r".*language_model\.embed_tokens", "save_embedding_layers": True},
    }
    world = make_world(family, tmp_path, device, specs=specs, make_model=make_whole_model)
    requests = make_requests(world, 8)
    engine = build_engine(config_of(world, token_budget=24, max_sequences=4, side_bytes=4 << 20))
    answers = run_engine(engine, [request.submit(world) for request in requests], joins_per_step=2)
    engine.close()
    oracle = Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [({"do_sample": True}, {2}), ({"eos_token_id": [4]}, {2, 4}), ({"eos_token_id": {"a": 4}}, {2}), (None, {2})],
    ids=["silent", "more", "wrong", "no-file"],
)
def test_the_text_ends_where_its_own_config_says(
    generation: dict[str, Any] | None, expected: set[int], tmp_path: Path
) -> None:
    """text_config alone names the end, whatever generation_config.json says or does not."""
    config = config_json("qwen3_5")
    config.pop("eos_token_id", None)
    config["text_config"]["eos_token_id"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    make_tokenizer(tmp_path)
    assert set(model_spec(read_config(tmp_path)).eos_token_ids) == expected
    assert set(TextTokenizer.load(tmp_path).eos_token_ids) == expected


_GEMMA4_ROTATIONS = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
}
# What config.json of published checkpoints says, with the numbers of hidden layers cut.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-4-E2B": {
        "model_type": "gemma4",
        "eos_token_id": [1, 106],
        "text_config": {
            "attention_k_eq_v": False,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1536,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 6144,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 3,
            "max_position_embeddings": 131_072,
            "num_attention_heads": 8,
            "num_global_key_value_heads": None,
            "num_hidden_layers": 15,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 5,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _GEMMA4_ROTATIONS,
            "sliding_window": 512,
            "use_double_wide_mlp": True,
            "vocab_size": 262_144,
            "vocab_size_per_layer_input": 262_144,
        },
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision", "num_hidden_layers": 2, "use_clipped_linears": True},
        "audio_config": {"model_type": "gemma4_audio", "num_hidden_layers": 2},
    },
    "gemma-4-31B": {
        "model_type": "gemma4",
        "text_config": {
            "attention_bias": False,
            "attention_k_eq_v": True,
            "enable_moe_block": False,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 5376,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 21_504,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "max_position_embeddings": 262_144,
            "model_type": "gemma4_text",
            "num_attention_heads": 32,
            "num_experts": None,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 6,
            "num_key_value_heads": 16,
            "num_kv_shared_layers": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _GEMMA4_ROTATIONS,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
            "vocab_size": 262_144,
            "vocab_size_per_layer_input": 262_144,
        },
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision", "num_hidden_layers": 2},
    },
    "gemma-4-26B-A4B": {
        "model_type": "gemma4",
        "eos_token_id": [1, 106],
        "text_config": {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "max_position_embeddings": 262_144,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_experts": 128,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 6,
            "num_key_value_heads": 8,
            "num_kv_shared_layers": 0,
            "rms_norm_eps": 1e-6,
            "rope_parameters": _GEMMA4_ROTATIONS,
            "sliding_window": 1024,
            "tie_word_embeddings": True,
            "top_k_experts": 8,
            "vocab_size": 262_144,
        },
        "vision_config": {"model_type": "gemma4_vision", "num_hidden_layers": 2},
    },
    "gemma-3-4b-it": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "Mistral-Small-3.1": {
        "model_type": "mistral3",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32_768,
            "model_type": "mistral",
            "max_position_embeddings": 131_072,
            "num_attention_heads": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e9,
            "sliding_window": None,
            "vocab_size": 131_072,
        },
    },
    "Ministral-3-8B-Instruct-2512-BF16": {
        "model_type": "mistral3",
        "image_token_index": 10,
        "text_config": {
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "max_position_embeddings": 262_144,
            "model_type": "ministral3",
            "num_attention_heads": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16_384,
                "rope_theta": 1_000_000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 131_072,
        },
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "pixtral"},
    },
    "Qwen2.5-VL-3B": {
        "model_type": "qwen2_5_vl",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "max_position_embeddings": 128_000,
        "max_window_layers": 70,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": 32_768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151_936,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32, "hidden_size": 1280},
    },
    "GLM-4.1V-9B-Thinking": {
        "model_type": "glm4v",
        "text_config": {
            "attention_bias": True,
            "eos_token_id": [151_329, 151_336, 151_338, 151_348],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 13_696,
            "max_position_embeddings": 65_536,
            "model_type": "glm4v_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
            "rope_theta": 10_000.0,
            "vocab_size": 151_552,
        },
        "tie_word_embeddings": False,
        "vision_config": {"depth": 2, "hidden_size": 1536},
    },
    "Qwen3-VL-30B-A3B": {
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 262_144,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5_000_000,
            "vocab_size": 151_936,
        },
        "tie_word_embeddings": False,
        "vision_config": {"depth": 2},
    },
    "Qwen3-VL-4B": {
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "max_position_embeddings": 262_144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 8,
            "rope_theta": 5_000_000,
            "vocab_size": 151_936,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
        "tie_word_embeddings": True,
    },
    "LFM2-VL": {
        "model_type": "lfm2_vl",
        "text_config": {
            "model_type": "lfm2",
            "hidden_size": 1024,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "block_ff_dim": 6656,
            "full_attn_idxs": [2],
            "vocab_size": 65_536,
            "conv_L_cache": 3,
        },
    },
}


@pytest.mark.parametrize("name", with_wide(PUBLISHED))
def test_published_config_json_means_what_transformers_reads_in_it(name: str) -> None:
    assert_transformers_reads_the_same(PUBLISHED[name])


_TOWERS = ("vis", "projector", "audio")


def assert_transformers_reads_the_same(config: dict[str, Any]) -> None:
    """The modules that adapters bind to, and what else the specification says."""
    read = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    is_whole = "vision_config" in read.to_dict()
    kind = transformers.AutoModelForImageTextToText if is_whole else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(read)
    expected = {
        module: tuple(layer.weight.shape)
        for module, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and not any(part in module for part in _TOWERS)
    }
    layout = layout_of(config)
    expected |= {name: tuple(model.get_submodule(name).weight.shape) for name in layout.routers}
    found = {
        piece.module: (piece.out_features, projection.in_features)
        for projection in layout.projections
        for piece in projection.slices
        if projection.kind == "linear"
    }
    assert found == expected
    for one in layout.experts:
        held = {f"{one.module}.{name}": weight for name, weight in model.get_submodule(one.module).named_parameters()}
        projections = {one.name: one for one in layout.projections}
        gate_up, down = projections[one.gate_up], projections[one.down]
        assert tuple(held[one.down].shape) == (one.num, down.slices[0].out_features, down.in_features)
        if not one.is_interleaved:
            outputs = sum(piece.out_features for piece in gate_up.slices)
            assert tuple(held[one.gate_up].shape) == (one.num, outputs, gate_up.in_features)
    spec, full = model_spec(config), model_spec(json.loads(read.to_json_string(use_diff=False)))
    assert (spec.layers, spec.rotations, spec.tie_word_embeddings) == (
        full.layers,
        full.rotations,
        full.tie_word_embeddings,
    )
    assert spec.norm_eps == full.norm_eps and spec.context_tokens == full.context_tokens


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no-text": (config_json("gemma3", text_config=None), "must have a text_config, and has none"),
    "other-text": (
        config_json("mistral3", text_config={"model_type": "mistral4"}),
        "has a text_config of the model_type 'mistral4'; served is mistral",
    ),
    "experts-of-no-number": (
        config_json("gemma4", text_config={"model_type": "gemma4_text", "enable_moe_block": True}),
        "must give num_experts as a positive integer",
    ),
    "quantised": (
        config_json("gemma3", text_config={"model_type": "gemma3_text", "quantization_config": {"bits": 4}}),
        "quant_method None; served are fp8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named(case: str) -> None:
    config, words = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        model_spec(config)
    assert words in str(caught.value) and "\n" not in str(caught.value)
