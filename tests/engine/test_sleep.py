"""Sleep without the end of the process: what memory goes, what stays away from it meanwhile, and what comes back.

A CPU's weights are in host memory, so its engine moves none; here it moves them as a GPU's does. With `--device cuda`
steps are captured, before and after.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adapters.memory.row_pool import RowPool
from service.engine.engine import Engine
from service.engine.ipc.messages import Evict, Finished, Load, Pause, Pin
from service.engine.model import runner as runner_module
from service.engine.model import sleeping_memory
from service.engine.model.runner import ModelRunner
from service.engine.model.sleeping_memory import tensors_on
from service.models.layers.weights import WeightsKind
from service.models.loader import load_model
from tests.support.engine.engine_parity import World, build_engine, config_of, make_requests, make_world, run_engine
from tests.support.models.tiny_models import FAMILIES, WITH_EXPERTS, make_tiny_model

SPECS = {"all": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}}
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    return make_world(request.param, tmp_path_factory.mktemp("world"), device, specs=SPECS)


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    made = build_engine(config_of(world))
    yield made
    made.close()


def told(engine: Engine, world: World) -> list[list[int]]:
    answers = run_engine(engine, [one.submit(world) for one in make_requests(world, 4)])
    return [answer.tokens for answer in answers.values()]


def sleeps(engine: Engine) -> Finished:
    """The answer to a sleep behind a pause."""
    engine.pauses.begin(Pause("p", "abort", 0.0))
    engine.step()
    engine.sleep("s")
    answers = [event for event in engine.step() if isinstance(event, Finished) and event.request_id == "s"]
    assert len(answers) == 1
    return answers[0]


def test_caches_go_and_come_back_empty(engine: Engine, world: World) -> None:
    before = told(engine, world)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    assert sleeps(engine).error is None
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in runner.caches.tensors)
    assert engine.pauses.seconds_left is None, "a sleep has no lease"
    digest = world.digests["all"]
    for message in (Load(digest), Pin((digest,)), Evict(digest)):
        engine.handle(message)
        assert not engine.step()
    engine.resume("r")
    assert [event.request_id for event in engine.step() if isinstance(event, Finished)] == ["r"]
    hit = engine.cache.counts.hit_tokens
    assert told(engine, world) == before
    assert engine.cache.counts.hit_tokens == hit, "keys and values of before are gone"
    engine.check_integrity()


def test_weights_and_rows_wait_in_host_memory(engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = told(engine, world)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    moved = moved_as_on_a_gpu(runner, engine, monkeypatch)
    places = [one.data_ptr() for one in moved]
    assert sleeps(engine).error is None
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in moved)
    others = [torch.full_like(one, torch.nan) for one in (torch.empty(1 << 20) for _ in range(8))]
    engine.resume("r")
    engine.step()
    assert [one.data_ptr() for one in moved] != places
    del others
    assert isinstance(engine.rows, RowPool)
    assert not engine.rows._scatter._plans, "plans of a GPU hold addresses"
    assert told(engine, world) == before
    engine.check_integrity()


def found(device: torch.device, *roots: object) -> list[torch.Tensor]:
    """Those of the device whose memory is torch's; oneDNN has packed others for itself."""
    return [one for one in tensors_on(device, *roots) if one.layout is torch.strided]


def moved_as_on_a_gpu(runner: ModelRunner, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Have a sleep move weights and rows, all of which are returned; those that are mapped files are copied first."""
    for tensor in found(runner.capacity.device, runner._model, engine.rows):
        if not tensor.untyped_storage().resizable():
            tensor.set_(tensor.clone())
    moved = found(runner.capacity.device, runner._model, engine.rows)
    sleeping = sleeping_memory.SleepingMemory
    monkeypatch.setattr(runner_module, "SleepingMemory", lambda lost, _kept: sleeping(lost, moved))
    return moved


@pytest.mark.parametrize("weights", ["auto", "int8", "nf4"])
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_all_weights_are_found(tmp_path: Path, family: str, weights: WeightsKind) -> None:
    loaded = load_model(make_tiny_model(family, tmp_path, dtype=torch.bfloat16), weights=weights)
    tensors = {id(one): one for one in tensors_on(CPU, loaded.model)}.values()
    assert sum(one.numel() * one.element_size() for one in tensors) >= loaded.num_weight_bytes


def test_all_rows_are_found(engine: Engine) -> None:
    assert isinstance(engine.rows, RowPool)
    stacks = engine.rows._tensors.stacks.values()
    rows = {id(rows) for one in stacks for rows in (*one.a, *one.b)}
    assert rows
    assert rows <= {id(one) for one in tensors_on(engine.runner.capacity.device, engine.rows)}


def test_an_engine_that_cannot_sleep_says_so_and_goes_on(
    engine: Engine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = told(engine, world)
    moved_as_on_a_gpu(engine.runner, engine, monkeypatch)  # type: ignore[arg-type]
    monkeypatch.setattr(sleeping_memory, "memory_bytes", lambda: (1000, 1000))
    error = sleeps(engine).error
    assert error is not None
    assert "of host memory, of which 1000 are free" in error
    assert told(engine, world) == before


def test_an_engine_whose_pause_has_ended_does_not_sleep(engine: Engine, world: World) -> None:
    engine.submit(make_requests(world, 1)[0].submit(world))
    engine.sleep("s")
    answers = [event for event in engine.step() if isinstance(event, Finished)]
    assert [answer.error for answer in answers if answer.request_id == "s"] == ["the pause has ended, and requests run"]
    assert not engine.sleeping.is_asleep
