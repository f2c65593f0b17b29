"""Adapters of trainers that have a packed projection as several modules, or several as one, against PEFT on a model
that has them so: queries, keys and values of a delta net or of Phi, gate and up; ranks and alphas of their own, some of
them alone, with magnitudes, beside adapters of the base's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from adapters.store.store import AdapterStore
from service.models.layouts import layout_in
from tests.support.engine.engine_parity import (
    BASE,
    Oracle,
    Request,
    World,
    assert_greedy,
    build_engine,
    config_of,
    make_world,
    run_engine,
)
from tests.support.models.split_projections import GATE_UP, PARTS, QKV, load_packed, load_split
from tests.support.models.tiny_models import OTHER_MIXERS, VOCAB_SIZE

FAMILY = "qwen3_5_text"
OTHERS = list(OTHER_MIXERS[FAMILY][1:])
RANKS = {"in_proj_q": 3, "in_proj_k": 9}
Specs = dict[str, dict[str, Any]]
SPLIT: Specs = {
    "same": {"rank": 4, "target_modules": [*PARTS, *OTHERS]},
    "ranks": {"rank": 5, "target_modules": list(PARTS), "rank_pattern": RANKS, "alpha_pattern": {"in_proj_v": 2}},
    "keys": {"rank": 4, "target_modules": ["in_proj_k", "in_proj_z"], "lora_alpha": 40},
    "ends": {"rank": 2, "target_modules": [PARTS[0], PARTS[2]], "rank_pattern": RANKS, "use_rslora": True},
    "dora": {"rank": 3, "target_modules": list(PARTS), "rank_pattern": RANKS, "use_dora": True},
    "some-dora": {"rank": 3, "target_modules": [PARTS[0], PARTS[2]], "use_dora": True},
    "bias": {"rank": 4, "target_modules": [*PARTS[1:], "q_proj"], "alpha_pattern": {"in_proj_v": 1}, "lora_bias": True},
    "activated": {"rank": 4, "target_modules": list(PARTS), "alora_invocation_tokens": [9, 8]},
}
SEVEN = [*QKV, "o_proj", *GATE_UP, "down_proj"]
OF_SEVEN: Specs = {
    "same": {"rank": 4, "target_modules": SEVEN},
    "all-linear": {"rank": 4, "target_modules": "all-linear"},
    "ranks": {
        "rank": 5,
        "target_modules": SEVEN,
        "rank_pattern": {"k_proj": 9, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"v_proj": 2, "gate_proj": 3},
    },
    "default": {"rank": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "one": {"rank": 4, "target_modules": ["up_proj"], "lora_alpha": 40},
    "dora": {"rank": 3, "target_modules": SEVEN, "rank_pattern": {"k_proj": 9}, "use_dora": True},
    "some-dora": {"rank": 3, "target_modules": ["q_proj", "v_proj", "up_proj"], "use_dora": True},
    "bias": {"rank": 4, "target_modules": ["k_proj", "gate_proj"], "lora_bias": True},
}
JOINED: Specs = {
    "all-linear": {"rank": 4, "target_modules": "all-linear"},
    "qkv": {"rank": 4, "target_modules": ["qkv_proj"]},
    "dora": {"rank": 4, "target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True},
    "bias": {"rank": 4, "target_modules": ["gate_up_proj", "o_proj"], "lora_bias": True},
}
# Adapters of a model whose modules are not the served one's, and one of the served one's own.
WORLDS: dict[str, tuple[Specs, Any, list[str]]] = {
    "qwen3_5_text": (SPLIT, load_split, ["in_proj_qkv", *OTHERS]),
    "phi3": (OF_SEVEN, load_split, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "llama": (JOINED, load_packed, SEVEN),
}


class SplitOracle(Oracle):
    """PEFT on the model that each adapter was made for."""

    def _load(self, adapter: str, merged: bool) -> Any:
        specs, load, _ = WORLDS[self._world.family]
        if adapter not in specs:
            return super()._load(adapter, merged)
        model = load(self._world.model_dir, self._world.dtype)
        return PeftModel.from_pretrained(model, self._world.adapters[adapter]).eval()


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    made, load, own = WORLDS[request.param]
    specs = {name: spec | {"load": load} for name, spec in made.items()}
    specs["own"] = {"rank": 6, "target_modules": own}
    return make_world(request.param, tmp_path_factory.mktemp("split"), device, specs=specs)


def test_adapters_of_other_modules_beside_adapters_of_the_base_s_own_equal_peft(world: World) -> None:
    generator = torch.Generator().manual_seed(4)
    requests = []
    for i, name in enumerate([BASE, *world.adapters] * 2):
        prompt = torch.randint(10, VOCAB_SIZE, (20 + 3 * i,), generator=generator).tolist()
        if name == "activated":
            prompt[7:9] = 9, 8
        requests.append(Request(f"r{i}", name, tuple(prompt), 10))
    engine = build_engine(config_of(world, token_budget=48, max_sequences=12, side_bytes=4 << 20))
    answers = run_engine(engine, [request.submit(world) for request in requests], joins_per_step=4)
    engine.close()
    oracle = SplitOracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)


@pytest.mark.parametrize("world", [FAMILY], indirect=True)
@pytest.mark.parametrize("name", ["same", "ranks", "ends"])
def test_what_is_stored_is_the_parts_delta(world: World, name: str) -> None:
    """Of the whole projection, row for row, and of no row more than was trained."""
    store = AdapterStore(world.store_root, layout_in(world.model_dir), base_name=BASE, base_dir=world.model_dir)
    report = {one.module: one for one in store.get(name).manifest.modules}
    stored = load_file(store.path_of(world.digests[name]) / "adapter_model.safetensors")
    store.close()
    model = PeftModel.from_pretrained(load_split(world.model_dir, torch.float32), world.adapters[name])
    for layer in (0, 1, 3):
        net: Any = model.get_submodule(f"base_model.model.model.layers.{layer}.linear_attn")
        deltas = [
            getattr(net, part).get_delta_weight("default")
            if part in SPLIT[name]["target_modules"]
            else torch.zeros_like(getattr(net, part).weight)
            for part in PARTS
        ]
        module = f"model.layers.{layer}.linear_attn.in_proj_qkv"
        a, b = (stored[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        assert report[module].rank == a.shape[0] == b.shape[1]
        torch.testing.assert_close(report[module].scaling * (b @ a), torch.cat(deltas), atol=1e-6, rtol=0)
