"""Quantised checkpoints: bits of dequantised weights, logits beside transformers' on the same weights, and adapters."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from kernels.linear.quantised import Quantised, dequantise, quantise
from kernels.platform import BackendError
from service.engine.ipc.config import EngineOptions
from service.engine.startup.build import build_engine
from service.models.checkpoint.checkpoint import compare, open_checkpoint
from service.models.families import model_spec
from service.models.gguf_directory import model_directory
from service.models.layouts import weights_fingerprint
from service.models.loader import load_model
from service.models.spec.config_json import ModelError, read_config
from service.text.tokenizer import TextTokenizer
from tests.models.test_parity import assert_parity
from tests.support.engine.engine_parity import Oracle, answers_of, assert_greedy, make_requests, make_world
from tests.support.models.quantised_models import (
    FORMATS,
    ONLINE,
    make_gguf,
    make_mxfp4,
    make_quantised,
    make_quantised_online,
    packed,
)
from tests.support.models.tiny_models import (
    DEQUANTISED,
    LINEAR_MODULES,
    SPECIAL_TOKENS,
    WITH_EXPERTS,
    make_tiny_model,
)
from tests.tolerances import LOGITS

FIXTURE = Path(__file__).with_name("quantised_fixture.safetensors")
Q_PROJ = "model.layers.1.self_attn.q_proj"
# Formats with further families: 8 bits, groups with zeros, another order of the inputs, blocks across rows.
OTHERS = ("qwen3", "gemma3_text", "lfm2", "qwen3_5_text", "qwen3_moe", "phi3", "mixtral")
WITH_OTHERS = ("awq", "gptq_act_order", "fp8_blocks", "nf4_nested")
CASES = [
    *(f"llama-{form}" for form in FORMATS),
    *(f"{family}-{form}" for family in (*OTHERS, *WITH_EXPERTS) for form in WITH_OTHERS),
]
WIDE = {case for case in CASES if not case.startswith("llama-")}


def marked(cases: list[str], wide: set[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.wide) if case in wide else case for case in cases]


@pytest.mark.parametrize("case", marked(CASES, WIDE))
def test_dequantised_weights_are_the_formats_own(case: str, tmp_path: Path) -> None:
    family, _, form = case.rpartition("-")
    model_dir = make_quantised(form, family, tmp_path)
    plain = load_file(model_dir / DEQUANTISED / "model.safetensors")
    spec = model_spec(read_config(model_dir))
    with open_checkpoint(model_dir) as checkpoint:
        found = compare(spec, checkpoint)
        assert (found.faults, found.unexpected) == ((), ())
        num_compared = 0
        for name, shape in spec.tensors(checkpoint).items():
            if name in plain:
                assert torch.equal(checkpoint.tensor(name, shape), plain[name]), name
                num_compared += name.endswith("proj.weight")
        assert num_compared >= 4
    assert_parity(model_dir, "cpu")


MIXTURES = ("gpt_oss", *WITH_EXPERTS)  # beside qwen3_moe, whose experts are stored one by one
ONLINE_CASES = [f"{family}-{kind}" for family in ("llama", *OTHERS, *MIXTURES) for kind in ONLINE]


@pytest.mark.parametrize("case", marked(ONLINE_CASES, {case for case in ONLINE_CASES if not case.startswith("llama-")}))
def test_weights_quantised_while_they_load(case: str, tmp_path: Path) -> None:
    """As transformers computes with the weights that codes stand for; of the same directory, so the same adapters."""
    family, _, kind = case.rpartition("-")
    assert_parity(make_quantised_online(kind, family, tmp_path), "cpu", family=case, weights=kind)


@pytest.mark.parametrize("family", ["qwen3_moe", *MIXTURES])
def test_experts_are_quantised_while_they_load(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_dir = make_tiny_model(family, tmp_path)
    with caplog.at_level("INFO"):
        wide, narrow = (load_model(model_dir, weights=kind) for kind in ("auto", "int8"))
    experts = sum(moe.num_experts * moe.size * 3 * wide.spec.hidden_size for moe in wide.spec.moes)
    assert wide.num_weight_bytes - narrow.num_weight_bytes > 2.5 * experts
    assert f"quantised weights: {len(wide.spec.moes)} in their codes" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ONLINE)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_that_are_no_numbers_are_not_quantised(family: str, kind: Any, value: float, tmp_path: Path) -> None:
    model_dir = make_tiny_model(family, tmp_path)
    tensors = load_file(model_dir / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][1, 3] = value
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name.partition('.experts')[0]}.* has a value that is NaN or infinite"):
        load_model(model_dir, weights=kind)


def test_a_quantised_checkpoint_may_be_held_in_floats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_dir = make_quantised("awq", "llama", tmp_path)
    with caplog.at_level("INFO"):
        assert_parity(model_dir, "cpu", weights="bf16")
    assert "quantised weights" not in caplog.text


def test_a_cpu_holds_codes_of_4_bits_where_floats_would_take_its_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make_gguf("Q4_K", "qwen2", tmp_path, num_hidden_layers=2)
    model_dir = model_directory(file, tmp_path / "served")
    (model_dir / DEQUANTISED).symlink_to(tmp_path / DEQUANTISED)
    with caplog.at_level("INFO"):
        assert_parity(model_dir, "cpu", torch.bfloat16, free_bytes=1 << 20)
        assert "quantised weights: 8 in their codes; floats would take most of the free memory" in caplog.text
        enough, little = (load_model(model_dir, free_bytes=free) for free in (1 << 30, 1 << 20))
        assert little.num_weight_bytes < 0.65 * enough.num_weight_bytes
        load_model(model_dir, dtype="float32", free_bytes=1 << 20)
    assert "--dtype bfloat16 would hold weights of 4-bit integers in their codes" in caplog.text


def test_weights_in_codes_are_not_quantised_anew_and_that_is_said(tmp_path: Path, caplog: Any) -> None:
    assert_parity(make_quantised("awq", "llama", tmp_path), "cpu", weights="nf4")
    assert "--weights nf4 is for floats: what the checkpoint has in codes keeps these (awq)" in caplog.text


@pytest.mark.parametrize(("weights", "dtype"), [("nf4", "bfloat16"), ("auto", "bfloat16"), ("fp8", "float32")])
def test_prompts_are_rounded_where_weights_are_in_float8_alone(weights: Any, dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--fp8-activations needs weights in float8.* or with --weights fp8"):
        load_model(make_tiny_model("llama", tmp_path), dtype=dtype, weights=weights, rounds_prompts=True)
    for device in ("cpu", "npu", "npu:1"):  # torch knows "npu" with torch_npu alone
        options = EngineOptions(model_dir=str(tmp_path), store_root=str(tmp_path), device=device, fp8_activations=True)
        with pytest.raises(BackendError, match="served on NVIDIA GPUs alone: serve without it"):
            build_engine(options)


def test_nf4_has_the_bits_of_bitsandbytes() -> None:
    """The file is by `scripts/quantised_fixture.py`, with bitsandbytes."""
    fixture = load_file(FIXTURE)
    for name in ("flat", "straddling"):
        weight = quantise(fixture[f"{name}.weight"], "nf4")
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(dequantise(weight, dtype), fixture[f"{name}.{dtype}"])


TOOLS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "flat": (FORMATS["nf4"][1], (6, 128)),
    "flat.nested": (FORMATS["nf4"][1], (6, 128)),
    "straddling": (FORMATS["nf4"][1], (10, 40)),
    "straddling.nested": (FORMATS["nf4"][1], (10, 40)),
    "packed": (FORMATS["packed"][1], (16, 48)),
    "float": (FORMATS["fp8_channels"][1], (16, 48)),
    "gptq": ({**FORMATS["gptq_act_order"][1], "group_size": 16}, (32, 64)),
    "gptq_v2": ({**FORMATS["gptq_v2_8bit"][1], "group_size": 16, "desc_act": True}, (32, 64)),
    "awq": ({**FORMATS["awq"][1], "group_size": 16}, (32, 64)),
}


@pytest.mark.parametrize("name", TOOLS)
def test_tensors_of_the_tools_have_the_bits_that_the_tools_give_them(name: str, tmp_path: Path) -> None:
    """bitsandbytes, compressed-tensors and auto-round, as above."""
    quantization_config, shape = TOOLS[name]
    fixture, start = load_file(FIXTURE), f"{name}.stored."
    stored = {key.removeprefix(start): part for key, part in fixture.items() if key.startswith(start)}
    with open_checkpoint(stored_module(tmp_path, stored, **quantization_config)) as checkpoint:
        weight = checkpoint.weight("m.weight", shape)
    assert isinstance(weight, Quantised)
    expected = {dtype: fixture.get(f"{name}.{dtype}") for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    assert any(values is not None for values in expected.values())
    for dtype, values in expected.items():
        assert values is None or torch.equal(dequantise(weight, dtype), values)


def stored_module(directory: Path, stored: dict[str, torch.Tensor], **quantization_config: Any) -> Path:
    """A checkpoint of the one module m."""
    save_file({f"m.{suffix}": part for suffix, part in stored.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantization_config}))
    return directory


def test_blocks_of_modelopt_have_scales_of_four_axes(tmp_path: Path) -> None:
    codes, scales = torch.randn(200, 256).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    stored = {"weight": codes, "weight_scale": scales[:, None, :, None].contiguous()}
    stored_module(tmp_path, stored, quant_method="modelopt", quant_algo="FP8_PB_WO")
    with open_checkpoint(tmp_path) as checkpoint:
        weight = checkpoint.tensor("m.weight", (200, 256))
    expected = codes.float() * scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    assert torch.equal(weight, expected)


PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "format beside checkpoint_format": ("gptq_v2_8bit", {"checkpoint_format": None, "format": "gptq_v2"}, {}),
    "zero points of auto-round as they are": (
        "gptq_v2_8bit",
        {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"},
        {},
    ),
    "scales of rounded inputs": ("fp8_tensor", {}, {"q_proj.activation_scale": 1.0, "q_proj.input_scale_ub": 1200.0}),
    "a scale of the cache": ("fp8_tensor", {}, {"kv_scale": 1.0}),
    "blocks as a text": ("fp8_blocks", {"weight_block_size": "32x32"}, {}),
    "4 bits in 8 of compressed-tensors": (
        "int8",
        {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}}},
        {},
    ),
    "channels of modelopt": (
        "fp8_channels",
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        {},
    ),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_further_ways_in_which_tools_write_the_formats(case: str, tmp_path: Path, caplog: Any) -> None:
    form, fields, scalars = PUBLISHED[case]
    model_dir = make_quantised(form, "llama", tmp_path, num_hidden_layers=1)
    config(**fields or {"ignored_layers": ["lm_head"]})(model_dir)
    stored = load_file(model_dir / "model.safetensors")
    stored |= {f"model.layers.0.self_attn.{name}": torch.tensor(value) for name, value in scalars.items()}
    save_file(stored, model_dir / "model.safetensors", {"format": "pt"})
    assert_parity(model_dir, "cpu")
    assert "does not use these tensors" not in caplog.text


def test_older_checkpoints_of_modelopt_have_the_algorithm_in_a_file_of_their_own(tmp_path: Path) -> None:
    model_dir = make_quantised("fp8_tensor", "llama", tmp_path, num_hidden_layers=1)
    config()(model_dir)
    file = model_dir / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    assert_parity(model_dir, "cpu")
    file.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ModelError, match="has the quant_algo 'NVFP4'; served is FP8"):
        load_model(model_dir)


def test_scales_of_blocks_may_be_powers_of_two(tmp_path: Path) -> None:
    """As transformers writes them with the scale_fmt ue8m0."""
    codes, powers = torch.randn(40, 64).to(torch.float8_e4m3fn), torch.randint(-4, 5, (2, 2)).float().exp2()
    stored = {"weight": codes, "weight_scale_inv": powers.to(torch.float8_e8m0fnu)}
    stored_module(tmp_path, stored, quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0")
    with open_checkpoint(tmp_path) as checkpoint:
        weight = checkpoint.tensor("m.weight", (40, 64))
    assert torch.equal(weight, codes.float() * powers.repeat_interleave(32, 0)[:40].repeat_interleave(32, 1))


@pytest.mark.parametrize("shape", [(4, 2, 3), (2,), (2, 2, 2, 2)])
def test_scales_of_other_axes_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """(2,) as of gate and up in one module, whose parts may be of any size."""
    stored = {"weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "weight_scale": torch.ones(shape)}
    with open_checkpoint(stored_module(tmp_path, stored, quant_method="fp8")) as checkpoint:
        assert "which does not divide a weight of [8, 8]" in str(checkpoint.fault("m.weight", (8, 8)))


GGUF_CASES = [
    *(f"llama-{kind}" for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")),
    *("qwen2-Q4_K", "qwen3-Q6_K", "qwen3-Q4_0"),
]


@pytest.mark.parametrize("case", marked(GGUF_CASES, {*GGUF_CASES} - {"llama-Q4_1", "llama-Q4_K", "llama-Q6_K"}))
def test_a_gguf_file_has_the_weights_of_its_own_package(case: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="NOT RUN: the package gguf is not installed")
    family, _, kind = case.partition("-")
    file = make_gguf(kind, family, tmp_path)
    model_dir = model_directory(file, tmp_path / "served")
    (model_dir / DEQUANTISED).symlink_to(tmp_path / DEQUANTISED)
    plain = load_file(model_dir / DEQUANTISED / "model.safetensors")
    spec = model_spec(read_config(model_dir))
    with open_checkpoint(model_dir) as checkpoint:
        assert compare(spec, checkpoint).faults == compare(spec, checkpoint).unexpected == ()
        for name, shape in spec.tensors(checkpoint).items():
            assert torch.equal(checkpoint.tensor(name, shape).float(), plain[name]), name
    assert_parity(model_dir, "cpu")
    tokenizer = TextTokenizer.load(model_dir)
    text = "the 12 ants,  <|im_start|>then"
    assert tokenizer.encode(text) == TextTokenizer.load(tmp_path / DEQUANTISED).encode(text)


def test_the_rotation_of_llama_3_is_a_gguf_file_s_own(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="NOT RUN: the package gguf is not installed")
    rope = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    file = make_gguf("F16", "llama", tmp_path, num_hidden_layers=2, rope_parameters=rope)
    model_dir = model_directory(file, tmp_path / "served")
    (model_dir / DEQUANTISED).symlink_to(tmp_path / DEQUANTISED)
    assert_parity(model_dir, "cpu")
    with open_checkpoint(model_dir) as checkpoint:
        assert compare(model_spec(read_config(model_dir)), checkpoint).unexpected == ()
    content = file.read_bytes()
    factors = next(one for one in gguf.GGUFReader(file).tensors if one.name == "rope_freqs.weight")
    at, name = factors.data_offset, b"rope_freqs.weight" + struct.pack("<IQ", 1, 32)
    negative = content[:at] + struct.pack("<f", -1) + content[at + 4 :]
    few = content.replace(name, name[:-8] + struct.pack("<Q", 16))
    for changed, words in ((negative, "short_factor in rope_parameters as a list of numbers"), (few, "16 factors")):
        with pytest.raises(ModelError, match=words):
            load_model(model_directory(write(file, changed), tmp_path / "served"))


@pytest.mark.parametrize(
    ("pre", "adds_bos", "begins", "composes"),
    [
        ("smollm", None, False, False),
        ("smollm", True, True, False),
        ("llama-bpe", None, True, False),
        ("llama-bpe", False, False, False),
        ("qwen2", None, False, True),
        ("deepseek-r1-qwen", True, True, False),
        ("tekken", None, True, False),
    ],
)
def test_texts_of_a_gguf_file_begin_and_compose_as_its_pre_tokenizer_says(
    pre: str, adds_bos: bool | None, begins: bool, composes: bool, tmp_path: Path
) -> None:
    """Converters of Llama 3 left the beginning to the name; the tokenizers of Qwen compose accents."""
    file = make_gguf("F16", "llama", tmp_path, num_hidden_layers=1, pre=pre, adds_bos=adds_bos)
    tokenizer = TextTokenizer.load(model_directory(file, tmp_path / "served"))
    apart, together = (tokenizer.encode(text) for text in ("the cafe\u0301", "the caf\u00e9"))
    assert (together[0] == 1) == begins
    assert (apart == together) == composes


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("llama-bpe", ["camelCase", " don", "'t", " ", "123", "4"]),
        ("deepseek-r1-qwen", ["camelCase", " don", "'t", " ", "1", "2", "3", "4"]),
        ("tekken", ["camel", "Case", " don", "'t", " ", "1", "2", "3", "4"]),
    ],
)
def test_texts_of_a_gguf_file_are_cut_as_its_pre_tokenizer_says(pre: str, expected: list[str], tmp_path: Path) -> None:
    file = make_gguf("F16", "llama", tmp_path, num_hidden_layers=1, pre=pre)
    tokenizer = Tokenizer.from_file(str(model_directory(file, tmp_path / "served") / "tokenizer.json"))
    text = "camelCase don't 1234"
    cut = [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == expected


def test_a_gguf_file_that_cannot_be_served_is_refused_by_a_sentence(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="NOT RUN: the package gguf is not installed")
    file = make_gguf("Q8_0", "llama", tmp_path, num_hidden_layers=1)
    content = file.read_bytes()
    cut, nothing = "is cut or no GGUF file: download it again", b"GGUX" + content[4:]
    cases = [(content[:size], cut) for size in (0, 3, 20, 500, 6000, len(content) - 64)] + [(nothing, cut)]
    cases += [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "pointer and not the file: run `git")
    ]
    cases += [(content.replace(b"llama", b"mamba"), "of the architecture 'mamba'; served are llama, qwen2, qwen3")]
    cases += [(content.replace(b"smollm", b"falcon"), "the pre-tokenizer 'falcon'; served are gpt2 with smollm")]
    cases += [(content.replace(b"llama.block_count", b"llama.block_mount"), "metadata has no llama.block_count")]
    kind_at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    low_bits = content[:kind_at] + struct.pack("<I", 10) + content[kind_at + 4 :]
    cases += [(low_bits, "tensor token_embd.weight of the GGUF file is of the type Q2_K; served are F32, F16, Q4_0")]
    for changed, words in cases:
        file.write_bytes(changed)
        with pytest.raises(ModelError) as caught:
            model_directory(file, tmp_path / "served")
        assert words in str(caught.value) and "\n" not in str(caught.value)
    facts = {"rope.dimension_count": ("I", 32), "attention.clamp_kqv": ("f", 8.0), "attention.causal": ("?", False)}
    facts |= {f"rope.scaling.{name}": ("f", 4.0) for name in ("factor", "attn_factor")}
    for name, (word, value) in facts.items():
        with pytest.raises(ModelError, match=f"has a llama.{name}, which is not served"):
            model_directory(write(file, with_fact(content, f"llama.{name}", word, value)), tmp_path / "served")
    kind = struct.pack("<I", 4)
    heads = content.index(b"head_count" + kind) + len(b"head_count")
    text = struct.pack("<IQ", 8, 1) + b"4"
    with pytest.raises(ModelError, match="has a value of another kind"):
        model_directory(write(file, content[:heads] + text + content[heads + 8 :]), tmp_path / "served")
    at = gguf.GGUFReader(write(file, content)).get_tensor(3).data_offset
    write(file, content[:at] + b"\x00\x7e" + content[at + 2 :])  # NaN, as a scale
    with pytest.raises(ModelError, match="NaN or infinite"):
        load_model(model_directory(file, tmp_path / "served"))


@pytest.mark.parametrize(("kind", "half"), [("Q4_1", 2), ("Q5_K", 2), ("Q6_K", 208)])
def test_halves_of_a_gguf_file_s_blocks_that_are_no_numbers_are_refused(kind: str, half: int, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="NOT RUN: the package gguf is not installed")
    file = make_gguf(kind, "llama", tmp_path, num_hidden_layers=1)
    at = next(one for one in gguf.GGUFReader(file).tensors if one.name == "blk.0.ffn_up.weight").data_offset + half
    content = file.read_bytes()
    write(file, content[:at] + b"\x00\x7e" + content[at + 2 :])
    with pytest.raises(ModelError, match=r"tensor blk.0.ffn_up.weight of .* NaN or infinite"):
        load_model(model_directory(file, tmp_path / "served"))


def test_control_tokens_of_known_names_end_answers_of_a_gguf_file(tmp_path: Path) -> None:
    """Files name one: of Llama 3 "<|end_of_text|>" at times, with which its chats do not end."""
    file = make_gguf("F16", "llama", tmp_path, num_hidden_layers=1, eos=5)
    content, name = file.read_bytes(), b"<|im_end|>"
    at = SPECIAL_TOKENS.index(name.decode())
    for text, expected in ((name, [5, at]), (b"<|eot_id|>", [5, at]), (b"<|im_ond|>", [5])):
        written = write(file, content.replace(struct.pack("<Q", len(name)) + name, struct.pack("<Q", len(name)) + text))
        assert read_config(model_directory(written, tmp_path / "served"))["eos_token_id"] == expected


def test_texts_of_a_gguf_file_may_end_with_a_token(tmp_path: Path) -> None:
    """As those of embedding models, which read the last token."""
    file = make_gguf("F16", "llama", tmp_path, num_hidden_layers=1, adds_bos=True, eos=5)
    without = TextTokenizer.load(model_directory(file, tmp_path / "served")).encode("the ants")
    write(file, with_fact(file.read_bytes(), "tokenizer.ggml.add_eos_token", "?", True))
    tokenizer = TextTokenizer.load(model_directory(file, tmp_path / "served"))
    assert tokenizer.encode("the ants") == [*without, 5] and without[0] == 1
    assert tokenizer.encode("the ants", add_special_tokens=False) == without[1:]


def with_fact(content: bytes, name: str, word: str, value: float) -> bytes:
    """A GGUF file with a number more in its metadata; word: as in struct."""
    fact = struct.pack("<Q", len(name)) + name.encode()
    fact += struct.pack("<I" + word, {"I": 4, "f": 6, "?": 7}[word], value)
    return content[:16] + struct.pack("<Q", 1 + struct.unpack("<Q", content[16:24])[0]) + fact + content[24:]


def write(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("others", [(), ("config.json",), ("config.json", "tokenizer.json")])
def test_a_directory_of_gguf_files_is_answered_by_one_of_their_names(others: tuple[str, ...], tmp_path: Path) -> None:
    """Repositories have a config.json beside them at times."""
    for name in ("tiny.Q4_K_M.gguf", "tiny.Q8_0.gguf", *others):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"and no safetensors: name one of them, such as .*/tiny.Q4_K_M.gguf$"):
        model_directory(tmp_path, tmp_path / "served")


def test_a_gguf_file_in_parts_is_served_by_any_of_them(tmp_path: Path) -> None:
    """The first may have no tensor; names are those of links, as in a cache of Hugging Face."""
    first = make_gguf("Q8_0", "llama", tmp_path, num_hidden_layers=1, tensors_per_part=6)
    names = sorted(tmp_path.glob("tiny-*-of-00003.gguf"))
    assert names[0] == first
    blobs = [name.rename(tmp_path / f"blob-{index}") for index, name in enumerate(names)]
    for name, blob in zip(names, blobs, strict=True):
        name.symlink_to(blob)
    served = [model_directory(name, tmp_path / "served") for name in names]
    assert len({*served}) == 1
    (served[0] / DEQUANTISED).symlink_to(tmp_path / DEQUANTISED)
    assert_parity(served[0], "cpu")
    content, before = blobs[2].read_bytes(), weights_fingerprint(served[0])
    half = len(content) // 2
    write(blobs[2], content[:half] + bytes(64) + content[half + 64 :])
    assert weights_fingerprint(served[0]) != before
    for changed, words in ((content[:-64], "00003-of-00003.gguf is cut"), (blobs[1].read_bytes(), "not of one model")):
        write(blobs[2], changed)
        with pytest.raises(ModelError, match=words):
            model_directory(first, tmp_path / "served")
    names[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf cannot be read: No such file"):
        model_directory(first, tmp_path / "served")
    with pytest.raises(ModelError, match=r"split.count of 3, and its name is not that of a part"):
        model_directory(blobs[0], tmp_path / "served")


def test_a_vector_of_a_gguf_file_in_codes_is_refused(tmp_path: Path) -> None:
    file = make_gguf("Q8_0", "llama", tmp_path, num_hidden_layers=1)
    content = file.read_bytes()
    at = content.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight") + 4 + 8
    changed = write(file, content[:at] + struct.pack("<I", 8) + content[at + 4 :])
    with pytest.raises(ModelError, match=r"tensor blk.0.attn_norm.weight of .* is a vector in Q8_0"):
        load_model(model_directory(changed, tmp_path / "served"))


@pytest.mark.parametrize("name", ["tiny.GGUF", "sha256-0a1b"])
def test_a_gguf_file_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Ollama names files by their digests."""
    file = make_gguf("Q8_0", "llama", tmp_path, num_hidden_layers=1).rename(tmp_path / name)
    model_dir = model_directory(file, tmp_path / "served")
    assert load_model(model_dir).spec.num_layers == 1
    assert model_directory(model_dir, tmp_path / "served") == model_dir


