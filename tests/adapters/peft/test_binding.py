"""Every tensor binds or the upload is refused with the complete list of those that do not, and why."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.errors import BindingError
from adapters.files.safetensors_header import read_header
from adapters.layout import BaseLayout, Slice
from adapters.peft.binding import bind
from adapters.peft.bound_tensors import Binding
from adapters.peft.config import parse_config
from tests.support.adapter_files import (
    HIDDEN,
    VOCAB,
    config_bytes,
    lora_tensors,
    modules_ending,
    safetensors_bytes,
    small_layout,
)

LAYOUT = small_layout()
Q = modules_ending(LAYOUT, "q_proj")


def bind_tensors(tmp_path: Path, tensors: dict[str, np.ndarray], layout: BaseLayout = LAYOUT, **fields: Any) -> Binding:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    return bind(layout, parse_config(config_bytes(**fields)), read_header(path))


def problems_of(tmp_path: Path, tensors: dict[str, np.ndarray], **fields: Any) -> dict[str, str]:
    with pytest.raises(BindingError) as caught:
        bind_tensors(tmp_path, tensors, **fields)
    return dict(caught.value.problems)


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.",
        "",
        "base_model.model.model.",
        "module.base_model.model.",
        "base_model.model._orig_mod.",
        "_orig_mod.base_model.model.",
        "base_model.model._fsdp_wrapped_module.",
        "base_model.model.language_model.",
    ],
)
def test_prefixes_of_training_frameworks_are_understood(tmp_path: Path, prefix: str) -> None:
    binding = bind_tensors(tmp_path, lora_tensors(LAYOUT, Q, 4, prefix=prefix))
    assert [bound.slice.module for bound in binding.slices] == Q


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.layers", "layers"),
        ("model.layers", "model.language_model.layers"),
        ("model.layers", "language_model.model.layers"),
        (".0.self_attn", ".0._checkpoint_wrapped_module.self_attn"),
        (".lora_A.weight", ".lora_A.default.weight"),
    ],
)
def test_renamed_parts_of_a_name_are_understood(tmp_path: Path, old: str, new: str) -> None:
    tensors = {name.replace(old, new): data for name, data in lora_tensors(LAYOUT, Q, 4).items()}
    assert len(bind_tensors(tmp_path, tensors).slices) == len(Q)


def test_patterns_and_regular_expressions_see_the_trainers_own_paths(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, Q, {Q[0]: 4, Q[1]: 2})
    renamed = {name.replace("model.layers", "model.language_model.layers"): data for name, data in tensors.items()}
    binding = bind_tensors(
        tmp_path,
        renamed,
        target_modules=r"model\.language_model\.layers\.\d+\..*q_proj",
        rank_pattern={r"^model\.language_model\.layers\.1\.self_attn\.q_proj": 2},
    )
    assert [(bound.rank, bound.scaling) for bound in binding.slices] == [(4, 2.0), (2, 4.0)]


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_the_embedding_and_the_head_bind(tmp_path: Path, prefix: str) -> None:
    modules = ["model.embed_tokens", "lm_head"]
    binding = bind_tensors(
        tmp_path, lora_tensors(LAYOUT, modules, 3, prefix=prefix), r=3, target_modules=["embed_tokens", "lm_head"]
    )
    assert [bound.slice.module for bound in binding.slices] == modules
    assert binding.rows == {"embeddings": 3}


def test_embedding_names_with_the_adapters_name_bind(tmp_path: Path) -> None:
    tensors = {f"{name}.default": data for name, data in lora_tensors(LAYOUT, ["model.embed_tokens"], 3).items()}
    assert len(bind_tensors(tmp_path, tensors, r=3, target_modules=["embed_tokens"]).slices) == 1


def test_rank_and_scaling_follow_the_patterns(tmp_path: Path) -> None:
    modules = modules_ending(LAYOUT, "q_proj", "down_proj")
    ranks = {module: 6 if "down" in module else 4 for module in modules}
    fields = {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 6},
        "alpha_pattern": {"layers.1.mlp.down_proj": 3},
        "use_rslora": True,
    }
    binding = bind_tensors(tmp_path, lora_tensors(LAYOUT, modules, ranks), **fields)
    scalings = {bound.slice.module: bound.scaling for bound in binding.slices}
    assert scalings["model.layers.0.self_attn.q_proj"] == 8 / math.sqrt(4)
    assert scalings["model.layers.0.mlp.down_proj"] == 8 / math.sqrt(6)
    assert scalings["model.layers.1.mlp.down_proj"] == 3 / math.sqrt(6)
    assert binding.rows == {"attention": 4, "mlp": 6}


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_tensor_of_size_0_is_told_as_saved_in_parts(tmp_path: Path, side: str) -> None:
    name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"
    problems = problems_of(tmp_path, {**lora_tensors(LAYOUT, Q, 4), name: np.zeros((0, HIDDEN), "<f4")})
    assert "it is empty" in problems[name] and "ZeRO-3" in problems[name]


def test_a_saved_head_of_size_0_is_no_changed_vocabulary(tmp_path: Path) -> None:
    name = "base_model.model.lm_head.weight"
    tensors = {**lora_tensors(LAYOUT, Q, 4), name: np.zeros((0, HIDDEN), "<f4")}
    reason = problems_of(tmp_path, tensors, modules_to_save=["lm_head"])[name]
    assert "it is empty" in reason and "vocabulary" not in reason


def test_the_head_by_the_name_that_tinker_has_for_it_binds(tmp_path: Path) -> None:
    every = lora_tensors(LAYOUT, [*Q, "lm_head"], 4)
    tensors = {name.replace("model.lm_head", "model.model.unembed_tokens"): tensor for name, tensor in every.items()}
    bound = bind_tensors(tmp_path, tensors, target_modules=["q_proj", "unembed_tokens"]).slices
    assert bound[-1].slice.module == "lm_head" and bound[-1].b.shape == (VOCAB, 4)


BESIDE_TEXT = {
    "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight": "visual",
    "base_model.model.visual.merger.mlp.0.lora_B.weight": "visual",
    "base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.lora_A.weight": "vision_tower",
    "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_magnitude_vector": "vision_tower",
    "base_model.model.model.vision_model.layers.0.self_attn.q_proj.lora_A.default.weight": "vision_model",
    "base_model.model.multi_modal_projector.modules_to_save.linear_1.weight": "multi_modal_projector",
    "base_model.model.model.multi_modal_projector.linear_1.bias": "multi_modal_projector",
    "base_model.model.model.mm_projector.0.weight": "mm_projector",
    "base_model.model.model.connector.modality_projection.proj.lora_A.weight": "connector",
    "base_model.model.audio_tower.layers.0.self_attn.v_proj.lora_A.weight": "audio_tower",
    "base_model.model.model.embed_audio.embedding_projection.lora_A.weight": "embed_audio",
    "base_model.model.mtp.layers.0.self_attn.q_proj.lora_B.weight": "mtp",
}


def test_tensors_of_parts_that_no_text_passes_are_left_and_named(tmp_path: Path) -> None:
    """PEFT's target_modules finds q_proj in the tower as well as in the text model."""
    beside = dict.fromkeys(BESIDE_TEXT, np.zeros((3, 5), "<f4"))
    text = {
        name.replace("model.model.", "model.model.language_model."): t for name, t in lora_tensors(LAYOUT, Q, 4).items()
    }
    binding = bind_tensors(tmp_path, {**beside, **text}, modules_to_save=["multi_modal_projector"])
    assert {side.name for one in binding.slices for side in (one.a, one.b)} == text.keys() and not binding.extras
    for name, part in BESIDE_TEXT.items():
        num = sum(other == part for other in BESIDE_TEXT.values())
        assert any(f"{num} tensors of {part} are left" in note and "not served" in note for note in binding.notes), name


