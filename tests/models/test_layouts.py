"""From config.json to layouts: every projection of PEFT's module tree, and one sentence for what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from adapters.errors import BindingError
from adapters.files.paths import layout_fingerprint
from adapters.files.safetensors_header import Tensor
from adapters.peft.binding import bind
from adapters.peft.config import parse_config
from service.models.families import model_spec
from service.models.layouts import layout_in, layout_of
from service.models.spec.config_json import ModelError, read_config
from tests.support.models.tiny_models import FAMILIES, make_tiny_model, tiny_config


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    return json.loads(tiny_config(family, **overrides).to_json_string(use_diff=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_exactly_the_linear_and_embedding_modules(family: str) -> None:
    config = tiny_config(family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    modules = {
        name: (module.weight.shape[0], module.weight.shape[1])
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }
    layout = layout_of(config_of(family))
    fixed = {name.removesuffix(".weight") for name in layout.fixed}
    modules = {name: shape for name, shape in modules.items() if name not in fixed}
    modules |= {name: tuple(model.get_submodule(name).weight.shape) for name in layout.routers}
    found = {}
    for projection in (projection for projection in layout.projections if projection.kind != "experts"):
        for piece in projection.slices:
            shape = (piece.out_features, projection.in_features)
            found[piece.module] = shape[::-1] if projection.kind == "embedding" else shape
    assert found == modules
    assert layout.num_layers == config.num_hidden_layers
    assert all(
        projection.name.startswith(layout.layer_prefix) == (projection.layer >= 0) for projection in layout.projections
    )
    names = [projection.name for projection in layout.projections]
    assert len(set(names)) == len(names)


def test_lfm2_by_hand() -> None:
    layout = layout_of(config_of("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]))
    rows = [(p.name, p.group, p.in_features, tuple(s.out_features for s in p.slices)) for p in layout.projections]
    assert rows == [
        ("model.embed_tokens", "embeddings", 304, (64,)),
        ("model.layers.0.conv.in_proj", "operator", 64, (192,)),
        ("model.layers.0.conv.out_proj", "operator", 64, (64,)),
        ("model.layers.0.feed_forward.w13", "mlp", 64, (72, 72)),
        ("model.layers.0.feed_forward.w2", "mlp", 72, (64,)),
        ("model.layers.1.self_attn.qkv_proj", "attention", 64, (64, 32, 32)),
        ("model.layers.1.self_attn.out_proj", "attention", 64, (64,)),
        ("model.layers.1.feed_forward.w13", "mlp", 64, (72, 72)),
        ("model.layers.1.feed_forward.w2", "mlp", 72, (64,)),
        ("lm_head", "embeddings", 64, (304,)),
    ]
    assert layout.groups == ("attention", "mlp", "operator", "embeddings")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown-family": (
        "llama",
        {"model_type": "lfm2_moe"},
        "'lfm2_moe'; served are llama, mistral, qwen2, qwen3, qwen3_moe, lfm2",
    ),
    "no-family": ("llama", {"model_type": None}, "model_type None"),
    "quantised": ("qwen3", {"quantization_config": {"quant_method": "quip"}}, "quantization_config"),
    "activation": ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
    "rope-type": ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
    "rope-factor": ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' without factor"),
    "yarn-theta": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
        "rope_theta 1; with the rope type 'yarn' it must be above 1",
    ),
    "rope-by-layer-type": (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}},
        "rope_parameters by layer type (full_attention)",
    ),
    "old-rope-by-layer-type": (
        "qwen3",
        {"rope_scaling": {"rope_type": "default", "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_scaling by layer type (sliding_attention)",
    ),
    "partial-rotation": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "no-size": ("qwen2", {"hidden_size": None}, "hidden_size as a positive integer below 2^31, and has None"),
    "zero-size": ("qwen2", {"num_hidden_layers": 0}, "num_hidden_layers as a positive integer below"),
    "huge-size": ("llama", {"head_dim": 10**400}, "head_dim as a positive integer below 2^31, and has 1000"),
    "huge-depth": ("llama", {"num_hidden_layers": 10**400}, "num_hidden_layers as an integer from 0 to 65536"),
    "false-depth": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers as an integer from 0 to 65536"),
    "false-experts": ("qwen3_moe", {"num_experts": 2**30}, "num_experts as an integer from 0 to 65536"),
    "predicting-layers": ("glm4_moe", {"num_nextn_predict_layers": 10**12}, "num_nextn_predict_layers as an integer"),
    "dense-layers": ("glm4_moe", {"first_k_dense_replace": "1"}, "first_k_dense_replace as an integer from 0"),
    "shared-experts": ("glm4_moe", {"n_shared_experts": 1.5}, "n_shared_experts as an integer from 0"),
    "windowed-layers": ("qwen2", {"max_window_layers": [1], "layer_types": None}, "max_window_layers as an integer"),
    "rope-of-a-layer-type": (
        "olmo3",
        {"rope_parameters": {"sliding_attention": 1, "full_attention": {"rope_theta": 1e4}}},
        "must give rope_parameters of a layer type as an object, and has 1",
    ),
    "no-theta": (
        "gemma4_text",
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_type": "default"}}},
        "config.json gives no rope_theta in rope_parameters",
    ),
    "no-original": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 0.5}},
        "must give original_max_position_embeddings as 1 or more",
    ),
    "heads": ("llama", {"num_key_value_heads": 4}, "6 attention heads"),
    "layer-types": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "mamba"]}, "mamba"),
    "no-attention": ("lfm2", {"layer_types": ["conv"] * 4}, "no attention layer"),
    "layer-count": ("lfm2", {"layer_types": ["conv"]}, "lists 1"),
    "rope-no-object": ("llama", {"rope_scaling": "linear"}, "must give rope_scaling as an object"),
    "rope-type-list": ("llama", {"rope_parameters": {"rope_type": ["linear"]}}, "rope type ['linear']"),
    "rope-factor-text": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
        "must give factor in rope_parameters as a number above 0, and has '2'",
    ),
    "rope-factor-zero": ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor in rope_scaling"),
    "rope-factor-huge": ("llama", {"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor in rope_scaling"),
    "rope-band": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 2}},
        "low_freq_factor and high_freq_factor as the same",
    ),
    "rope-factors": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0] * 6}},
        "must give short_factor in rope_parameters as a list of numbers",
    ),
    "epsilon": ("qwen2", {"rms_norm_eps": "1e-6"}, "must give rms_norm_eps as a number above 0"),
    "epsilon-below": ("qwen2", {"rms_norm_eps": -1e-6}, "must give rms_norm_eps as a number above 0"),
    "bias-text": ("qwen3", {"attention_bias": "yes"}, "must give attention_bias as true or false"),
    "kinds-text": ("lfm2", {"layer_types": "conv"}, "must give layer_types as a list"),
    "kinds-nested": ("lfm2", {"layer_types": [["conv"], "conv", "conv", "conv"]}, "with ['conv']"),
    "window-text": ("mistral", {"sliding_window": "4096"}, "sliding_window as a positive integer or null"),
    "window-zero": ("mistral", {"sliding_window": 0}, "sliding_window as a positive integer or null, and has 0"),
    "compressed": ("qwen3", {"compression_config": {"format": "int-quantized"}}, "compression_config"),
    "window-off": ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is off"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named_in_one_sentence(case: str) -> None:
    family, changes, words = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        layout_of({**config_of(family), **changes})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_old_spelling_of_rope_means_the_same() -> None:
    config = config_of("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0})
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    old |= {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 777.0}
    assert model_spec(old) == model_spec(config)


def test_yarn_without_a_factor_has_that_of_its_two_contexts() -> None:
    """As transformers has it, where the field is there and null."""
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    config = {**config_of("qwen2"), "max_position_embeddings": 64, "rope_parameters": rope}
    assert model_spec(config).rotations[0].factor == 4.0


@pytest.mark.parametrize(
    ("rope", "context_tokens"),
    [({"original_max_position_embeddings": 300}, 1200), ({"original_max_position_embeddings": 100}, 512), ({}, 2048)],
    ids=["stretched", "shorter-than-config-says", "without-original"],
)
def test_yarn_stretches_the_context_by_its_factor(rope: dict[str, int], context_tokens: int) -> None:
    config = {**config_of("qwen2"), "rope_parameters": {"rope_type": "yarn", "factor": 4.0, **rope}}
    assert config["max_position_embeddings"] == 512
    assert model_spec(config).context_tokens == context_tokens


def test_linear_scaling_stretches_the_context_only_as_far_as_the_operator_says() -> None:
    config = {**config_of("llama"), "rope_parameters": {"rope_type": "linear", "factor": 4.0}}
    spec = model_spec(config)
    assert (spec.context_tokens, spec.longest_context_tokens) == (512, 2048)
    plain = model_spec(config_of("llama"))
    assert (plain.context_tokens, plain.longest_context_tokens) == (512, 512)


def test_endings_that_the_model_cannot_produce_are_left_out() -> None:
    config = config_of("llama")
    size = config["vocab_size"]
    assert model_spec({**config, "eos_token_id": [-1, 2, size - 1, size, 10**9, "2", None]}).eos_token_ids == (
        2,
        size - 1,
    )


def test_the_old_spelling_of_lfm2_means_what_transformers_reads_in_it() -> None:
    old = {key: value for key, value in config_of("lfm2").items() if key not in ("layer_types", "tie_word_embeddings")}
    old |= {"full_attn_idxs": [1, 2], "tie_embedding": False, "block_ff_dim": 200, "intermediate_size": 7}
    read = transformers.AutoConfig.for_model(**old)
    assert model_spec(old) == model_spec(json.loads(read.to_json_string(use_diff=False)))
    assert [layer.mixer.name for layer in model_spec(old).layers] == ["conv", "self_attn", "self_attn", "conv"]


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in ("granitemoehybrid", "bamba")]
)  # Mamba by default
def test_fields_that_config_json_leaves_out_have_the_familys_defaults(family: str) -> None:
    """What transformers assumes for a config.json that names only the sizes."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 32}
    short = {"model_type": family, "vocab_size": 99, **sizes}
    full = transformers.AutoConfig.for_model(family, vocab_size=99, **sizes)
    assert model_spec(short) == model_spec(
        {**json.loads(full.to_json_string(use_diff=False)), "bos_token_id": None, "eos_token_id": None, "dtype": None}
    )


