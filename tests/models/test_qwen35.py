"""Qwen3.5 as it is published: text inside a larger model, under other names, beside parts that are not served."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.errors import BindingError
from adapters.files.safetensors_header import Tensor
from adapters.peft.binding import bind
from adapters.peft.config import parse_config
from service.models.families import model_spec
from service.models.layers.mixers import GatedDeltaNet
from service.models.layouts import layout_of
from service.models.loader import load_model
from service.models.spec.config_json import ModelError
from tests.models.test_parity import LENGTHS, oracle_logits, prompt
from tests.support.engine.hand_steps import HandDriver
from tests.support.models.tiny_models import make_tiny_model, tiny_config
from tests.tolerances import LOGITS


def text_config(**changes: Any) -> dict[str, Any]:
    return {**json.loads(tiny_config("qwen3_5_text").to_json_string(use_diff=False)), **changes}


def whole_config(**changes: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_5", "text_config": text_config(), **changes}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_text_of_a_whole_checkpoint_is_served(
    tied: bool, family: str, tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same tensors below model.language_model., beside a vision tower and layers for multi-token prediction."""
    text = make_tiny_model(f"{family}_text", tmp_path / "text", tie_word_embeddings=tied)
    tensors = load_file(text / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    # One of these ends like a tensor of layer 0.
    renamed["mtp.layers.0.input_layernorm.weight"] = torch.full((48,), torch.nan)
    renamed["model.visual.patch_embed.proj.weight"] = torch.full((3, 3), torch.nan)
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file(renamed, whole / "model.safetensors")
    inner = json.loads((text / "config.json").read_text())
    config = {"model_type": family, "text_config": inner, "tie_word_embeddings": tied, "dtype": "float32"}
    (whole / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO):
        loaded = load_model(whole, device=device)
    assert any("model.visual.*, mtp.*" in message for message in caplog.messages)
    assert not any("does not use" in message for message in caplog.messages)
    prompts = [prompt(length) for length in LENGTHS]
    driver = HandDriver(loaded)
    logits = driver.step([(driver.sequence(), tokens) for tokens in prompts], all_logits=True)
    expected = torch.cat(oracle_logits(text, prompts, torch.float32))
    torch.testing.assert_close(logits, expected, atol=LOGITS[torch.float32], rtol=0)


def test_what_is_stored_in_float32_beside_bfloat16_stays_exact(tmp_path: Path, device: str) -> None:
    """A_log and the norm of a delta net, as checkpoints of Qwen3.5 hold them; dt_bias is widened. Rounded again, states
    decay otherwise in each step."""
    model_dir = make_tiny_model("qwen3_5_text", tmp_path, dtype=torch.bfloat16)
    tensors = load_file(model_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in tensors:
        if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")):
            tensors[name] = 1 + torch.rand(tensors[name].shape, generator=generator)
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(model_dir, device=device)
    assert loaded.dtype == torch.bfloat16
    for index in (0, 1, 3):
        mixer, name = loaded.model.layers[index].mixer, f"model.layers.{index}.linear_attn."
        assert isinstance(mixer, GatedDeltaNet)
        held = {"A_log": mixer.a_log, "norm.weight": mixer.norm_weight, "dt_bias": mixer.dt_bias}
        for part, tensor in held.items():
            torch.testing.assert_close(tensor.cpu(), tensors[name + part].float(), atol=0, rtol=0)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no-text": (lambda: whole_config(text_config=None), "must have a text_config"),
    "gate": (lambda: text_config(attn_output_gate=False), "attn_output_gate"),
    "gate-type": (lambda: text_config(output_gate_type="sigmoid"), "'sigmoid'; served is silu"),
    "heads": (lambda: text_config(linear_num_value_heads=3), "3 value heads over 2 key heads"),
    "taps": (lambda: text_config(linear_conv_kernel_dim=9), "9 taps"),
    "kinds": (lambda: text_config(layer_types=["linear_attention"] * 3 + ["mamba"]), "mamba"),
    "share": (
        lambda: text_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 1.5}),
        "above 0 and at most 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named(case: str) -> None:
    config, words = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        model_spec(config())
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_published_sizes_are_read() -> None:
    """Qwen3.5-9B's config.json as it is published, fields that say what is the case anyway included."""
    text = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 12_288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248_320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }
    spec = model_spec({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False})
    assert [layer.mixer.name for layer in spec.layers[:4]] == ["linear_attn"] * 3 + ["self_attn"]
    assert len(spec.attentions) == 8 and len(spec.deltas) == 24
    assert spec.rotations[0].rotary_dim(spec.attentions[0].head_dim) == 64
    layout = layout_of({**text, "model_type": "qwen3_5_text"})
    sizes = {p.name: [piece.out_features for piece in p.slices] for p in layout.projections}
    assert sizes["model.layers.0.linear_attn.in_proj"] == [8192, 4096, 32, 32]
    assert sizes["model.layers.3.self_attn.qkv_proj"] == [8192, 1024, 1024]


