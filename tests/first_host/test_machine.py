"""The steps that look at the machine, where devices are there that cannot be used."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from service.first_host.plan import STEPS
from service.first_host.steps import machine_facts
from service.first_host.steps.step_process import StepFailed, StepHost
from tests.first_host.conftest import BUNDLED


def host_on(device: str, *, asked: str, limit_seconds: float = 100.0) -> StepHost:
    return StepHost(device, {"device": asked, "model_dir": str(BUNDLED)}, limit_seconds, io.StringIO())


def said(host: StepHost, kind: str) -> list[dict[str, Any]]:
    assert isinstance(host.channel, io.StringIO)
    words = map(json.loads, host.channel.getvalue().splitlines())
    return [word[kind] for word in words if kind in word]


@pytest.mark.parametrize(("node", "named"), [("davinci0", "--device npu"), ("nvidia0", "--device cuda")])
def test_a_device_that_torch_does_not_see_is_told(
    node: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own steps are passed over, as the machine was taken for a CPU; not where a CPU was asked for."""
    monkeypatch.setattr(machine_facts, "_DEVICES", tmp_path)
    for name in (node, "nvidiactl"):  # the latter is there without any GPU
        (tmp_path / name).touch()
    for asked, wanted in (("auto", [True]), ("cpu", [])):
        host = host_on("cpu", asked=asked)
        machine_facts.environment(host)
        faults = [fault for fault in said(host, "fault") if fault["code"] == "device-not-seen"]
        assert [named in fault["cure"] and node in fault["message"] for fault in faults] == wanted


def test_this_user_has_longer_to_answer_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first start of the device's package from a slow disk is no refusal; without this answer nothing else is run."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    limits: list[float] = []

    def run(*_: Any, timeout: float, **__: Any) -> subprocess.CompletedProcess[str]:
        limits.append(timeout)
        return subprocess.CompletedProcess((), 0, "1 + 1 is 2", "")

    monkeypatch.setattr(subprocess, "run", run)
    permissions = next(step for step in STEPS if step.name == "permissions")
    machine_facts.permissions(host_on("cuda:99", asked="cuda:99", limit_seconds=permissions.limit_seconds))
    own, *others = limits
    assert others and own > 2 * max(others)
    assert own + max(others) <= permissions.limit_seconds


def test_this_user_s_answer_does_not_wait_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that lets everybody wait, the others' time would be the whole step's."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    host = host_on("cuda:99", asked="cuda:99", limit_seconds=0.0)
    with pytest.raises(StepFailed, match="This user cannot use cuda:99"):
        machine_facts.permissions(host)
    assert [one["user"] for one in said(host, "facts")[-2]["tried"]] == [0]
