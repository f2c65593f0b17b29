"""Mixtures of experts as they are published: both layouts of their weights, settings, and adapters that cannot bind."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.errors import AdapterError, BindingError
from adapters.files.manifest import AdapterRecord
from adapters.layout import BaseLayout
from adapters.memory.host_tier import read_adapter
from adapters.memory.slab import HostAdapter
from adapters.row_plan import plan_rows
from adapters.store.store import AdapterStore
from kernels.platform import installed
from service.models.families import model_spec
from service.models.layouts import layout_of
from service.models.loader import load_model
from service.models.spec.config_json import ModelError
from tests.models.test_lora_parity import windowed
from tests.models.test_parity import assert_parity
from tests.support.engine.engine_parity import (
    BASE,
    Oracle,
    World,
    answers_of,
    assert_greedy,
    make_requests,
    make_world,
)
from tests.support.models.tiny_models import make_tiny_model, tiny_config

FAMILIES = ("qwen3_moe", "qwen3_5_moe_text", "glm4_moe")
LAYER = {"qwen3_moe": "model.layers.0", "qwen3_5_moe_text": "model.layers.1", "glm4_moe": "model.layers.1"}
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
PARTS = ("gate_proj", "up_proj", "down_proj")


def is_packed(tensors: dict[str, torch.Tensor]) -> bool:
    return any(name.endswith("experts.gate_up_proj") for name in tensors)


def rewrite(model_dir: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = edit(load_file(model_dir / "model.safetensors"))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, model_dir / "model.safetensors", metadata={"format": "pt"})


def all_in_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefixes = sorted({name.partition("experts.")[0] + "experts." for name in tensors if ".experts." in name})
    for prefix in prefixes:
        num = sum(name.startswith(prefix) and name.endswith("down_proj.weight") for name in tensors)
        gate, up, down = (torch.stack([tensors[f"{prefix}{e}.{part}.weight"] for e in range(num)]) for part in PARTS)
        out |= {f"{prefix}gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}down_proj": down}
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_of_the_experts_are_read(family: str, tmp_path: Path, device: str) -> None:
    """transformers reads both too, and writes them one by one, which all other tests are about."""
    model_dir = make_tiny_model(family, tmp_path)
    assert not is_packed(load_file(model_dir / "model.safetensors"))
    rewrite(model_dir, all_in_one)
    assert is_packed(load_file(model_dir / "model.safetensors"))
    assert_parity(model_dir, device)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights-as-they-are": ("qwen3_moe", {"norm_topk_prob": False}),
    "every-second": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "one-expert": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "all-experts": ("qwen3_5_moe_text", {"num_experts_per_tok": 7}),
    "window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
    "beside-a-shared-one": ("granitemoehybrid-experts", {}),
    "of-the-stream": ("gemma4_text-experts", {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_logits_equal_transformers(setting: str, tmp_path: Path, device: str) -> None:
    family, overrides = SETTINGS[setting]
    assert_parity(make_tiny_model(family, tmp_path, **overrides), device)


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads(tiny_config(family).to_json_string(use_diff=False)), **changes}


def test_more_experts_for_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match="7 experts in a layer, and gives a token 8 of them"):
        model_spec(config_of("qwen3_moe", num_experts_per_tok=8))


@pytest.mark.parametrize("layout", ["one-by-one", "packed"])
@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_a_wrong_tensor_of_an_expert_is_named(layout: str, fault: str, tmp_path: Path) -> None:
    model_dir = make_tiny_model("qwen3_moe", tmp_path)
    if layout == "packed":
        rewrite(model_dir, all_in_one)
    name = f"{LAYER['qwen3_moe']}.mlp.experts." + ("down_proj" if layout == "packed" else "6.down_proj.weight")

    def edit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wrong = tensors.pop(name)
        return tensors if fault == "missing" else {**tensors, name: wrong[..., 1:]}

    rewrite(model_dir, edit)
    with pytest.raises(ModelError) as caught:
        load_model(model_dir)
    assert name in str(caught.value) and "\n" not in str(caught.value)


# ---- adapters of experts, in the forms that trainers write

WRITTEN = Path(__file__).parent / "expert_adapters"
# Experts, rank, hidden width, their own width; the layer is the first.
E, R, H, W = 3, 2, 8, 5
EXPERTS = "model.layers.0.mlp.experts"
WIDTHS = {"gate": (H, W), "up": (H, W), "down": (W, H)}
Deltas = dict[str, tuple[torch.Tensor, torch.Tensor]]  # A [E, r, in], B [E, out, r] by part


def small_layout(width: int = W) -> BaseLayout:
    sizes = {"hidden_size": H, "num_experts": E, "moe_intermediate_size": width, "num_experts_per_tok": 2}
    return layout_of(config_of("qwen3_moe", **sizes, num_hidden_layers=1, mlp_only_layers=[]))


def small_gpt_oss(width: int = W) -> BaseLayout:
    sizes = {"hidden_size": H, "num_local_experts": E, "intermediate_size": width, "num_experts_per_tok": 2}
    return layout_of(config_of("gpt_oss", **sizes, num_hidden_layers=1, layer_types=["full_attention"]))


def publish(
    root: Path, layout: BaseLayout, tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> tuple[AdapterRecord, HostAdapter]:
    """The adapter as the store has it, and as it is read for the device."""
    root.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, root / "adapter_model.safetensors")
    (root / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": R, "lora_alpha": 3} | config))
    return published(root, root / "store", layout)


def published(directory: Path, store_root: Path, layout: BaseLayout) -> tuple[AdapterRecord, HostAdapter]:
    store = AdapterStore(store_root, layout, base_name=BASE)
    upload = store.begin()
    upload.add_directory(directory)
    record, _ = upload.finish("a")
    store.close()
    return record, read_adapter(store_root, layout, record.digest, torch.float32)


def deltas_of(adapter: HostAdapter, part: str, path: str = EXPERTS) -> torch.Tensor:
    """[E, out, in] that the adapter adds to the weights of gate_proj, say."""
    held = adapter.slices[f"{path}.{part}_proj"]
    a, b = (side.unflatten(0, (E, -1)) for side in (held.a, held.b))
    return held.scaling * b.transpose(1, 2) @ a


VERSIONS = [
    *(f"{version}-{case}" for version in ("0.17.1", "0.18.1", "0.19.0", "0.19.1", "0.21.2")
      for case in ("odd", "wide", "square")),
    # Where down_proj alone tells nothing: inputs and outputs are of one width.
    *(f"{version}-gpt-oss" for version in ("0.18.1", "0.19.0", "0.19.1", "0.21.2")),
    *(f"{version}-gpt-oss-4" for version in ("0.19.1", "0.21.2")),
]  # fmt: skip


@pytest.mark.parametrize("written", VERSIONS)
def test_parameters_mean_what_the_peft_that_wrote_them_merges(written: str, tmp_path: Path) -> None:
    expected = load_file(WRITTEN / written / "deltas.safetensors")
    directory = tmp_path / "adapter"
    directory.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / name).write_bytes((WRITTEN / written / name).read_bytes())
    case = written.partition("-")[2]
    layout = small_gpt_oss(8) if "gpt-oss" in case else small_layout({"odd": 5, "wide": 4, "square": 8}[case])
    record, adapter = published(directory, tmp_path / "store", layout)
    gate, up, down = (deltas_of(adapter, part) for part in WIDTHS)
    found = torch.stack((gate, up), dim=2).flatten(1, 2) if "gpt-oss" in case else torch.cat((gate, up), dim=1)
    for part, delta in (("gate_up", found), ("down", down)):
        wanted = expected[part].transpose(1, 2) if "gpt-oss" in case else expected[part]
        torch.testing.assert_close(delta, wanted, atol=1e-5, rtol=1e-5)
    assert {one.rank for one in record.manifest.modules} == {R}
    assert record.manifest.rows == {"experts": E * R}


def random_deltas() -> Deltas:
    generator = torch.Generator().manual_seed(3)
    return {
        part: (torch.randn(E, R, width, generator=generator), torch.randn(E, out, R, generator=generator))
        for part, (width, out) in WIDTHS.items()
    }


def one_by_one_form(deltas: Deltas, names: tuple[str, str, str] = PARTS) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{EXPERTS}.{e}.{name}.lora_{side}.weight": tensor[e]
        for name, part in zip(names, deltas, strict=True)
        for side, tensor in zip("AB", deltas[part], strict=True)
        for e in range(E)
    }


def parameters_form(deltas: Deltas, order: str = "o r e") -> dict[str, torch.Tensor]:
    """As PEFT makes parameters of modules: gate and up of twice the rank, B of two blocks."""
    (gate_a, gate_b), (up_a, up_b) = deltas["gate"], deltas["up"]
    blocks = torch.zeros(E, 2 * W, 2 * R)
    blocks[:, :W, :R], blocks[:, W:, R:] = gate_b, up_b
    both = {"base_layer.": (torch.cat((gate_a, up_a), dim=1), blocks), "": deltas["down"]}
    prefix, tensors = f"base_model.model.{EXPERTS}", {}
    for name, (a, b) in both.items():
        tensors[f"{prefix}.{name}lora_A.weight"] = a.flatten(0, 1)
        in_order = b.permute(1, 2, 0) if order == "o r e" else b.permute(1, 0, 2)
        tensors[f"{prefix}.{name}lora_B.weight"] = in_order.flatten(1)
    return tensors


def exchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As PEFT up to 0.19.0 has them: A is B, and B is A."""

    def other(name: str) -> torch.Tensor:
        is_a = "lora_A" in name
        of = tensors[name.replace("lora_A", "lora_B") if is_a else name.replace("lora_B", "lora_A")]
        return of.unflatten(1, (-1, E)).permute(2, 1, 0).flatten(0, 1) if is_a else (
            of.unflatten(0, (E, -1)).permute(2, 1, 0).flatten(1))  # fmt: skip

    return {name: other(name) for name in tensors}