def adapter_of(*paths: str) -> tuple[Any, dict[str, Tensor]]:
    """An adapter's configuration and tensors of rank 4 for these modules of the tiny text model."""
    sizes = {p.module: (q.in_features, p.out_features) for q in layout_of(text_config()).projections for p in q.slices}
    tensors = {}
    for path in paths:
        key = path.replace("model.language_model.", "model.").removeprefix("base_model.model.")
        in_features, out_features = sizes.get(key, (48, 48))
        for side, shape in (("A", (4, in_features)), ("B", (out_features, 4))):
            name = f"base_model.model.{path}.lora_{side}.weight"
            tensors[name] = Tensor(name, "F32", shape, 0, 4 * shape[0] * shape[1])
    targets = sorted({path.rsplit(".", 1)[-1] for path in paths})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets}
    return parse_config(json.dumps(config).encode()), tensors


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_adapters_of_both_classes_bind(prefix: str) -> None:
    """What AutoModelForCausalLM names, and what the class of the whole model does; every projection of a delta net."""
    names = [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")]
    paths = [f"{prefix}layers.{layer}.{name}" for layer in (0, 1, 3) for name in names]
    for layout in (layout_of(text_config()), layout_of(whole_config())):
        assert len(bind(layout, *adapter_of(*paths)).slices) == len(paths)


def test_modules_that_trainers_merge_are_taken_apart() -> None:
    """in_proj_qkvz and in_proj_ba: one A for both, and rows of B in their flat order."""
    layout = layout_of(text_config())
    sizes = {"in_proj_qkvz": (80, 32), "in_proj_ba": (4, 4)}
    tensors = {}
    for name, parts in sizes.items():
        for side, shape in (("A", (4, 48)), ("B", (sum(parts), 4))):
            key = f"base_model.model.model.layers.0.linear_attn.{name}.lora_{side}.weight"
            tensors[key] = Tensor(key, "F32", shape, 1000, 1000 + 4 * shape[0] * shape[1])
    fields = {"target_modules": list(sizes), "layers_to_transform": [0]}
    config = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, **fields}).encode()
    bound = {one.slice.module.rsplit(".", 1)[-1]: one for one in bind(layout, parse_config(config), tensors).slices}
    assert list(bound) == ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
    qkv, z = bound["in_proj_qkv"], bound["in_proj_z"]
    assert (qkv.b.shape, qkv.b.start, qkv.b.end) == ((80, 4), 1000, 2280)
    assert (z.b.shape, z.b.start, z.b.end) == ((32, 4), 2280, 2792)
    assert qkv.a is z.a
    key = "base_model.model.model.layers.0.linear_attn.in_proj_qkvz.lora_B.weight"
    wrong = {**tensors, key: Tensor(key, "F32", (111, 4), 0, 111 * 16)}
    with pytest.raises(BindingError, match=r"needs \(112, 4\)"):
        bind(layout, parse_config(config), wrong)


