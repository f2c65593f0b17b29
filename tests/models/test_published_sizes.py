"""The table of published sizes, from which the gate for Ascend has its shapes."""

from __future__ import annotations

import math

import pytest
import torch

from service.models.layers.caches import kv_bytes_per_token, state_bytes_per_line
from tests.support.models.published import PUBLISHED, delta_heads_of, heads_of, product_of, spec_of
from tests.support.models.tiny_models import FAMILIES

# As their publishers count them.
NUM_PARAMETERS = {
    "Llama-3-8B": 8_030_261_248,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "LFM2-350M": 354_483_968,
    "LFM2-1.2B": 1_170_340_608,
    "Phi-4-mini": 3_836_021_760,
    "gemma-2-9b": 9_241_705_984,
    "SmolLM3-3B": 3_075_098_624,
    "Olmo-3-7B": 7_298_011_136,
}


def test_each_family_has_a_model() -> None:
    assert {config["model_type"] for config in PUBLISHED.values()} == set(FAMILIES)


@pytest.mark.parametrize("model", NUM_PARAMETERS)
def test_the_specifications_have_as_many_parameters_as_the_models(model: str) -> None:
    assert sum(math.prod(shape) for shape in spec_of(model).tensors(()).values()) == NUM_PARAMETERS[model]


@pytest.mark.parametrize(
    ("model", "kib_per_token", "state_mib"),
    [("Qwen3.5-0.8B", 12, 18.6), ("Qwen3.5-4B", 32, 49.1), ("Qwen3.5-9B", 32, 49.1), ("Qwen3.5-27B", 64, 146.8)],
)
def test_a_sequence_takes_what_the_documentation_says(model: str, kib_per_token: int, state_mib: float) -> None:
    """docs/models.md."""
    spec = spec_of(model)
    assert kv_bytes_per_token(spec, torch.bfloat16) == kib_per_token * 2**10
    assert round(state_bytes_per_line(spec, torch.bfloat16) / 2**20, 1) == state_mib


def test_what_the_gate_takes_from_the_table() -> None:
    assert product_of("Qwen3.5-9B", "linear_attn.in_proj") == (4096, [8192, 4096, 32, 32])
    assert product_of("Qwen3.5-35B-A3B", "mlp.shared_expert_gate") == (2048, [1])
    assert product_of("LFM2-350M", "conv.in_proj") == (1024, [3072])
    assert [(conv.size, conv.width) for conv in (spec_of(name).convs[0] for name in ("LFM2-1.2B", "Qwen3.5-27B"))] == [
        (2048, 3),
        (10_240, 4),
    ]
    assert delta_heads_of("Qwen3.5-27B") == (16, 48, 128, 128)
    assert heads_of("Phi-4-mini").form == (128, 96, False, False)
    assert heads_of("gemma-3-4b").form == (256, 256, True, True)
    assert len(spec_of("Qwen3.5-27B").tensors(())) == 851
