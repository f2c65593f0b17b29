"""Loading: what a broken checkpoint's sentence names, which dtype is computed in, what is logged."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from service.models.loader import load_model
from service.models.spec.config_json import ModelError
from tests.support.models.tiny_models import EMBEDDING, HEAD, make_tiny_model, make_wrongly_tied_model

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny_model("qwen3", tmp_path)


def edit_tensors(model_dir: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    edit(tensors)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})


def sentence(model_dir: Path, dtype: str = "auto") -> str:
    with pytest.raises(ModelError) as caught:
        load_model(model_dir, dtype=dtype)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.__delitem__(NORM))
    said = sentence(model_dir)
    assert f"no tensor {NORM}" in said and "download it again" in said


def test_a_misshapen_tensor_is_named_with_both_shapes(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.update({NORM: torch.zeros(47)}))
    assert sentence(model_dir) == (
        f"tensor {NORM} in model.safetensors has the shape [47], and config.json calls for [48]: "
        "take both from one download"
    )


def test_a_missing_slice_of_a_packed_projection_is_named(model_dir: Path) -> None:
    name = "model.layers.2.self_attn.k_proj.weight"
    edit_tensors(model_dir, lambda tensors: tensors.__delitem__(name))
    assert name in sentence(model_dir)


def test_a_tensor_of_another_dtype_is_named(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.update({NORM: torch.zeros(48, dtype=torch.float64)}))
    assert f"{NORM} in model.safetensors is F64" in sentence(model_dir)


def test_a_directory_without_safetensors_is_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    assert "pickled weights are never read" in sentence(model_dir)


def test_a_directory_without_a_config_is_refused(model_dir: Path) -> None:
    (model_dir / "config.json").unlink()
    assert "no config.json" in sentence(model_dir)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_git_lfs_pointer_is_told_as_one(model_dir: Path, name: str) -> None:
    (model_dir / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    assert f"{name} is a Git LFS pointer and not the file: run `git lfs pull`" in sentence(model_dir)


def test_a_git_lfs_pointer_that_nobody_reads_may_stay(model_dir: Path) -> None:
    (model_dir / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    load_model(model_dir)


def test_a_broken_config_is_refused(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("{")
    assert "config.json cannot be read" in sentence(model_dir)


def test_a_cut_file_is_refused(model_dir: Path) -> None:
    content = (model_dir / "model.safetensors").read_bytes()
    (model_dir / "model.safetensors").write_bytes(content[:-100])
    assert "cannot be read as safetensors" in sentence(model_dir)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_tiny_model("qwen3", tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in sentence(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd"])
def test_an_index_may_not_lead_outside(tmp_path: Path, file: str) -> None:
    make_tiny_model("qwen3", tmp_path, max_shard_size="100KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"][NORM] = file
    index_path.write_text(json.dumps(index))
    assert "not a file of" in sentence(tmp_path)


def test_an_unknown_dtype_is_refused(model_dir: Path) -> None:
    assert "'int8' is not served" in sentence(model_dir, "int8")


@pytest.mark.parametrize(
    ("stored", "wanted", "computed"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float32),
        (torch.float16, "float16", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
    ],
    ids=str,
)
def test_the_dtype_computed_in_is_chosen_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: torch.dtype, wanted: str, computed: torch.dtype
) -> None:
    make_tiny_model("lfm2", tmp_path, dtype=stored)
    with caplog.at_level(logging.INFO, "service.models.loader"):
        assert load_model(tmp_path, dtype=wanted).dtype == computed
    assert f"computing in {str(computed).removeprefix('torch.')}" in caplog.text


def test_the_stored_dtype_counts_where_config_json_is_silent(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    edit_tensors(model_dir, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    assert load_model(model_dir).dtype == torch.bfloat16


def test_tensors_that_nobody_uses_are_named_in_a_warning(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(model_dir, lambda tensors: tensors.update({bias: torch.zeros(192), HEAD: tensors[EMBEDDING].clone()}))
    load_model(model_dir)
    assert warnings_of(caplog) == [f"the model does not use these tensors of the checkpoint: {bias}"]


def test_a_head_that_contradicts_a_tied_config_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That it is used, and how, is for the parity tests."""
    load_model(make_wrongly_tied_model("qwen3", tmp_path))
    assert warnings_of(caplog) == [
        "the checkpoint's lm_head.weight differs from the token embedding, so it is used as it is, although "
        "config.json ties the two (its tie_word_embeddings or tie_embedding should be false)"
    ]


def test_a_misshapen_head_is_named_even_where_config_json_ties_it(model_dir: Path) -> None:
    edit_tensors(model_dir, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING][:-1].clone()}))
    assert f"{HEAD} in model.safetensors has the shape [303, 48]" in sentence(model_dir)
