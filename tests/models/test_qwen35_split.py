"""Adapters with in_proj_q, in_proj_k and in_proj_v in the place of in_proj_qkv: what binds, and what is refused. What
comes of those that bind is in tests/parity/test_split_projections.py."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from adapters.errors import BindingError, Malformed, RowsExceeded
from adapters.files.safetensors_header import Tensor
from adapters.peft.binding import bind
from adapters.peft.config import parse_config
from adapters.row_plan import plan_rows
from adapters.store.store import AdapterStore
from adapters.upload.validate import bind_header, check_binding
from service.models.layouts import layout_of
from tests.models.test_qwen35 import text_config

SPLIT = {"in_proj_q": 24, "in_proj_k": 24, "in_proj_v": 32}


def split_adapter(
    parts: Sequence[str] = tuple(SPLIT), target_modules: Any = None, layers: Sequence[int] = (0, 1, 3), **fields: Any
) -> tuple[Any, dict[str, Tensor]]:
    """An adapter's configuration and its tensors, of rank 4 unless rank_pattern says otherwise, for these parts of
    in_proj_qkv in these layers."""
    tensors, ranks = {}, fields.get("rank_pattern", {})
    for layer in layers:
        for name in parts:
            rank = ranks.get(name, 4)
            shapes = {"lora_A.weight": (rank, 48), "lora_B.weight": (SPLIT[name], rank)}
            if fields.get("use_dora"):
                shapes["lora_magnitude_vector"] = (SPLIT[name],)  # type: ignore[assignment]
            for side, shape in shapes.items():
                key = f"base_model.model.model.layers.{layer}.linear_attn.{name}.{side}"
                tensors[key] = Tensor(key, "F32", shape, 0, 4 * math.prod(shape))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": target_modules or list(parts), **fields}
    return parse_config(json.dumps(config).encode()), tensors


def problems_of(config: Any, tensors: dict[str, Tensor]) -> tuple[tuple[str, str], ...]:
    with pytest.raises(BindingError) as caught:
        bind(layout_of(text_config()), config, tensors)
    return caught.value.problems


def test_parts_of_a_projection_that_a_trainer_adapts_apart_bind_together() -> None:
    """Their ranks add up."""
    adapter = split_adapter(rank_pattern={"in_proj_k": 6}, alpha_pattern={"in_proj_v": 2})
    binding = bind(layout_of(text_config()), *adapter)
    assert [one.slice.module for one in binding.slices] == [
        f"model.layers.{i}.linear_attn.in_proj_qkv" for i in (0, 1, 3)
    ]
    assert [(one.rank, one.scaling, one.a.shape, one.b.shape) for one in binding.slices] == [
        (14, 1.0, (14, 48), (80, 14))
    ] * 3
    assert binding.rows == {"operator": 14} and binding.notes == ()


@pytest.mark.parametrize(
    "targets", ["all-linear", list(SPLIT), r".*\.in_proj_[qkv]"], ids=["all", "list", "expression"]
)
def test_a_part_that_is_named_and_has_no_tensors_is_refused(targets: Any) -> None:
    config, tensors = split_adapter(("in_proj_q", "in_proj_v"), targets)
    named = {name for name, reason in problems_of(config, tensors) if "no tensors" in reason}
    assert named >= {f"model.layers.{layer}.linear_attn.in_proj_k" for layer in (0, 1, 3)}
    assert not any(name.endswith(("in_proj_q", "in_proj_v", "in_proj_qkv", "in_proj_qkvz")) for name in named)


def test_a_layer_without_any_part_is_refused_by_the_parts_names() -> None:
    problems = problems_of(*split_adapter(layers=(0, 3)))
    reason = "target_modules names it, but the file has no tensors for it"
    assert problems == tuple((f"model.layers.1.linear_attn.{name}", reason) for name in SPLIT)
    config, tensors = split_adapter(layers=(0, 3), layers_to_transform=[0, 3])
    assert len(bind(layout_of(text_config()), config, tensors).slices) == 2


def test_parts_of_a_projection_that_is_named_as_a_whole_must_all_be_there() -> None:
    """Who took the adapter of the whole apart has lost one; where parts are named too, these alone were trained."""
    whole = split_adapter(target_modules=["in_proj_qkv"])
    assert len(bind(layout_of(text_config()), *whole).slices) == 3
    reason = "target_modules names it, but the file has no tensors for it"
    lost = tuple((f"model.layers.{layer}.linear_attn.in_proj_v", reason) for layer in (0, 1, 3))
    assert problems_of(*split_adapter(("in_proj_q", "in_proj_k"), ["in_proj_qkv"])) == lost
    assert problems_of(*split_adapter(("in_proj_q", "in_proj_k"), r".*\.in_proj_qkv")) == lost
    named = split_adapter(("in_proj_q", "in_proj_k"), ["in_proj_q", "in_proj_k", "in_proj_qkv"])
    assert len(bind(layout_of(text_config()), *named).slices) == 3


def test_parts_with_tensors_that_are_not_named_are_refused() -> None:
    problems = problems_of(*split_adapter(target_modules=["in_proj_q", "in_proj_k"]))
    assert problems == tuple(
        (f"model.layers.{i}.linear_attn.in_proj_v", "the file has tensors for it, but target_modules does not name it")
        for i in (0, 1, 3)
    )


@pytest.mark.parametrize("other", ["in_proj_qkv", "in_proj_qkvz"])
def test_a_projection_that_is_adapted_whole_and_in_parts_is_refused(other: str) -> None:
    """The model that it was trained on has either."""
    config, tensors = split_adapter(("in_proj_k",), ["in_proj_k", other], layers_to_transform=[0], layers=(0,))
    stem = f"base_model.model.model.layers.0.linear_attn.{other}"
    for side, shape in (("A", (4, 48)), ("B", (80 if other == "in_proj_qkv" else 112, 4))):
        key = f"{stem}.lora_{side}.weight"
        tensors[key] = Tensor(key, "F32", shape, 0, 4 * math.prod(shape))
    ((name, reason),) = problems_of(config, tensors)
    assert name.endswith("in_proj_k") and f"{other} changes the same rows" in reason and "in one way" in reason


@pytest.mark.parametrize("parts", [tuple(SPLIT), ("in_proj_q", "in_proj_v")])
def test_magnitudes_of_all_or_some_parts_bind(parts: tuple[str, ...]) -> None:
    """Of rows that no part trains they are 0, as B is."""
    binding = bind(layout_of(text_config()), *split_adapter(parts, use_dora=True))
    assert [(one.part, one.tensor.shape) for one in binding.extras] == [("lora_magnitude_vector", (80,))] * 3


def test_a_part_of_another_shape_is_refused() -> None:
    config, tensors = split_adapter()
    key = "base_model.model.model.layers.1.linear_attn.in_proj_v.lora_B.weight"
    tensors[key] = replace(tensors[key], shape=(24, 4))
    assert problems_of(config, tensors) == (
        (key, "its shape is (24, 4); rank 4 of model.layers.1.linear_attn.in_proj_v needs (32, 4)"),
    )


def test_ranks_of_parts_that_add_up_to_too_many_are_refused_with_the_sum(tmp_path: Path) -> None:
    """Each of them fits the kernels of a device."""
    layout = layout_of(text_config())
    _, tensors = split_adapter(rank_pattern=dict.fromkeys(SPLIT, 100))
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    save_file({name: torch.ones(tensor.shape) for name, tensor in tensors.items()}, file)
    config.write_text(json.dumps({"peft_type": "LORA", "r": 100, "target_modules": list(SPLIT)}))
    plan = plan_rows(layout, 64 << 20, element_bytes=4, max_rank=256)
    with pytest.raises(RowsExceeded, match=r"rank 300 in .*in_proj_qkv, the sum of 100 \+ 100 \+ 100 of its parts"):
        check_binding(bind_header(config.read_bytes(), file, layout), file, plan, None)
    binding = bind_header(config.read_bytes(), file, layout)
    assert check_binding(binding, file, replace(plan, max_rank=300), None).slices


AGAIN: dict[str, tuple[dict[str, tuple[int, ...]], Any]] = {
    "split": ({f"model.layers.0.linear_attn.{name}": (size,) for name, size in SPLIT.items()}, list(SPLIT)),
    "merged": ({"model.layers.0.linear_attn.in_proj_qkvz": (112,)}, ["in_proj_qkvz"]),
    "whole-model": (
        {"model.language_model.layers.0.linear_attn.in_proj_z": (32,)},
        r"^(model\.language_model(?=\.).*\.layers\.0\..*in_proj_z)$",
    ),
}


@pytest.mark.parametrize("case", AGAIN)
def test_an_adapter_of_renamed_modules_that_comes_again_with_other_training_settings_is_no_news(
    case: str, tmp_path: Path
) -> None:
    """Its stored tensors have the base's names, which its configuration does not: it was taken for damaged, put in the
    place of itself, and read anew by the engine."""
    sizes, targets = AGAIN[case]
    tensors = {}
    for module, (rows,) in sizes.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.ones(4, 48)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.ones(rows, 4)
    gone: list[str] = []
    store = AdapterStore(tmp_path / "store", layout_of(text_config()), base_name="base", on_gone=gone.append)
    layers = [0] if isinstance(targets, list) else None
    config = {"peft_type": "LORA", "r": 4, "target_modules": targets, "layers_to_transform": layers}
    made = []
    for training in ({"lora_dropout": 0.1}, {"lora_dropout": 0, "inference_mode": True}):
        with store.begin() as upload:
            with upload.open_part("adapter_config") as part:
                part.write(json.dumps(config | training).encode())
            with upload.open_part("adapter_model") as part:
                part.write(save(tensors))
            made.append(upload.finish("again"))
    store.check_integrity()
    store.close()
    (first, is_new), (second, is_again_new) = made
    assert (is_new, is_again_new, gone) == (True, False, [])
    assert second.version == first.version


@pytest.mark.parametrize("part", SPLIT)
@pytest.mark.parametrize("side", ["A", "B"])
def test_a_part_that_is_none_is_refused_by_its_name(side: str, part: str, tmp_path: Path) -> None:
    """Not by that of the projection that the parts are put together to."""
    _, found = split_adapter()
    tensors = {name: torch.ones(tensor.shape) for name, tensor in found.items()}
    tensors[f"base_model.model.model.layers.3.linear_attn.{part}.lora_{side}.weight"][-1, 1] = torch.nan
    config = {"peft_type": "LORA", "r": 4, "target_modules": list(SPLIT), "alpha_pattern": {"in_proj_v": 2}}
    store = AdapterStore(tmp_path / "store", layout_of(text_config()), base_name="base")
    with store.begin() as upload:
        with upload.open_part("adapter_config") as opened:
            opened.write(json.dumps(config).encode())
        with upload.open_part("adapter_model") as opened:
            opened.write(save(tensors))
        with pytest.raises(Malformed, match=rf"model.layers.3.linear_attn.{part}.lora_{side}.weight' holds NaN"):
            upload.finish("none")
    store.close()
