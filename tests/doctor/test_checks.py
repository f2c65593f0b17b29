"""The real steps on a CPU, with a tiny model: each has an answer, and plants are noticed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.doctor.checks import machine_facts
from service.doctor.checks.profiles import figures_of_table
from service.doctor.checks.serving import one_layer
from service.doctor.checks.step_process import StepFailed, StepHost
from service.doctor.plan import EVERYWHERE, STEPS
from service.models.families import model_spec
from service.models.loader import load_model
from service.models.spec.config_json import read_config
from tests.doctor.conftest import BROKEN_OPS, BUNDLED, Meeting
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
NOT_ON_A_CPU = {"permissions", "triton", "capture", "setting-cpu-affinity-2", "setting-task-queue-2",
                "setting-eager", "setting-no-lora-window", "setting-npu-graphs"}  # fmt: skip


@pytest.mark.parametrize("device", EVERYWHERE)
def test_all_steps_together_take_half_an_hour(device: str) -> None:
    assert sum(step.limit_seconds for step in STEPS if device in step.devices) <= 30 * 60


def run(work_dir: Path, model_dir: Path, **environment: str) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MULTILORA_")}
    paths = os.pathsep.join([environment.pop("PYTHONPATH", ""), str(ROOT)])
    flags = ["--device", "cpu", "--model-dir", str(model_dir)]
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "doctor", "--deep", *flags],
        cwd=work_dir,
        env={**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads((work_dir / "doctor-report" / "report.json").read_text())
    return report


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_tiny_model("llama", directory, num_hidden_layers=1)
    return directory


def test_a_fault_of_an_op_reaches_the_end_of_the_report(meeting: Meeting, model_dir: Path) -> None:
    """LoRA's result is a tenth too large."""
    paths = os.pathsep.join(map(str, (BROKEN_OPS, ROOT)))
    flags = ("--model-dir", str(model_dir))
    meeting.run("environment,doctor,profile", *flags, PYTHONPATH=paths, BROKEN_OPS="lora=differs", OMP_NUM_THREADS="1")
    assert [step["status"] for step in meeting.report["steps"]] == ["ok"] * 3
    used = {op["op"]: op for op in meeting.step("doctor")["facts"]["ops"]}
    assert used["lora"] == {"op": "lora", "wished": "broken_differs", "used": "cpu"}
    assert [fault["code"] for fault in meeting.report["faults"]] == ["op-fallback"]
    figures = meeting.step("profile")["facts"]
    assert figures["kernels"] and figures["ms_per_step"] > 0


@pytest.mark.wide
def test_every_step_has_an_answer_on_a_cpu(tmp_path: Path, model_dir: Path) -> None:
    """LoRA's result is a tenth too large."""
    report = run(tmp_path, model_dir, PYTHONPATH=str(BROKEN_OPS), BROKEN_OPS="lora=differs")
    steps = {step["name"]: step for step in report["steps"]}
    assert {name for name, step in steps.items() if step["status"] == "not applicable"} == NOT_ON_A_CPU
    assert {steps[name]["reason"] for name in NOT_ON_A_CPU} == {"not applicable on cpu"}
    assert {step["status"] for name, step in steps.items() if name not in NOT_ON_A_CPU} == {"ok"}, steps
    assert report["device"] == steps["environment"]["facts"]["device"] == "cpu"
    used = {op["op"]: op for op in steps["doctor"]["facts"]["ops"]}
    assert used["lora"] == {"op": "lora", "wished": "broken_differs", "used": "cpu"}
    assert [fault["code"] for fault in report["faults"]] == ["op-fallback"]
    raced = {case["case"]: case for case in steps["races"]["facts"]["cases"]}
    assert raced["ranks_5_8_24 linear 16-16-16-13"]["different"] == 0
    assert {case["repeats"] for case in raced.values()} == {20}
    heads = {(case["implementation"], case["head_dim"]) for case in steps["attention"]["facts"]["cases"]}
    assert heads == {(name, dim) for name in ("sdpa", "reference") for dim in (16, 64, 128)}
    loads = {(load["requests"], load["adapters"]): load["ms_per_token"] for load in steps["serving"]["facts"]["loads"]}
    assert set(loads) == {(requests, adapters) for requests in (1, 8, 32, 64) for adapters in (0, 1, 64)}
    assert all(loads.values())
    assert steps["profile"]["facts"]["kernels"] and steps["profile"]["facts"]["ms_per_step"] > 0
    assert steps["loads"]["facts"]["loads"] == 8
    assert report["settings"][0]["setting"] == "--device cpu"
    assert any("--num-threads 1" in setting["setting"] for setting in report["settings"])


def test_one_layer_is_the_first_with_attention(tmp_path: Path) -> None:
    """Weights are found by their layers' numbers, so the layers before it stay."""
    for name, family, num_layers in (("llama", "llama", 1), ("hybrid", "lfm2", 2)):
        whole, one = make_tiny_model(family, tmp_path / name), tmp_path / f"{name}-one"
        one.mkdir()
        assert one_layer(whole, one) == num_layers - 1
        spec = model_spec(read_config(one))
        assert spec.num_layers == num_layers and len(spec.attentions) == 1
        load_model(one, dtype="auto", device="cpu")


def test_the_npu_s_table_of_kernels_is_understood() -> None:
    """As torch_npu's profiler writes it: which kernels ran on AI_CPU, and which are LoRA's."""
    rows = [
        {
            "Name": "lora_shrink_few",
            "Accelerator Core": "AI_VECTOR_CORE",
            "Start Time(us)": "10.0\t",
            "Duration(us)": "4",
        },
        {"Name": "MatMulV2", "Accelerator Core": "AI_CORE", "Start Time(us)": "14.0\t", "Duration(us)": "6"},
        {
            "Name": "swiglu_window_few",
            "Accelerator Core": "AI_VECTOR_CORE",
            "Start Time(us)": "20.0",
            "Duration(us)": "2",
        },
        {"Name": "Cumsum", "Accelerator Core": "AI_CPU", "Start Time(us)": "30.0\t", "Duration(us)": "10"},
    ]
    figures = figures_of_table(rows, num_steps=2)
    assert figures["ai_cpu"] == [{"name": "Cumsum", "calls_per_step": 0.5, "us_per_step": 5.0}]
    assert [kernel["name"] for kernel in figures["lora_kernels"]] == ["lora_shrink_few", "swiglu_window_few"]
    # As a profiler of the lowest level writes it, which does not look at cores.
    unknown = figures_of_table([{**row, "Accelerator Core": "N/A"} for row in rows], num_steps=2)
    assert unknown["ai_cpu"] == "the profiler did not tell which core a kernel ran on"
    assert (figures["device_busy_ms_per_step"], figures["device_busy_share"]) == (0.011, 22 / 30)


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
    monkeypatch.setattr(machine_facts, "DEVICES", tmp_path)
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