def stacked_form(deltas: Deltas) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{EXPERTS}.{part}_proj.lora_{side}.weight": tensor
        for part, sides in deltas.items()
        for side, tensor in zip("AB", sides, strict=True)
    }


def lists_form(deltas: Deltas) -> dict[str, torch.Tensor]:
    """As Unsloth's gpt-oss in 4 bits has its experts, in the place of parameters."""
    lists, tensors = {"base_layer.": "gate_up_projs", "": "down_projs"}, {}
    for name, tensor in parameters_form(deltas).items():
        module, _, side = name.removeprefix(f"base_model.model.{EXPERTS}.").rpartition("lora_")
        of_experts = tensor.unflatten(0, (E, -1)) if side[0] == "A" else tensor.unflatten(1, (-1, E)).permute(2, 0, 1)
        tensors |= {f"base_model.model.{EXPERTS}.{lists[module]}.{e}.lora_{side}": of_experts[e] for e in range(E)}
    return tensors


def apart_form(deltas: Deltas) -> dict[str, torch.Tensor]:
    """As Megatron-Bridge stacks parameters for vLLM: experts and ranks have axes of their own."""
    return {
        name: tensor.unflatten(0, (E, -1)) if ".lora_A." in name else tensor.unflatten(1, (-1, E))
        for name, tensor in parameters_form(deltas).items()
    }


