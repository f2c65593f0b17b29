"""Mixtures of experts as they are published: both layouts of their weights, settings, and adapters that cannot bind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.errors import BindingError
from adapters.files.safetensors_header import Tensor
from adapters.peft.binding import bind
from adapters.peft.config import parse_config
from service.models.errors import ModelError
from service.models.families import model_spec
from service.models.layouts import layout_of
from service.models.loader import load_model
from tests.models.test_parity import assert_parity
from tests.support.engine.engine_parity import (
    Oracle,
    World,
    answers_of,
    assert_greedy,
    make_requests,
    make_world,
)
from tests.support.models.tiny_models import make_tiny_model, tiny_config

FAMILIES = ("qwen3_moe", "qwen3_5_moe_text", "glm4_moe")
LAYER = {"qwen3_moe": "model.layers.0", "qwen3_5_moe_text": "model.layers.1", "glm4_moe": "model.layers.1"}
PARTS = ("gate_proj", "up_proj", "down_proj")


def is_packed(tensors: dict[str, torch.Tensor]) -> bool:
    return any(name.endswith("experts.gate_up_proj") for name in tensors)


def rewrite(model_dir: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = edit(load_file(model_dir / "model.safetensors"))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, model_dir / "model.safetensors", metadata={"format": "pt"})


def all_in_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefixes = sorted({name.partition("experts.")[0] + "experts." for name in tensors if ".experts." in name})
    for prefix in prefixes:
        num = sum(name.startswith(prefix) and name.endswith("down_proj.weight") for name in tensors)
        gate, up, down = (torch.stack([tensors[f"{prefix}{e}.{part}.weight"] for e in range(num)]) for part in PARTS)
        out |= {f"{prefix}gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}down_proj": down}
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_of_the_experts_are_read(family: str, tmp_path: Path, device: str) -> None:
    """transformers reads both too, and writes them one by one, which all other tests are about."""
    model_dir = make_tiny_model(family, tmp_path)
    assert not is_packed(load_file(model_dir / "model.safetensors"))
    rewrite(model_dir, all_in_one)
    assert is_packed(load_file(model_dir / "model.safetensors"))
    assert_parity(model_dir, device)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights-as-they-are": ("qwen3_moe", {"norm_topk_prob": False}),
    "every-second": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "one-expert": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "all-experts": ("qwen3_5_moe_text", {"num_experts_per_tok": 7}),
    "window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_equal_transformers(setting: str, tmp_path: Path, device: str) -> None:
    family, overrides = SETTINGS[setting]
    assert_parity(make_tiny_model(family, tmp_path, **overrides), device)


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads(tiny_config(family).to_json_string(use_diff=False)), **changes}


def test_more_experts_for_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match="7 experts in a layer, and gives a token 8 of them"):
        model_spec(config_of("qwen3_moe", num_experts_per_tok=8))


@pytest.mark.parametrize("layout", ["one-by-one", "packed"])
@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_a_wrong_tensor_of_an_expert_is_named(layout: str, fault: str, tmp_path: Path) -> None:
    model_dir = make_tiny_model("qwen3_moe", tmp_path)
    if layout == "packed":
        rewrite(model_dir, all_in_one)
    name = f"{LAYER['qwen3_moe']}.mlp.experts." + ("down_proj" if layout == "packed" else "6.down_proj.weight")

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wrong = tensors.pop(name)
        return tensors if fault == "missing" else {**tensors, name: wrong[..., 1:]}

    rewrite(model_dir, edit)
    with pytest.raises(ModelError) as caught:
        load_model(model_dir)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def tensors_of(*paths: str) -> dict[str, Tensor]:
    """Of rank 4; shapes of experts are as PEFT writes them for bare parameters."""
    names = [f"base_model.model.{path}.lora_{side}.weight" for path in paths for side in "AB"]
    return {name: Tensor(name, "F32", (4, 48) if "lora_A" in name else (48, 4), 0, 768) for name in names}


UNADAPTED = {
    "bare-parameters": ("mlp.experts", "mlp.experts.base_layer"),
    "one-by-one": ("mlp.experts.3.gate_proj", "mlp.experts.6.down_proj"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", UNADAPTED)
def test_adapters_of_experts_are_refused_with_the_list(case: str, family: str) -> None:
    paths = [f"{LAYER[family]}.{module}" for module in UNADAPTED[case]]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": "all-linear"}
    tensors = tensors_of(f"{LAYER[family]}.self_attn.q_proj", *paths)
    with pytest.raises(BindingError) as caught:
        bind(layout_of(config_of(family)), parse_config(json.dumps(config).encode()), tensors)
    assert {f"{path}.lora_{side}.weight" for path in paths for side in "AB"} <= {
        name.removeprefix("base_model.model.") for name, reason in caught.value.problems if "experts" in reason
    }
    assert "adapters of experts" in str(caught.value)


def test_adapters_of_a_router_in_float32_are_refused() -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": "all-linear"}
    tensors = tensors_of("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.gate")
    with pytest.raises(BindingError, match=r"float32 routers \(layers\.1\.mlp\.gate\)"):
        bind(layout_of(config_of("glm4_moe")), parse_config(json.dumps(config).encode()), tensors)


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family != "glm4_moe"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    """Adapters that name what they train in each of PEFT's ways."""
    router = {"target_parameters": ["mlp.gate.weight"]}
    specs: dict[str, dict[str, Any]] = {
        "router": {"rank": 4, "target_modules": ["q_proj"], **router, "rank_pattern": {"gate.weight": 3}},
        "router-alone": {"rank": 5, "target_modules": [], **router, "alpha_pattern": {"mlp.gate.weight": 20}},
        "attention": {"rank": 8, "target_modules": ["q_proj", "v_proj"]},
    }
    return make_world(request.param, tmp_path_factory.mktemp(request.param), device, specs=specs)


def test_mixed_batches_equal_peft(world: World) -> None:
    """Prompts in chunks and decode steps, beside an adapter of attention and the base; each adapter says its own."""
    requests = make_requests(world, 2 * (1 + len(world.adapters)), max_prompt=20)
    answers = answers_of(world, requests, token_budget=24, max_sequences=6, num_rows=64)
    oracle = Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)
    first_round = {tuple(answers[request.name].tokens[:8]) for request in requests[: 1 + len(world.adapters)]}
    assert len(first_round) == 1 + len(world.adapters)


def test_sizes_of_a_published_model_are_read() -> None:
    """Qwen3-30B-A3B's, and what its adapters can bind to."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    }
    spec = model_spec(config)
    assert len(spec.moes) == 48 and not spec.mlps
    layout = layout_of(config)
    assert {p.name.rpartition(".")[2] for p in layout.projections if p.group == "mlp"} == {"gate"}
    assert layout.unadapted[0] == "model.layers.0.mlp.experts"
