"""Adapters that leave the store: PEFT loads them, with the logits of what was uploaded, and the same digest comes of
them when they are uploaded again."""

from __future__ import annotations

import io
import json
import tarfile
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from adapters.store.store import AdapterStore, StoreLimits
from service.models.layouts import layout_in
from tests.adapters.peft.test_peft_adapters import KINDS, LINEAR
from tests.models.test_experts import PARAMETERS
from tests.parity.test_kinds import kinds_of
from tests.support.models.split_projections import load_packed, load_split
from tests.support.models.tiny_models import (
    LINEAR_MODULES,
    WITH_EXPERTS,
    load_classifier,
    load_oracle,
    make_adapter,
    make_tiny_model,
)
from tests.tolerances import LOGITS

TENSORS = "adapter_model.safetensors"
FILES = {"adapter_config.json", TENSORS}


def store_at(root: Path, base: Path) -> AdapterStore:
    limits = StoreLimits(free_disk_floor_bytes=0)
    return AdapterStore(root, layout_in(base), limits, base_name="base", base_dir=base)


def take(store: AdapterStore, directory: Path, name: str = "x") -> str:
    with store.begin() as upload:
        upload.add_directory(directory)
        return upload.finish(name)[0].digest


def unpacked(store: AdapterStore, name: str, out: Path) -> Path:
    with store.lease(name) as lease, tarfile.open(fileobj=io.BytesIO(b"".join(store.archive(lease.record)))) as packed:
        packed.extractall(out, filter="data")
    return out


def there_and_back(base: Path, directory: Path, tmp_path: Path) -> Path:
    """The directory that comes out; it is the same adapter in another store."""
    with closing(store_at(tmp_path / "store", base)) as store:
        digest = take(store, directory)
        out = unpacked(store, "x", tmp_path / "out")
    with closing(store_at(tmp_path / "other-store", base)) as other:
        assert take(other, out) == digest
    return out


def logits(base: Path, adapter: Path, load: Any = load_oracle) -> torch.Tensor:
    with warnings.catch_warnings():
        # An adapter that is not loaded whole is none.
        warnings.filterwarnings("error", message=".*(missing|unexpected).*keys")
        model = PeftModel.from_pretrained(load(base, torch.float32), str(adapter)).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(4, 44)[None]).logits
    return found


WAYS = {f"peft {name}": kind for name, kind in KINDS.items()}


def all_kinds(family: str) -> dict[str, dict[str, Any]]:
    return WAYS | kinds_of(family)