OF_PARAMETERS = {
    "target_modules": [],
    "target_parameters": ["gate_up_proj", "down_proj"],
    "rank_pattern": {r".*\.gate_up_proj": 2 * R},
    "alpha_pattern": {r".*\.gate_up_proj": 6},
}
OF_MODULES: dict[str, Any] = {"target_modules": [*PARTS]}
FORMS: dict[str, tuple[Callable[[Deltas], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "one-by-one": (one_by_one_form, OF_MODULES),
    "mixtral": (lambda deltas: one_by_one_form(deltas, ("w1", "w3", "w2")), {"target_modules": ["w1", "w2", "w3"]}),
    "parameters": (parameters_form, OF_PARAMETERS | {"peft_version": "0.21.2"}),
    "parameters-silent": (parameters_form, OF_PARAMETERS),
    # As PEFT 0.17 has it, whose adapters name no version.
    "exchanged-silent": (lambda deltas: exchanged(parameters_form(deltas)), OF_PARAMETERS),
    "exchanged": (lambda deltas: exchanged(parameters_form(deltas)), OF_PARAMETERS | {"peft_version": "0.18.1"}),
    "unsloth": (partial(parameters_form, order="o e r"), OF_PARAMETERS | {"lora_B_layout": "grouped_by_expert"}),
    "unsloth-mended": (parameters_form, OF_PARAMETERS | {"lora_B_layout": "rank_major"}),
    "stacked": (stacked_form, OF_MODULES),
    "megatron": (apart_form, OF_PARAMETERS | {"target_modules": ["base_layer", "experts"], "target_parameters": None}),
    "megatron-of-modules": (apart_form, OF_PARAMETERS | OF_MODULES | {"target_parameters": None}),
    "tinker": (stacked_form, {"target_modules": "all-linear"}),
    "prime-rl": (one_by_one_form, {"target_modules": ["experts"]}),
    "prime-rl-gpt-oss": (parameters_form, OF_PARAMETERS | {"target_modules": ["experts"], "target_parameters": None}),
    "unsloth-gpt-oss": (
        lists_form,
        {
            "target_modules": r".*\.experts\.(gate_up|down)_projs\.\d+",
            "rank_pattern": {r"gate_up_projs\.\d+": 2 * R},
            "alpha_pattern": {r"gate_up_projs\.\d+": 6},
        },
    ),
}


SMALL: dict[str, dict[str, Any]] = {
    "granitemoehybrid-experts": {"num_local_experts": E, "num_experts_per_tok": 2, "intermediate_size": W},
    "gemma4_text-experts": {"num_experts": E, "top_k_experts": 2, "moe_intermediate_size": W},
}


@pytest.mark.parametrize("family", ["qwen3_moe", *(pytest.param(one, marks=pytest.mark.wide) for one in SMALL)])
def test_all_forms_of_one_training_are_one_adapter(family: str, tmp_path: Path) -> None:
    layout = small_layout()
    if family in SMALL:
        one_layer = {"hidden_size": H, "num_hidden_layers": 1, "layer_types": ["full_attention"], "mamba_n_heads": 2}
        layout = layout_of(config_of(family, **SMALL[family] | one_layer))
    path, deltas, digests = layout.experts[0].module, random_deltas(), {}
    for form, (write, config) in FORMS.items():
        tensors = {name.replace(EXPERTS, path): tensor for name, tensor in write(deltas).items()}
        names = config["target_modules"]
        # Dense layers have modules of such names too.
        if family in SMALL and isinstance(names, list) and names and "experts" not in names:
            config = config | {"target_modules": rf".*\.experts\.(\d+\.)?({'|'.join(names)})"}
        record, adapter = publish(tmp_path / form, layout, tensors, config)
        for part, (a, b) in deltas.items():
            found = deltas_of(adapter, part, path)
            torch.testing.assert_close(found, 1.5 * b @ a, msg=lambda m, f=form: f"{f}: {m}")
        digests[form] = record.digest
    assert len(set(digests.values())) == 1, digests


def ordered(root: Path, order: str | None, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> AdapterRecord:
    """The adapter of an upload with this `expert_b_order`, whose archive is it again."""
    layout = small_layout()
    publish(root / "files", layout, tensors, config)
    store = AdapterStore(root / "store", layout, base_name=BASE)
    upload = store.begin()
    if order is not None:
        upload.order_experts(order)
    upload.add_directory(root / "files")
    record, _ = upload.finish("a")
    store.close()
    return record


def test_the_order_of_b_is_said_at_the_upload_where_the_file_does_not(tmp_path: Path) -> None:
    deltas = random_deltas()
    right = ordered(tmp_path / "right", None, parameters_form(deltas), OF_PARAMETERS)
    grouped, unmarked = parameters_form(deltas, order="o e r"), OF_PARAMETERS | {"base_model_name_or_path": "unsloth/x"}
    for order, config in (
        ("grouped_by_expert", unmarked),
        ("grouped_by_expert", unmarked | {"lora_B_layout": "grouped_by_expert"}),
    ):
        assert ordered(tmp_path / str(len(config)), order, grouped, config).digest == right.digest
    other = ordered(tmp_path / "taken-for-peft", None, grouped, unmarked)
    assert other.digest != right.digest
    said = "if the answers lack what it learnt, upload it with expert_b_order=grouped_by_expert"
    assert said in str(other.manifest.notes)
    made_by = ordered(tmp_path / "made", None, grouped, OF_PARAMETERS | {"auto_mapping": {"unsloth_fixed": True}})
    assert said in str(made_by.manifest.notes)
    for fields in ({"lora_B_layout": "rank_major"}, {"base_model_name_or_path": "Qwen-x"}):
        notes = ordered(tmp_path / str(len(str(fields))), None, grouped, unmarked | fields).manifest.notes
        assert said not in str(notes)
    with pytest.raises(AdapterError, match="lora_B_layout is 'rank_major', and expert_b_order 'grouped_by_expert'"):
        ordered(tmp_path / "both", "grouped_by_expert", grouped, unmarked | {"lora_B_layout": "rank_major"})


def test_mixtral_has_its_first_names_too(tmp_path: Path) -> None:
    """As transformers 4 calls its modules, which are layers there: PEFT takes the router for one."""
    sizes = {"hidden_size": H, "intermediate_size": W, "num_local_experts": E, "num_experts_per_tok": 2}
    layout, deltas = layout_of(config_of("mixtral", **sizes, num_hidden_layers=1)), random_deltas()
    router = {f"base_model.model.{LAYER['qwen3_moe']}.mlp.gate.lora_A.weight": torch.ones(R, H)}
    router |= {name.replace("_A", "_B"): torch.ones(E, R) for name in router}
    before = {
        name.replace("mlp.", "block_sparse_moe."): tensor
        for name, tensor in (one_by_one_form(deltas, ("w1", "w3", "w2")) | router).items()
    }
    now = one_by_one_form(deltas) | router
    named = {"target_modules": ["w1", "w2", "w3", "gate"]}, {"target_modules": r".*block_sparse_moe\..*(gate|w\d)"}
    digests = {publish(tmp_path / str(at), layout, before, config)[0].digest for at, config in enumerate(named)}
    record, adapter = publish(tmp_path / "now", layout, now, {"target_modules": [*PARTS, "gate"]})
    assert digests == {record.digest}
    for part, (a, b) in deltas.items():
        torch.testing.assert_close(deltas_of(adapter, part), 1.5 * b @ a)
    without = {name: tensor for name, tensor in before.items() if ".w2." not in name}
    with pytest.raises(BindingError, match="target_modules names it, but the file has no tensors for it"):
        publish(tmp_path / "without", layout, without, named[0])


def test_what_experts_share_is_each_expert_s(tmp_path: Path) -> None:
    """SGLang and Megatron keep one A of gate and up, and one B of down, for all experts."""
    deltas = random_deltas()
    for part, side in (("gate", 0), ("up", 0), ("down", 1)):
        sides = list(deltas[part])
        sides[side] = sides[side][:1]
        deltas[part] = sides[0], sides[1]
    _, adapter = publish(tmp_path, small_layout(), stacked_form(deltas), OF_MODULES)
    for part, (a, b) in deltas.items():
        torch.testing.assert_close(deltas_of(adapter, part), (1.5 * b @ a).expand(E, -1, -1))


@pytest.mark.parametrize("dtypes", ["one", "mixed"])
def test_experts_that_nobody_trained_add_nothing(dtypes: str, tmp_path: Path) -> None:
    """As some train the experts alone that their task meets: others in each layer."""
    deltas = random_deltas()
    trained = {n: t for n, t in one_by_one_form(deltas).items() if ".experts.1." not in n}
    if dtypes == "mixed":
        trained = {n: t.bfloat16() if ".2." in n else t for n, t in trained.items()}
    some = {"target_modules": [f"{EXPERTS}.{e}.{part}" for e in (0, 2) for part in PARTS]}
    others = {"target_modules": [*PARTS], "exclude_modules": r".*experts\.1\..*"}
    digests = set()
    for at, config in enumerate((some, others)):
        record, adapter = publish(tmp_path / str(at), small_layout(), trained, config)
        digests.add(record.digest)
        for part, (a, b) in deltas.items():
            wanted = 1.5 * b @ a
            wanted[1] = 0
            torch.testing.assert_close(
                deltas_of(adapter, part), wanted, atol=0.3 if dtypes == "mixed" else 1e-5, rtol=0
            )
    assert len(digests) == 1


def test_lists_of_gpt_oss_are_its_parameters(tmp_path: Path) -> None:
    """Rows of gate and of up take turns in the base's weights."""
    layout, deltas = small_gpt_oss(), random_deltas()
    targets = {"target_modules": r".*_projs\.\d", "rank_pattern": {r"gate_up_projs\.\d": 2 * R}}
    lists, _ = publish(tmp_path / "lists", layout, lists_form(deltas), targets)
    parameters, adapter = publish(
        tmp_path / "parameters", layout, parameters_form(deltas), OF_PARAMETERS | {"alpha_pattern": {}}
    )
    assert lists.digest == parameters.digest
    both = torch.cat((deltas["gate"][1] @ deltas["gate"][0], deltas["up"][1] @ deltas["up"][0]), dim=1)
    torch.testing.assert_close(deltas_of(adapter, "gate"), 0.75 * both[:, ::2])


def test_tinker_s_names_of_gpt_oss_bind(tmp_path: Path) -> None:
    """Its configurations say all-linear, whatever was trained; PEFT never saves that word."""
    layout = layout_of(config_of("gpt_oss"))
    whole = {
        f"base_model.model.model.layers.{index}.{attention}.{name}.lora_{side}.weight": torch.ones(shape)
        for attention in ("self_attn", "attn")
        for index in range(3)
        for name, width in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))
        for side, shape in (("A", (R, 48)), ("B", (width, R)))
    }
    theirs = {name: tensor for name, tensor in whole.items() if ".attn." in name}
    record, _ = publish(tmp_path / "theirs", layout, theirs, {"target_modules": "all-linear"})
    notes = "has nothing for layers.mlp.router, layers.self_attn.o_proj: the base's stay"
    assert notes in str(record.manifest.notes)
    peft = {name: tensor for name, tensor in whole.items() if ".attn." not in name}
    named = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
    assert record.digest == publish(tmp_path / "peft", layout, peft, named)[0].digest
    torn = {name: tensor for name, tensor in theirs.items() if "1.attn.q_proj" not in name}
    with pytest.raises(BindingError, match=r"model\.layers\.1\.self_attn\.q_proj: target_modules names it"):
        publish(tmp_path / "torn", layout, torn, {"target_modules": "all-linear"})


def test_no_note_says_that_targets_of_experts_are_nothing(tmp_path: Path) -> None:
    config = {"target_modules": [*PARTS, "gates"]}
    record, _ = publish(tmp_path, small_layout(), one_by_one_form(random_deltas()), config)
    assert "target_modules names nothing in this base model with: gates." in record.manifest.notes


def test_experts_of_mixed_dtypes_and_one_rank_for_gate_and_up(tmp_path: Path) -> None:
    """Gate and up that share an A keep it; an expert in bfloat16 among others is widened."""
    deltas = random_deltas()
    both = torch.cat((deltas["gate"][1], deltas["up"][1]), dim=1)
    tensors = {
        f"base_model.model.{EXPERTS}.lora_A.weight": deltas["gate"][0].flatten(0, 1),
        f"base_model.model.{EXPERTS}.lora_B.weight": both.permute(1, 2, 0).flatten(1),
    }
    config = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}
    _, adapter = publish(tmp_path / "shared", small_layout(), tensors, config)
    assert adapter.slices.keys() == {f"{EXPERTS}.gate_proj", f"{EXPERTS}.up_proj"}
    torch.testing.assert_close(deltas_of(adapter, "up"), 1.5 * deltas["up"][1] @ deltas["gate"][0])
    mixed = one_by_one_form(deltas)
    name = f"base_model.model.{EXPERTS}.1.gate_proj.lora_B.weight"
    mixed[name] = mixed[name].bfloat16()
    _, adapter = publish(tmp_path / "mixed", small_layout(), mixed, OF_MODULES)
    deltas["gate"][1][1] = deltas["gate"][1][1].bfloat16().float()
    torch.testing.assert_close(deltas_of(adapter, "gate"), 1.5 * deltas["gate"][1] @ deltas["gate"][0])