MERGED = {"in_proj_qkvz": 112, "in_proj_ba": 8}


def merged_adapter(target_modules: Any, layers: Sequence[int], **fields: Any) -> tuple[Any, dict[str, Tensor]]:
    """An adapter's configuration and its tensors of rank 4 for the merged modules of these layers."""
    tensors = {}
    for module in (f"model.layers.{layer}.linear_attn.{name}" for layer in layers for name in MERGED):
        for side, shape in (("A", (4, 48)), ("B", (MERGED[module.rsplit(".", 1)[-1]], 4))):
            key = f"base_model.model.{module}.lora_{side}.weight"
            tensors[key] = Tensor(key, "F32", shape, 0, 16 * max(shape))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": target_modules, **fields}
    return parse_config(json.dumps(config).encode()), tensors


@pytest.mark.parametrize("targets", [list(MERGED), r".*\.(in_proj_qkvz|in_proj_ba)"], ids=["list", "expression"])
def test_a_merged_module_that_is_named_and_has_no_tensors_is_refused(targets: Any) -> None:
    """As any other: the file was cut, and half an adapter is another one."""
    layout = layout_of(text_config())
    assert len(bind(layout, *merged_adapter(targets, (0, 1, 3))).slices) == 12
    with pytest.raises(BindingError) as caught:
        bind(layout, *merged_adapter(targets, (0, 3)))
    reason = "target_modules names it, but the file has no tensors for it"
    assert caught.value.problems == tuple((f"model.layers.1.linear_attn.{name}", reason) for name in MERGED)
    excluded = merged_adapter(targets, (0, 3), exclude_modules=r".*layers\.1\..*")
    assert len(bind(layout, *excluded).slices) == 8


def test_merged_modules_that_bind_are_not_noted_as_unknown() -> None:
    layout = layout_of(text_config())
    assert bind(layout, *merged_adapter(list(MERGED), (0, 1, 3))).notes == ()
    config, tensors = merged_adapter([*MERGED, "in_proj_kv"], (0, 1, 3))
    assert bind(layout, config, tensors).notes == ("target_modules names nothing in this base model with: in_proj_kv.",)


def test_names_of_merged_modules_say_nothing_where_a_trainer_does_not_merge() -> None:
    """A list for several models: PEFT passes over what its model does not have."""
    config, tensors = adapter_of("model.layers.2.self_attn.q_proj")
    binding = bind(layout_of(text_config()), replace(config, target_modules=("q_proj", *MERGED)), tensors)
    assert len(binding.slices) == 1
    assert binding.notes == (f"target_modules names nothing in this base model with: {', '.join(MERGED)}.",)


NOT_SERVED = {
    f"model.layers.0.linear_attn.{tensor}": f"adapters that change layers.0.linear_attn.{part} are not served"
    for part, tensor in (
        ("conv1d", "conv1d.lora_A.weight"),
        ("conv1d", "conv1d.modules_to_save.weight"),
        ("A_log", "A_log"),
        ("A_log", "A_log.lora_A.weight"),
        ("dt_bias", "dt_bias"),
        ("norm", "norm.weight"),
    )
}


@pytest.mark.parametrize("target", ["conv1d", "linear_attn.A_log", "dt_bias", "model.layers.1.linear_attn.norm"])
def test_a_target_that_no_adapter_changes_is_named_though_it_has_no_tensors(target: str) -> None:
    config, tensors = adapter_of("model.layers.2.self_attn.q_proj")
    assert bind(layout_of(text_config()), config, tensors).slices
    with pytest.raises(BindingError) as caught:
        bind(layout_of(text_config()), replace(config, target_modules=("q_proj", target)), tensors)
    part, layer = target.rsplit(".", 1)[-1], 1 if "layers" in target else 0
    assert caught.value.problems == (
        (
            f"target_modules '{target}'",
            f"adapters that change layers.{layer}.linear_attn.{part} are not served: train without it",
        ),
    )
    only_attention = replace(config, target_modules=("q_proj", "conv1d"), layers_to_transform=(2,))
    assert bind(layout_of(text_config()), only_attention, tensors).slices


