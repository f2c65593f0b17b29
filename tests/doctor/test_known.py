"""Each known problem is recognised by its traces, and a host without them has none."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from service.doctor.checks.host import Compiler, Host, installed_cann, read_host, version_in
from service.doctor.checks.known import compiler_facts, known_problems
from service.doctor.checks.software import import_torch
from service.doctor.report import Examination
from service.settings import load_settings

_GOOD: dict[str, Any] = {
    "python": (3, 11),
    "distributions": {
        "torch": "2.13.0+cpu",
        "torch_npu": "2.13.0",
        "triton-ascend": "3.2.0",
        "pybind11": "3.0.1",
        "numpy": "2.4.6",
    },
    "environment": {"ASCEND_RT_VISIBLE_DEVICES": "0", "TASK_QUEUE_ENABLE": "1"},
    "programs": {"g++": "/usr/bin/g++", "bishengir-compile": "/usr/local/Ascend/bin/bishengir-compile"},
    "compiler": Compiler("1.2.0", "--limit-auto-multi-buffer-buffer=<value>"),
    "device_nodes": {"/dev/davinci0": True, "/dev/davinci_manager": True},
    "cann": "9.1.0",
    "npu_driver": "25.5.1",
    "has_libatb": True,
}


def codes(device_type: str, **traces: Any) -> dict[str, str]:
    host = Host(**{**_GOOD, **traces})
    findings = known_problems(host, device_type)
    assert all(finding.message.endswith(".") for finding in findings)
    return {finding.code: finding.level for finding in findings}


def patched_triton(directory: Path, source: str = "") -> Path:
    """A triton-ascend as far as it is looked at."""
    (directory / "backends" / "ascend").mkdir(parents=True)
    (directory / "backends" / "ascend" / "npu_utils.cpp").write_text(source)
    return directory


def with_distributions(**versions: str | None) -> dict[str, str]:
    named = {name.replace("triton_ascend", "triton-ascend"): version for name, version in versions.items()}
    return {name: version for name, version in {**_GOOD["distributions"], **named}.items() if version is not None}


def test_a_good_host_has_none(tmp_path: Path) -> None:
    assert codes("npu", triton_dir=patched_triton(tmp_path / "triton")) == {}


@pytest.mark.parametrize(
    ("traces", "code", "level"),
    [
        ({"distributions": with_distributions(torch_npu=None)}, "torch-npu-missing", "error"),
        ({"distributions": with_distributions(torch_npu="2.12.0")}, "torch-npu-mismatch", "error"),
        ({"torch_cuda": "13.0"}, "torch-cuda-build", "error"),
        ({"import_errors": {"torch_npu": "ImportError: libge_runner.so: cannot open"}}, "torch-npu-broken", "error"),
        ({"environment": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}, "autoload-off", "warning"),
        ({"cann": None}, "cann-missing", "error"),
        ({"cann": None, "has_imported_torch_npu": True}, "cann-missing", "warning"),
        ({"cann": "8.5.0"}, "cann-old", "warning"),
        ({"device_nodes": {}}, "no-davinci-node", "error"),
        ({"device_nodes": {"/dev/davinci0": False, "/dev/davinci_manager": True}}, "davinci-access", "error"),
        ({"npu_driver": "24.1.0"}, "npu-driver-old", "note"),
        ({"distributions": with_distributions(triton="3.7.1")}, "triton-twice", "warning"),
        ({"triton_dir": Path("/nowhere/triton")}, "triton-overwritten", "warning"),
        ({"distributions": with_distributions(triton_ascend=None)}, "triton-ascend-missing", "warning"),
        ({"distributions": with_distributions(pybind11=None)}, "pybind11-missing", "warning"),
        ({"programs": {"bishengir-compile": "x"}}, "compiler-missing", "warning"),
        ({"programs": {"g++": "x"}}, "bishengir-missing", "warning"),
        ({"compiler": None}, "bishengir-mute", "warning"),
        ({"compiler": Compiler("1.2.0", "--enable-hivm-compile")}, "bishengir-old", "warning"),
        ({"compiler": Compiler("1.3.0", _GOOD["compiler"].help)}, "bishengir-unknown", "note"),
        ({"compiler": Compiler("1.2.0", _GOOD["compiler"].help + " --reg-based")}, "bishengir-reg-based", "warning"),
        ({"environment": {"CC": "/usr/bin/gcc"}}, "cc-gcc", "warning"),
        ({"python": (3, 12)}, "python-new", "warning"),
        ({"environment": {"PYTORCH_NPU_ALLOC_CONF": "a", "PYTORCH_ALLOC_CONF": "b"}}, "alloc-conf-twice", "error"),
        ({"environment": {"ASCEND_LAUNCH_BLOCKING": "1"}}, "launch-blocking", "warning"),
        ({"environment": {"TASK_QUEUE_ENABLE": "0"}}, "task-queue-off", "warning"),
        ({"environment": {"TRITON_ENABLE_TASKQUEUE": "False"}}, "triton-task-queue-off", "warning"),
        ({"environment": {"TRITON_ENABLE_TASKQUEUE": ""}}, "triton-task-queue-off", "warning"),
        ({"environment": {"TRITON_INTERPRET": "1"}}, "triton-debugging", "warning"),
        ({"environment": {"ASCEND_RT_VISIBLE_DEVICES": ""}}, "no-visible-device", "error"),
        ({"environment": {"ASCEND_RT_VISIBLE_DEVICES": "0-3"}}, "visible-devices-wrong", "error"),
        ({"environment": {"ASCEND_RT_VISIBLE_DEVICES": "0,0"}}, "visible-devices-wrong", "error"),
        ({"environment": {"ASCEND_RT_VISIBLE_DEVICES": "0, 3"}}, "visible-device-absent", "warning"),
        ({"environment": {"TRITON_CACHE_DIR": "/proc/nowhere"}}, "triton-cache", "warning"),
        ({"has_libatb": False}, "libatb-missing", "note"),
    ],
)
def test_each_is_recognised_and_nothing_beside_it(
    traces: dict[str, Any], code: str, level: str, tmp_path: Path
) -> None:
    found = codes("npu", **{"triton_dir": patched_triton(tmp_path / "triton"), **traces})
    assert found == {code: level}


def test_an_unpatched_triton_ascend_matters_from_cann_9_on(tmp_path: Path) -> None:
    triton_dir = patched_triton(tmp_path / "triton", '{"x", RT_LIMIT_TYPE_SIMT_WARP_STACK_SIZE},')
    assert codes("npu", triton_dir=triton_dir) == {"triton-unpatched": "warning"}
    assert "triton-unpatched" not in codes("npu", triton_dir=triton_dir, cann="8.5.0")


@pytest.mark.parametrize("value", ["true", "TRUE", "1"])
def test_a_task_queue_that_is_on_is_no_problem(value: str, tmp_path: Path) -> None:
    environment = {"TRITON_ENABLE_TASKQUEUE": value}
    assert codes("npu", triton_dir=patched_triton(tmp_path / "triton"), environment=environment) == {}


def test_npus_of_a_container_are_counted_from_0(tmp_path: Path) -> None:
    """The host's number 3, alone in the container, is NPU 0 there."""
    traces = {"triton_dir": patched_triton(tmp_path / "triton"), "device_nodes": {"/dev/davinci3": True}}
    assert codes("npu", **traces, environment={"ASCEND_RT_VISIBLE_DEVICES": "0"}) == {}
    found = codes("npu", **traces, environment={"ASCEND_RT_VISIBLE_DEVICES": "3"})
    assert found == {"visible-device-absent": "warning"}
    assert codes("cpu", **traces, environment={"ASCEND_RT_VISIBLE_DEVICES": "3"}) == {}


