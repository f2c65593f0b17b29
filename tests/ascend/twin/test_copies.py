"""What a step and an adapter load bring to the device, and what they wait for."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from service.engine import engine as engine_module
from service.engine.step_inputs import StepInputs
from tests.ascend.twin.copies import recorded_copies
from tests.ascend.twin.install import npu_path
from tests.ascend.twin.test_service import SIZES, config
from tests.ascend.twin.waits import recorded_waits
from tests.support.engine_parity import BASE, Request, build_engine, make_world, run_engine

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


class Runtime:
    """A device's events, on a device that has done everything at once."""

    class Event:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_step_brings_its_inputs_in_one_copy(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decode steps, with adapters and without."""
    monkeypatch.setattr(engine_module, "StepInputs", functools.partial(StepInputs, runtime=Runtime()))  # type: ignore[arg-type]
    world = make_world(family, tmp_path, "cpu", **SIZES[family])
    with npu_path(float32_attention=True):
        engine = build_engine(config(world, num_blocks=9, token_budget=64))
        try:
            first = [Request(f"first {name}", name, (9, 8), 1) for name in ("all", "one")]
            run_engine(engine, [request.submit(world) for request in first])
            for i, name in enumerate((BASE, "all", "one")):
                engine.submit(Request(f"r{i}", name, (5 + i, 9, 8), 3).submit(world))
            while engine.num_requests:
                with recorded_copies(engine._inputs._host) as copies:
                    engine.step()
                assert copies == ["service.engine.step_inputs._send: copy_"]
        finally:
            engine.close()


def test_a_load_waits_for_nothing_and_its_copies_are_counted(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The goal is one copy for each load: the number is told, and every copy is one of the row pool's."""
    world = make_world("llama", tmp_path, "cpu", **SIZES["llama"])
    with npu_path(float32_attention=True):
        engine = build_engine(config(world, num_blocks=9, token_budget=64))
        try:
            run_engine(engine, [Request("first", BASE, (9, 8), 1).submit(world)])
            engine.submit(Request("r", "all", (9, 8, 7), 1).submit(world))
            with recorded_copies(()) as copies, recorded_waits() as waits:
                while engine.num_requests:
                    engine.step()
        finally:
            engine.close()
    assert set(waits) == {"service.engine.results.wait: numpy"}
    loads = [copy for copy in copies if copy.startswith("adapters.")]
    assert loads, "the load is seen"
    record_property("twin", f"{len(loads)} copies to the device in a load of an adapter of all projections, 0 waits")


WATCHED = """
def work():
    ours[[2, 1]]
    ours.copy_(torch.tensor([1.0, 2.0, 3.0]))
    ours + host
    (ours + 1).mul_(ours.sum())
    ours.index_select(0, torch.arange(2, device=ours.device))
    made = torch.zeros(3, device=ours.device)
    made.copy_(host)
    host + host
"""


def test_copies_are_seen() -> None:
    """What the tests above rely on."""
    ours, host = torch.arange(3.0), torch.ones(3)
    names = {"__name__": "service.example", "torch": torch, "ours": ours, "host": host}
    exec(WATCHED, names)
    with recorded_copies([host]) as copies:
        names["work"]()  # type: ignore[operator]
    assert Counter(copy.partition(": ")[2] for copy in copies) == {"index": 1, "copy_": 2, "add": 1}
