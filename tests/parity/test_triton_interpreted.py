"""The path of an NVIDIA GPU without a GPU: the Triton kernels of all ops in Triton's
interpreter, through the whole engine. With `--device cuda` the other parity tests run these kernels as compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import platform
from service.engine.ipc.messages import Load
from tests.support.engine.engine_parity import (
    BASE,
    Oracle,
    Request,
    assert_greedy,
    build_engine,
    config_of,
    make_world,
    run_engine,
)
from tests.support.limits import LIMIT_SECONDS
from tests.support.npu.triton_interpreter import kernels_wished_for

pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")

OPS = ("paged_attention", "lora", "causal_conv1d", "rms_norm", "rotary_kv", "row_scatter", "swiglu", "gated_delta")
# The interpreter takes seconds for a step, so there are few layers.
FAMILIES = {
    "llama": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@pytest.fixture(autouse=True)
def _triton_kernels(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[None]:
    if device != "cpu":
        pytest.skip("NOT RUN: on a GPU the other tests run these kernels")
    with kernels_wished_for(OPS, monkeypatch):
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """Two adapters and the base in one step, a prompt in chunks beside decode tokens."""
    world = make_world(family, tmp_path, "cpu", **FAMILIES[family])
    lengths = {"all": 7, "attention": 4, BASE: 3}
    requests = [Request(name, name, tuple(range(7, 7 + length)), 2) for name, length in lengths.items()]
    engine = build_engine(config_of(world, num_blocks=20, num_rows=64, token_budget=12, max_sequences=3))
    for name in ("all", "attention"):
        engine.handle(Load(world.digests[name]))
    while engine.stats().num_adapters_on_device < 2:
        engine.wake.clear()
        engine.step()
        assert engine.stats().num_adapters_on_device == 2 or engine.wake.wait(LIMIT_SECONDS), (
            "the adapters do not arrive"
        )
    answers = run_engine(engine, [request.submit(world) for request in requests])
    engine.close()
    modules = [platform.implementation(op, torch.device("cpu")).__name__ for op in OPS]
    assert modules == [f"kernels.{op}.triton_cuda" for op in OPS]
    oracle = Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)
    assert any(len(record.adapters) == 2 and record.num_base_tokens for record in engine.step_records)
    assert any(record.num_prefill_tokens and record.num_decode_tokens for record in engine.step_records)