def test_an_adapter_of_parts_that_no_text_passes_alone_is_refused_by_their_names(tmp_path: Path) -> None:
    beside = dict.fromkeys(BESIDE_TEXT, np.zeros((3, 5), "<f4"))
    with pytest.raises(BindingError, match=r"audio_tower, connector, .*visual alone.*Train modules of the text model"):
        bind_tensors(tmp_path, beside)


def test_every_tensor_that_does_not_bind_is_listed_with_its_reason(tmp_path: Path) -> None:
    zeros = np.zeros((4, HIDDEN), "<f4")
    strange = {
        "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": "no projection",
        "base_model.model.model.layers.0.self_attn.c_attn.lora_A.weight": "no projection",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": "DoRA",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": "bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.bias": "bias",
        "base_model.model.model.layers.0.self_attn.q_proj.bias": "bias 'none'",
        "base_model.model.model.layers.0.self_attn.q_proj.weight": "full weight",
        "base_model.model.lm_head.modules_to_save.weight": "modules_to_save",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": "trained tokens",
        "base_model.model.model.embed_tokens.weight": "vocabulary was changed",  # it has fewer rows
        "base_model.model.model.embed_tokens.lora_A.weight": "lora_embedding_A/B",
        "base_model.model.model.layers.0.self_attn.o_proj.lora_embedding_A": "lora_A/B",
        "base_model.model.model.norm.weight": "neither",
        "prompt_embeddings": "neither",
        "": "neither",
    }
    tensors = {**lora_tensors(LAYOUT, Q, 4), **dict.fromkeys(strange, zeros)}
    problems = problems_of(tmp_path, tensors)
    assert problems.keys() == strange.keys()
    for name, reason in strange.items():
        assert reason in problems[name], (name, problems[name])


