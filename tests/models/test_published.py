"""Checkpoints as people have them: spellings of config.json, shards, dtypes and names that transformers reads too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from service.models.families import model_spec
from service.models.loader import load_model
from service.models.spec.config_json import ModelError, read_config
from tests.models.test_parity import assert_parity
from tests.models.test_whole_models import assert_transformers_reads_the_same
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


# What config.json of published checkpoints says, with the numbers of layers cut; beside vision: test_whole_models.py.
PUBLISHED: dict[str, dict[str, Any]] = {
    "GLM-4-9B-0414": {
        "model_type": "glm4",
        "attention_bias": True,
        "eos_token_id": [151_329, 151_336, 151_338],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151_552,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "eos_token_id": [151_329, 151_336, 151_338],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151_552,
    },
    "Mixtral-8x7B-Instruct-v0.1": {
        "model_type": "mixtral",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32_000,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200_002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131_072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "pad_token_id": 199_999,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201_088,
    },
    "Phi-4-mini-instruct": {
        "model_type": "phi3",
        "attention_bias": False,
        "bos_token_id": 199_999,
        "eos_token_id": 199_999,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131_072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 199_999,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "long_factor": [
                *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
                *(
                    2.446418898,
                    2.735880826,
                    3.059592084,
                    3.421605075,
                    3.826451687,
                    4.279200023,
                    4.785517845,
                    5.351743533,
                ),
                *(5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651),
                *(14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03),
                *(32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7),
                *(32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
            ],
            "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        "rope_theta": 10_000.0,
        "sliding_window": 262_144,
        "tie_word_embeddings": True,
        "vocab_size": 200_064,
    },
    "phi-4": {
        "model_type": "phi3",
        "attention_bias": False,
        "bos_token_id": 100_257,
        "eos_token_id": 100_265,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17_920,
        "max_position_embeddings": 16_384,
        "num_attention_heads": 40,
        "num_hidden_layers": 2,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16_384,
        "pad_token_id": 100_349,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 250_000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 100_352,
    },
    "granite-4.0-h-350m": {
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "layer_types": ["mamba", "attention", "mamba"],
        "logits_scaling": 3,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "mamba_proj_bias": False,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 12,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "position_embedding_type": "nope",
        "residual_multiplier": 0.246,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000,
        "shared_intermediate_size": 2048,
        "tie_word_embeddings": True,
        "vocab_size": 100_352,
    },
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid",
        "embedding_multiplier": 12,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "layer_types": ["mamba", "attention", "mamba"],
        "logits_scaling": 6,
        "mamba_chunk_size": 256,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 48,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 12,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "rms_norm_eps": 1e-5,
        "shared_intermediate_size": 1024,
        "tie_word_embeddings": True,
        "vocab_size": 100_352,
    },
    "granite-4.0-micro": {
        "model_type": "granitemoehybrid",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "layer_types": ["attention"] * 2,
        "logits_scaling": 10,
        "mamba_d_head": 40,
        "mamba_n_heads": 128,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 40,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000_000,
        "shared_intermediate_size": 8192,
        "tie_word_embeddings": True,
        "vocab_size": 100_352,
    },
}


@pytest.mark.wide
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_json_means_what_transformers_reads_in_it(name: str) -> None:
    assert_transformers_reads_the_same(PUBLISHED[name])


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "quantised-text": (
        "qwen3_5_text",
        lambda config: {
            "model_type": "qwen3_5",
            "text_config": config,
            "quantization_config": {"quant_method": "quip"},
        },
        "quant_method 'quip'; served are",
    ),
    "quantised-inside": (
        "qwen3_5_text",
        lambda config: {
            "model_type": "qwen3_5",
            "text_config": {**config, "quantization_config": {"quant_method": "awq", "bits": 3}},
        },
        "has the bits 3; served is 4",
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
    "mamba": (
        "granitemoehybrid",
        lambda config: {**config, "mamba_n_heads": 7},
        "7 heads of 16 in 2 groups behind a convolution of 4 taps; the heads must fill",
    ),
    "steps-of-mamba": ("bamba", lambda config: {**config, "time_step_limit": [0.0, 5.0]}, "served is [0.0, Infinity]"),
    "attention-of-bamba": ("bamba", lambda config: {**config, "attn_layer_indices": 3}, "attn_layer_indices as a list"),
    "experts-of-granite": (
        "granitemoehybrid",
        lambda config: {**config, "num_local_experts": 62, "num_experts_per_tok": 63},
        "has 62 experts in a layer, and gives a token 63 of them",
    ),
    "groups-of-experts": (
        "glm4_moe",
        lambda config: {**config, "n_group": 8, "topk_group": 4},
        "chooses experts of 4 of 8 groups (topk_group); served are routers that choose among all",
    ),
    "gate": (
        "gpt_oss",
        lambda config: {**config, "swiglu_limit": 10.0},
        "has a swiglu_limit of 10.0; served is 7.0",
    ),
    "beta": (
        "ministral3",
        lambda config: {**config, "rope_parameters": {**config["rope_parameters"], "llama_4_scaling_beta": "0.1"}},
        "llama_4_scaling_beta as a number above 0, and has '0.1'",
    ),
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
