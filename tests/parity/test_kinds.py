"""Adapters that are more than LoRA rows, against transformers + PEFT: mixed with others and the base, in chunks and in
decode steps, and in steps that are replayed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda

from adapters import row_plan
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
    make_requests,
    make_world,
    run_engine,
)
from tests.support.models.tiny_models import ATTENTION_INPUTS, LINEAR_MODULES, make_tiny_model
from tests.tolerances import LOGITS


def kinds_of(family: str) -> dict[str, dict[str, Any]]:
    linear, inputs = LINEAR_MODULES[family], ATTENTION_INPUTS[family]
    return {
        "plain": {"rank": 4, "target_modules": inputs},
        "dora": {"rank": 4, "target_modules": linear, "use_dora": True},
        "dora-embedding": {"rank": 3, "target_modules": ["embed_tokens", inputs[0]], "use_dora": True},
        "dora-rs": {
            "rank": 5,
            "target_modules": linear,
            "use_dora": True,
            "use_rslora": True,
            "rank_pattern": {inputs[0]: 2},
        },
        "all-biases": {"rank": 2, "target_modules": [inputs[-1]], "bias": "all"},
        "own-biases": {"rank": 2, "target_modules": [inputs[0]], "bias": "lora_only", "use_dora": True},
        "bias-of-b": {"rank": 4, "target_modules": linear, "lora_bias": True},
        "embedding": {"rank": 2, "target_modules": inputs, "modules_to_save": ["embed_tokens"]},
        "head": {"rank": 2, "target_modules": inputs, "modules_to_save": ["lm_head"]},
        "both": {"rank": 2, "target_modules": inputs, "modules_to_save": ["embed_tokens", "lm_head", "model.norm"]},
        "tied-whole": {
            "rank": 2,
            "target_modules": inputs,
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
        "tied-lora": {"rank": 3, "target_modules": ["embed_tokens", inputs[0]], "ensure_weight_tying": True},
        "tied-lora-of-other-rank": {
            "rank": 6,
            "target_modules": ["embed_tokens", inputs[0]],
            "ensure_weight_tying": True,
            "rank_pattern": {"embed_tokens": 2},
            "alpha_pattern": {"lm_head": 3},
        },
        "head-not-adapted": {"rank": 2, "target_modules": ["lm_head", inputs[0]], "modules_to_save": ["lm_head"]},
        "saved-twice": {
            "rank": 2,
            "target_modules": inputs,
            "modules_to_save": ["embed_tokens", "lm_head"],
            "save_embedding_layers": True,
        },
        "tokens": {"rank": 2, "target_modules": inputs, "trainable_token_indices": [5, 9, 30]},
        "tokens-of-both": {
            "rank": 2,
            "target_modules": [inputs[0]],
            "trainable_token_indices": {"embed_tokens": [20], "lm_head": [40, 41]},
        },
        "norms": {"rank": 2, "target_modules": inputs, "modules_to_save": ["input_layernorm", "model.norm"]},
    }


@pytest.fixture(scope="module", params=["qwen2", "gemma3_text"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    family = request.param
    specs = kinds_of(family)
    return make_world(family, tmp_path_factory.mktemp(family), device, specs=specs)


@pytest.mark.parametrize(
    ("family", "norms"),
    [
        ("qwen3", ["q_norm", "k_norm"]),
        ("gemma3_text", ["k_norm", "q_norm"]),
        ("lfm2", ["q_layernorm", "k_layernorm"]),
        ("qwen3_5_text", ["q_norm"]),
    ],
)
def test_norms_of_attention_heads_equal_peft_in_mixed_steps(
    family: str, norms: list[str], tmp_path: Path, device: str
) -> None:
    inputs = ATTENTION_INPUTS[family]
    specs: dict[str, dict[str, Any]] = {
        "plain": {"rank": 4, "target_modules": inputs},
        "heads": {"rank": 2, "target_modules": inputs, "modules_to_save": norms},
        "more-norms": {"rank": 2, "target_modules": inputs, "modules_to_save": [norms[0], "model.norm"]},
    }
    world = make_world(family, tmp_path, device, specs=specs)
    assert {"norms"} <= world.rows["heads"].keys()
    requests = make_requests(world, 2 * (len(world.adapters) + 1))
    engine = build_engine(config_of(world, token_budget=24, max_sequences=8, side_bytes=4 << 20))
    answers = run_engine(engine, [request.submit(world, logprobs=1) for request in requests], joins_per_step=3)
    engine.close()
    oracle = Oracle(world)
    for request in requests:
        answer = answers[request.name]
        assert_greedy(oracle, request, answer.tokens)
        logits = oracle.logits(request.adapter, [*request.prompt, *answer.tokens])[len(request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).max(-1).values.tolist()
        found = [entry.logprob for entry in answer.logprobs]
        assert found == pytest.approx(expected, abs=LOGITS[world.dtype]), request.name


def few_lines(world: World, monkeypatch: pytest.MonkeyPatch) -> int:
    """A side budget for fewer adapters than there are with vectors, and for one table of each kind: they take turns."""
    monkeypatch.setattr(row_plan, "MAX_LINES", 3)
    units = row_plan.non_lora_unit_bytes(layout_in(world.model_dir), 4)
    num_bytes = 8 * (units["vectors"] + units["norms"]) + units["saved_embedding"] + units["saved_head"]
    lines = row_plan.plan_non_lora(units, num_bytes)
    assert (lines["vectors"], lines["saved_head"]) == (3, 1)
    assert sum("vectors" in rows for rows in world.rows.values()) > 3
    return num_bytes


def names_of(digests: Iterable[str], world: World) -> set[str]:
    return {name for name, digest in world.digests.items() if digest in digests}


def test_every_kind_equals_peft_in_mixed_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decode tokens of others; then the logits themselves."""
    requests = make_requests(world, 2 * (len(world.adapters) + 1))
    requests += [Request(f"trained {name}", name, (7, 5, 20, 9, 40, 30), 6) for name in ("tokens", "tokens-of-both")]
    engine = build_engine(config_of(world, token_budget=40, max_sequences=12, side_bytes=few_lines(world, monkeypatch)))
    answers = run_engine(engine, [request.submit(world, logprobs=1) for request in requests], joins_per_step=3)
    engine.close()
    assert any({"dora", "plain"} <= names_of(record.adapters, world) for record in engine.step_records)
    oracle = Oracle(world)
    for request in requests:
        answer = answers[request.name]
        assert answer.ended is not None and answer.ended.error is None
        assert_greedy(oracle, request, answer.tokens)
        logits = oracle.logits(request.adapter, [*request.prompt, *answer.tokens])[len(request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).max(-1).values.tolist()
        found = [entry.logprob for entry in answer.logprobs]
        assert found == pytest.approx(expected, abs=LOGITS[world.dtype]), request.name


INVOCATION = (9, 8, 9)


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def activated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    linear = LINEAR_MODULES[request.param]
    specs: dict[str, dict[str, Any]] = {
        "plain": {"rank": 4, "target_modules": linear},
        "activated": {"rank": 4, "target_modules": linear, "alora_invocation_tokens": list(INVOCATION)},
        "with-bias": {
            "rank": 2,
            "target_modules": [*linear, "lm_head"],
            "alora_invocation_tokens": [7],
            "lora_bias": True,
        },
    }
    return make_world(request.param, tmp_path_factory.mktemp("activated"), device, specs=specs)


def test_an_activated_adapter_begins_at_its_invocation(activated: World) -> None:
    """At the start, in the middle, at the end, twice, in part, not at all; prompts longer than a step."""
    words = tuple(range(20, 50))
    prompts = {
        "start": (*INVOCATION, *words),
        "middle": (*words[:17], *INVOCATION, *words[17:]),
        "end": (*words, *INVOCATION),
        "twice": (*INVOCATION, *words[:9], *INVOCATION, *words[9:]),
        "overlapping": (*words[:5], 9, 8, 9, 8, 9, *words[5:9]),
        "in part": (*words, 9, 8),
        "nowhere": words,
    }
    requests = [
        Request(f"{where} {who}", who, prompt, 9) for where, prompt in prompts.items() for who in activated.adapters
    ]
    requests += [Request(f"one {at}", "with-bias", (*words[:at], 7, *words[at:]), 5) for at in (0, 11, 30)]
    requests += [Request("base", BASE, words, 9)]
    engine = build_engine(config_of(activated, token_budget=24, max_sequences=8, side_bytes=4 << 20))
    answers = run_engine(engine, [request.submit(activated, logprobs=1) for request in requests], joins_per_step=2)
    engine.close()
    oracle = Oracle(activated)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)
        logits = oracle.logits(request.adapter, [*request.prompt, *answers[request.name].tokens])
        expected = logits[len(request.prompt) - 1 : -1].log_softmax(-1).max(-1).values.tolist()
        found = [entry.logprob for entry in answers[request.name].logprobs]
        assert found == pytest.approx(expected, abs=LOGITS[activated.dtype]), request.name
    # It is the invocation that makes the difference.
    alike = {name: answers[f"{name} activated"].tokens == answers[f"{name} plain"].tokens for name in prompts}
    assert not any(alike[name] for name in ("middle", "nowhere"))
    assert answers["nowhere activated"].tokens == answers["base"].tokens


