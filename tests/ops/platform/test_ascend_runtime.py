"""What is said and decided about NPUs on a machine that has none: chips, environments, launches, caches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kernels import ascend_runtime
from kernels.ascend_chips import chip_of
from kernels.platform import IMPLEMENTATIONS, BackendError, detect
from service.engine.ipc.config import EngineConfig
from service.engine.startup.build import build_engine
from tests.support.limits import LIMIT_SECONDS
from tests.support.processes import forked

ROOT = Path(__file__).parents[3]
# Neither imports Triton.
IMPORTED = ("kernels.ascend_runtime", "kernels.platform")


@pytest.mark.parametrize(
    ("name", "has_triton", "has_bfloat16", "buffer_kib"),
    [
        ("Ascend910B4", True, True, 192),
        ("Ascend910B2C", True, True, 192),
        ("Ascend910_9392", True, True, 192),
        ("Ascend950PR_9579", False, True, 248),
        ("Ascend310P3", False, False, 0),
        ("Ascend910A", False, False, 0),
        ("Ascend1020X", False, True, 192),
    ],
)
def test_a_chips_name_tells_what_it_can(name: str, has_triton: bool, has_bfloat16: bool, buffer_kib: int) -> None:
    chip = chip_of(name)
    assert (chip.has_triton, chip.has_bfloat16) == (has_triton, has_bfloat16)
    assert chip.unified_buffer_bytes == buffer_kib * 1024


@pytest.mark.parametrize("device", ["npu", "npu:1"])
def test_an_npu_without_torch_npu_is_refused_in_a_sentence(device: str) -> None:
    if ascend_runtime.importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("NOT RUN: torch_npu is installed here")
    with pytest.raises(BackendError, match=r"torch_npu is not installed; see docs/ascend\.md"):
        detect(device)


def test_every_op_has_an_npu_row_that_ends_in_plain_torch() -> None:
    assert set(IMPLEMENTATIONS["npu"]) == set(IMPLEMENTATIONS["cpu"])
    for op, names in IMPLEMENTATIONS["npu"].items():
        assert names[-1] == "reference"
        for name in names:
            assert (ROOT / "kernels" / op / f"{name}.py").is_file(), (op, name)


def _package(site: Path, *, is_ascend: bool, version: str, helper: str) -> None:
    package = site / "triton"
    (package / "backends" / ("ascend" if is_ascend else "nvidia")).mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('looked at, not imported')\n")
    if is_ascend:
        (package / "backends" / "ascend" / "npu_utils.cpp").write_text(helper)
        info = site / f"triton_ascend-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton-ascend\nVersion: {version}\n")


def _fault(site: Path, cann: str) -> str:
    code = f"""
