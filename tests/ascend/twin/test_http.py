"""`multilora serve` with its engine process on the NPU path, on a CPU: base and adapters in one batch over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.platform import IMPLEMENTATIONS
from tests.ascend.twin.stand_ins.calls import ROOT
from tests.support.engine.engine_parity import BASE, Oracle, World, make_world
from tests.support.http.server import Server, running_server
from tests.tolerances import LOGITS

pytestmark = pytest.mark.wide

# Run by Python itself when a process starts: the engine's becomes a twin before it looks at its device.
SITE_CUSTOMIZE = """
import sys
if "service.engine.process" in sys.orig_argv:
    from kernels.platform import install
    from tests.ascend.twin.stand_ins.install import import_torch_npu, npu_platform, prepare_interpreter
    import_torch_npu()
    prepare_interpreter()
    install(npu_platform(), "cpu")
"""
PROMPT = [int(number) for number in torch.randint(5, 304, (20,), generator=torch.Generator().manual_seed(0))]
NUM_TOKENS = 5


@pytest.fixture
def world(tmp_path: Path) -> World:
    sizes = {"head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return make_world("qwen3", tmp_path / "world", "cpu", dtype=torch.bfloat16, **sizes)


@pytest.fixture
def server(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT), os.environ["PYTHONPATH"]]))
    settings = {"block_size_tokens": 128, "token_budget": 64, "max_sequences": 8, "model_name": BASE}
    with running_server(world.model_dir, tmp_path / "work", store_dir=world.store_root, **settings) as server:
        yield server


def test_a_mixed_batch_over_http(world: World, server: Server) -> None:
    for op, names in IMPLEMENTATIONS["npu"].items():
        assert server.metric("op_implementation", op=op, implementation=names[0]) == 1, f"{op} fell back: {server.log}"
    names = [BASE, "all", "attention", "embedding", "rs"]
    with ThreadPoolExecutor(len(names)) as threads:
        answers = dict(zip(names, threads.map(lambda name: _complete(server, name), names), strict=True))
    assert server.metric("lora_op_calls_total") > 0
    oracle = Oracle(world)
    for name, choice in answers.items():
        tokens = choice["token_ids"]
        assert len(tokens) == NUM_TOKENS
        expected = oracle.logits(name, [*PROMPT, *tokens]).log_softmax(-1)[len(PROMPT) - 1 : -1]
        difference = torch.tensor(choice["logprobs"]["token_logprobs"]) - expected[range(NUM_TOKENS), tokens]
        assert float(difference.abs().max()) <= LOGITS[torch.bfloat16], name
    assert len({tuple(choice["logprobs"]["token_logprobs"]) for choice in answers.values()}) == len(names)


def _complete(server: Server, model: str) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]
