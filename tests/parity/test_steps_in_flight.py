"""Hundreds of random changes while steps are in flight: nothing is lost, and no token of anybody else changes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from adapters.files.name_versions import move
from adapters.store.store import AdapterStore
from service.engine.engine import Engine
from service.engine.ipc.messages import Abort, Evict, Submit, Tokens
from service.engine.model import runner
from service.models.layouts import layout_in
from tests.support.engine.engine_parity import (
    BASE,
    Answer,
    Request,
    World,
    build_engine,
    config_of,
    make_world,
    run_engine,
)
from tests.support.engine.stepped_loader import SteppedLoader
from tests.support.models.tiny_models import LINEAR_MODULES, make_adapter
from tests.tolerances import LOGITS

PROMPTS = ((7, 9, 8), tuple(range(5, 22)))
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 2, "logprobs": 2, "prompt_logprobs": 1},
    {"bad_words": ((7,), (8, 9)), "logit_bias": {7: 50.0, 8: 5.0, 9: 5.0}},
)
# Other ways: greedy, up to a token that the answer would go on behind; and the same, of which that token is the last
# that may not end it, or the first that may, by the prompt.
STOPPED = len(SAMPLINGS)
BARRED = STOPPED + 1
WAYS = (*range(BARRED + 1), STOPPED, STOPPED)
MAX_TOKENS = 9
Key = tuple[str, int, int]  # adapter, prompt, sampling
# A name, and whose weights it has one after another.
UPLOADED, NUM_CONTENTS = "uploaded", 4


class Contents:
    """What is uploaded, one by one, under one name."""

    def __init__(self, world: World, directory: Path) -> None:
        self._store = AdapterStore(
            world.store_root, layout_in(world.model_dir), base_name=BASE, base_dir=world.model_dir
        )
        modules = LINEAR_MODULES[world.family]
        self._directories = [
            make_adapter(world.model_dir, directory / str(seed), seed=seed, rank=2 + seed, target_modules=modules)
            for seed in range(NUM_CONTENTS)
        ]
        self._num_uploads = 0
        self._world = world

    def upload(self) -> str:
        """The name of the weights that UPLOADED has now, as `World` knows them."""
        content = self._num_uploads % NUM_CONTENTS
        self._num_uploads += 1
        upload = self._store.begin()
        upload.add_directory(self._directories[content])
        record, _ = upload.finish(UPLOADED, condition=move)
        name = f"{UPLOADED}-{content}"
        self._world.digests[name], self._world.rows[name] = record.digest, record.manifest.rows
        return name

    def close(self) -> None:
        self._store.close()


@pytest.fixture(params=["llama", "lfm2"])
def world(request: pytest.FixtureRequest, tmp_path: Path, device: str) -> World:
    """Of attention alone, and of attention and convolutions with states."""
    return make_world(request.param, tmp_path, device, **{"llama": {"num_hidden_layers": 1}}.get(request.param, {}))


@pytest.fixture
def uploads(world: World, tmp_path: Path) -> Any:
    contents = Contents(world, tmp_path / "contents")
    yield contents
    contents.close()


@dataclass(frozen=True, slots=True)
class Alone:
    """What each adapter, prompt and sampling gives by itself, without overlap; tokens at which STOPPED ends."""

    answers: dict[Key, Answer]
    stops: dict[tuple[str, int], int]

    def submit(self, world: World, request: str, key: Key) -> Submit:
        name, prompt, sampling = key
        stopped = {"stop_token_ids": (self.stops.get((name, prompt), -1),)}
        options = (*SAMPLINGS, stopped, stopped | {"min_tokens": 3 - prompt})[sampling]
        return Request(request, name, PROMPTS[prompt], MAX_TOKENS).submit(world, **options)

    def check(self, key: Key, told: Answer) -> None:
        """What was told so far, and all that there is once it has ended."""
        alone = self.answers[key]
        assert told.tokens == alone.tokens[: len(told.tokens)]
        if told.ended is None:
            return
        assert alone.ended is not None
        assert (told.ended.reason, told.ended.error) == (alone.ended.reason, None)
        assert len(told.tokens) == len(alone.tokens)
        for found, expected in ((told.logprobs, alone.logprobs), (told.prompt_logprobs, alone.prompt_logprobs)):
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert (one.token_id, len(one.top)) == (other.token_id, len(other.top))
                    assert one.logprob == pytest.approx(other.logprob, abs=LOGITS[torch.float32])


def alone(world: World, names: list[str]) -> Alone:
    """STOPPED ends at the third token of the greedy answer, or where it comes before."""
    found = Alone({}, {})
    engine = build_engine(config_of(world, max_sequences=4, token_budget=256, overlap=False))

    def run(samplings: Sequence[int]) -> None:
        keys = [(name, prompt, one) for name in names for prompt in range(len(PROMPTS)) for one in samplings]
        answers = run_engine(engine, [found.submit(world, str(key), key) for key in keys])
        for key in keys:
            ended = answers[str(key)].ended
            assert ended is not None
            if key[2] != BARRED:
                assert ended.reason == ("stop" if key[2] == STOPPED else "length")
            found.answers[key] = answers[str(key)]

    run(range(len(SAMPLINGS)))
    for name in names:
        for prompt in range(len(PROMPTS)):
            found.stops[name, prompt] = found.answers[name, prompt, 0].tokens[2]
    run([STOPPED, BARRED])
    engine.close()
    return found


@pytest.fixture
def _row_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of those that run are brought low on every device, windows or not."""
    capacity_of = runner.capacity_of
    monkeypatch.setattr(runner, "capacity_of", lambda *of: dataclasses.replace(capacity_of(*of), swaps_rows=True))