from kernels import ascend_runtime
ascend_runtime.cann_version = lambda: {cann!r}
connection.send(str(ascend_runtime.triton_fault()))
"""
    with forked(code, {**os.environ, "PYTHONPATH": str(site)}, IMPORTED) as connection:
        return str(connection.recv())


BROKEN = "{X, rtLimitType_t::RT_LIMIT_TYPE_SIMT_WARP_STACK_SIZE},"


@pytest.mark.parametrize(
    ("is_ascend", "version", "helper", "cann", "said"),
    [
        (True, "3.2.0", "", "9.1.0", "None"),
        (True, "3.2.0", BROKEN, "8.5.0", "None"),
        (True, "3.2.0", BROKEN, "9.1.0", "patch_triton_ascend.py"),
        (True, "3.2.0", BROKEN, "", "patch_triton_ascend.py"),
        (True, "3.6.0", "", "9.1.0", "3.6.0 is installed"),
        (False, "", "", "9.1.0", "upstream's"),
    ],
    ids=["patched", "old CANN", "unpatched", "unknown CANN", "another version", "upstream"],
)
def test_what_is_wrong_with_triton_is_said(
    is_ascend: bool, version: str, helper: str, cann: str, said: str, tmp_path: Path
) -> None:
    _package(tmp_path, is_ascend=is_ascend, version=version, helper=helper)
    assert said in _fault(tmp_path, cann)


def test_launches_that_an_npu_would_fail_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(3)
    monkeypatch.setattr(ascend_runtime, "launch_device_type", lambda: "cpu")
    ascend_runtime.check_launch((65_535,), {"x_ptr": tensor, "num_tokens": 3, "bias_ptr": None})
    for grid in ((65_536,), (256, 257), (0,)):
        with pytest.raises(AssertionError, match="65535 programs"):
            ascend_runtime.check_launch(grid, {})
    with pytest.raises(AssertionError, match="x_ptr is empty"):
        ascend_runtime.check_launch((1,), {"x_ptr": tensor[:0]})
    monkeypatch.setattr(ascend_runtime, "launch_device_type", lambda: "npu")
    with pytest.raises(AssertionError, match="x_ptr is on cpu"):
        ascend_runtime.check_launch((1,), {"x_ptr": tensor})


MADE_UP_NPU = """
import logging, os, sys, types
from kernels import ascend_runtime
from kernels.platform import prepare
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
npu = types.SimpleNamespace(
    is_available=lambda: True,
    set_device=lambda device: None,
    set_compile_mode=lambda jit_compile: None,
    conv=types.SimpleNamespace(allow_hf32=True),
    utils=types.SimpleNamespace(get_cann_version=lambda module: os.environ.get("CANN", "9.1.0")),
)
binding = types.SimpleNamespace(_npu_getCurrentRawStreamNoWait=lambda device: 40 + device)
environment = types.SimpleNamespace(npu=npu, __version__="2.13.0", _C=binding)
ascend_runtime.torch_npu = lambda: environment
"""

CLAIM = f"""
{MADE_UP_NPU}
ascend_runtime.triton_fault = lambda: None
prepare("npu:0")
connection.send(os.environ["TRITON_CACHE_DIR"])
connection.poll(None)
"""


@contextmanager
def _claimed(root: Path, cann: str = "9.1.0", **environ: str) -> Iterator[Path]:
    """The cache of a process that lives as long as the block."""
    # Launches that pass the queue need no driver, which is not here.
    environ = {"TRITON_CACHE_DIR": str(root), "CANN": cann, "TRITON_ENABLE_TASKQUEUE": "0", **environ}
    with forked(CLAIM, {**os.environ, **environ}, IMPORTED) as connection:
        yield Path(connection.recv())


def test_each_process_has_a_cache_of_kernels_of_its_own(tmp_path: Path) -> None:
    """Two at a time never share one; a later process takes over what an ended one has left; CANN's versions differ."""
    with _claimed(tmp_path) as first, _claimed(tmp_path) as second:
        assert first == tmp_path / "cann-9.1.0" / "0"
        assert second == tmp_path / "cann-9.1.0" / "1"
    with _claimed(tmp_path) as third, _claimed(tmp_path, "9.2.0") as fourth:
        assert third == tmp_path / "cann-9.1.0" / "0"
        assert fourth == tmp_path / "cann-9.2.0" / "0"


def test_a_process_that_is_started_by_another_uses_its_cache(tmp_path: Path) -> None:
    with _claimed(tmp_path, MULTILORA_TRITON_CACHE_IN_USE=str(tmp_path)) as cache:
        assert cache == tmp_path


PROBE = """
import sys, types
from kernels.ascend_runtime import prepare
from kernels.platform import BackendError, detect
from kernels.probe.isolated import probe_apart
from kernels.probe.probe_process import ProbeProcess
from kernels.shapes import ProbeShapes
early = ProbeProcess(is_early=True)  # before the claim, as an engine does
next(early.lines(60.0))
prepare("npu:0")
try:
    probe_apart(detect("cpu"), "npu:0", ProbeShapes(), process=early)
except BackendError as error:
    print(error)
"""


