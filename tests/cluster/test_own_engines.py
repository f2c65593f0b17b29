"""How a server's own engines share a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service import machine
from service.cluster.engines import Engines
from service.engine.ipc.client import EngineClient
from service.server.own_engines import own_engines
from service.settings import BUNDLED_MODEL_DIR, Settings


@pytest.mark.parametrize(("device", "nodes", "is_divided"), [
    ("cpu", ["nvidia0"], True),
    ("auto", [], True),
    ("auto", ["nvidia0"], False),
    ("auto", ["davinci0"], False),
    ("cuda", [], False),
])  # fmt: skip
def test_engines_on_cpus_have_a_part_of_them_each(
    device: str, nodes: list[str], is_divided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of them each, two engines' threads wait for one another."""
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    for node in nodes:
        (tmp_path / node).touch()
    engines = own_engines(Settings(model_dir=BUNDLED_MODEL_DIR, device=device, replicas=2))
    assert isinstance(engines, Engines)
    threads = [client.options.num_threads for client in engines.clients if isinstance(client, EngineClient)]
    assert threads == [4 if is_divided else None] * 2
