"""scripts/torch-index.sh with a made-up pip: the CPU build where its index has it, and one line that says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
WANTED = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))[7:]

pytestmark = pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="NOT RUN: this machine's NVIDIA driver decides which torch is taken"
)


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def index_for(tmp_path: Path, pip: str, **environment: str) -> tuple[str, str]:
    """What the script prints and what it says, with a python whose pip is the shell script `pip`."""
    python = program(tmp_path / "python", f'echo "$@" >>{tmp_path}/asked\n{pip}')
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [ROOT / "scripts" / "torch-index.sh", python, ROOT / "constraints.txt"],
        env={name: value for name, value in os.environ.items() if name != "TORCH_INDEX"} | path | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr


def test_the_cpu_build_is_taken_where_its_index_has_it(tmp_path: Path) -> None:
    found, said = index_for(tmp_path, f"echo 'Available versions: 99.0+cpu, {WANTED}+cpu, 1.0'")
    assert found == CPU_INDEX
    assert said.count("\n") == 1 and f"{WANTED}+cpu" in said
    asked = (tmp_path / "asked").read_text()
    assert "--timeout 5 --retries 0" in asked and f"--index-url {CPU_INDEX} torch" in asked


@pytest.mark.parametrize(
    "pip", ["exit 1", "echo 'Available versions: 99.0+cpu'", f"echo 'Available versions: {WANTED}'"]
)
def test_else_pips_own_is_taken_and_told(pip: str, tmp_path: Path) -> None:
    """Not reached; reached without the version that is served; what another index of pip's configuration has."""
    found, said = index_for(tmp_path, pip)
    assert found == ""
    assert said.count("\n") == 1 and "pip's own build, several GB" in said


def test_a_gpu_gets_pips_own_without_a_question(tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", "exit 0")
    found, said = index_for(tmp_path, "exit 1")
    assert (found, (tmp_path / "asked").exists()) == ("", False)
    assert "NVIDIA GPU" in said
    program(tmp_path / "nvidia-smi", "exit 9")  # installed, but there is no device
    assert index_for(tmp_path, f"echo {WANTED}+cpu")[0] == CPU_INDEX


def test_who_names_an_index_gets_it(tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", "exit 0")
    assert index_for(tmp_path, "exit 1", TORCH_INDEX="https://index.example/torch") == (
        "https://index.example/torch",
        "",
    )
    assert not (tmp_path / "asked").exists()