def test_half_a_module_is_refused(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, Q, 4)
    missing = tensors.popitem()[0]
    problems = problems_of(tmp_path, tensors)
    assert problems == {missing.replace("lora_B", "lora_A"): "its counterpart lora_B is missing"}


def test_two_tensors_for_one_matrix_are_refused(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, Q, 4)
    twice = {name.replace("base_model.model.", ""): data for name, data in lora_tensors(LAYOUT, Q[:1], 4).items()}
    problems = problems_of(tmp_path, {**tensors, **twice})
    assert problems.keys() == twice.keys()
    assert all("already has" in reason for reason in problems.values())


def test_two_adapters_in_one_file_are_refused(tmp_path: Path) -> None:
    tensors = {
        name.replace(".weight", f".{adapter}.weight"): data
        for adapter in ("one", "two")
        for name, data in lora_tensors(LAYOUT, Q, 4).items()
    }
    assert all("already has" in reason for reason in problems_of(tmp_path, tensors).values())


def test_targets_without_tensors_are_refused(tmp_path: Path) -> None:
    problems = problems_of(tmp_path, lora_tensors(LAYOUT, Q, 4), target_modules=["q_proj", "o_proj"])
    assert problems.keys() == set(modules_ending(LAYOUT, "o_proj"))
    assert all("no tensors" in reason for reason in problems.values())


def test_targets_without_tensors_are_found_under_the_trainers_names_too(tmp_path: Path) -> None:
    tensors = {
        name.replace("model.layers", "model.language_model.layers"): data
        for name, data in lora_tensors(LAYOUT, Q[:1], 4).items()
    }
    problems = problems_of(tmp_path, tensors, target_modules=r"model\.language_model\..*q_proj")
    assert problems.keys() == {Q[1]}


def test_tensors_without_a_target_are_refused(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, [*Q, *modules_ending(LAYOUT, "o_proj")], 4)
    problems = problems_of(tmp_path, tensors)
    assert problems.keys() == set(modules_ending(LAYOUT, "o_proj"))


def test_layers_to_transform_limits_what_must_be_there(tmp_path: Path) -> None:
    binding = bind_tensors(tmp_path, lora_tensors(LAYOUT, Q[1:], 4), layers_to_transform=[1])
    assert [bound.slice.module for bound in binding.slices] == Q[1:]


@pytest.mark.parametrize(("rank", "r"), [(4, 5), (5, 4)])
def test_a_rank_that_disagrees_with_the_config_is_refused(tmp_path: Path, rank: int, r: int) -> None:
    problems = problems_of(tmp_path, lora_tensors(LAYOUT, Q, rank), r=r)
    assert len(problems) == 2 * len(Q)
    assert all(f"rank {r}" in reason for reason in problems.values())


@pytest.mark.parametrize("shape", [(4, HIDDEN + 1), (HIDDEN, 4), (4 * HIDDEN,), (1, 4, HIDDEN), (4, 0)])
def test_a_shape_of_another_base_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = lora_tensors(LAYOUT, Q, 4)
    name = next(iter(tensors))
    tensors[name] = np.zeros(shape, "<f4")
    assert problems_of(tmp_path, tensors).keys() == {name}


@pytest.mark.parametrize(("module", "side"), [("model.embed_tokens", "A"), ("lm_head", "B.weight")])
def test_factors_of_a_larger_vocabulary_are_told_as_such(tmp_path: Path, module: str, side: str) -> None:
    """Training resized the base's embedding and head before it adapted them."""
    tensors = lora_tensors(LAYOUT, [module], 4)
    (name,) = (one for one in tensors if one.endswith(side))
    tensors[name] = np.pad(tensors[name], ((0, 0), (0, 2)) if side == "A" else ((0, 2), (0, 0)))
    problems = problems_of(tmp_path, tensors, target_modules=[module.rpartition(".")[2]])
    assert problems.keys() == {name}
    assert "the vocabulary was changed in training; train without resize_token_embeddings" in problems[name]


