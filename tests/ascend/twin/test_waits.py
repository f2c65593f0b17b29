"""A step on the NPU path waits for the device once: for the tokens that it has sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ascend.twin.stand_ins.install import npu_path
from tests.ascend.twin.stand_ins.waits import recorded_waits
from tests.ascend.twin.test_service import config, make_twin_world
from tests.support.engine.engine_parity import build_engine, submit_every_sampling

WAITING = """
def work():
    if x[1]:
        x[mask].sum().item()
    torch.nonzero(x)
    x.repeat_interleave(x)
    x.repeat_interleave(x, output_size=3)
    x.index_select(0, x)
    x.to(torch.int32).to("cpu").numpy()
    list(x)
    torch.equal(x, x)
"""


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("family", ["lfm2", "qwen3_moe"])
def test_a_step_waits_for_the_device_once(family: str, tmp_path: Path) -> None:
    world = make_twin_world(family, tmp_path)
    with npu_path(float32_attention=True):
        engine = build_engine(config(world, num_blocks=9, token_budget=64))
        try:
            submit_every_sampling(engine, world)
            num_steps = engine.num_steps
            while engine.num_requests:
                with recorded_waits() as waits:
                    engine.step()
                assert waits == ["service.engine.step.outputs.wait: numpy"]
            assert engine.num_steps - num_steps == 3
        finally:
            engine.close()


def test_waits_are_seen() -> None:
    """What the test above relies on."""
    names = {"__name__": "service.example", "torch": torch, "x": torch.arange(3), "mask": torch.arange(3) > 1}
    exec(WAITING, names)
    with recorded_waits() as waits:
        names["work"]()
    assert [wait.partition(": ")[2] for wait in waits] == [
        "bool",
        "index by a mask",
        "item",
        "nonzero",
        "repeat_interleave",
        "to",
        "numpy",
        "iter",
        "equal",
    ]
