"""The base models against transformers: logits of whole prompts, chunks and decode steps, in every setting served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service.models.layers.weights import WeightsKind
from service.models.loader import LoadedModel, load_model
from tests.support.engine.hand_steps import HandDriver
from tests.support.models.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    WITH_EXPERTS,
    load_oracle,
    make_tiny_model,
    make_wrongly_tied_model,
)
from tests.tolerances import LOGITS, LOGITS_RMS, logits_bounds

LENGTHS = (1, 7, 33, 50)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def oracle_logits(model_dir: Path, prompts: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] of each prompt alone, by transformers."""
    model = load_oracle(model_dir, dtype)
    return [model(torch.tensor([tokens])).logits[0].float() for tokens in prompts]


def assert_parity(
    model_dir: Path,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    family: str | None = None,
    weights: WeightsKind = "auto",
    free_bytes: int | None = None,
) -> None:
    """All tokens of prompts of several lengths, run as one step, against each prompt alone in transformers.

    family  whose tolerances hold; None: the model_type's
    """
    dtype_name = str(dtype).removeprefix("torch.")
    loaded = load_model(model_dir, dtype=dtype_name, weights=weights, device=device, free_bytes=free_bytes)
    prompts = [prompt(length) for length in LENGTHS]
    driver = HandDriver(loaded)
    logits = driver.step([(driver.sequence(), tokens) for tokens in prompts], all_logits=True)
    expected = torch.cat(oracle_logits(model_dir, prompts, dtype))
    assert logits.dtype == torch.float32
    assert expected.std() > 0.3, "logits too flat to tell anything"
    largest, rms = logits_bounds(family or loaded.spec.model_type, dtype)
    torch.testing.assert_close(logits, expected, atol=largest, rtol=0)
    assert (logits - expected).square().mean().sqrt() < rms
    assert (logits - expected).square().mean(-1).sqrt().median() < LOGITS_RMS[dtype], "of the token in the middle"


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *WITH_EXPERTS)},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 6}),
    "llama-head-dim-derived": ("llama", {"head_dim": None}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "lfm2-biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 4}),
    "lfm2-plain-ff": ("lfm2", {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
    "phi3-whole-heads": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}},
    ),
    "gemma2-tied": ("gemma2", {"tie_word_embeddings": True, "attn_logit_softcapping": 0.7}),
    "gemma3-cap": ("gemma3_text", {"attn_logit_softcapping": 2.0}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma4-31B": (  # keys that are values too, no layer reads another's, and no inputs of layers
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "attention_bias": True,
        },
    ),
    "gemma4-shared-values": ("gemma4_text", {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}),
    "olmo3-rope": (
        "olmo3",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gemma3-rope": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "final_logit_softcapping": None,
        },
    ),
    "smollm3-biases": ("smollm3", {"attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 1, 1, 0]}),
    "smollm3-no-window": ("smollm3", {"use_sliding_window": False}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "granitemoehybrid-no-positions": ("granitemoehybrid", {"position_embedding_type": None, "attention_bias": True}),
    "granitemoehybrid-no-mamba": ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}),
    "bamba-biases": (
        "bamba",
        {
            **dict.fromkeys(("mamba_proj_bias", "attention_bias", "mlp_bias"), True),
            "mamba_conv_bias": False,
            "mamba_d_head": 8,
            "mamba_n_heads": 12,
            "mamba_n_groups": 3,
            "mamba_d_conv": 3,
        },
    ),
    "glm-whole-heads": ("glm", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    "glm4_moe-as-air": ("glm4_moe", {"use_qk_norm": False, "routed_scaling_factor": 1.0, "norm_topk_prob": False}),
    "rope-theta": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "rope-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "rope-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope-yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 4.0,
            }
        },
    ),
    "rope-yarn-mscale": (
        "lfm2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 0.4,
                "truncate": False,
            }
        },
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_equal_transformers(setting: str, tmp_path: Path, device: str) -> None:
    family, overrides = SETTINGS[setting]
    assert_parity(make_tiny_model(family, tmp_path, **overrides), device)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_bfloat16(family: str, tmp_path: Path, device: str) -> None:
    assert_parity(make_tiny_model(family, tmp_path, dtype=torch.bfloat16), device, torch.bfloat16)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_checkpoints_compute_in_float32_when_asked(
    stored: torch.dtype, tmp_path: Path, device: str
) -> None:
    assert_parity(make_tiny_model("lfm2", tmp_path, dtype=stored), device, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_farther_from_float32_than_transformers_is(family: str, tmp_path: Path, device: str) -> None:
    """In the median token: where a delta net norms what is next to nothing, single tokens say who was lucky."""
    model_dir = make_tiny_model(family, tmp_path, dtype=torch.bfloat16)
    tokens = prompt(50)
    (exact,) = oracle_logits(model_dir, [tokens], torch.float32)
    (rounded,) = oracle_logits(model_dir, [tokens], torch.bfloat16)
    driver = HandDriver(load_model(model_dir, device=device))
    ours = driver.step([(driver.sequence(), tokens)], all_logits=True)
    found, theirs = ((logits - exact).square().mean(-1).median() for logits in (ours, rounded))
    assert found < 1.25 * theirs


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_float16_when_asked(family: str, tmp_path: Path, device: str) -> None:
    assert_parity(make_tiny_model(family, tmp_path, dtype=torch.float16), device, torch.float16)


def test_shards_equal_transformers(tmp_path: Path, device: str) -> None:
    assert_parity(make_tiny_model("qwen2", tmp_path, max_shard_size="100KB"), device)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_contradicts_a_tied_config_is_used_as_transformers_does(
    family: str, tmp_path: Path, device: str
) -> None:
    assert_parity(make_wrongly_tied_model(family, tmp_path), device)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> LoadedModel:
    return load_model(make_tiny_model(request.param, tmp_path_factory.mktemp(request.param)), device=device)


@pytest.mark.parametrize("scatter", [False, True], ids=["adjoining-blocks", "scattered-blocks"])
@pytest.mark.parametrize("chunk_sizes", [(50,), (1,) * 50, (2, 1, 17, 30), (31, 19)], ids=str)
def test_chunks_and_decode_steps_equal_one_prefill(
    loaded: LoadedModel, chunk_sizes: tuple[int, ...], scatter: bool
) -> None:
    tokens = prompt(50)
    whole = HandDriver(loaded)
    expected = whole.step([(whole.sequence(), tokens)], all_logits=True)
    driver = HandDriver(loaded, scatter=scatter)
    sequence = driver.sequence()
    logits, start = [], 0
    for size in chunk_sizes:
        logits.append(driver.step([(sequence, tokens[start : start + size])], all_logits=True))
        start += size
    torch.testing.assert_close(torch.cat(logits), expected, atol=LOGITS[torch.float32], rtol=0)


def test_neighbours_and_reused_blocks_do_not_matter(loaded: LoadedModel) -> None:
    """Sequences join, decode beside prefill chunks, and blocks hold what earlier sequences left there."""
    prompts = [prompt(length, seed=2) for length in (40, 9, 23)]
    alone = []
    for tokens in prompts:
        single = HandDriver(loaded)
        alone.append(single.step([(single.sequence(), tokens)], all_logits=True))
    driver = HandDriver(loaded, num_blocks=40)
    for cache in driver.caches.layers:  # what a sequence that has gone leaves behind
        for tensor in (getattr(cache, name) for name in cache.__slots__):
            tensor.fill_(1e4)
    a, b, c = (driver.sequence(44) for _ in prompts)
    steps = [
        [(a, 0, 30)],
        [(a, 30, 31), (b, 0, 8)],
        [(b, 8, 9), (a, 31, 33), (c, 0, 21)],
        [(c, 21, 22), (a, 33, 34)],
        [(a, 34, 40), (c, 22, 23)],
    ]
    index = {id(a): 0, id(b): 1, id(c): 2}
    for step in steps:
        logits = driver.step([(s, prompts[index[id(s)]][i:j]) for s, i, j in step], all_logits=True)
        expected = torch.cat([alone[index[id(s)]][i:j] for s, i, j in step])
        torch.testing.assert_close(logits, expected, atol=LOGITS[torch.float32], rtol=0)


def test_dynamic_rope_takes_the_limit_of_its_own_request(tmp_path: Path, device: str) -> None:
    """Beyond max_position_embeddings a request's limit stretches its rotation, whatever its neighbours' limits are."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0}
    model_dir = make_tiny_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=32)
    tokens = prompt(60)
    # transformers takes the length of the longest position so far: a whole prompt of 60 is scaled as a limit of 60.
    (expected,) = oracle_logits(model_dir, [tokens], torch.float32)
    driver = HandDriver(load_model(model_dir, device=device))
    assert driver.loaded.spec.context_tokens == 128
    first, second = driver.sequence(limit=60), driver.sequence(limit=128)
    logits = driver.step([(first, tokens), (second, tokens)], all_logits=True)
    torch.testing.assert_close(logits[:60], expected, atol=LOGITS[torch.float32], rtol=0)
    assert (logits[60:] - expected).abs().max() > 100 * LOGITS[torch.float32]


@pytest.mark.parametrize("share", [0.75, 1.0])
def test_longrope_takes_the_wavelengths_of_its_own_limit(share: float, tmp_path: Path, device: str) -> None:
    """Within the original context the short ones, beyond it the long ones, whatever the neighbours' limits are."""
    num_factors = int(16 * share) // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "partial_rotary_factor": share,
        "short_factor": [1.0 + 0.1 * i for i in range(num_factors)],
        "long_factor": [2.0 + i for i in range(num_factors)],
    }
    model_dir = make_tiny_model(
        "phi3",
        tmp_path,
        rope_parameters=rope,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        sliding_window=None,
    )
    long, short = prompt(60), prompt(32)
    # transformers takes the length of the longest position of a forward pass.
    expected = torch.cat(oracle_logits(model_dir, [long, short], torch.float32))
    driver = HandDriver(load_model(model_dir, device=device))
    assert driver.loaded.spec.context_tokens == 128
    tokens = [(driver.sequence(limit=60), long), (driver.sequence(limit=32), short)]
    torch.testing.assert_close(driver.step(tokens, all_logits=True), expected, atol=LOGITS[torch.float32], rtol=0)