def refused() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]]:
    single, parameters = one_by_one_form(random_deltas()), parameters_form(random_deltas())
    first = f"base_model.model.{EXPERTS}.0.gate_proj.lora_A.weight"
    outer = f"base_model.model.{EXPERTS}.lora_A.weight"
    square = {outer: torch.ones(E * R, 8), outer.replace("_A", "_B"): torch.ones(8, E * R)}
    of_down = {"target_modules": [], "target_parameters": ["down_proj"]}
    return {
        "expert-not-targeted": (
            single,
            {"target_modules": [f"0.{part}" for part in PARTS]},
            "the file has tensors for it, but target_modules does not name it",
        ),
        "missing-expert": (
            {n: t for n, t in single.items() if ".1.up_proj" not in n},
            OF_MODULES,
            "model.layers.0.mlp.experts.1.up_proj: target_modules names it, but the file has no tensors",
        ),
        "twice": (
            single
            | {n.replace("0.gate_proj", "00.gate_proj"): t + 1 for n, t in single.items() if ".0.gate_proj" in n},
            OF_MODULES,
            "too, which is the same weight",
        ),
        "missing-b": ({n: t for n, t in single.items() if n != first}, OF_MODULES, "counterpart lora_A is missing"),
        "too-many": (single | {first.replace("0.gate", "3.gate"): single[first] + 1}, OF_MODULES, "has 3 experts"),
        "another-rank": (single | {first: torch.ones(3, H)}, OF_MODULES, "rank 3 of all experts needs"),
        "rank-of-config": (single, OF_MODULES | {"r": 4}, "rank 2 for each expert, and adapter_config.json says 4"),
        "misshapen": (parameters | {outer: torch.ones(E * R, W + 1)}, OF_PARAMETERS, "neither gate_up_proj nor down"),
        "not-targeted": (parameters, OF_PARAMETERS | {"target_parameters": ["down_proj"]}, "does not name it"),
        "not-trained": ({n: t for n, t in parameters.items() if "base_layer" not in n}, OF_PARAMETERS, "no tensors"),
        "silent": (square, of_down, "add the peft_version"),
        "unknown-name": (
            {first.replace("gate_proj", "gates"): single[first]},
            OF_MODULES,
            "of experts, lora_A",
        ),
        "dora": (single, OF_MODULES | {"use_dora": True}, "says use_dora, which is not served of experts"),
        "lora-bias": (parameters, OF_PARAMETERS | {"lora_bias": True}, "says lora_bias, which is not served of exp"),
        "alpha-of-one": (
            single,
            OF_MODULES | {"alpha_pattern": {r"experts\.1\.up_proj": 9}},
            "tells experts of its layer apart",
        ),
        "rank-of-one": (
            single,
            OF_MODULES | {"rank_pattern": {r"experts\.1\.up_proj": 4}},
            "tells experts of its layer apart",
        ),
        "no-down-of-prime-rl": (
            {n: t for n, t in single.items() if "down_proj" not in n},
            {"target_modules": ["experts"]},
            "target_modules names it, but the file has no tensors for it",
        ),
        "no-down-of-lists": (
            {n: t for n, t in lists_form(random_deltas()).items() if "down" not in n},
            {"target_modules": [f"{name}_projs.{e}" for name in ("gate_up", "down") for e in range(E)], "r": 2 * R},
            "target_modules names it, but the file has no tensors for it",
        ),
        "too-many-in-a-list": (
            {n.replace("projs.1", "projs.4"): t for n, t in lists_form(random_deltas()).items()},
            {"target_modules": r".*_projs\.\d"},
            "has 3 experts",
        ),
        "no-experts": (
            {
                f"base_model.model.{LAYER['qwen3_moe']}.self_attn.q_proj.lora_{side}.weight": torch.ones(shape)
                for side, shape in (("A", (R, H)), ("B", (4 * 16, R)))
            },
            {"target_modules": ["experts", "q_proj"]},
            "target_modules names it, but the file has no tensors for it",
        ),
        "no-down": (
            {n: t for n, t in single.items() if "down_proj" not in n},
            OF_MODULES,
            "target_modules names it, but the file has no tensors for it",
        ),
        "whole": (single | {f"base_model.model.{EXPERTS}.down_proj": torch.ones(E, H, W)}, OF_MODULES, "nothing else"),
        "unknown-order": (parameters, OF_PARAMETERS | {"lora_B_layout": "x"}, "lora_B_layout 'x' is not known"),
    }