def test_an_adapter_that_binds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BindingError):
        bind_tensors(tmp_path, {})
    with pytest.raises(BindingError, match="no LoRA tensors"):
        bind_tensors(tmp_path, {}, target_modules=["elsewhere"])


def test_an_adapter_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BindingError, match="change nothing"):
        bind_tensors(tmp_path, lora_tensors(LAYOUT, Q, 4), lora_alpha=0)


def test_targets_that_this_base_has_not_are_noted(tmp_path: Path) -> None:
    binding = bind_tensors(tmp_path, lora_tensors(LAYOUT, Q, 4), target_modules=["q_proj", "gate_proj"])
    assert any("gate_proj" in note for note in binding.notes)


def test_copies_of_base_embeddings_are_kept_apart_for_a_comparison(tmp_path: Path) -> None:
    modules = ["model.embed_tokens", "lm_head"]
    tensors = lora_tensors(LAYOUT, modules, 3)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = np.zeros((VOCAB, HIDDEN), "<f4")
    tensors["base_model.model.lm_head.base_layer.weight"] = np.zeros((VOCAB, HIDDEN), "<f4")
    binding = bind_tensors(tmp_path, tensors, r=3, target_modules=["embed_tokens", "lm_head"])
    assert {copy.name for copy in binding.base_copies} == {f"{module}.weight" for module in modules}


def test_a_saved_module_may_be_there_twice_and_no_more(tmp_path: Path) -> None:
    names = [
        f"base_model.model.lm_head.{end}" for end in ("modules_to_save.weight", "weight", "modules_to_save.x.weight")
    ]
    tensors: dict[str, np.ndarray] = lora_tensors(LAYOUT, Q, 4)
    tensors |= dict.fromkeys(names[:2], np.zeros((VOCAB, HIDDEN), "<f4"))
    binding = bind_tensors(tmp_path, tensors, modules_to_save=["lm_head"])
    (extra,), (repeat,) = binding.extras, binding.repeats
    assert {repeat.tensor.name, repeat.of.name} == set(names[:2])
    assert extra.tensor == repeat.of
    assert any(repeat.tensor.name in note for note in binding.notes)
    for third in ({names[2]: tensors[names[0]]}, {names[1]: tensors[names[0]].astype("<f2")}):
        with pytest.raises(BindingError, match="already has its weight"):
            bind_tensors(tmp_path, {**tensors, **third}, modules_to_save=["lm_head"])


@pytest.mark.parametrize("lost", ["lm_head", "model.layers.1.input_layernorm"])
def test_a_saved_module_that_the_file_has_lost_is_refused(tmp_path: Path, lost: str) -> None:
    """The base's would answer in its place."""
    norms = tuple(Slice(f"model.layers.{layer}.input_layernorm", HIDDEN) for layer in range(LAYOUT.num_layers))
    layout, settings = replace(LAYOUT, norms=norms), {"modules_to_save": ["head", "input_layernorm", "score"]}
    tensors: dict[str, np.ndarray] = lora_tensors(LAYOUT, Q, 4)
    tensors["base_model.model.lm_head.weight"] = np.zeros((VOCAB, HIDDEN), "<f4")
    tensors |= {f"base_model.model.{norm.module}.weight": np.zeros(HIDDEN, "<f4") for norm in norms}
    assert len(bind_tensors(tmp_path, tensors, layout, **settings).extras) == 1 + len(norms)
    del tensors[f"base_model.model.{lost}.weight"]
    with pytest.raises(BindingError, match="modules_to_save names it") as caught:
        bind_tensors(tmp_path, tensors, layout, **settings)
    assert [name for name, _ in caught.value.problems] == [lost]


