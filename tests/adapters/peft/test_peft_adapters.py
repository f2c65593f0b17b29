"""Adapters that PEFT itself wrote: every kind of target binds, and ranks, scalings and weights are PEFT's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from adapters.errors import AdapterError, BindingError, Unsupported
from adapters.files.manifest import AdapterRecord
from adapters.memory.host_tier import read_adapter
from adapters.memory.row_pool import RowPool
from adapters.row_plan import plan_rows
from adapters.store.store import AdapterStore, StoreLimits
from service.models.layouts import layout_of
from tests.support.models.tiny_models import LINEAR_MODULES, make_adapter, make_tiny_model

LINEAR = "the family's linear modules"
KINDS: dict[str, dict[str, Any]] = {
    "every linear module": {"rank": 4, "target_modules": LINEAR},
    "all-linear": {"rank": 6, "target_modules": "all-linear"},
    "regular expression, rsLoRA": {"rank": 5, "target_modules": r".*\.(q_proj|v_proj)$", "use_rslora": True},
    "rank and alpha patterns": {
        "rank": 4,
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 7, r"layers\.1\..*v_proj": 3},
        "alpha_pattern": {"k_proj": 5, r"^model.layers.1.self_attn.q_proj": 2.5},
    },
    "patterns with rsLoRA": {
        "rank": 4,
        "target_modules": ["q_proj"],
        "use_rslora": True,
        "rank_pattern": {"1.self_attn.q_proj": 9},
    },
    "embedding and head": {"rank": 3, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "embedding and head with copies of the base": {
        "rank": 3,
        "target_modules": ["embed_tokens", "lm_head"],
        "save_embedding_layers": True,
    },
    "some layers": {"rank": 2, "target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded modules": {"rank": 2, "target_modules": LINEAR, "exclude_modules": ["k_proj"]},
    "rank 1": {"rank": 1, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "lfm2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, make_tiny_model(request.param, directory / "base")


@pytest.fixture
def store(base: tuple[str, Path], tmp_path: Path) -> Iterator[AdapterStore]:
    layout = layout_of(json.loads((base[1] / "config.json").read_text()))
    opened = AdapterStore(
        tmp_path / "store",
        layout,
        StoreLimits(free_disk_floor_bytes=0),
        base_name="base",
        base_dir=base[1],
        row_plan=plan_rows(layout, 16 << 20, element_bytes=4),
    )
    yield opened
    opened.check_integrity()
    opened.close()


def make(base: tuple[str, Path], directory: Path, **kind: Any) -> Path:
    if kind["target_modules"] == LINEAR:
        kind["target_modules"] = LINEAR_MODULES[base[0]]
    return make_adapter(base[1], directory, seed=3, **kind)


def take(store: AdapterStore, directory: Path) -> AdapterRecord:
    with store.begin() as upload:
        upload.add_directory(directory)
        return upload.finish("x")[0]


def peft_modules(base_dir: Path, adapter_dir: Path) -> dict[str, Any]:
    """Module path -> PEFT's LoRA layer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base_dir)
    named = PeftModel.from_pretrained(model, adapter_dir).named_modules()
    return {
        name.removeprefix("base_model.model."): module
        for name, module in named
        if isinstance(getattr(module, "scaling", None), dict)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_wrote_is_what_the_device_holds(
    base: tuple[str, Path], store: AdapterStore, tmp_path: Path, kind: str
) -> None:
    directory = make(base, tmp_path / "adapter", **KINDS[kind])
    record = take(store, directory)
    truth = peft_modules(base[1], directory)
    assert {report.module for report in record.manifest.modules} == set(truth)
    layout = layout_of(json.loads((base[1] / "config.json").read_text()))
    adapter = read_adapter(tmp_path / "store", layout, record.digest, torch.float32)
    for module, layer in truth.items():
        held = adapter.slices[module]
        assert held.scaling == layer.scaling["default"]
        assert held.rank == layer.r["default"]
        if layer.lora_embedding_A:
            a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
        else:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert torch.equal(held.a, a.detach())
        assert torch.equal(held.b, b.detach().t())
    pool = RowPool(layout_of(json.loads((base[1] / "config.json").read_text())), 16 << 20)
    assert pool.load(record.digest, adapter)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(
    base: tuple[str, Path], store: AdapterStore, tmp_path: Path, setting: dict[str, Any], says: str
) -> None:
    directory = make(base, tmp_path / "adapter", rank=2, target_modules=["q_proj"], **setting)
    with pytest.raises(Unsupported, match=says):
        take(store, directory)


@pytest.mark.parametrize(
    "setting", [{"use_dora": True}, {"lora_bias": True}, {"trainable_token_indices": [1, 2]}], ids=str
)
def test_its_tensors_are_refused_even_when_the_config_hides_the_setting(
    base: tuple[str, Path], store: AdapterStore, tmp_path: Path, setting: dict[str, Any]
) -> None:
    directory = make(base, tmp_path / "adapter", rank=2, target_modules=["q_proj"], **setting)
    fields = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(fields | dict.fromkeys(setting)))
    with pytest.raises(BindingError):
        take(store, directory)


@pytest.mark.parametrize("family", ["llama"])
def test_an_adapter_of_another_base_is_refused(store: AdapterStore, tmp_path: Path, family: str) -> None:
    other = make_tiny_model(family, tmp_path / "other", hidden_size=96)
    directory = make_adapter(other, tmp_path / "adapter", rank=4, target_modules=["q_proj"], seed=0)
    with pytest.raises(AdapterError, match="does not fit"):
        take(store, directory)


def test_biases_of_convolutions_are_refused_and_those_of_adapted_projections_bind(tmp_path: Path) -> None:
    base_dir = make_tiny_model("lfm2", tmp_path / "base", conv_bias=True)
    linear = LINEAR_MODULES["lfm2"]
    for bias in ("all", "lora_only"):
        make_adapter(base_dir, tmp_path / bias, rank=2, target_modules=linear, seed=3, bias=bias)
    layout = layout_of(json.loads((base_dir / "config.json").read_text()))
    limits = StoreLimits(free_disk_floor_bytes=0)
    with closing(AdapterStore(tmp_path / "store", layout, limits, base_name="base", base_dir=base_dir)) as store:
        report = take(store, tmp_path / "lora_only").manifest.modules
        with_bias = {one.module for one in report if "bias" in one.parts}
        assert with_bias == {f"model.layers.{at}.conv.{name}" for at in (0, 2) for name in ("in_proj", "out_proj")}
        with pytest.raises(BindingError, match=r"conv\.conv\.bias: adapters that change layers\.0\.conv\.conv are not"):
            take(store, tmp_path / "all")


def test_resized_embeddings_are_refused(base: tuple[str, Path], store: AdapterStore, tmp_path: Path) -> None:
    directory = make(base, tmp_path / "adapter", rank=4, target_modules=["embed_tokens"])
    other = make_tiny_model(base[0], tmp_path / "other", vocab_size=320)
    make_adapter(other, directory, rank=4, target_modules=["embed_tokens"], seed=0)
    with pytest.raises(AdapterError, match="does not fit"):
        take(store, directory)