@pytest.mark.parametrize("case", refused())
def test_what_does_not_bind_is_refused_with_what_to_do(case: str, tmp_path: Path) -> None:
    tensors, config, words = refused()[case]
    layout = small_layout(8 if case == "silent" else W)
    with pytest.raises(AdapterError) as caught:
        publish(tmp_path, layout, tensors, config)
    assert words in " ".join([str(caught.value), *(r for _, r in getattr(caught.value, "problems", ()))])


def test_a_router_is_one_by_its_names_in_all_versions_of_transformers(tmp_path: Path) -> None:
    layout = layout_of(config_of("granitemoehybrid-experts"))
    digests = set()
    for name, config in (
        ("router", {"target_modules": [], "target_parameters": ["router.weight"]}),
        ("router.layer", {"target_modules": ["layer"]}),
    ):
        tensors = {
            f"base_model.model.model.layers.{index}.block_sparse_moe.{name}.lora_{side}.weight": torch.ones(shape)
            for index in range(layout.num_layers)
            for side, shape in (("A", (R, 48)), ("B", (7, R)))
        }
        digests.add(publish(tmp_path / name, layout, tensors, config)[0].digest)
    assert len(digests) == 1


# The weight of the router, where adapters bind to it.
ROUTERS = {
    "qwen3_moe": "mlp.gate",
    "qwen3_5_moe_text": "mlp.gate",
    "gpt_oss": "mlp.router",
    "mixtral": "mlp.gate",
    "glm4_moe": "mlp.gate",  # exact: in float32
    "granitemoehybrid-experts": "block_sparse_moe.router",
    "gemma4_text-experts": "router.proj",
}
WORLDS = [pytest.param(family, marks=pytest.mark.wide if family != "qwen3_moe" else ()) for family in ROUTERS]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    """Adapters that name what they train in each of PEFT's ways."""
    router = ROUTERS[request.param]
    target = {"target_parameters": [f"{router}.weight"]}
    pattern = {router.partition(".")[2] + ".weight": 3}
    takes_all = request.param in ("qwen3_moe", "glm4_moe")  # of these PEFT takes experts and routers for linear
    specs: dict[str, dict[str, Any]] = {
        "router": {"rank": 4, "target_modules": ["q_proj"], **target, "rank_pattern": pattern},
        "router-alone": {"rank": 5, "target_modules": [], **target, "lora_alpha": 40},
        "experts": {"rank": 2, "target_modules": ["q_proj"], "target_parameters": PARAMETERS},
        "everything": {
            "rank": 3,
            "target_modules": "all-linear" if takes_all else ["o_proj", "k_proj"],
            **({} if takes_all else {"target_parameters": PARAMETERS, "use_rslora": True}),
        },
        "down": {
            "rank": 5,
            "target_modules": [],
            "target_parameters": PARAMETERS[1:],
            "rank_pattern": {"down_proj": 1},
            "alpha_pattern": {"experts.down_proj": 7},
        },
        "attention": {"rank": 8, "target_modules": ["q_proj", "v_proj"]},
    }
    if request.param == "gemma4_text-experts":
        norms = ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
        specs["norms"] = {"rank": 2, "target_modules": ["q_proj"], "modules_to_save": norms}
    return make_world(request.param, tmp_path_factory.mktemp(request.param), device, specs=specs)


