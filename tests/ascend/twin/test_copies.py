"""What a step and an adapter load bring to the device, and what they wait for."""

from __future__ import annotations

import functools
import gc
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from adapters.memory import row_pool
from adapters.memory.device_upload import COMPLETED, CopyEvent
from adapters.memory.slab import HostAdapter
from service.engine.step import launcher
from service.engine.step.inputs import StepInputs
from tests.ascend.twin.stand_ins.copies import noted_host_memory, recorded_copies
from tests.ascend.twin.stand_ins.install import npu_path
from tests.ascend.twin.stand_ins.waits import recorded_waits
from tests.ascend.twin.test_service import SIZES, config
from tests.support.engine.engine_parity import BASE, Request, build_engine, make_world, run_engine

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
    monkeypatch.setattr(launcher, "StepInputs", functools.partial(StepInputs, runtime=Runtime()))  # type: ignore[arg-type]
    world = make_world(family, tmp_path, "cpu", **SIZES[family])
    with npu_path(float32_attention=True):
        with noted_host_memory() as host:
            engine = build_engine(config(world, num_blocks=9, token_budget=64))
        try:
            first = [Request(f"first {name}", name, (9, 8), 1) for name in ("all", "one")]
            run_engine(engine, [request.submit(world) for request in first])
            for i, name in enumerate((BASE, "all", "one")):
                engine.submit(Request(f"r{i}", name, (5 + i, 9, 8), 3).submit(world))
            while engine.num_requests:
                with recorded_copies(host) as copies:
                    engine.step()
                assert copies == ["service.engine.step.inputs._send: copy_"]
        finally:
            engine.close()


class MadeUpStream:
    """A device's stream of copies, on a device that has done everything at once; adapters come there by a buffer."""

    def begin(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_steps(self) -> None:
        pass

    def mark(self) -> CopyEvent:
        return COMPLETED

    def before_steps(self, mark: CopyEvent) -> None:
        pass


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_load_is_one_copy_and_waits_for_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an adapter of all projections: into the device's buffer, and from there into its rows."""
    monkeypatch.setattr(row_pool, "copy_stream_of", lambda _device: MadeUpStream())
    world = make_world(family, tmp_path, "cpu", **SIZES[family])
    with npu_path(float32_attention=True):
        engine = build_engine(config(world, num_blocks=9, token_budget=64))
        try:
            run_engine(engine, [Request("first", BASE, (9, 8), 1).submit(world)])
            for name in ("all", "one"):
                engine.submit(Request(name, name, (9, 8, 7), 1).submit(world))
                slabs = [one.slab for one in gc.get_objects() if isinstance(one, HostAdapter)]
                assert slabs, "the adapter is in host memory"
                with recorded_copies(slabs) as copies, recorded_waits() as waits:
                    while engine.num_requests:
                        engine.step()
                assert set(waits) == {"service.engine.step.outputs.wait: numpy"}
                assert [copy for copy in copies if copy.startswith("adapters.")] == [
                    "adapters.memory.device_upload.fetch: copy_"
                ]
        finally:
            engine.close()


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