@pytest.mark.parametrize("num_wanted", [250, pytest.param(1000, marks=pytest.mark.wide)])
@pytest.mark.usefixtures("_row_compaction")
def test_many_changes_beside_steps_in_flight_lose_and_change_nothing(
    num_wanted: int, world: World, uploads: Contents
) -> None:
    uploaded = [uploads.upload() for _ in range(NUM_CONTENTS)]
    expected = alone(world, [BASE, *world.adapters, *uploaded])
    rng, loader = random.Random(15), SteppedLoader()
    # Blocks for two of the long prompts; rows for less than half of the adapters, of which a device rounds
    # each one's up to 16. An adapter of the hybrid has more groups, and each must hold the largest.
    limits = {"token_budget": 14, "max_sequences": 5, "max_steps_waiting_for_rows": 3}
    is_cpu = world.device == "cpu"
    usual = config_of(world, num_blocks=14, num_rows=32 if is_cpu else 96, num_embedding_rows=8, **limits, overlap=True)
    share = 2 if is_cpu and world.family == "llama" else 1
    config = msgspec.structs.replace(usual, row_bytes=usual.row_bytes // share)
    engine = build_engine(config, loader=loader)
    running: dict[str, Key] = {}
    told: dict[str, Answer] = {}
    current, num_changes = uploaded[-1], 0
    ended: Counter[str] = Counter()

    def submit() -> None:
        name = rng.choice([BASE, *world.adapters, current, current])
        key = name, rng.randrange(len(PROMPTS)), rng.choice(WAYS)
        request = f"r{len(told)}"
        running[request], told[request] = key, Answer()
        engine.handle(expected.submit(world, request, key))

    def upload() -> None:
        nonlocal current
        current = uploads.upload()

    def abort() -> None:
        request = rng.choice(list(running))
        del running[request]
        engine.handle(Abort(request))

    changes: list[Callable[[], None]] = [
        abort,
        upload,
        lambda: engine.handle(Evict(rng.choice([*world.digests.values()]))),
    ]
    while num_changes < num_wanted or running:
        while len(running) < 7 and num_changes < num_wanted:
            submit()
        ended.update(_step(engine, running, told, expected))
        if rng.random() < 0.8:
            loader.do_next()
        if running and num_changes < num_wanted and engine.has_step_in_flight and rng.random() < 0.6:
            rng.choice(changes)()
            num_changes += 1
            engine.check_integrity()
    while engine.num_requests or not engine.is_idle or loader.do_all():
        engine.step()
        engine.check_integrity()
    stats = engine.stats()
    engine.close()
    assert min(ended["length"], ended["stop"], stats.num_preemptions) > num_wanted / 10
    assert stats.num_adapter_evictions > num_wanted / 10
    assert engine.blocks.num_used == engine.slots.num_used == 0


def _step(engine: Engine, running: dict[str, Key], told: dict[str, Answer], expected: Alone) -> list[str]:
    """Step, and look at all that is told of those that nobody has aborted; why some have ended."""
    reasons = []
    for event in engine.step():
        key = running.get(event.request_id)
        if key is None:
            continue  # aborted
        answer = told[event.request_id]
        if isinstance(event, Tokens):
            answer.tokens.extend(event.token_ids)
            answer.logprobs.extend(event.logprobs)
            answer.prompt_logprobs = event.prompt_logprobs or answer.prompt_logprobs
        else:
            answer.ended = event
            del running[event.request_id]
            reasons.append(event.reason)
        expected.check(key, answer)
    engine.check_integrity()
    return reasons