def test_a_gguf_file_beside_safetensors_is_left(tmp_path: Path) -> None:
    model_dir = make_quantised("fp8_tensor", "llama", tmp_path, num_hidden_layers=1)
    (model_dir / "model.gguf").write_bytes(b"another model")
    with open_checkpoint(model_dir) as checkpoint:
        assert "model.norm.weight" in checkpoint


# DoRA reads the base's norms, saved heads and trained tokens its rows.
KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8, "target_modules": LINEAR_MODULES["llama"]},
    "attention": {"rank": 4, "target_modules": ["q_proj", "v_proj"]},
    "dora": {"rank": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "head": {"rank": 4, "target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"rank": 4, "target_modules": ["up_proj"], "trainable_token_indices": [7, 9]},
}


def make_model_of(form: str) -> Callable[..., Path]:
    """Writes a model in a form of FORMATS, "online" and a kind of weights, or "gguf" and a type of tensors."""
    name, _, kind = form.partition(" ")
    if name == "gguf":
        return partial(make_served_gguf, kind)
    return partial(make_quantised_online, kind) if kind else partial(make_quantised, name)


def make_served_gguf(kind: str, family: str, directory: Path, **_: Any) -> Path:
    model_dir = model_directory(make_gguf(kind, family, directory, num_hidden_layers=2), directory / "served")
    (model_dir / DEQUANTISED).symlink_to(directory / DEQUANTISED)
    return model_dir


OF_LOADING = [f"online {kind}" for kind in ONLINE]
BASES = [*FORMATS, *OF_LOADING, "gguf Q4_K"]


@pytest.mark.parametrize("form", marked(BASES, {*BASES} - {"awq", "online nf4", "gguf Q4_K"}))
def test_adapters_of_all_kinds_answer_as_peft_on_the_dequantised_weights(form: str, tmp_path: Path) -> None:
    world = make_world("llama", tmp_path, "cpu", specs=KINDS, make_model=make_model_of(form))
    requests, weights = make_requests(world, 12), form.removeprefix("online ") if form in OF_LOADING else "auto"
    answers, oracle = answers_of(world, requests, side_bytes=8 << 20, weights=weights), Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)