def test_end_of_sequence_ids_of_both_files_are_known(tmp_path: Path) -> None:
    make_tiny_model("qwen3", tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [4, 2]}))
    assert model_spec(read_config(tmp_path)).eos_token_ids == (2, 4)


def test_layouts_import_no_torch() -> None:
    code = "import sys, service.models.layouts; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_trainings_of_one_shape_have_layouts_of_their_own(tmp_path: Path) -> None:
    """Adapters of one base must not be served on another that happens to have the same shape."""
    one = make_tiny_model("llama", tmp_path / "one")
    same = shutil.copytree(one, tmp_path / "same")
    other = shutil.copytree(one, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in weights.items()}, other / "model.safetensors")
    assert layout_in(one) == layout_in(same)
    assert layout_in(one).weights != layout_in(other).weights
    assert layout_fingerprint(layout_in(one)) != layout_fingerprint(layout_in(other))


def test_norms_that_no_adapter_replaces_are_missed_where_they_were_saved_whole() -> None:
    """Of all queries or keys of a token together, as olmo3 has them. The base's would answer in their place."""
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    names = {f"{module}.lora_A.weight": (4, 48), f"{module}.lora_B.weight": (48, 4)}
    tensors = {name: Tensor(name, "F32", shape, 0, 768) for name, shape in names.items()}
    fields = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "layers_to_transform": [0]}
    layout = layout_of(config_of("olmo3"))
    assert bind(layout, parse_config(json.dumps(fields).encode()), tensors).slices
    saved = json.dumps(fields | {"modules_to_save": ["q_norm"]}).encode()
    with pytest.raises(BindingError, match=r"change layers.0.self_attn.q_norm are not served: train without it"):
        bind(layout, parse_config(saved), tensors)