def test_the_probe_compiles_into_the_cache_of_the_process_that_serves(tmp_path: Path) -> None:
    """Also one that was started before the claim: otherwise a first start compiles each probed kernel twice."""
    _package(tmp_path, is_ascend=True, version="3.2.0", helper="")
    for package in ("triton", "triton/backends", "triton/backends/ascend"):
        (tmp_path / package / "__init__.py").write_text("")
    note = 'open(os.environ["NOTES"], "a").write(os.environ["TRITON_CACHE_DIR"] + "\\n")'
    driver = f"import os\n{note}\nclass NPUDriver: pass\n"
    (tmp_path / "triton" / "backends" / "ascend" / "driver.py").write_text(driver)
    made_up = MADE_UP_NPU.partition("npu = ")[2].rpartition("environment = ")[0]
    (tmp_path / "torch_npu.py").write_text(f"import os, types\n__version__ = '2.13.0'\nnpu = {made_up}\n_C = binding\n")
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_SECONDS,
        env={
            **{name: value for name, value in os.environ.items() if name != "MULTILORA_TRITON_CACHE_IN_USE"},
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
            "NOTES": str(tmp_path / "notes"),
        },
    )
    assert done.returncode == 0, done.stderr
    caches = (tmp_path / "notes").read_text().split()
    assert caches == [str(tmp_path / "cache" / "cann-9.1.0" / "0")] * 2, done.stdout


PREPARE = f"""
import io, sys; sys.stdout = io.StringIO()
{MADE_UP_NPU}
prepare("npu:0")
print("prepared")
if "ASK" in os.environ:
    from triton.backends.ascend.driver import NPUDriver
    print(NPUDriver().get_current_stream(), NPUDriver().get_current_stream(2))
connection.send(sys.stdout.getvalue())
"""


def _prepared(site: Path, cache: Path, **environ: str) -> list[str]:
    """What is said where torch_npu is made up, and triton-ascend's driver too, which wants pybind11 as the true one."""
    _package(site, is_ascend=True, version="3.2.0", helper="")
    for package in ("triton", "triton/backends", "triton/backends/ascend"):
        (site / package / "__init__.py").write_text("")
    driver = (
        "import pybind11\n\n\nclass NPUDriver:\n"
        "    def get_current_device(self):\n        return 1\n\n"
        "    def get_current_stream(self, device=None):\n        return 'waits for the queue'\n"
    )
    (site / "triton" / "backends" / "ascend" / "driver.py").write_text(driver)
    unset = ("MULTILORA_TRITON_CACHE_IN_USE", "TRITON_ENABLE_TASKQUEUE")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    environ = {"PYTHONPATH": str(site), "TRITON_CACHE_DIR": str(cache), **environ}
    with forked(PREPARE, {**inherited, **environ}, IMPORTED) as connection:
        return str(connection.recv()).splitlines()


def test_launches_ask_for_the_stream_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "pybind11.py").write_text("")
    assert _prepared(tmp_path, tmp_path / "cache", ASK="yes") == ["prepared", "41 42"]


@pytest.mark.parametrize(("value", "waits"), [("True", False), ("1", False), ("0", True), ("", True)])
def test_launches_past_the_queue_wait_for_it(value: str, waits: bool, tmp_path: Path) -> None:
    """Else a kernel overtakes the operators before it. The values are read as triton-ascend's driver reads them."""
    (tmp_path / "pybind11.py").write_text("")
    streams = _prepared(tmp_path, tmp_path / "cache", ASK="yes", TRITON_ENABLE_TASKQUEUE=value)[-1]
    assert streams == ("waits for the queue waits for the queue" if waits else "41 42")


def test_a_start_survives_a_triton_without_pybind11(tmp_path: Path) -> None:
    (tmp_path / "pybind11.py").write_text("raise ModuleNotFoundError(\"No module named 'pybind11'\")")
    assert _prepared(tmp_path, tmp_path / "cache") == [
        "Triton cannot be prepared: ModuleNotFoundError: No module named 'pybind11'",
        "prepared",
    ]


def test_a_start_survives_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "pybind11.py").write_text("")
    (tmp_path / "cache").write_text("a file")  # which holds for root too
    warning, end = _prepared(tmp_path, tmp_path / "cache")
    assert warning.startswith("Triton cannot be prepared: NotADirectoryError: ")
    assert end == "prepared"


@pytest.mark.parametrize("device", ["npu", "npu:1"])
def test_an_engine_says_so_too(device: str, tmp_path: Path) -> None:
    if ascend_runtime.importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("NOT RUN: torch_npu is installed here")
    config = EngineConfig(model_dir=str(tmp_path), store_root=str(tmp_path), device=device)
    with pytest.raises(ValueError, match=r"torch_npu is not installed; see docs/ascend\.md"):
        build_engine(config)
