"""What the images install exists as wheels for CPython 3.11, on x86-64 and on aarch64, in the pinned versions.

uv resolves for each machine against the package index, reading the index and wheels' metadata: no wheel is downloaded.
That proves that the versions exist, fit the images' bases (glibc 2.35 and later, so manylinux_2_31 and older) and need
no compiler. It does not prove that a wheel works there. Of the `npu` image torch is left out, since its CPU builds have
an index of their own: test_image_parts.py holds that line by its text.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.deploy.test_image_parts import pins
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
NPU_PINS = {name: version for name, version in pins("constraints-npu.txt").items() if name != "torch"}
MACHINES = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


def _resolve(source: Path, machine: str, *options: str, python: str = "3.11") -> tuple[dict[str, str], str]:
    """Distribution -> version that uv resolved, and what it said if it did not."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-cache", "--no-header",
               "--no-annotate", "--only-binary=:all:", f"--python-version={python}",
               f"--python-platform={machine}-manylinux_2_31", *options, str(source)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    lines = [line.partition(";")[0].strip() for line in done.stdout.splitlines() if "==" in line]
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}, done.stderr


def _requirements(path: Path, wanted: dict[str, str]) -> Path:
    path.write_text("".join(f"{name}=={version}\n" for name, version in wanted.items()))
    return path


@pytest.fixture(scope="module", autouse=True)
def _index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, loudly, where there is no index to ask."""
    wanted = {"idna": NPU_PINS["idna"]}
    path = _requirements(tmp_path_factory.mktemp("index") / "requirements.in", wanted)
    found, error = _resolve(path, "x86_64", "--no-deps")
    if found != wanted:
        pytest.skip(f"NOT RUN: no package index can be reached from here: {error.strip()}")


@MACHINES
def test_every_pin_of_the_npu_image_has_a_wheel(machine: str, tmp_path: Path) -> None:
    found, error = _resolve(_requirements(tmp_path / "requirements.in", NPU_PINS), machine, "--no-deps")
    assert found == NPU_PINS, error


@MACHINES
def test_torch_npu_of_the_second_set_has_a_wheel(machine: str, tmp_path: Path) -> None:
    """triton-ascend 3.2.2 of that set is on no public index that was found, but on Huawei's own."""
    wanted = {"torch-npu": pins("constraints-npu-2.12.txt")["torch-npu"]}
    found, error = _resolve(_requirements(tmp_path / "requirements.in", wanted), machine, "--no-deps")
    assert found == wanted, error


def test_torch_of_the_second_set_agrees_with_the_other_pins(tmp_path: Path) -> None:
    """All that is installed beside it is pinned too; what it asks for by itself may not be at odds with that."""
    wanted = {**NPU_PINS, **pins("constraints-npu-2.12.txt")}
    constraints = _requirements(tmp_path / "constraints.txt", wanted)
    torch = {"torch": wanted["torch"]}
    found, error = _resolve(_requirements(tmp_path / "requirements.in", torch), "x86_64", f"--constraint={constraints}")
    assert found.items() >= {**torch, "setuptools": wanted["setuptools"]}.items(), error


def test_a_pin_without_a_wheel_is_found(tmp_path: Path) -> None:
    """triton-ascend 3.2.0 is why the image has Python 3.11: there is no wheel for 3.12."""
    wanted = {"triton-ascend": NPU_PINS["triton-ascend"]}
    path = _requirements(tmp_path / "requirements.in", wanted)
    found, error = _resolve(path, "aarch64", "--no-deps", python="3.12")
    assert found == {}
    assert "Python ABI tag" in " ".join(error.split())


@MACHINES
def test_everything_in_the_cuda_image_is_pinned(machine: str) -> None:
    files = ["constraints.txt", "constraints-cuda.txt"]
    found, error = _resolve(ROOT / "pyproject.toml", machine, *(f"--constraint={ROOT / file}" for file in files))
    assert "nvidia-cublas" in found, error
    assert found.items() <= {**pins(files[0]), **pins(files[1])}.items()