def test_cann_s_pairing_is_told_as_it_is_known() -> None:
    """No statement of the CANN that torch_npu 2.13.0 is made for was found, only reports."""
    findings = known_problems(Host(**{**_GOOD, "cann": "9.0.0"}), "npu")
    message = next(found.message for found in findings if found.code == "cann-old")
    assert "wants" not in message
    assert "is reported to work with" in message and "not found stated" in message


def test_what_only_an_npu_needs_is_no_fault_of_a_cpu(tmp_path: Path) -> None:
    """A host that has half of an NPU's software still serves on its CPU."""
    found = codes("cpu", triton_dir=tmp_path, device_nodes={}, cann=None, torch_cuda="13.0", has_libatb=False,
                  environment={"TRITON_ENABLE_TASKQUEUE": "0"})  # fmt: skip
    assert found == {"torch-cuda-build": "note", "triton-overwritten": "note"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100\n", "9.1.0"),
        ("# version: 1.0\nruntime_running_version=[9.0.0:9.0.0]\n", "9.0.0"),
        ("Version=25.5.1\nascendhal_version=7.35.23\n", "25.5.1"),
        ("nothing\n", None),
    ],
)
def test_versions_are_read_from_what_installers_leave(text: str, version: str | None, tmp_path: Path) -> None:
    (tmp_path / "info").write_text(text)
    assert version_in(tmp_path / "info") == version


@pytest.mark.parametrize(
    "file",
    [
        "aarch64-linux/ascend_toolkit_install.info",
        "ascend_toolkit_install.info",
        "aarch64-linux/ascend_cann_install.info",
        "ascend_cann_install.info",
        "version.cfg",
        "version.info",
    ],
)
def test_cann_is_found_by_any_file_of_its_packages(file: str, tmp_path: Path) -> None:
    assert installed_cann({"ASCEND_HOME_PATH": str(tmp_path)}) is None
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("version=9.1.0\n")
    assert installed_cann({"ASCEND_HOME_PATH": str(tmp_path)}) == "9.1.0"


def test_a_torch_npu_that_sets_its_autoload_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor starts and reports is to be as the server will find it."""
    (tmp_path / "torch_npu.py").write_text("import os\nos.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    examination = Examination(load_settings(device="npu"), tell=lambda _: None)
    for before in (None, "0", "1"):
        sys.modules.pop("torch_npu", None)
        monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
        if before is not None:
            monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", before)
        import_torch(examination)
        assert "torch_npu" in sys.modules and not examination.import_errors
        assert os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == before
    del sys.modules["torch_npu"]  # not by monkeypatch, which would bring it back


@pytest.mark.parametrize(
    ("shown", "takes", "passes"),
    [
        ("--limit-auto-multi-buffer-buffer=<value>", "kernel.o", "--enable-hivm-compile=true"),
        ("--limit-auto-multi-buffer-buffer=<value> --reg-based", "kernel.o", "--reg-based=true"),
        ("--enable-auto-multi-buffer", "kernel_reloc.o", "--enable-hivm-compile=true"),
    ],
    ids=["known", "reg-based", "old"],
)
def test_what_triton_ascend_decides_of_the_compiler_is_told(
    shown: str, takes: str, passes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real program's two answers."""
    program = tmp_path / "bishengir-compile"
    program.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && echo 'bishengir-compile 1.2.0 (x 2026-07-29)' || echo '{shown}'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert compiler_facts(read_host()) == {
        "bishengir_compile": "1.2.0",
        "known_here": "1.2.0",
        "triton_ascend_takes": takes,
        "triton_ascend_passes": passes,
    }
    program.write_text("#!/bin/sh\nexit 1\n")
    assert compiler_facts(read_host()) is None