EXPRESSIONS = {
    # PEFT makes LoRA of a convolution, and trains no norm.
    "conv1d": (r".*\.(q_proj|conv1d)", "model.", "linear_attn.conv1d"),
    "norm": (r".*(self_attn\.q_proj|linear_attn\.norm)", "model.", "linear_attn.norm"),
    "whole-model": (r"model\.language_model\..*(q_proj|conv1d)", "model.language_model.", "linear_attn.conv1d"),
}


@pytest.mark.parametrize("case", EXPRESSIONS)
def test_an_expression_that_matches_what_no_adapter_changes_is_refused_as_a_list_is(case: str) -> None:
    expression, prefix, part = EXPRESSIONS[case]
    config, tensors = adapter_of(f"{prefix}layers.2.self_attn.q_proj")
    with pytest.raises(BindingError) as caught:
        bind(layout_of(text_config()), replace(config, target_modules=expression), tensors)
    reason = f"adapters that change layers.0.{part} are not served: train without it"
    assert caught.value.problems == ((f"target_modules {expression!r}", reason),)
    excluded = replace(config, target_modules=expression, exclude_modules=r".*linear_attn.*")
    assert bind(layout_of(text_config()), excluded, tensors).slices


def test_an_expression_that_is_refused_is_told_by_its_beginning() -> None:
    """The answer has what was wrong, and is not as long as that."""
    config, tensors = adapter_of("model.layers.2.self_attn.q_proj")
    expression = rf".*\.(q_proj|conv1d)(?#{'x' * 10_000})"
    with pytest.raises(BindingError) as caught:
        bind(layout_of(text_config()), replace(config, target_modules=expression), tensors)
    ((name, _),) = caught.value.problems
    assert name == f"target_modules {expression[:200]!r}"


def test_parameters_that_an_expression_matches_are_no_modules() -> None:
    """PEFT looks for modules, so that an adapter of all that is left has all its tensors."""
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    config, tensors = adapter_of(*(f"model.layers.{layer}.linear_attn.{name}" for layer in (0, 1, 3) for name in names))
    expression = r".*linear_attn\.(?!conv1d|norm|act).*"
    binding = bind(layout_of(text_config()), replace(config, target_modules=expression), tensors)
    assert len(binding.slices) == len(tensors) / 2


@pytest.mark.parametrize("target_modules", [["q_proj"], r".*self_attn\.q_proj"], ids=["list", "expression"])
def test_a_module_to_save_that_no_adapter_changes_is_named_though_it_has_no_tensors(target_modules: Any) -> None:
    _, tensors = adapter_of("model.layers.2.self_attn.q_proj")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": target_modules}
    config = json.dumps({**fields, "modules_to_save": ["conv1d", "classifier"]})
    with pytest.raises(BindingError) as caught:
        bind(layout_of(text_config()), parse_config(config.encode()), tensors)
    reason = "adapters that change layers.0.linear_attn.conv1d are not served: train without it"
    assert caught.value.problems == (("modules_to_save 'conv1d'", reason),)


@pytest.mark.parametrize("modules_to_save", [None, ["conv1d", "norm"]], ids=["lora", "whole-modules"])
@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_no_adapter_changes_is_named_beside_what_binds(name: str, modules_to_save: list[str] | None) -> None:
    """One sentence for each, which says what to do."""
    _, tensors = adapter_of("model.layers.2.self_attn.q_proj")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    config |= {"modules_to_save": modules_to_save, "layers_to_transform": [2]}
    full = f"base_model.model.{name}"
    tensors[full] = Tensor(full, "F32", (4, 4), 0, 64)
    with pytest.raises(BindingError) as caught:
        bind(layout_of(whole_config()), parse_config(json.dumps(config).encode()), tensors)
    assert [problem[0] for problem in caught.value.problems] == [full]
    assert NOT_SERVED[name] in str(caught.value)
