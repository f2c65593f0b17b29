"""A server whose wished-for implementations do not work: it starts, says so once, and answers right all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernels.platform import IMPLEMENTATIONS
from tests.api.conftest import ADAPTERS, BASE, Checkpoints
from tests.support.http.server import Server, running_server, start_server, wait_for

BROKEN_OPS = Path(__file__).resolve().parents[2] / "support" / "broken_ops"


def break_ops(monkeypatch: pytest.MonkeyPatch, wishes: str) -> None:
    """For servers started from now on."""
    monkeypatch.setenv("PYTHONPATH", str(BROKEN_OPS))
    monkeypatch.setenv("BROKEN_OPS", wishes)


def answers(server: Server) -> list[Any]:
    """Greedy answers of the base and every adapter in one batch."""
    items = [{"model": name, "prompt": "the quick", "max_tokens": 12, "temperature": 0} for name in (BASE, *ADAPTERS)]
    body = {"items": [{**item, "return_token_ids": True} for item in items]}
    found = server.post("/v1/completions/batch", json=body).json()["items"]
    return [item["choices"][0]["token_ids"] for item in found]


def test_each_op_s_implementation_is_in_the_metrics(server: Server) -> None:
    for op, names in IMPLEMENTATIONS["cpu"].items():
        assert server.metric("op_implementation", op=op, implementation=names[0], wished=names[0]) == 1
        assert server.metric("op_implementation", op=op) == 1


def test_broken_ones_are_replaced_and_the_answers_are_right(
    server: Server, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_ops(monkeypatch, "lora=differs paged_attention=raises rms_norm=missing")
    settings = {"model_name": BASE, "preload_adapters_dir": checkpoints.adapters}
    with running_server(checkpoints.base, tmp_path, **settings) as fallen:
        for op, kind in (("lora", "differs"), ("paged_attention", "raises"), ("rms_norm", "missing")):
            used = IMPLEMENTATIONS["cpu"][op][0]
            assert fallen.metric("op_implementation", op=op, implementation=used, wished=f"broken_{kind}") == 1
            told = fallen.log.count(f"The op {op} is served by {used} instead of broken_{kind}: ")
            assert told == len(fallen.engine_pids())
        assert fallen.metric("op_implementation") == len(IMPLEMENTATIONS["cpu"])
        # What the probe itself ran counts as no step's.
        assert fallen.metric("lora_op_calls_total") == 0
        assert answers(fallen) == answers(server)
        assert fallen.metric("lora_op_calls_total") > 0


def test_an_op_without_any_that_works_ends_the_start(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_ops(monkeypatch, "lora=raises!")
    server = start_server(checkpoints.base, tmp_path, wait=False, model_name=BASE)
    wait_for(lambda: server.process.poll() is not None, "the server to end")
    assert server.process.returncode == 1
    sentence = "The op lora is not served by any implementation: broken_raises failed in lora_linear"
    assert f"multilora: {sentence}" in server.log