# Of the base whose head is no embedding and of one with biases and a tied head all kinds; of others those that differ.
QUICK = ("dora-rs", "both", "tokens-of-both", "own-biases", "peft rank and alpha patterns")
CASES = [
    pytest.param(family, kind, marks=() if family == "lfm2" or kind in QUICK else pytest.mark.wide)
    for family in ("llama", "qwen2", "lfm2", "gemma3_text")
    for kind in all_kinds(family)
    if family in ("llama", "qwen2") or kind in ("dora", "tokens", "tied-whole")
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_peft_wrote_comes_out_as_peft_reads_it(family: str, kind: str, tmp_path: Path) -> None:
    spec = dict(all_kinds(family)[kind])
    if spec["target_modules"] == LINEAR:
        spec["target_modules"] = LINEAR_MODULES[family]
    base = make_tiny_model(family, tmp_path / "base")
    directory = make_adapter(base, tmp_path / "adapter", seed=5, **spec)
    out = there_and_back(base, directory, tmp_path)
    assert load_file(out / TENSORS).keys() <= load_file(directory / TENSORS).keys()
    torch.testing.assert_close(logits(base, out), logits(base, directory), atol=LOGITS[torch.float32], rtol=0)


def test_a_canonical_upload_comes_out_byte_for_byte(tmp_path: Path) -> None:
    base = make_tiny_model("llama", tmp_path / "base")
    directory = make_adapter(base, tmp_path / "adapter", rank=4, target_modules=["q_proj", "down_proj"], seed=1)
    out = there_and_back(base, directory, tmp_path)
    assert {path.name for path in out.iterdir()} == FILES
    for name in FILES:
        assert (out / name).read_bytes() == (directory / name).read_bytes()


@pytest.mark.parametrize("form", ["as PEFT wrote it", "labels beside it", "another name"])
def test_score_heads_come_out_with_their_labels(form: str, tmp_path: Path) -> None:
    base = make_tiny_model("llama", tmp_path / "base")
    spec: dict[str, Any] = {"rank": 4, "target_modules": ["q_proj"], "num_labels": 3, "has_head_bias": True}
    sent = make_adapter(base, tmp_path / "adapter", seed=5, **spec)

    def load(path: Path, dtype: torch.dtype) -> Any:
        return load_classifier(path, 3, has_head_bias=True).to(dtype)

    expected, config = logits(base, sent, load), json.loads((sent / "adapter_config.json").read_text())
    facts = {"id2label": {"0": "sad", "1": "so so", "2": "glad"}, "problem_type": "multi_label_classification"}
    if form != "as PEFT wrote it":
        (sent / "config.json").write_text(json.dumps(facts))
    if form == "another name":
        tensors = load_file(sent / TENSORS)
        save_file({name.replace(".score.", ".classifier."): one for name, one in tensors.items()}, sent / TENSORS)
        changed = {**config, "task_type": None, "modules_to_save": ["classifier"]}
        (sent / "adapter_config.json").write_text(json.dumps(changed))
    out = there_and_back(base, sent, tmp_path)
    written = json.loads((out / "adapter_config.json").read_text())
    if form == "as PEFT wrote it":
        assert (out / "adapter_config.json").read_bytes() == (sent / "adapter_config.json").read_bytes()
    elif form == "labels beside it":
        assert written == {**config, **facts}
    else:
        assert {name: written[name] for name in facts} == facts
    torch.testing.assert_close(logits(base, out, load), expected, atol=LOGITS[torch.float32], rtol=0)


SPLIT = {
    "parts": ("phi3", load_split, {"target_modules": ["q_proj", "v_proj", "up_proj"]}),
    "parts-rs": ("phi3", load_split, {"target_modules": ["q_proj", "v_proj", "up_proj"], "use_rslora": True}),
    "packed": ("llama", load_packed, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "packed-dora": ("llama", load_packed, {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}),
    "qwen": ("qwen3_5_text", load_split, {"target_modules": ["in_proj_q", "in_proj_v", "q_proj"]}),
}


@pytest.mark.parametrize("case", SPLIT)
def test_other_modules_than_the_base_s_come_out_as_the_base_s(case: str, tmp_path: Path) -> None:
    family, load, spec = SPLIT[case]
    base = make_tiny_model(family, tmp_path / "base")
    directory = make_adapter(base, tmp_path / "adapter", seed=5, rank=4, load=load, **spec)
    out = there_and_back(base, directory, tmp_path)
    torch.testing.assert_close(logits(base, out), logits(base, directory, load), atol=LOGITS[torch.float32], rtol=0)


EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"rank": 2, "target_modules": ["q_proj"], "target_parameters": PARAMETERS},
    "all-linear": {"rank": 3, "target_modules": "all-linear", "target_parameters": PARAMETERS, "use_rslora": True},
    "down": {"rank": 5, "target_modules": [], "target_parameters": PARAMETERS[1:], "rank_pattern": {"down_proj": 1}},
}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", *WITH_EXPERTS])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_come_out_as_parameters(family: str, kind: str, tmp_path: Path) -> None:
    base = make_tiny_model(family, tmp_path / "base")
    directory = make_adapter(base, tmp_path / "adapter", seed=5, **EXPERTS[kind])
    out = there_and_back(base, directory, tmp_path)
    torch.testing.assert_close(logits(base, out), logits(base, directory), atol=LOGITS[torch.float32], rtol=0)