@pytest.mark.parametrize("ties_head", [True, False])
def test_trained_tokens_that_the_file_has_lost_are_refused_unless_a_tied_head_shares_them(
    tmp_path: Path, ties_head: bool
) -> None:
    layout, settings = (
        replace(LAYOUT, ties_head=ties_head),
        {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [3]}},
    )
    tensors: dict[str, np.ndarray] = lora_tensors(LAYOUT, Q, 4)
    names = [
        f"base_model.model.{module}.token_adapter.trainable_tokens_delta"
        for module in ("model.embed_tokens", "lm_head")
    ]
    tensors |= dict.fromkeys(names, np.zeros((1, HIDDEN), "<f4"))
    assert len(bind_tensors(tmp_path, tensors, layout, **settings).tokens) == 2
    del tensors[names[1]]
    if ties_head:
        assert len(bind_tensors(tmp_path, tensors, layout, **settings).tokens) == 2
    else:
        with pytest.raises(BindingError, match="lm_head: trainable_token_indices names it"):
            bind_tensors(tmp_path, tensors, layout, **settings)


def test_biases_that_the_file_has_not_are_told(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = lora_tensors(LAYOUT, Q, 4)
    assert any("no biases" in note for note in bind_tensors(tmp_path, tensors, bias="all").notes)
    tensors |= {f"base_model.model.{module}.bias": np.zeros(8, "<f4") for module in Q}
    assert not bind_tensors(tmp_path, tensors, bias="all").notes


def test_the_message_is_short_however_many_problems_there_are(tmp_path: Path) -> None:
    tensors = {f"x{index}": np.zeros(1, "<f4") for index in range(500)}
    with pytest.raises(BindingError) as caught:
        bind_tensors(tmp_path, tensors, target_modules=["elsewhere"])
    assert len(caught.value.problems) == 500
    assert "492 more" in str(caught.value)
    assert len(json.dumps(str(caught.value))) < 2000


def test_the_message_says_once_what_is_wrong_with_many_alike(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, Q, 4)
    with pytest.raises(BindingError) as caught:
        bind_tensors(tmp_path, tensors, target_modules=["elsewhere"])
    reason = "the file has tensors for it, but target_modules does not name it"
    assert f" {Q[0]}, {Q[1]}: {reason}." in str(caught.value)
    assert caught.value.problems == ((Q[0], reason), (Q[1], reason))


@pytest.mark.parametrize(("ties_head", "asks"), [(True, True), (True, False), (False, True)])
def test_a_whole_embedding_is_the_head_too_where_training_tied_them(
    tmp_path: Path, ties_head: bool, asks: bool
) -> None:
    tensors: dict[str, np.ndarray] = lora_tensors(LAYOUT, Q, 4)
    tensors["base_model.model.model.embed_tokens.weight"] = np.zeros((VOCAB, HIDDEN), "<f4")
    binding = bind_tensors(
        tmp_path,
        tensors,
        replace(LAYOUT, ties_head=ties_head),
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=asks,
    )
    both = [("lm_head", "saved_head"), ("model.embed_tokens", "saved_embedding")]
    assert [(one.module, one.group) for one in binding.extras] == (both if ties_head and asks else both[1:])


def test_parameters_that_neither_the_base_nor_the_file_has_are_named(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, Q, 3)
    settings = {"r": 3, "target_modules": ["q_proj"]}
    with pytest.raises(BindingError, match=r"mlp\.experts\.gate_up_proj: target_parameters names it"):
        bind_tensors(tmp_path, tensors, LAYOUT, target_parameters=["mlp.experts.gate_up_proj"], **settings)
    assert bind_tensors(tmp_path, tensors, LAYOUT, target_parameters=["q_proj.weight"], **settings).slices


def test_a_head_that_training_tied_to_the_embedding_needs_no_target(tmp_path: Path) -> None:
    tensors = lora_tensors(LAYOUT, ["model.embed_tokens", "lm_head"], 3)
    tied, settings = replace(LAYOUT, ties_head=True), {"r": 3, "target_modules": ["embed_tokens"]}
    binding = bind_tensors(tmp_path, tensors, tied, ensure_weight_tying=True, **settings)
    assert [bound.slice.module for bound in binding.slices] == ["model.embed_tokens", "lm_head"]
    for layout, asks in ((tied, False), (LAYOUT, True)):
        with pytest.raises(BindingError, match="lm_head: the file has tensors"):
            bind_tensors(tmp_path, tensors, layout, ensure_weight_tying=asks, **settings)
    del tensors["base_model.model.lm_head.lora_A.weight"], tensors["base_model.model.lm_head.lora_B.weight"]
    with pytest.raises(BindingError, match="lm_head: target_modules names it"):
        bind_tensors(tmp_path, tensors, tied, ensure_weight_tying=True, **settings)