def test_adapters_on_codes_that_a_cpu_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In bfloat16, in which near tokens may change places."""
    monkeypatch.setattr("service.models.loader._FLOATS_SHARE", 0.0)
    monkeypatch.setattr("tests.support.models.quantised_models.GROUP", 32)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    make_model = partial(make_quantised, "packed", **sizes)
    world = make_world("llama", tmp_path, "cpu", dtype=torch.bfloat16, specs=KINDS, make_model=make_model)
    requests = make_requests(world, 12)
    with caplog.at_level("INFO"):
        answers, oracle = answers_of(world, requests, side_bytes=8 << 20), Oracle(world)
    assert "12 in their codes; floats would take" in caplog.text
    for request in requests:
        tokens = answers[request.name].tokens
        logits = oracle.logits(request.adapter, [*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert behind.max() <= LOGITS[torch.bfloat16], (request.name, behind)


@pytest.mark.wide
@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("form", [*WITH_OTHERS, *OF_LOADING])
def test_adapters_of_other_families(family: str, form: str, tmp_path: Path) -> None:
    world = make_world(family, tmp_path, "cpu", make_model=make_model_of(form))
    requests, weights = make_requests(world, 12), form.removeprefix("online ") if form in OF_LOADING else "auto"
    answers, oracle = answers_of(world, requests, weights=weights), Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_experts_are_those_that_transformers_dequantises(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_mxfp4("gpt_oss", tmp_path, dtype=dtype)
    config = transformers.Mxfp4Config(dequantize=True)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, quantization_config=config)
    plain, spec = oracle.state_dict(), model_spec(read_config(model_dir))
    with open_checkpoint(model_dir) as checkpoint:
        found = compare(spec, checkpoint)
        assert (found.faults, found.unexpected) == ((), ())
        for name, shape in spec.tensors(checkpoint).items():
            assert torch.equal(checkpoint.tensor(name, shape).to(dtype), plain[name]), name
    if dtype == torch.float32:  # rounded to bfloat16, a token takes another expert
        with caplog.at_level("INFO"):
            assert_parity(model_dir, "cpu", dtype)
        assert "quantised weights: 3 in their codes" in caplog.text


def test_experts_in_codes_take_the_bytes_of_their_file(tmp_path: Path) -> None:
    model_dir = make_mxfp4("gpt_oss", tmp_path)
    in_codes, in_floats = load_model(model_dir), load_model(model_dir, weights="bf16")
    assert str(model_dir) not in Path("/proc/self/maps").read_text(), "codes lie in memory of their own"
    stored = load_file(model_dir / "model.safetensors")
    num_values = sum(2 * part.numel() for name, part in stored.items() if name.endswith("_blocks"))
    tables = 4 * 16 * 2 * 7 * len(in_codes.spec.layers)  # of values, for each weight
    assert in_floats.num_weight_bytes - in_codes.num_weight_bytes == num_values * 4 - num_values * 17 // 32 - tables


def test_adapters_of_experts_in_mxfp4_answer_as_peft_on_the_dequantised_weights(tmp_path: Path) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    specs: dict[str, dict[str, Any]] = {
        "experts": {"rank": 2, "target_modules": ["q_proj"], "target_parameters": parameters},
        "down": {"rank": 3, "target_modules": [], "target_parameters": parameters[1:]},
        "attention": {"rank": 8, "target_modules": ["q_proj", "v_proj"]},
    }
    world = make_world("gpt_oss", tmp_path, "cpu", specs=specs, make_model=make_mxfp4)
    requests = make_requests(world, 8, max_prompt=20)
    answers, oracle = answers_of(world, requests, num_rows=64), Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)


def test_descriptions_of_msmodelslim(tmp_path: Path) -> None:
    """W8A8_DYNAMIC beside what stays in floats, of files that the tool names; config.json knows nothing of it."""
    model_dir = make_quantised("int8", "llama", tmp_path, num_hidden_layers=2)
    config()(model_dir)
    stored = load_file(model_dir / "model.safetensors")
    stored |= {name.replace("scale", "offset"): part * 0 for name, part in stored.items() if "weight_scale" in name}
    (model_dir / "model.safetensors").unlink()
    save_file(stored, model_dir / "quant_model_weight_w8a8_dynamic.safetensors")
    kinds = {name: "W8A8_DYNAMIC" if "proj" in name else "FLOAT" for name in stored}
    description = model_dir / "quant_model_description_w8a8_dynamic.json"
    description.write_text(json.dumps({"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", **kinds}))
    assert_parity(model_dir, "cpu")
    rotation = {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}
    description.write_text(json.dumps({**kinds, "optional": {"quarot": rotation}}))
    with pytest.raises(ModelError, match=r"has rotated weights, which are not served: give the directory"):
        load_model(model_dir)
    description.write_text(json.dumps({**kinds, f"{Q_PROJ}.weight": "W4A4_FLATQUANT_DYNAMIC"}))
    with pytest.raises(ModelError, match="kind of tensors 'W4A4_FLATQUANT_DYNAMIC'; served is FLOAT, W8A8"):
        load_model(model_dir)


@pytest.mark.parametrize("deq_dtype", [None, torch.float32, torch.int64], ids=str)
def test_static_scales_of_activations_are_left_by_name(
    deq_dtype: torch.dtype | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As compressed-tensors stores them; and as msmodelslim, times a weight's scales, in float32 or as its bits."""
    model_dir = make_quantised("int8", "llama", tmp_path, num_hidden_layers=2)
    groups = json.loads((model_dir / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False, "strategy": "tensor", "symmetric": False}
    config(config_groups=groups)(model_dir)
    stored = load_file(model_dir / "model.safetensors")
    scaled = [name.removesuffix("weight_scale") for name in stored if name.endswith("weight_scale")]
    for module in scaled:
        num_outputs = len(stored[f"{module}weight"])
        stored |= {f"{module}input_scale": torch.tensor([0.125]), f"{module}input_zero_point": torch.tensor([3])}
        if deq_dtype is not None:
            deq_scale = stored.pop(f"{module}weight_scale").flatten() * 0.125
            bits = deq_scale.view(torch.int32).to(deq_dtype) if deq_dtype == torch.int64 else deq_scale
            del stored[f"{module}input_zero_point"]
            offset, bias = torch.tensor([3.0]), torch.zeros(num_outputs, dtype=torch.int32)
            stored |= {f"{module}deq_scale": bits, f"{module}input_offset": offset, f"{module}quant_bias": bias}
    save_file(stored, model_dir / "model.safetensors")
    kinds = dict.fromkeys(stored, "W8A8_MIX" if deq_dtype == torch.int64 else "W8A8")
    if deq_dtype is not None:
        config()(model_dir)
        (model_dir / "quant_model_description.json").write_text(json.dumps(kinds))
    with caplog.at_level("INFO"):
        assert_parity(model_dir, "cpu")
    assert "scales of activations are left" in caplog.text and "does not use these tensors" not in caplog.text
    if deq_dtype is not None:
        kinds["model.layers.1.input_layernorm.bias"] = "FLOAT"
        (model_dir / "quant_model_description.json").write_text(json.dumps(kinds))
        with pytest.raises(
            ModelError, match=r"layers.1.input_layernorm.bias, .* quantise without anti-outlier, or give"
        ):
            load_model(model_dir)


def tensor(change: Callable[[torch.Tensor], torch.Tensor | None], suffix: str) -> Callable[[Path], None]:
    """Change one tensor of a module, or leave it out."""

    def edit(model_dir: Path) -> None:
        tensors = load_file(model_dir / "model.safetensors")
        changed = change(tensors.pop(f"{Q_PROJ}.{suffix}"))
        if changed is not None:
            tensors[f"{Q_PROJ}.{suffix}"] = changed
        save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})

    return edit


