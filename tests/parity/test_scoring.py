"""Score heads of adapters against PEFT's AutoModelForSequenceClassification, in steps with generation, other adapters
and the base."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from service.engine.engine import Engine
from service.engine.ipc.messages import Sampling, Submit
from tests.support.engine.engine_parity import (
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
from tests.support.models.tiny_models import ATTENTION_INPUTS, LINEAR_MODULES, load_classifier
from tests.tolerances import LOGITS

# Labels of each adapter's score head; None: it has none, and generates.
NUM_LABELS = {"one": 1, "three": 3, "biased": 2, "many": 70, "plain": None}


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3_text"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    family = request.param
    linear, inputs = LINEAR_MODULES[family], ATTENTION_INPUTS[family]
    specs: dict[str, dict[str, Any]] = {
        "one": {"rank": 4, "target_modules": linear, "num_labels": 1},
        "three": {"rank": 2, "target_modules": inputs, "num_labels": 3, "use_dora": True},
        "biased": {"rank": 3, "target_modules": inputs, "num_labels": 2, "has_head_bias": True},
        "many": {"rank": 8, "target_modules": "all-linear", "num_labels": 70},
        "plain": {"rank": 4, "target_modules": linear},
    }
    return make_world(family, tmp_path_factory.mktemp(family), device, specs=specs)


def classify(request: Request, world: World) -> Submit:
    digest, rows = world.digests[request.adapter], world.rows[request.adapter]
    return Submit(request.name, request.prompt, Sampling(max_tokens=0), digest, rows, pooling="classify")


def logits_of(pooled: bytes | None) -> torch.Tensor:
    assert pooled is not None
    return torch.from_numpy(np.frombuffer(pooled, "<f4").copy())


@torch.no_grad()
def expected_logits(world: World, adapter: str, num_labels: int, prompts: list[tuple[int, ...]]) -> list[torch.Tensor]:
    base = load_classifier(world.model_dir, num_labels, has_head_bias=adapter == "biased")
    model = PeftModel.from_pretrained(base, world.adapters[adapter]).eval()
    return [model(torch.tensor([list(prompt)])).logits[0] for prompt in prompts]


def test_logits_equal_peft_in_mixed_steps(world: World) -> None:
    requests = make_requests(world, 4 * (len(NUM_LABELS) + 1))
    submits = [
        classify(one, world) if NUM_LABELS.get(one.adapter) is not None else one.submit(world) for one in requests
    ]
    engine = build_engine(config_of(world, token_budget=24, max_sequences=8, side_bytes=4 << 20))
    answers = run_engine(engine, submits, joins_per_step=3)
    engine.close()
    oracle = Oracle(world)
    for adapter, num_labels in NUM_LABELS.items():
        own = [one for one in requests if one.adapter == adapter]
        if num_labels is None:
            continue
        for one, expected in zip(
            own, expected_logits(world, adapter, num_labels, [r.prompt for r in own]), strict=True
        ):
            ended = answers[one.name].ended
            assert ended is not None and ended.reason == "length", ended
            torch.testing.assert_close(logits_of(ended.pooled), expected, rtol=0, atol=LOGITS[torch.float32])
    for one in requests:
        if NUM_LABELS.get(one.adapter) is None:
            assert_greedy(oracle, one, answers[one.name].tokens)


def test_heads_come_and_go_with_the_rows_of_their_adapters(world: World) -> None:
    """With rows for one adapter at a time and no host tier, each is read again for each of its turns."""
    config = config_of(world, num_rows=8, max_sequences=4, side_bytes=4 << 20)
    engine = build_engine(config)
    residency = engine.adapter_loads.residency
    assert residency is not None
    prompts = [(9, 8, 7), (5, 6)]
    for _ in range(2):
        for adapter in ("many", "one"):
            submits = [
                classify(Request(f"{adapter}{index}", adapter, prompt, 0), world)
                for index, prompt in enumerate(prompts)
            ]
            answers = run_engine(engine, submits)
            expected = expected_logits(world, adapter, NUM_LABELS[adapter] or 0, prompts)
            for index, logits in enumerate(expected):
                ended = answers[f"{adapter}{index}"].ended
                assert ended is not None
                torch.testing.assert_close(logits_of(ended.pooled), logits, rtol=0, atol=LOGITS[torch.float32])
        _evict(engine, world.digests["many"])
        assert residency.head_of(world.digests["many"]) is None
    assert residency.head_of(world.digests["one"]) is not None
    engine.close()


def test_the_engine_refuses_a_head_that_is_not_there(world: World) -> None:
    engine = build_engine(config_of(world))
    one = Sampling(max_tokens=0)
    plain = world.digests["plain"], world.rows["plain"]
    answers = run_engine(
        engine,
        [Submit("base", (5, 6), one, pooling="classify"), Submit("plain", (5, 6), one, *plain, pooling="classify")],
    )
    engine.close()
    for name in ("base", "plain"):
        ended = answers[name].ended
        assert ended is not None and ended.reason == "error" and ended.client_fault, ended


def _evict(engine: Engine, digest: str) -> None:
    engine.adapter_loads.evict(digest)
