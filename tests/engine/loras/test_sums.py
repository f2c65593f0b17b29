"""Sums of adapters beside adapters and the base in one batch, against PEFT's own sums, token by token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from adapters.store.store import AdapterStore
from adapters.sums import digest_of, rows_of
from service.engine.ipc.messages import Evict
from service.models.layouts import layout_in
from tests.support.engine.engine_parity import (
    BASE,
    BLOCK_SIZE,
    Answer,
    Oracle,
    Request,
    World,
    adapter_specs,
    assert_greedy,
    build_engine,
    config_of,
    make_requests,
    make_world,
    run_engine,
)
from tests.support.models.quantised_models import make_quantised
from tests.support.models.tiny_models import DEQUANTISED, load_oracle
from tests.tolerances import LOGITS

# By name: adapters of other ranks, targets and scalings, with their weights. PEFT takes the settings of the first for
# the sum, so that is one without scalings and layers of its own.
SUMS: dict[str, dict[str, float]] = {
    "sum-half": {"all": 0.5},
    "sum-two": {"all": 0.5, "attention": -1.25},
    "sum-four": {"mlp": 0.7, "pattern": 1.0, "one": 2.0, "all": 0.25},
    "sum-rs": {"mlp": 1.0, "rs": -0.5},
}


class SumOracle(Oracle):
    """With PEFT's `add_weighted_adapter(combination_type="cat")` for each sum."""

    def _load(self, adapter: str, merged: bool) -> Any:
        if adapter not in SUMS or merged:
            return super()._load(adapter, merged)
        names, weights = list(SUMS[adapter]), list(SUMS[adapter].values())
        model = load_oracle(self._world.model_dir, self._world.dtype)
        model = PeftModel.from_pretrained(model, self._world.adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(str(self._world.adapters[name]), adapter_name=name)
        model.add_weighted_adapter(names, weights, "sum", combination_type="cat")
        model.set_adapter("sum")
        return model.eval()


class MergedOracle(Oracle):
    """With the weights of the base and the weighted sum of what each adapter adds to them: of what PEFT cannot sum."""

    def _load(self, adapter: str, merged: bool) -> Any:
        if adapter not in SUMS:
            return super()._load(adapter, merged)
        model = load_oracle(self._world.model_dir, self._world.dtype)
        base = {name: tensor.double() for name, tensor in model.state_dict().items()}
        total = dict(base)
        for name, weight in SUMS[adapter].items():
            for key, tensor in super()._load(name, True).state_dict().items():
                total[key] = total[key] + weight * (tensor.double() - base[key])
        model.load_state_dict(total)
        return model.eval()


def with_sums(world: World, names: dict[str, dict[str, float]]) -> World:
    """The same world, whose sums are adapters too."""
    store = AdapterStore(world.store_root, layout_in(world.model_dir), base_name=BASE)
    digests, rows = dict(world.digests), dict(world.rows)
    for name, parts in names.items():
        digest = digest_of((world.digests[part], weight) for part, weight in parts.items())
        assert digest is not None
        digests[name], rows[name] = digest, rows_of(store.manifest(world.digests[part]) for part in parts)
    store.close()
    return replace(
        world, adapters={**world.adapters, **dict.fromkeys(names, world.store_root)}, digests=digests, rows=rows
    )


def assert_equal_to(oracle: Oracle, world: World, **config: Any) -> dict[str, Answer]:
    """Greedy tokens and log probabilities of all adapters, sums and the base, in mixed steps."""
    requests = make_requests(world, 2 * (len(world.adapters) + 1), max_prompt=40)
    engine = build_engine(config_of(world, num_rows=320, token_budget=48, max_sequences=12, **config))
    answers = run_engine(engine, [request.submit(world, logprobs=1) for request in requests], joins_per_step=4)
    assert max(len(record.adapters) for record in engine.step_records) >= 4
    engine.close()
    for request in requests:
        answer = answers[request.name]
        assert_greedy(oracle, request, answer.tokens)
        logits = oracle.logits(request.adapter, [*request.prompt, *answer.tokens])[len(request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).max(-1).values.tolist()
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(expected, abs=2 * LOGITS[world.dtype])
    return answers


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5_text"])
def test_sums_are_those_of_peft(family: str, tmp_path: Path, device: str) -> None:
    names = {part for parts in SUMS.values() for part in parts}
    specs = {name: spec for name, spec in adapter_specs(family).items() if name in names}
    world = with_sums(make_world(family, tmp_path, device, specs=specs), SUMS)
    answers = assert_equal_to(SumOracle(world), world)
    first = make_requests(world, len(world.adapters) + 1)
    assert len({tuple(answers[request.name].tokens[:8]) for request in first}) == len(first), "two answer alike"


def test_sums_are_those_of_peft_on_a_quantised_base(tmp_path: Path, device: str) -> None:
    """In 4 bits; the oracle has the weights that the codes stand for."""
    specs = {name: spec for name, spec in adapter_specs("llama").items() if name in SUMS["sum-two"]}
    sums = {name: SUMS[name] for name in ("sum-half", "sum-two")}
    world = make_world("llama", tmp_path, device, specs=specs, make_model=quantised)
    world = with_sums(world, sums)
    assert_equal_to(SumOracle(replace(world, model_dir=world.model_dir / DEQUANTISED)), world)


def quantised(family: str, directory: Path, **_: Any) -> Path:
    return make_quantised("awq", family, directory)


def test_sums_of_experts_are_those_of_their_weights(tmp_path: Path, device: str) -> None:
    """Adapters of experts have other ranks, or stand beside one of attention alone; PEFT sums no parameters."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    specs: dict[str, dict[str, Any]] = {
        "all": {"rank": 2, "target_modules": ["q_proj"], "target_parameters": parameters},
        "mlp": {"rank": 3, "target_modules": ["o_proj"], "target_parameters": parameters[1:]},
        "attention": {"rank": 4, "target_modules": ["q_proj", "v_proj"]},
        "one": {"rank": 1, "target_modules": ["o_proj"]},
    }
    sums = {"sum-half": SUMS["sum-half"], "sum-two": SUMS["sum-two"]}
    world = with_sums(make_world("qwen3_moe", tmp_path, device, specs=specs), sums)
    assert_equal_to(MergedOracle(world), world)


def test_equal_sums_share_the_prefix_cache_until_a_part_is_replaced(tmp_path: Path, device: str) -> None:
    specs = {name: spec for name, spec in adapter_specs("llama").items() if name in SUMS["sum-two"]}
    swapped = dict(reversed(SUMS["sum-two"].items()))
    sums = {"sum-two": SUMS["sum-two"], "swapped": swapped, "others": swapped | {"all": 0.25}}
    world = with_sums(make_world("llama", tmp_path, device, specs=specs), sums)
    engine = build_engine(config_of(world, prefix_cache=True))
    prompt = tuple(range(5, 45))

    def num_found(adapter: str) -> tuple[int, list[int]]:
        before = engine.stats().prefix_cache_hit_tokens
        answers = run_engine(engine, [Request(adapter, adapter, prompt, 4).submit(world)])
        return engine.stats().prefix_cache_hit_tokens - before, answers[adapter].tokens

    none, tokens = num_found("sum-two")
    assert (none, num_found("others")[0], num_found("all")[0]) == (0, 0, 0)
    found, same = num_found("swapped")
    assert found >= len(prompt) - 2 * BLOCK_SIZE
    assert same == tokens
    engine.handle(Evict(world.digests["attention"]))
    engine.check_integrity()
    assert num_found("all")[0] >= len(prompt) - 2 * BLOCK_SIZE
    assert num_found("sum-two") == (0, tokens)
    engine.close()
