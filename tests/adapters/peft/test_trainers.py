"""What trainers leave in an adapter's directory, by hand after their documented layouts: each is the same adapter."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapters.errors import Malformed, Unsupported
from adapters.files.manifest import AdapterRecord
from adapters.store.store import AdapterStore, StoreLimits
from tests.support.adapter_files import lora_tensors, modules_ending, safetensors_bytes, small_layout

LAYOUT = small_layout()
MODULES = modules_ending(LAYOUT, "q_proj", "v_proj")
TENSORS = lora_tensors(LAYOUT, MODULES, 4, prefix="")
INDEX = "adapter_model.safetensors.index.json"

# What PEFT 0.19 writes for a plain adapter, settings that are off included.
PEFT: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "base",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.19.1",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["v_proj", "q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}
# The expression that Unsloth's FastModel writes in the place of names.
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|v_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|v_proj)))"
)
STATE = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth")
# What accelerate writes for FSDP, and DeepSpeed in a directory below.
FSDP_STATE = ("optimizer.bin", "pytorch_model_fsdp.bin", "optimizer_1.bin", "random_states_0.pkl", "sampler.bin")
DEEPSPEED_STATE = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
)
# Trainer -> settings beside or in the place of PEFT's, what stands before the modules' names, other files.
TRAINERS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "PEFT": ({}, "base_model.model.", ("README.md",)),
    "Unsloth": (
        {
            "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "x", "unsloth_fixed": True},
            "target_modules": UNSLOTH,
            "lora_dropout": 0,
        },
        "base_model.model.",
        ("README.md", "trainer_state.json"),
    ),
    "LLaMA-Factory": (
        {"init_lora_weights": True, "lora_dropout": 0.0},
        "base_model.model.",
        ("README.md", "training_args.bin", "trainer_state.json", "all_results.json", "training_loss.png"),
    ),
    "TRL": ({}, "base_model.model.", ("README.md", "trainer_state.json", *STATE)),
    "ms-swift": (
        {
            "target_modules": r"^(model(?=\.).*\.(q_proj|v_proj))$",
            "lora_dtype": None,
            "lorap_lr_ratio": 16.0,
            "lorap_emb_lr": 1e-06,
        },
        "base_model.model.",
        ("args.json", "additional_config.json", "configuration.json", *STATE),
    ),
    "Axolotl with FSDP": (
        {},
        "base_model.model._fsdp_wrapped_module.",
        ("config.json", "debug.log", *STATE, *FSDP_STATE),
    ),
    "NeMo": (
        {"target_modules": [module.removeprefix("model.") for module in MODULES], "lora_dropout": 0.0},
        "base_model.model.",
        ("automodel_peft_config.json",),
    ),
    "LoRA+ (whole paths)": ({"target_modules": MODULES}, "", ()),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    opened = AdapterStore(tmp_path / "store", LAYOUT, StoreLimits(free_disk_floor_bytes=0), base_name="base")
    yield opened
    opened.check_integrity()
    opened.close()


def write(directory: Path, trainer: str, weights: Mapping[str, bytes] | None = None) -> Path:
    settings, prefix, others = TRAINERS[trainer]
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(PEFT | settings))
    named = {prefix + name: data for name, data in TENSORS.items()}
    weights = {"adapter_model.safetensors": safetensors_bytes(named)} if weights is None else weights
    for name, data in weights.items():
        (directory / name).write_bytes(data)
    for name in others:
        (directory / name).write_bytes(b"\x80\x04 not to be opened")
    (directory / "checkpoint-10").mkdir()
    return directory


def take(store: AdapterStore, directory: Path) -> AdapterRecord:
    with store.begin() as upload:
        upload.add_directory(directory)
        return upload.finish("x")[0]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_trainers_directory_is_the_same_adapter(store: AdapterStore, tmp_path: Path, trainer: str) -> None:
    truth = take(store, write(tmp_path / "peft", "PEFT"))
    record = take(store, write(tmp_path / "trained", trainer))
    assert record.digest == truth.digest
    assert [one.module for one in record.manifest.modules] == MODULES
    for name in TRAINERS[trainer][2]:
        assert any(name in note for note in record.manifest.notes), name


def test_an_archive_may_hold_a_trainers_state(store: AdapterStore, tmp_path: Path) -> None:
    truth = take(store, write(tmp_path / "peft", "PEFT"))
    directory, archive = write(tmp_path / "trained", "TRL"), tmp_path / "trained.tar.gz"
    (directory / "global_step10").mkdir()
    for name in DEEPSPEED_STATE:
        (directory / "global_step10" / name).write_bytes(b"\x80\x04 not to be opened")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(directory, "trained")
    with store.begin() as upload:
        with upload.open_part("archive", archive.name) as part:
            part.write(archive.read_bytes())
        assert upload.finish("y")[0].digest == truth.digest


def shards() -> dict[str, bytes]:
    """Two of them, and their index."""
    named = {"base_model.model." + name: data for name, data in TENSORS.items()}
    names = sorted(named)
    parts = {f"adapter_model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    files = {file: safetensors_bytes({name: named[name] for name in held}) for file, held in parts.items()}
    return {**files, INDEX: json.dumps(index).encode()}


@pytest.mark.parametrize("without", [None, INDEX])
def test_shards_are_put_together(store: AdapterStore, tmp_path: Path, without: str | None) -> None:
    truth = take(store, write(tmp_path / "peft", "PEFT"))
    files = {name: data for name, data in shards().items() if name != without}
    assert take(store, write(tmp_path / "sharded", "PEFT", files)).digest == truth.digest


@pytest.mark.parametrize("part_name", [None, "adapter_model"])
def test_shards_may_come_as_parts(store: AdapterStore, tmp_path: Path, part_name: str | None) -> None:
    """Each under its own name, or all under that of the one file."""
    truth = take(store, write(tmp_path / "peft", "PEFT"))
    with store.begin() as upload:
        for name, data in {"adapter_config.json": json.dumps(PEFT).encode(), **shards()}.items():
            named = part_name if part_name is not None and name.endswith(".safetensors") else name
            with upload.open_part(named, name) as part:
                part.write(data)
        assert upload.finish("y")[0].digest == truth.digest


def broken(kind: str) -> dict[str, bytes]:
    files = shards()
    first, second, _ = files
    if kind == "one is missing":
        del files[second]
    elif kind == "one tensor twice":
        files[second] = files[first]
    elif kind == "another index":
        files[INDEX] = files[INDEX].replace(b"lora_A", b"lora_C")
    elif kind == "no index at all":
        files[INDEX] = b"{}"
    elif kind == "shards and the whole":
        files["adapter_model.safetensors"] = files[first]
    return files


@pytest.mark.parametrize(
    "kind", ["one is missing", "one tensor twice", "another index", "no index at all", "shards and the whole"]
)
def test_broken_shards_are_refused(store: AdapterStore, tmp_path: Path, kind: str) -> None:
    with pytest.raises(Malformed, match=r"shards|tensor|index"):
        take(store, write(tmp_path / "sharded", "PEFT", broken(kind)))


def test_a_pickle_is_refused_with_the_command_that_converts_it(store: AdapterStore, tmp_path: Path) -> None:
    """Tensors that share memory are converted too, as a tied head's weights do with the embedding's."""
    named = {f"base_model.model.{name}": torch.from_numpy(data) for name, data in TENSORS.items()}
    shared = torch.ones(4, 6)
    named |= {name: shared for name, tensor in named.items() if tensor.shape == shared.shape}
    weights = safetensors_bytes({name: tensor.numpy() for name, tensor in named.items()})
    truth = take(store, write(tmp_path / "peft", "PEFT", {"adapter_model.safetensors": weights}))
    directory = write(tmp_path / "old", "PEFT", {})
    torch.save(named, directory / "adapter_model.bin")
    with pytest.raises(Unsupported, match=r"a pickle.*leave it out.*python -c ") as refusal:
        take(store, directory)
    _, python, command = str(refusal.value).partition("python -c ")
    subprocess.run([sys.executable, *shlex.split(python + command)[1:]], cwd=directory, check=True)
    (directory / "adapter_model.bin").unlink()
    assert take(store, directory).digest == truth.digest


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "olora", "corda", "lora_ga"])
def test_what_is_no_difference_is_refused_with_the_way_to_make_it_one(
    store: AdapterStore, tmp_path: Path, init: str
) -> None:
    directory = write(tmp_path / "init", "PEFT")
    (directory / "adapter_config.json").write_text(json.dumps(PEFT | {"init_lora_weights": init}))
    with pytest.raises(Unsupported, match="path_initial_model_for_weight_conversion"):
        take(store, directory)


def test_what_can_be_no_difference_is_refused_with_the_base_that_it_needs(store: AdapterStore, tmp_path: Path) -> None:
    """LoftQ rounds the base's weights: what PEFT would save as a difference is not the trained model."""
    directory = write(tmp_path / "init", "PEFT")
    (directory / "adapter_config.json").write_text(json.dumps(PEFT | {"init_lora_weights": "loftq"}))
    with pytest.raises(Unsupported, match="serve the base that LoftQ has made") as refusal:
        take(store, directory)
    assert "path_initial_model" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["VERA", "IA3", "LOHA", "ADALORA"])
