"""Tokens with the prefix cache are those without it: base, LoRA, DoRA and activated adapters in mixed steps, chunked,
preempted, aborted and evicted, in memory that begins as NaN."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from service.engine.engine import Engine
from service.engine.model.runner import ModelRunner
from service.models.families import model_spec
from service.models.layers.caches import state_bytes_per_line
from service.models.spec.config_json import read_config
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
from tests.support.models.tiny_models import ATTENTION_INPUTS, FAMILIES, LINEAR_MODULES, VOCAB_SIZE

INVOCATION = (9, 8, 7)


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    return world_of(request.param, tmp_path_factory.mktemp(request.param), device)


def world_of(family: str, directory: Path, device: str) -> World:
    linear, inputs = LINEAR_MODULES[family], ATTENTION_INPUTS[family]
    specs = {
        "plain": {"rank": 4, "target_modules": linear},
        "dora": {"rank": 4, "target_modules": inputs, "use_dora": True},
        "activated": {"rank": 4, "target_modules": linear, "alora_invocation_tokens": list(INVOCATION)},
    }
    return make_world(family, directory, device, specs=specs)


def requests_of(world: World, num: int) -> list[Request]:
    """Conversations that go on, over common beginnings: each prompt is the stem of another one, cut anywhere."""
    rng = random.Random(num)
    stem = tuple(rng.randrange(10, VOCAB_SIZE) for _ in range(40))
    stem = stem[:30] + INVOCATION + stem[30:]
    requests = []
    for i in range(num):
        rest = tuple(rng.randrange(10, VOCAB_SIZE) for _ in range(rng.randint(1, 6)))
        prompt = stem[: rng.choice((rng.randint(1, 43), 40, 43))] + (rest if rng.random() < 0.7 else ())
        adapter = (BASE, *world.adapters)[i % (1 + len(world.adapters))]
        requests.append(Request(f"r{i}", adapter, prompt, rng.randint(4, 12)))
    return requests


def poison_free_lines(engine: Engine) -> None:
    """Before each step, lines of state that neither a sequence nor the cache has are NaN."""
    assert isinstance(engine.runner, ModelRunner)
    layers = engine.runner.caches.layers
    tensors = [getattr(cache, name) for cache in layers for name in ("lines", "matrices") if hasattr(cache, name)]
    whole_run = engine.runner.run

    def run(*args: Any) -> torch.Tensor:
        for tensor in tensors:
            tensor[engine.lines.free] = float("nan")
        return whole_run(*args)

    engine.runner.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_with_the_cache_are_those_without_it(world: World, overlap: bool) -> None:
    requests = requests_of(world, 32)
    tokens = {}
    for has_cache in (False, True):
        # Thirty blocks of four tokens hold about two of these requests at their end, or idle blocks instead.
        sizes = {"num_blocks": 30, "token_budget": 24, "max_sequences": 6, "side_bytes": 2**20}
        spec = model_spec(read_config(world.model_dir))
        sizes["state_cache_bytes"] = 8 * state_bytes_per_line(spec, world.dtype)
        engine = build_engine(config_of(world, prefix_cache=has_cache, overlap=overlap, **sizes))
        poison_free_lines(engine)
        answers = run_engine(engine, [request.submit(world) for request in requests], joins_per_step=2)
        tokens[has_cache] = {name: answer.tokens for name, answer in answers.items()}
        assert all(len(tokens[has_cache][request.name]) == request.max_tokens for request in requests)
        assert engine.stats().num_preemptions
        counts = engine.cache.counts
        if has_cache:
            assert counts.hit_tokens > counts.queried_tokens / (12 if engine.capacity.has_conv else 3)
            assert engine.cache.trie.num_evicted
            assert engine.lines.num_evicted or not engine.capacity.has_conv
        else:
            assert not counts.hit_tokens
        engine.close()
    assert tokens[True] == tokens[False]
    oracle = Oracle(world)
    for request in requests:
        if request.adapter != "activated":
            assert_greedy(oracle, request, tokens[True][request.name])
