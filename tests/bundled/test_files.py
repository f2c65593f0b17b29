"""What lies in service/bundled: an ordinary Hugging Face directory and four PEFT directories, within their sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

from examples.bundled_calculator import CALCULATOR
from examples.bundled_jobs import JOBS, Recipe
from examples.train_adapters import ADAPTERS_DIR
from examples.train_base import BASE_DIR

BASE_LIMIT_BYTES = 8_000_000
ADAPTER_LIMIT_BYTES = 4_000_000


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def test_base_is_a_small_hybrid_lfm2() -> None:
    """The architecture, the head width, both kinds of layers, and the size on disk."""
    config = json.loads((BASE_DIR / "config.json").read_text())
    assert config["model_type"] == "lfm2"
    assert config["hidden_size"] // config["num_attention_heads"] == 64
    assert set(config["layer_types"]) == {"conv", "full_attention"}
    num_parameters = sum(math.prod(shape) for shape in _shapes(BASE_DIR / "model.safetensors").values())
    assert 2_000_000 <= num_parameters <= 4_000_000
    assert _size_bytes(BASE_DIR) <= BASE_LIMIT_BYTES


def test_base_has_the_files_of_a_hugging_face_directory() -> None:
    """Config, safetensors, tokenizer, chat template and generation config, and nothing else."""
    assert {path.name for path in BASE_DIR.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("job", [*JOBS, CALCULATOR], ids=lambda job: job.name)
def test_adapter_is_a_peft_directory_of_its_rank(job: Recipe) -> None:
    """Rank and targets of the config, the shapes of all tensors, and the size on disk; one has a chat template."""
    directory = ADAPTERS_DIR / job.name
    others = {"chat_template.jinja"} if job is CALCULATOR else set()
    assert {path.name for path in directory.iterdir()} - others == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["r"] == job.rank
    assert sorted(config["target_modules"]) == sorted(job.targets)
    shapes = _shapes(directory / "adapter_model.safetensors")
    assert all(shape[0 if ".lora_A." in name else 1] == job.rank for name, shape in shapes.items())
    assert _size_bytes(directory) <= ADAPTER_LIMIT_BYTES


def test_ranks_are_4_8_16_and_32() -> None:
    """Five adapters, four ranks, and no other directory beside them."""
    assert [job.rank for job in JOBS] == [4, 8, 16, 32]
    assert {path.name for path in ADAPTERS_DIR.iterdir()} == {recipe.name for recipe in (*JOBS, CALCULATOR)}