def test_other_kinds_of_adapters_are_refused_by_name(store: AdapterStore, tmp_path: Path, kind: str) -> None:
    directory = write(tmp_path / "other", "PEFT")
    (directory / "adapter_config.json").write_text(json.dumps(PEFT | {"peft_type": kind}))
    with pytest.raises(Unsupported, match=kind):
        take(store, directory)


def test_the_load_report_says_what_bound_where(store: AdapterStore, tmp_path: Path) -> None:
    module = MODULES[0]
    named = {f"base_model.model.{name}": data for name, data in TENSORS.items() if name.startswith(module)}
    named[f"base_model.model.{module}.lora_magnitude_vector"] = np.ones(8, "<f4")
    named["base_model.model.lm_head.modules_to_save.default.weight"] = np.ones((14, 6), "<f4")
    directory = write(tmp_path / "dora", "PEFT", {"adapter_model.safetensors": safetensors_bytes(named)})
    settings = {"use_dora": True, "modules_to_save": ["lm_head"], "target_modules": [module]}
    (directory / "adapter_config.json").write_text(json.dumps(PEFT | settings))
    manifest = take(store, directory).manifest
    assert [(one.module, one.rank, one.parts) for one in manifest.modules] == [
        (module, 4, ("lora_magnitude_vector",)),
        ("lm_head", 0, ("weight",)),
    ]
    assert manifest.rows == {"attention": 4, "vectors": 1, "saved_head": 1}
