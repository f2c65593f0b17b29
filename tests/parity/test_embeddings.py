"""Pooled hidden states against transformers + PEFT, for every family, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from service.engine.ipc.messages import Sampling, Submit
from service.engine.startup.build import build_engine
from tests.support.engine.engine_parity import (
    BASE,
    Oracle,
    Request,
    World,
    config_of,
    make_requests,
    make_world,
    run_engine,
)
from tests.support.models.tiny_models import FAMILIES
from tests.tolerances import LOGITS

POOLINGS = ("last", "mean")


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    return make_world(request.param, tmp_path_factory.mktemp(request.param), device)


def submit_of(request: Request, world: World, pooling: Any) -> Submit:
    digest, rows = world.digests.get(request.adapter), world.rows.get(request.adapter, {})
    return Submit(f"{request.name}-{pooling}", request.prompt, Sampling(max_tokens=0), digest, rows, pooling=pooling)


def test_each_adapter_s_hidden_states_are_peft_s(world: World) -> None:
    """Prompts in chunks, beside requests that generate; all projections of the last layer, and its norm, count."""
    requests = make_requests(world, 9)
    engine = build_engine(config_of(world, token_budget=24, max_sequences=8, num_blocks=90))
    asked = [submit_of(request, world, pooling) for request in requests for pooling in POOLINGS]
    beside = [request.submit(world) for request in requests[:3]]
    answers = run_engine(engine, [*beside, *asked], joins_per_step=3)
    engine.close()
    oracle, found = Oracle(world), {}
    for request in requests:
        states = oracle.hidden(request.adapter, request.prompt)
        for pooling, expected in zip(POOLINGS, (states[-1], states.mean(dim=0)), strict=True):
            ended = answers[f"{request.name}-{pooling}"].ended
            assert ended is not None
            pooled = torch.from_numpy(np.frombuffer(ended.pooled or b"", "<f4").copy())
            torch.testing.assert_close(pooled, expected, rtol=0, atol=LOGITS[torch.float32])
            found[request.adapter, pooling] = pooled
    # All but those of the head alone change what the head reads.
    for name in set(world.adapters) - {"head"}:
        for pooling in POOLINGS:
            assert not torch.allclose(found[name, pooling], found[BASE, pooling], atol=1e-3), name
