"""A step on the NPU path waits for the device once: for the tokens that it has sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service.engine.build import build_engine
from tests.ascend.twin.install import npu_path
from tests.ascend.twin.test_service import SIZES, config
from tests.ascend.twin.waits import recorded_waits
from tests.support.engine_parity import BASE, Request, make_world, run_engine

# One request each: every way to choose a token, and to be told of probabilities.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 0.8, "top_k": 5, "min_p": 0.05, "seed": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0}, "min_tokens": 2, "ignore_eos": False},
    {"logprobs": 3, "prompt_logprobs": 2},
)
WAITING = """
def work():
    if x[1]:
        x[mask].sum().item()
    torch.nonzero(x)
    x.repeat_interleave(x)
    x.repeat_interleave(x, output_size=3)
    x.index_select(0, x)
"""


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_a_step_waits_for_the_device_once(tmp_path: Path) -> None:
    world = make_world("lfm2", tmp_path, "cpu", **SIZES["lfm2"])
    with npu_path(float32_attention=True):
        engine = build_engine(config(world, num_blocks=9, token_budget=64))
        try:
            first = [Request(f"first {name}", name, (9,), 1) for name in ("all", "embedding")]
            run_engine(engine, [request.submit(world.digests) for request in first])
            for i, sampling in enumerate(SAMPLINGS):
                request = Request(f"r{i}", (BASE, "all", "embedding")[i % 3], (5 + i, 9, 8, 7), 3)
                engine.submit(request.submit(world.digests, **sampling))
            num_steps = engine.num_steps
            while engine.num_requests:
                with recorded_waits() as waits:
                    engine.step()
                assert waits == ["service.engine.sampling_plan.read: cpu"]
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
    ]
