"""What is compiled after ready fails the test that it happens in, wherever the engine runs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import pytest
import torch

from kernels.platform import implementation
from service.engine.ipc.client import EngineClient
from tests.support import compiled_after_ready
from tests.support.engine.engine_mock import make_mock_engine
from tests.support.engine.engine_process import collect, request, small_config, until
from tests.support.models.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
# Run by Python itself when a process starts: each look finds one variant more.
ONE_MORE_EACH_TIME = """
import itertools, sys
if "service.engine.process" in sys.orig_argv:
    from kernels import compile_ahead
    counts = itertools.count()
    compile_ahead.num_variants = lambda device: next(counts)
"""


def test_by_an_engine_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = implementation("sampling", torch.device("cpu"))
    compiled: list[str] = []
    contract = dataclasses.replace(sampler.CONTRACT, compiled_count=lambda: len(compiled))
    monkeypatch.setattr(sampler, "CONTRACT", contract)
    mock = make_mock_engine()
    mock.submit("a", max_tokens=3)
    compiled.append("outside of a step")
    mock.step()
    compiled_after_ready.check()
    mock.runner.before_run = lambda: compiled.append("in a step")
    mock.step()
    assert compiled_after_ready.take() == ["step 2: 1 variants compiled after it was ready"]
    mock.runner.before_run = lambda: None
    mock.settle()


def test_by_an_engine_process(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ONE_MORE_EACH_TIME)
    model_dir = make_tiny_model("llama", tmp_path / "model")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    async def drive() -> None:
        client = EngineClient(small_config(model_dir, tmp_path / "store"), environment)
        await client.start()
        try:
            await client.wait_ready()
            await collect(client.submit(request("a")))
            await until(lambda: client.stats is not None)
        finally:
            await client.close()

    asyncio.run(drive())
    found = compiled_after_ready.take()
    assert found and all(compiled_after_ready.COMPILED in line for line in found)


def test_by_a_server(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("info    listening\n")
    compiled_after_ready.watch_log(log)
    compiled_after_ready.check()
    line = f"warning 2 variants {compiled_after_ready.COMPILED}"
    for written, found in ((line, []), ("\n", [line]), ("info    more\n", [])):
        with log.open("a") as file:
            file.write(written)
        assert compiled_after_ready.take() == found
