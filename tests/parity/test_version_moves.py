"""Requests that go on with another version of their adapter are transformers + PEFT, whose adapter is changed between
two tokens while its cache stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import PeftModel

from service.engine.ipc.messages import Finished, Move, Tokens
from tests.support.engine.engine_parity import Request, World, build_engine, config_of, make_world
from tests.support.models.tiny_models import ATTENTION_INPUTS, FAMILIES, LINEAR_MODULES, load_oracle

# What each request begins with, and the versions that it goes on with, by the number of its tokens then.
MOVES: dict[str, tuple[str, dict[int, str]]] = {
    "once": ("first", {5: "second"}),
    "often": ("first", {3: "second", 4: "dora", 9: "first"}),
    "there and back": ("dora", {2: "first", 6: "dora"}),
    "never": ("first", {}),
    "before": ("first", {0: "second"}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    linear, inputs = LINEAR_MODULES[request.param], ATTENTION_INPUTS[request.param]
    specs: dict[str, dict[str, Any]] = {
        "first": {"rank": 4, "target_modules": linear},
        "second": {"rank": 8, "target_modules": linear},
        "dora": {"rank": 3, "target_modules": inputs, "use_dora": True},
    }
    return make_world(request.param, tmp_path_factory.mktemp(request.param), device, specs=specs)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_of_moved_requests_are_those_of_a_cache_that_stays(world: World, overlap: bool) -> None:
    engine = build_engine(config_of(world, overlap=overlap, side_bytes=2**20))
    requests = {name: Request(name, first, (11, *range(20, 40)), 14) for name, (first, _) in MOVES.items()}
    tokens: dict[str, list[int]] = {name: [] for name in MOVES}
    versions: dict[str, list[tuple[int, str]]] = {name: [(0, first)] for name, (first, _) in MOVES.items()}
    names = {digest: name for name, digest in world.digests.items()}
    due = {name: dict(moves) for name, (_, moves) in MOVES.items()}
    try:
        for request in requests.values():
            engine.submit(request.submit(world))
        while engine.num_requests:
            for name, moves in due.items():
                if (target := moves.pop(len(tokens[name]), None)) is not None:
                    engine.handle(Move(name, world.digests[target], world.rows[target]))
            events = engine.step()
            engine.check_integrity()
            for event in events:
                assert not isinstance(event, Finished) or event.reason == "length", event
                if isinstance(event, Tokens):
                    if event.adapter is not None:
                        versions[event.request_id].append((len(tokens[event.request_id]), names[event.adapter]))
                    tokens[event.request_id] += event.token_ids
    finally:
        engine.close()
    assert [name for _, name in versions["often"]] == ["first", "second", "dora", "first"]
    model = _oracle(world)
    for name, request in requests.items():
        assert tokens[name] == _greedy(model, request.prompt, versions[name], 14), f"{name}: {versions[name]}"


def _oracle(world: World) -> Any:
    model: Any = load_oracle(world.model_dir, world.dtype)
    for name, directory in world.adapters.items():
        if isinstance(model, PeftModel):
            model.load_adapter(directory, name)
        else:
            model = PeftModel.from_pretrained(model, directory, adapter_name=name)
    return model.eval()


@torch.no_grad()
def _greedy(model: Any, prompt: Sequence[int], versions: Sequence[tuple[int, str]], num_tokens: int) -> list[int]:
    """Greedy tokens with one cache, of the last version that begins with each."""
    given, cache, tokens, num_before = list(prompt), None, [], 0
    for index in range(num_tokens):
        model.set_adapter([name for start, name in versions if start <= index][-1])
        # Without positions transformers begins at 0 again, where the first layer is no attention (Bamba).
        positions = torch.arange(num_before, num_before + len(given))[None]
        output = model(torch.tensor([given]), position_ids=positions, past_key_values=cache, use_cache=True)
        num_before += len(given)
        cache = output.past_key_values
        given = [int(output.logits[0, -1].argmax())]
        tokens += given
    return tokens