def test_mixed_batches_equal_peft(world: World) -> None:
    """Prompts in chunks and decode steps, beside an adapter of attention and the base; each adapter says its own."""
    requests = make_requests(world, 2 * (1 + len(world.adapters)), max_prompt=20)
    answers = answers_of(world, requests, token_budget=24, max_sequences=6, num_rows=64, side_bytes=4 << 20)
    oracle = Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)
    first_round = {tuple(answers[request.name].tokens[:8]) for request in requests[: 1 + len(world.adapters)]}
    assert len(first_round) == 1 + len(world.adapters)


def test_rows_of_an_exact_router_stand_by_themselves(tmp_path: Path) -> None:
    """They are in the model's dtype, and the router's weight is in float32."""
    model_dir = make_tiny_model("glm4_moe", tmp_path, dtype=torch.bfloat16)
    with installed(windowed("cpu")):
        model = load_model(model_dir).model
        assert model.rows_behind("model.layers.1.mlp.gate", 4, 1) is None
        beside = model.rows_behind("model.layers.1.mlp.shared_experts.down_proj", 4, 1)
    assert beside is not None and beside.dtype == torch.bfloat16


def test_sizes_of_a_published_model_are_read() -> None:
    """Qwen3-30B-A3B's, and what its adapters can bind to."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    }
    spec = model_spec(config)
    assert len(spec.moes) == 48 and not spec.mlps
    layout = layout_of(config)
    assert {p.name.rpartition(".")[2] for p in layout.projections if p.group == "mlp"} == {"gate"}
    assert [one.num for one in layout.experts] == [128] * 48
    # Of rank 2: what PEFT advises for these, on 20 GB.
    plan = plan_rows(layout, 20 << 30, element_bytes=2, max_rank=256)
    assert plan.rows["experts"] // plan.length("experts", 2 * 128) == 51
