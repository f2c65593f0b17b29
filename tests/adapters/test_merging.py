"""Adapters merged into base directories, against PEFT's merge_and_unload and the base with the adapter beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from service.cli.main import main
from tests.adapters.peft.test_peft_adapters import KINDS, LINEAR
from tests.models.test_experts import PARAMETERS, all_in_one, rewrite
from tests.parity.test_kinds import kinds_of
from tests.support.http.server_process import wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.quantised_models import make_quantised
from tests.support.models.tiny_models import (
    DEQUANTISED,
    LINEAR_MODULES,
    WITH_EXPERTS,
    load_oracle,
    make_adapter,
    make_tiny_model,
)
from tests.tolerances import LOGITS

TOKENS = torch.arange(4, 44)[None]
INDEX = "model.safetensors.index.json"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


def assert_merged(base: Path, adapter: Path, out: Path, *, flags: tuple[str, ...] = (), merges: bool = True) -> None:
    """The logits are those of the base with the adapter; and of what PEFT merges, where it merges these."""
    assert main(["merge", str(base), str(adapter), str(out), *flags]) == 0
    merged = logits(load_oracle(out, torch.float32))
    beside = PeftModel.from_pretrained(load_oracle(base, torch.float32), str(adapter))
    torch.testing.assert_close(merged, logits(beside), atol=LOGITS[torch.float32], rtol=0)
    if merges:
        torch.testing.assert_close(merged, logits(beside.merge_and_unload()), atol=LOGITS[torch.float32], rtol=0)


WAYS = {f"peft {name}": kind for name, kind in KINDS.items()}
CASES = [
    (family, kind)
    for family in ("qwen2", "llama", "gemma3_text")
    for kind in (WAYS | kinds_of(family))
    if (family == "qwen2" and kind != "bias-of-b")
    or kind in ("dora", "both", "norms", "tied-whole", "peft rank and alpha patterns")
]
# PEFT merges what belongs to the embedding or to the head alone into both where they are tied, though its own model
# computes with the two apart before.
NOT_AS_PEFT_MERGES = {
    ("qwen2", kind)
    for kind in (
        *("peft embedding and head", "peft embedding and head with copies of the base", "dora-embedding"),
        *("tied-lora", "tied-lora-of-other-rank", "tokens-of-both"),
    )
}


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_equal_those_of_the_base_with_the_adapter(family: str, kind: str, tmp_path: Path) -> None:
    spec = dict((WAYS | kinds_of(family))[kind])
    if spec["target_modules"] == LINEAR:
        spec["target_modules"] = LINEAR_MODULES[family]
    base = make_tiny_model(family, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", seed=5, **spec)
    assert_merged(base, adapter, tmp_path / "out", merges=(family, kind) not in NOT_AS_PEFT_MERGES)


@pytest.mark.parametrize(
    ("family", "is_packed"),
    [*((family, True) for family in ("qwen3_moe", "gpt_oss", *WITH_EXPERTS)), ("qwen3_moe", False), ("mixtral", False)],
)
def test_experts(family: str, is_packed: bool, tmp_path: Path) -> None:
    base = make_tiny_model(family, tmp_path / "base")
    if is_packed and family == "qwen3_moe":
        rewrite(base, all_in_one)
    adapter = make_adapter(
        base, tmp_path / "adapter", rank=3, target_modules=["q_proj"], target_parameters=PARAMETERS, seed=4
    )
    assert_merged(base, adapter, tmp_path / "out")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("merging") / "base")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base, tmp_path_factory.mktemp("adapter"), rank=3, target_modules=["q_proj"], seed=2)


def in_shards(base: Path, out: Path) -> Path:
    """The model with a tensor that no text needs, in two files, and a side file."""
    shutil.copytree(base, out)
    tensors = load_file(out / "model.safetensors") | {"model.visual.x": torch.arange(3, dtype=torch.int64)}
    (out / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{1 + (at % 2)}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, out / file, {"format": "pt"})
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (out / "notes.md").write_text("of the publisher")
    (out / "pytorch_model.bin").write_bytes(b"a pickle")
    return out


def test_shards_keep_their_files_and_what_is_no_weight_is_copied(base: Path, adapter: Path, tmp_path: Path) -> None:
    sharded, out = in_shards(base, tmp_path / "sharded"), tmp_path / "out"
    assert_merged(sharded, adapter, out)
    before = json.loads((sharded / INDEX).read_text())["weight_map"]
    assert json.loads((out / INDEX).read_text())["weight_map"] == before
    for file in sorted(set(before.values())):
        old, new = load_file(sharded / file), load_file(out / file)
        assert {(name, one.dtype) for name, one in old.items()} == {(name, one.dtype) for name, one in new.items()}
        assert {name for name in old if not torch.equal(old[name], new[name])} == {
            name for name in old if "q_proj.weight" in name
        }
    kept = {path.name for path in sharded.iterdir()} - {"pytorch_model.bin"}
    assert {path.name for path in out.iterdir()} == kept
    for name in kept - set(before.values()) - {"config.json", INDEX}:
        assert (out / name).read_bytes() == (sharded / name).read_bytes()
    assert json.loads((out / "config.json").read_text()) == json.loads((sharded / "config.json").read_text())


def test_half_precision_is_rounded_once(adapter: Path, tmp_path: Path) -> None:
    base = make_tiny_model("qwen2", tmp_path / "base", dtype=torch.bfloat16)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out")]) == 0
    name = "model.layers.1.self_attn.q_proj"
    of_adapter = load_file(adapter / "adapter_model.safetensors")
    a, b = (of_adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    wanted = load_file(base / "model.safetensors")[f"{name}.weight"].float() + 2 * b @ a
    found = load_file(tmp_path / "out" / "model.safetensors")[f"{name}.weight"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted.bfloat16())


def test_a_head_that_is_no_longer_the_embedding_is_written(base: Path, tmp_path: Path, capsys: Any) -> None:
    adapter = make_adapter(base, tmp_path / "adapter", rank=3, target_modules=["embed_tokens"], seed=2)
    assert_merged(base, adapter, tmp_path / "out", merges=False)
    assert "no longer the embedding" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_templates_and_end_tokens_of_the_adapter_are_the_merged_model_s(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(adapter, tmp_path / "adapter")
    (own / "chat_template.jinja").write_text("{{ messages }}")
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [4]}))
    assert main(["merge", str(base), str(own), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"][-1] == 4


def test_a_quantised_base_is_refused_by_name_or_written_in_floats(tmp_path: Path, capsys: Any) -> None:
    base = make_quantised("fp8_channels", "llama", tmp_path / "base")
    adapter = make_adapter(base / DEQUANTISED, tmp_path / "adapter", rank=3, target_modules=["q_proj"], seed=2)
    for name in ("quantize_config.json", "hf_quant_config.json"):  # which loaders would believe
        (base / name).write_text("{}")
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out")]) == 1
    assert "compressed-tensors" in (told := capsys.readouterr().err) and "--dequantise" in told
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out"), "--dequantise"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not list((tmp_path / "out").glob("*quant*"))
    beside = PeftModel.from_pretrained(load_oracle(base / DEQUANTISED, torch.float32), str(adapter))
    merged = logits(load_oracle(tmp_path / "out", torch.float32))
    torch.testing.assert_close(merged, logits(beside), atol=LOGITS[torch.float32], rtol=0)


def test_the_merged_model_is_compared_with_the_adapter_beside_its_base(
    base: Path, adapter: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["merge", str(base), str(adapter)]
    assert main([*asked, str(tmp_path / "out")]) == 0
    assert "not compared with both: --check does that" in capsys.readouterr().out
    assert main([*asked, str(tmp_path / "checked"), "--check"]) == 0
    told = re.search(r"differ by at most (\S+) from .* by up to (\S+)\n", capsys.readouterr().out)
    assert told is not None
    lost, effect = map(float, told.groups())
    assert lost < LOGITS[torch.float32] < effect
    assert {path.name for path in (tmp_path / "checked").iterdir()} == {
        path.name for path in (tmp_path / "out").iterdir()
    }
    monkeypatch.setattr("service.models.merging._Changes.of", lambda *_: {})
    assert main([*asked, str(tmp_path / "wrong"), "--check"]) == 1
    assert "is not the base with the adapter" in capsys.readouterr().err
    assert not list(tmp_path.glob("*wrong*"))


@pytest.mark.parametrize(("family", "dtype"), [("gemma3_text", torch.bfloat16), ("qwen3_moe", torch.float32)])
def test_other_models_are_compared_too(family: str, dtype: torch.dtype, tmp_path: Path, capsys: Any) -> None:
    base = make_tiny_model(family, tmp_path / "base", dtype=dtype)
    adapter = make_adapter(base, tmp_path / "adapter", rank=3, target_modules=["q_proj"], seed=2, use_dora=True)
    assert main(["merge", str(base), str(adapter), str(tmp_path / "out"), "--check"]) == 0
    assert "log probabilities of 32 tokens" in capsys.readouterr().out


def refused(base: Path, adapter: Path, out: Path, capsys: Any) -> str:
    capsys.readouterr()  # making the adapter may have written something
    assert main(["merge", str(base), str(adapter), str(out)]) == 1
    told: str = capsys.readouterr().err
    assert "multilora: " in told and "Traceback" not in told
    assert not out.exists() and not list(out.parent.glob(f".{out.name}.*"))
    return told


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(
    base: Path, adapter: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert "adapter_config.json" in refused(base, tmp_path, out, capsys)
    assert "config.json" in refused(tmp_path, adapter, out, capsys)
    biased = make_adapter(base, tmp_path / "b", rank=2, target_modules=["o_proj"], seed=1, lora_bias=True)
    assert "lora_bias" in refused(base, biased, out, capsys)
    late = make_adapter(
        base, tmp_path / "late", rank=2, target_modules=["q_proj"], seed=1, alora_invocation_tokens=[5, 6]
    )
    assert "invocation" in refused(base, late, out, capsys)
    for inside in (base / "out", adapter / "in" / "out"):
        assert "lies in" in refused(base, adapter, inside, capsys)
        assert not (adapter / "in").exists()
    judge = make_adapter(base, tmp_path / "judge", rank=2, target_modules=["q_proj"], seed=1, num_labels=2)
    assert "score head" in refused(base, judge, out, capsys)
    other = make_tiny_model("llama", tmp_path / "other")
    assert "q_proj" in refused(other, adapter, out, capsys)
    cut = shutil.copytree(base, tmp_path / "cut")
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size - 8)
    assert "model.safetensors" in refused(cut, adapter, out, capsys)
    out.mkdir()
    assert main(["merge", str(base), str(adapter), str(out)]) == 1
    assert "is there already" in capsys.readouterr().err
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_merge_that_is_ended_leaves_no_directory(
    base: Path, adapter: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    """Where all weights are written, it stands still in the first copy of another file."""
    arguments = ["merge", str(base), str(adapter), str(tmp_path / "out")]
    standing = tmp_path / "standing"
    # Sent while the weights are written, a signal's exception may end in a destructor, which Python ignores.
    code = f"""
import pathlib, shutil, signal, sys
from service.cli.main import main

def stand_still(*_):
    pathlib.Path({str(standing)!r}).touch()
    signal.pause()

shutil.copyfile = stand_still
sys.exit(main({arguments!r}))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_for(standing.exists, "the weights")
        assert list(tmp_path.glob(".out.*/new/model.safetensors"))
        process.send_signal(ending)
        code_of_end = process.wait(LIMIT_SECONDS)
    assert not (tmp_path / "out").exists()
    if ending != signal.SIGKILL:
        assert (code_of_end, list(tmp_path.glob(".out.*"))) == (128 + ending, [])
    assert_merged(base, adapter, tmp_path / "out")
