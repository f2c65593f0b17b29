"""Every package of the `npu` image exists as a wheel for CPython 3.11, on x86-64 and on aarch64.

uv resolves the exact pins for each platform against the package index, reading the index and nothing else: no wheel is
downloaded. That proves that the versions exist, fit CANN's images (glibc 2.35, so manylinux_2_28 and older) and need no
compiler. It does not prove that a wheel works there. torch is left out, since its CPU builds have an index of their
own: test_image_parts.py holds that line by its text.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.test_image_parts import pins

PINS = {name: version for name, version in pins("constraints-npu.txt").items() if name != "torch"}


def _resolve(requirements: list[str], machine: str, tmp_path: Path, python: str = "3.11") -> tuple[set[str], str]:
    """What uv resolved, and what it said if it did not."""
    path = tmp_path / "requirements.in"
    path.write_text("\n".join(requirements))
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-cache", "--no-deps",
               "--no-header", "--no-annotate", "--only-binary=:all:", f"--python-version={python}",
               f"--python-platform={machine}-manylinux_2_28", str(path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return set(done.stdout.split()), done.stderr


@pytest.fixture(scope="module")
def _index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips, loudly, where there is no index to ask."""
    wanted = f"idna=={PINS['idna']}"
    found, error = _resolve([wanted], "x86_64", tmp_path_factory.mktemp("index"))
    if found != {wanted}:
        pytest.skip(f"NOT RUN: no package index can be reached from here: {error.strip()}")


@pytest.mark.usefixtures("_index")
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_pin_has_a_wheel(machine: str, tmp_path: Path) -> None:
    wanted = [f"{name}=={version}" for name, version in PINS.items()]
    found, error = _resolve(wanted, machine, tmp_path)
    assert found == set(wanted), error


@pytest.mark.usefixtures("_index")
def test_a_pin_without_a_wheel_is_found(tmp_path: Path) -> None:
    """triton-ascend 3.2.0 is why the image has Python 3.11: there is no wheel for 3.12."""
    found, error = _resolve([f"triton-ascend=={PINS['triton-ascend']}"], "aarch64", tmp_path, python="3.12")
    assert found == set()
    assert "no wheels with a matching Python ABI tag" in " ".join(error.split())