def config(**fields: Any) -> Callable[[Path], None]:
    """Change the quantization_config; None removes a field, and no field at all the whole of it."""

    def edit(model_dir: Path) -> None:
        read = json.loads((model_dir / "config.json").read_text())
        read["quantization_config"].update(fields)
        if not fields:
            del read["quantization_config"]
        (model_dir / "config.json").write_text(json.dumps(read))

    return edit


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.flatten().index_fill(0, torch.tensor([1]), value).view_as(values)


def as_json(**fields: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"shape": [96, 48], **fields}).encode()), dtype=torch.uint8)


def shorter(values: torch.Tensor) -> torch.Tensor:
    return values[:-1].contiguous()


REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no-scales": ("awq", tensor(lambda _: None, "scales"), "scales is missing"),
    "no-zeros": ("awq", tensor(lambda _: None, "qzeros"), "qzeros is missing"),
    "cut-scales": ("awq", tensor(shorter, "scales"), "scales for 5 groups, which do not divide the 48 inputs"),
    "cut-codes": ("gptq", tensor(shorter, "qweight"), "neither in 4 nor 8 bits"),
    "float-codes": ("gptq", tensor(lambda codes: codes.float(), "qweight"), "is F32, and must be I32"),
    "groups": ("gptq_act_order", tensor(torch.zeros_like, "g_idx"), "groups that are not of 8 inputs each"),
    "no-group": ("gptq_act_order", tensor(filled(-1), "g_idx"), "groups that are not of 8 inputs each"),
    "nan": ("awq", tensor(filled(float("nan")), "scales"), "scale is NaN or infinite"),
    "infinite": ("nf4", tensor(filled(float("inf")), "weight.absmax"), "scale is NaN or infinite"),
    "zero": ("fp8_channels", tensor(filled(0.0), "weight_scale"), "scale is 0"),
    "blocks": ("fp8_blocks", tensor(shorter, "weight_scale_inv"), "does not divide a weight of [96, 48] into blocks"),
    "cut-absmax": ("nf4", tensor(shorter, "weight.absmax"), "absmax has too few values"),
    "long-absmax": (
        "nf4",
        tensor(lambda one: torch.cat((one, one[:1])), "weight.absmax"),
        "absmax has too many values",
    ),
    "axes-of-absmax": ("nf4", tensor(lambda one: one[:, None], "weight.absmax"), "absmax has the shape [72, 1]"),
    "axes-of-nested": ("nf4_nested", tensor(lambda one: one[None], "weight.nested_absmax"), "and must have one axis"),
    "no-codes": ("nf4", tensor(lambda _: None, "weight"), "weight is missing"),
    "no-order": ("gptq_act_order", tensor(lambda _: None, "g_idx"), "g_idx is missing"),
    "no-order-packed": ("packed_act_order", tensor(lambda _: None, "weight_g_idx"), "weight_g_idx is missing"),
    "row-of-blocks": (
        "fp8_blocks",
        tensor(lambda scales: scales[:1].clone(), "weight_scale_inv"),
        "does not divide a weight of [96, 48] into blocks",
    ),
    "no-state": ("nf4", tensor(lambda _: None, "weight.quant_state.bitsandbytes__nf4"), "quant_state is missing"),
    "no-json": (
        "nf4",
        tensor(torch.zeros_like, "weight.quant_state.bitsandbytes__nf4"),
        "is no JSON of bitsandbytes",
    ),
    "deep-json": (
        "nf4",
        tensor(lambda _: torch.full((100_000,), ord("["), dtype=torch.uint8), "weight.quant_state.bitsandbytes__nf4"),
        "is no JSON of bitsandbytes",
    ),
    "cut-nested": ("nf4_nested", tensor(shorter, "weight.nested_absmax"), "nested_absmax has another number"),
    "nan-map": ("nf4", tensor(filled(float("nan")), "weight.quant_map"), "scale is NaN or infinite"),
    "endless-block": (
        "nf4",
        tensor(lambda _: as_json(blocksize=float("inf")), "weight.quant_state.bitsandbytes__nf4"),
        "is no JSON of bitsandbytes",
    ),
    "tiles": ("llm_int8", tensor(torch.ones_like, "weight_format"), "weight_format is not rows"),
    "no-scale": (
        "fp8_tensor",
        tensor(lambda _: None, "weight_scale"),
        "is F8_E4M3; served are F32, BF16, F16: give the directory",
    ),
    "config-gone": ("fp8_tensor", config(), "config.json has no quantization_config"),
    "config-gone-packed": ("awq", config(), f"no tensor {Q_PROJ.replace('.1.', '.0.')}.weight"),
    "other-method": ("awq", config(quant_method="fp8"), "is of the format awq, and config.json names the method fp8"),
    "other-bits": ("gptq", config(bits=8), "has codes of 4 bits, and config.json says 8"),
    "other-group": ("gptq", config(group_size=16), "one scale for 8 inputs, and config.json gives the group_size 16"),
    "unknown-method": ("awq", config(quant_method="quip"), "quant_method 'quip'; served are fp8, fbgemm_fp8"),
    "unknown-bits": ("gptq", config(bits=3), "has the bits 3; served is 4, 8"),
    "unknown-version": ("awq", config(version="gemv"), "has the version 'gemv'; served is gemm"),
    "unknown-awq-format": ("awq", config(version=None, format="gemv"), "has the version 'gemv'; served is gemm"),
    "unknown-gptq-format": ("gptq", config(checkpoint_format=None, format="marlin"), "'marlin'; served is gptq"),
    "rotated-gptq": ("gptq", config(rotation="hadamard"), "has rotated weights"),
    "unknown-format": ("packed", config(format="nvfp4-pack-quantized"), "has the format 'nvfp4-pack-quantized'"),
    "rotated": ("packed", config(transform_config={"config_groups": {"R1": {}}}), "has a transform_config"),
    "sparse": ("packed", config(sparsity_config={"format": "sparse-24-bitmask"}), "has a sparsity_config"),
    "block-of-text": ("fp8_blocks", config(weight_block_size="128"), "two positive integers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_a_sentence(case: str, tmp_path: Path) -> None:
    form, edit, words = REFUSED[case]
    model_dir = make_quantised(form, "llama", tmp_path, num_hidden_layers=2)
    edit(model_dir)
    with pytest.raises(ModelError) as caught:
        load_model(model_dir)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_quantised_embedding_needs_no_dtype_in_the_config(tmp_path: Path) -> None:
    model_dir = make_quantised("packed", "llama", tmp_path, num_hidden_layers=1)
    stored, name = load_file(model_dir / "model.safetensors"), "model.embed_tokens"
    made, values = packed(stored.pop(f"{name}.weight").float() + 0.01)
    stored |= {f"{name}.{suffix}": part for suffix, part in made.items()}
    save_file(stored, model_dir / "model.safetensors", {"format": "pt"})
    fields = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**fields, "dtype": None, "torch_dtype": None}))
    assert load_model(model_dir).dtype == torch.bfloat16
    with open_checkpoint(model_dir) as checkpoint:
        assert torch.equal(checkpoint.tensor(f"{name}.weight", tuple(values.shape)), values)