def start_training(model_dir: Path, init: str) -> Any:
    """PEFT's model with weights as this initialisation makes them, of 64 random tokens where it asks for data."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    tokens = torch.randint(5, 300, (1, 64), generator=torch.Generator().manual_seed(1))
    if init == "corda":
        config.corda_config = CordaConfig(corda_method="kpm")
        preprocess_corda(base, config, run_model=lambda: base(tokens))
    if init != "eva":
        return get_peft_model(base, config)
    config.eva_config = EvaConfig(rho=2.0)
    trained = get_peft_model(base, config)
    initialize_lora_eva_weights(trained, [{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}] * 4)
    return trained


@pytest.mark.parametrize("init", ["pissa", "olora", "corda", "eva", "mica"])
def test_an_adapter_that_begins_at_the_base_s_weights_equals_the_trained_model(
    tmp_path: Path, device: str, init: str
) -> None:
    """PiSSA, OLoRA and CorDA change the base's weights at their start; saved with
    `path_initial_model_for_weight_conversion` they are plain LoRA of twice the rank. EVA leaves them, and divides ranks
    among modules; MiCA leaves them too, and trains A alone."""
    model_dir = make_tiny_model("llama", tmp_path / "base")
    trained, converted = start_training(model_dir, init), {}
    if init not in ("eva", "mica"):
        converted = {"path_initial_model_for_weight_conversion": str(tmp_path / "start")}
        trained.peft_config["default"].init_lora_weights = True
        trained.save_pretrained(str(tmp_path / "start"))
        trained.peft_config["default"].init_lora_weights = init
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name and parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    prompt = tuple(range(20, 40))
    with torch.no_grad():
        expected = trained(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).max(-1)
    trained.save_pretrained(str(tmp_path / "saved"), **converted)
    store = AdapterStore(tmp_path / "store", layout_in(model_dir), base_name=BASE, base_dir=model_dir)
    with store.begin() as upload:
        upload.add_directory(tmp_path / "saved")
        manifest = upload.finish(init)[0].manifest
    store.close()
    ranks = {one.rank for one in manifest.modules}
    assert (len(ranks) > 1) if init == "eva" else (ranks == {8 if converted else 4})
    digests, rows = {init: manifest.digest}, {init: manifest.rows}
    world = World("llama", torch.float32, device, model_dir, tmp_path / "store", {}, digests, rows)
    engine = build_engine(config_of(world, token_budget=32, max_sequences=2))
    answer = run_engine(engine, [Request("r", init, prompt, 1).submit(world, logprobs=1)])["r"]
    engine.close()
    assert answer.tokens == [int(expected.indices)]
    assert answer.logprobs[0].logprob == pytest.approx(float(expected.values), abs=LOGITS[torch.float32])
