"""The image's entry point, run with a made-up CANN whose scripts are as careless as the real ones."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_SECONDS

ENTRYPOINT = Path(__file__).parents[2] / "deploy" / "image" / "entrypoint.sh"


@pytest.fixture
def ascend(tmp_path: Path) -> Path:
    """An installation of CANN: scripts that read unset variables and end with a test that fails."""
    root = tmp_path / "Ascend"
    home = root / "cann-9.1.0"
    (home / "bin").mkdir(parents=True)
    (home / "version.info").write_text("Version=9.1.0\n")
    compiler = home / "bin" / "bishengir-compile"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    _script(root / "ascend-toolkit" / "set_env.sh", f"export ASCEND_HOME_PATH={home} PATH={home}/bin:$PATH")
    _script(home / "share" / "info" / "ascendnpu-ir" / "bin" / "set_env.sh", "export BISHENG=yes")
    _script(root / "nnal" / "atb" / "set_env.sh", 'export ATB_ARGUMENTS="$*"')
    return root


def _script(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f'{line}\nUNSET_BEFORE="$NEVER_SET"\n[ -n "$NEVER_SET" ]\n')


def _run(ascend: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "ASCEND_INSTALL_PATH": str(ascend), **variables}
    return subprocess.run(
        ["bash", str(ENTRYPOINT), *command], env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )


def _environment(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_cann_is_set_up_before_the_command(ascend: Path) -> None:
    environment = _environment(_run(ascend, "env", LD_LIBRARY_PATH="/before"))
    assert environment["ASCEND_HOME_PATH"] == str(ascend / "cann-9.1.0")
    assert environment["BISHENG"] == "yes"
    assert environment["ATB_ARGUMENTS"] == "--cxx_abi=1"
    driver = ascend / "driver" / "lib64"
    assert environment["LD_LIBRARY_PATH"] == f"{driver}:{driver}/common:{driver}/driver:/before"


def test_without_cann_the_command_runs_all_the_same(tmp_path: Path) -> None:
    environment = _environment(_run(tmp_path / "nothing", "env", TRITON_CACHE_DIR=str(tmp_path / "cache")))
    assert "LD_LIBRARY_PATH" not in environment
    assert not (tmp_path / "cache").exists()


def test_without_nnal_the_toolkit_is_set_up(ascend: Path) -> None:
    (ascend / "nnal" / "atb" / "set_env.sh").unlink()
    done = _run(ascend, "env")
    assert done.stderr == ""
    environment = _environment(done)
    assert environment["BISHENG"] == "yes"
    assert "ATB_ARGUMENTS" not in environment


def test_the_command_takes_the_place_of_the_entry_point(ascend: Path) -> None:
    """So that SIGTERM reaches it, and its exit code is the container's."""
    environment = {"PATH": os.environ["PATH"], "ASCEND_INSTALL_PATH": str(ascend)}
    command = ["bash", str(ENTRYPOINT), "sh", "-c", "echo $$; exit 7"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        printed, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert int(printed) == process.pid
    assert process.returncode == 7


@pytest.mark.parametrize("changed", ["version.info", "bin/bishengir-compile"])
def test_compiled_kernels_are_dropped_when_cann_changes(ascend: Path, tmp_path: Path, changed: str) -> None:
    cache = tmp_path / "cache"
    kernel = cache / "abc" / "kernel.o"
    assert _run(ascend, "true", TRITON_CACHE_DIR=str(cache)).returncode == 0
    kernel.parent.mkdir()
    kernel.write_text("compiled")
    assert _run(ascend, "true", TRITON_CACHE_DIR=str(cache)).stderr == ""
    assert kernel.exists()

    with (ascend / "cann-9.1.0" / changed).open("a") as file:
        file.write("# changed\n")
    done = _run(ascend, "true", TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0
    assert "CANN has changed" in done.stderr
    assert not kernel.exists()


def test_two_allocator_settings_are_refused_by_name(ascend: Path) -> None:
    done = _run(ascend, "true", PYTORCH_ALLOC_CONF="a:1", PYTORCH_NPU_ALLOC_CONF="a:1")
    assert done.returncode == 1
    assert "unset one" in done.stderr


@pytest.mark.parametrize("cache", [True, False], ids=["with a kernel cache", "without"])
def test_a_missing_directory_is_told_by_the_variable_that_names_it(ascend: Path, tmp_path: Path, cache: bool) -> None:
    toolkit = ascend / "ascend-toolkit" / "set_env.sh"
    toolkit.write_text("")
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "cache")} if cache else {}
    done = _run(ascend, "true", ASCEND_HOME_PATH="/nowhere/cann", **variables)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "ASCEND_HOME_PATH is /nowhere/cann" in line


def test_an_npu_s_process_gets_what_suits_it(ascend: Path) -> None:
    environment = _environment(_run(ascend, "env"))
    wanted = {
        "TASK_QUEUE_ENABLE": "1",
        "OMP_NUM_THREADS": "1",
        "CPU_AFFINITY_CONF": "1",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    }
    assert {name: environment.get(name) for name in wanted} == wanted
    preloaded = environment.get("LD_PRELOAD")
    assert preloaded is None or Path(preloaded).exists()


def test_what_the_container_was_given_goes_first(ascend: Path, tmp_path: Path) -> None:
    given = {"TASK_QUEUE_ENABLE": "2", "OMP_NUM_THREADS": "8", "CPU_AFFINITY_CONF": "", "LD_PRELOAD": ""}
    environment = _environment(_run(ascend, "env", **given, PYTORCH_ALLOC_CONF="max_split_size_mb:64"))
    assert {name: environment[name] for name in given} == given
    assert "PYTORCH_NPU_ALLOC_CONF" not in environment, "torch_npu refuses both"
    nothing = _environment(_run(tmp_path / "nothing", "env"))
    assert not {"TASK_QUEUE_ENABLE", "OMP_NUM_THREADS", "CPU_AFFINITY_CONF"} & nothing.keys(), "no CANN, no NPU"