def test_a_nested_block_may_be_longer_than_the_weight(tmp_path: Path) -> None:
    """No memory is taken by what the file says it is."""
    model_dir = make_quantised("nf4_nested", "llama", tmp_path, num_hidden_layers=2)
    plain = load_file(model_dir / DEQUANTISED / "model.safetensors")[f"{Q_PROJ}.weight"]

    def longer(state: torch.Tensor) -> torch.Tensor:
        fields = json.loads(bytes(state.tolist())) | {"nested_blocksize": 1 << 40}
        return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)

    tensor(longer, "weight.quant_state.bitsandbytes__nf4")(model_dir)
    with open_checkpoint(model_dir) as checkpoint:
        assert torch.equal(checkpoint.tensor(f"{Q_PROJ}.weight", (96, 48)), plain)


@pytest.mark.parametrize("form", ["awq", "gptq", "packed"])
def test_a_scale_of_zero_stands_over_a_group_of_zeros_alone(form: str, tmp_path: Path) -> None:
    """As tools store rows of padding; over other codes values were lost."""
    model_dir = make_quantised(form, "llama", tmp_path, num_hidden_layers=2)
    scales, codes = ("weight_scale", "weight_packed") if form == "packed" else ("scales", "qweight")
    along = 0 if form == "packed" else 1
    tensor(lambda values: values.index_fill(along, torch.tensor([0]), 0), scales)(model_dir)
    with pytest.raises(ModelError, match="scale is 0 over codes that say otherwise"):
        load_model(model_dir)
    same = {"awq": 0x33333333, "gptq": 0x33333333, "packed": -0x77777778}[form]
    tensor(lambda values: values.index_fill(along, torch.tensor([0]), same), codes)(model_dir)
    with open_checkpoint(model_dir) as checkpoint:
        weight = checkpoint.tensor(f"{Q_PROJ}.weight", (96, 48))
    assert not weight[0].any() and weight[-1].any()


MXFP4_FAULTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], str, str]] = {
    "nan": (lambda scales: scales.index_fill(0, torch.tensor([3]), 255), "scales", "scale is NaN or infinite"),
    "no-scales": (lambda _: None, "scales", "_scales is missing"),
    "cut": (shorter, "blocks", "calls for [7, 192, 2, 16]"),
    "float": (lambda codes: codes.float(), "blocks", "is F32, and must be U8"),
}


@pytest.mark.parametrize("fault", MXFP4_FAULTS)
def test_mxfp4_that_cannot_be_read_is_refused_by_a_sentence(fault: str, tmp_path: Path) -> None:
    change, suffix, words = MXFP4_FAULTS[fault]
    model_dir = make_mxfp4("gpt_oss", tmp_path, num_hidden_layers=2)
    tensors, name = load_file(model_dir / "model.safetensors"), "model.layers.1.mlp.experts.gate_up_proj"
    changed = change(tensors.pop(f"{name}_{suffix}"))
    rest = {} if changed is None else {f"{name}_{suffix}": changed}
    save_file(tensors | rest, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_model(model_dir)
    assert words in str(caught.value) and name in str(caught.value) and "\n" not in str(caught.value)
