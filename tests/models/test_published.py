"""Checkpoints as people have them: spellings of config.json, shards, dtypes and names that transformers reads too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from service.models.errors import ModelError
from service.models.families import model_spec
from service.models.loader import load_model
from service.models.spec.config_json import read_config
from tests.models.test_parity import assert_parity
from tests.support.models.tiny_models import make_tiny_model, tiny_config


def rewrite_config(model_dir: Path, **changes: Any) -> None:
    """None takes a field away."""
    config = {**json.loads((model_dir / "config.json").read_text()), **changes}
    (model_dir / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


YARN = {"factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}
# Fields as they were spelled before transformers 5, which is how most published checkpoints spell them.
OLD_SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo3": ("olmo3", {"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 500_000}),
    "olmo3-no-kinds": ("olmo3", {"rope_theta": 500_000, "layer_types": None}),
    "gemma2": ("gemma2", {"rope_theta": 500.0, "layer_types": None, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma3": (
        "gemma3_text",
        {
            "rope_theta": 5000.0,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": None,
            "sliding_window_pattern": 2,
        },
    ),
    "qwen2-yarn": ("qwen2", {"rope_theta": 1000.0, "rope_scaling": {"type": "yarn", **YARN}}),
    "smollm3": ("smollm3", {"rope_theta": 500.0, "layer_types": None, "no_rope_layers": [1, 0, 1, 0]}),
}


@pytest.mark.parametrize("case", OLD_SPELLINGS)
def test_old_spellings_mean_what_transformers_takes_them_for(case: str, tmp_path: Path, device: str) -> None:
    family, changes = OLD_SPELLINGS[case]
    model_dir = make_tiny_model(family, tmp_path)
    rewrite_config(model_dir, rope_parameters=None, **changes)
    assert_parity(model_dir, device)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo3", "gemma2"])
def test_shards_are_read(family: str, tmp_path: Path, device: str) -> None:
    model_dir = make_tiny_model(family, tmp_path, max_shard_size="60KB")
    assert len(list(model_dir.glob("model-*.safetensors"))) > 2
    assert_parity(model_dir, device)


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma2"])
def test_a_float16_checkpoint_is_computed_in_float32(family: str, tmp_path: Path, device: str) -> None:
    if device != "cpu":
        pytest.skip("NOT RUN: other devices compute in float16")
    model_dir = make_tiny_model(family, tmp_path, dtype=torch.float16)
    assert load_model(model_dir, device=device).dtype == torch.float32
    assert_parity(model_dir, device)


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma2", "olmo3"])
def test_all_endings_of_both_files_count(family: str, tmp_path: Path) -> None:
    model_dir = make_tiny_model(family, tmp_path)
    rewrite_config(model_dir, eos_token_id=7)
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 99_999]}))
    assert model_spec(read_config(model_dir)).eos_token_ids == (7, 9)


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "quantised-text": (
        "qwen3_5_text",
        lambda config: {"model_type": "qwen3_5", "text_config": config, "quantization_config": {"quant_method": "fp8"}},
        "quantised checkpoints are not served",
    ),
    "quantised-inside": (
        "qwen3_5_text",
        lambda config: {
            "model_type": "qwen3_5",
            "text_config": {**config, "quantization_config": {"quant_method": "awq"}},
        },
        "quantised checkpoints are not served",
    ),
    "bidirectional": (
        "gemma2",
        lambda config: {**config, "use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    "activation": ("gemma2", lambda config: {**config, "hidden_activation": "silu"}, "'silu'"),
    "cap": ("gemma2", lambda config: {**config, "attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
    "cap-of-logits": ("gemma2", lambda config: {**config, "final_logit_softcapping": "x"}, "final_logit_softcapping"),
    "dtype": ("qwen3_5_text", lambda config: {**config, "dtype": ["bfloat16"]}, "dtype as a text"),
    "windows-off": ("smollm3", lambda config: {**config, "use_sliding_window": False}, "use_sliding_window is off"),
    "windows-of-no-size": ("smollm3", lambda config: {**config, "sliding_window": None}, "sliding_window null"),
    "kinds": ("olmo3", lambda config: {**config, "layer_types": ["mamba"] * 3}, "mamba"),
    "share": (
        "olmo3",
        lambda config: {**config, "partial_rotary_factor": 0.5, "rope_parameters": None},
        "partial_rotary_factor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named(case: str) -> None:
    family, change, words = REFUSED[case]
    config = change(json.loads(tiny_config(family).to_json_string(use_diff=False)))
    with pytest.raises(ModelError) as caught:
        model_spec(config)
    assert words in str(caught.value) and "\n" not in str(caught.value)
