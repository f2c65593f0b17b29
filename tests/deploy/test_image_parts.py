"""What the Dockerfile is made of, as far as it can be checked without building; `make image-test` builds it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.image.patch_triton_ascend import without_simt_limits
from scripts.image_probe import Container, free_port
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
TARGETS = {text.split(None, 1)[0]: text for text in re.split(r"^FROM \S+ AS ", DOCKERFILE, flags=re.MULTILINE)[1:]}

TABLE = """
static const std::unordered_map<std::string, rtLimitType_t> LimitTypeMap = {
\t{"LOW_POWER_TIMEOUT", rtLimitType_t::RT_LIMIT_TYPE_LOW_POWER_TIMEOUT},
\t{"WARP_STACK_SIZE", rtLimitType_t::RT_LIMIT_TYPE_SIMT_WARP_STACK_SIZE},
\t{"STACK_SIZE", rtLimitType_t::RT_LIMIT_TYPE_STACK_SIZE}
  };
"""


def pins(name: str) -> dict[str, str]:
    """Distribution -> version of a constraints file; AssertionError for a line that is no exact pin."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    found = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if line.count("==") == 1}
    assert len(found) == len(lines), [line for line in lines if line.count("==") != 1]
    return found


def test_npu_versions_are_those_of_the_tests() -> None:
    """numpy is held back by triton-ascend's interpreter, and then as the gate's environment does; protobuf by CANN."""
    tested, image = pins("constraints.txt"), pins("constraints-npu.txt")
    assert {name for name in image.keys() & tested.keys() if image[name] != tested[name]} == {"numpy", "protobuf"}
    gate = {Requirement(line) for line in (ROOT / "constraints-ascend.txt").read_text().splitlines() if "#" not in line}
    unlike = [str(wanted) for wanted in gate if (name := canonicalize_name(wanted.name)) in image
              and not wanted.specifier.contains(image[name])]  # fmt: skip
    assert unlike == []


def test_what_is_copied_is_sent_to_the_build() -> None:
    """.dockerignore keeps back all but what it names; a file that it forgets ends the build."""
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = {source for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
              for source in line.split() if source != "."}  # fmt: skip
    assert len(copied) > 5 and all((ROOT / source).exists() for source in copied)
    assert {source for source in copied if not any(f"{source}/".startswith(f"{one}/") for one in sent)} == set()


def test_the_second_set_of_pins_takes_the_place_of_four_lines(tmp_path: Path) -> None:
    """By the Dockerfile's own command."""
    first, second = pins("constraints-npu.txt"), pins("constraints-npu-2.12.txt")
    assert second.keys() == {"torch", "torch-npu", "triton-ascend", "setuptools"} <= first.keys()
    assert second["torch-npu"].partition(".post")[0] == second["torch"]
    (command,) = re.findall(r"^RUN (if \[ \"\$NPU_PINS.*?fi)$", TARGETS["npu"], re.DOTALL | re.MULTILINE)
    command = command.replace("/opt/multilora/image", str(tmp_path))
    for name, expected in (("2.13", first), ("2.12", {**first, **second})):
        for file in ("constraints-npu.txt", "constraints-npu-2.12.txt"):
            (tmp_path / file).write_text((ROOT / file).read_text())
        subprocess.run(["bash", "-ec", command], env={"NPU_PINS": name, "PATH": os.defpath}, check=True)
        lines = [line for line in (tmp_path / "constraints-npu.txt").read_text().splitlines() if "==" in line]
        assert {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines} == expected


def test_cuda_pins_are_beside_the_others() -> None:
    assert pins("constraints-cuda.txt").keys() & pins("constraints.txt").keys() == set()


@pytest.mark.parametrize(("extra", "constraints"), [("otel", "constraints.txt"), ("npu", "constraints-npu.txt")])
def test_every_dependency_is_pinned(extra: str, constraints: str) -> None:
    command = [sys.executable, str(ROOT / "deploy/image/dependencies.py"), str(ROOT / "pyproject.toml")]
    printed = subprocess.run([*command, *extra.split()], check=True, capture_output=True, text=True).stdout
    named = {canonicalize_name(Requirement(line).name) for line in printed.splitlines()}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert named >= {canonicalize_name(Requirement(line).name) for line in listed}
    assert named <= pins(constraints).keys()


@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_torch_comes_from_the_index_of_its_cpu_builds(target: str) -> None:
    assert "ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu\n" in TARGETS[target]
    steps = [step for step in re.split(r"\n(?=[A-Z]+ )", TARGETS[target]) if "pip install" in step]
    assert '--index-url "$TORCH_INDEX_URL"' in steps[0]
    assert re.search(r"--no-deps --constraint \S+", steps[0])
    assert steps[0].rstrip().endswith("torch")
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins("constraints-npu.txt")["torch"])
    assert "triton" not in pins("constraints-npu.txt")


def test_triton_ascend_is_the_last_package_and_alone() -> None:
    steps = [step for step in re.split(r"\n(?=[A-Z]+ )", TARGETS["npu"]) if "pip install" in step]
    assert "--no-deps" in steps[-2]
    assert re.search(
        r"constraints-npu\.txt \\\n.*\$TRITON_INDEX_URL\S+ triton-ascend && \\\n.*patch_triton_ascend\.py$",
        steps[-2].strip(),
    )
    assert "--no-index --editable" in steps[-1]


def test_npu_is_what_is_built_when_nothing_is_said() -> None:
    assert list(TARGETS)[-1] == "npu"
    assert DOCKERFILE.count("\nUSER 10001\n") == DOCKERFILE.count("\nENTRYPOINT ") == len(TARGETS) - 1 == 3


def test_patch_removes_the_entries_of_simt_cores() -> None:
    patched = without_simt_limits(TABLE)
    assert patched == TABLE.replace('\t{"WARP_STACK_SIZE", rtLimitType_t::RT_LIMIT_TYPE_SIMT_WARP_STACK_SIZE},\n', "")


@pytest.mark.parametrize(
    "source",
    ["", TABLE.replace("SIMT_", ""), TABLE + TABLE, TABLE + "int x = RT_LIMIT_TYPE_SIMT_STACK_SIZE;"],
    ids=["no table", "no entry", "two tables", "named elsewhere"],
)
def test_patch_refuses_what_it_was_not_written_for(source: str) -> None:
    with pytest.raises(ValueError):
        without_simt_limits(source)


def test_nothing_of_this_machine_is_baked_in() -> None:
    parts = [ROOT / "Dockerfile", *(ROOT / "deploy").rglob("*.*"), *(ROOT / "scripts").glob("image*")]
    for path in (path for path in parts if path.is_file() and path.suffix != ".pyc"):
        hosts = set(re.findall(r"https?://([\w.-]+)", path.read_text()))
        services = {"collector", "jaeger"}  # of a Compose file
        assert hosts <= {"download.pytorch.org", "127.0.0.1", "json-schema.org"} | services, (path, hosts)


def test_a_containers_port_is_none_that_other_processes_are_dealt() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(20)]
    assert [port for port in ports if first <= port <= last] == []


def test_a_container_heeds_sigint_where_the_probe_ignores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the probe does behind `make image-test &`. A script stands in for buildah: it runs what is to be contained."""
    (tmp_path / "bin").mkdir()
    (buildah := tmp_path / "bin" / "buildah").write_text(
        "#!/bin/bash\n"
        """[ "$5" = inspect ] && echo '{"Docker": {"config": {"Entrypoint": ["env"]}}}' && exit\n"""
        """while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n"""
    )
    buildah.chmod(0o755)
    monkeypatch.setenv("PATH", f"{buildah.parent}:{os.environ['PATH']}")
    container = Container(tmp_path, "stand-in", [])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        container.start(["sleep", "infinity"])
        container.process.send_signal(signal.SIGINT)
        assert container.process.wait(LIMIT_SECONDS) == -signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
        container.process.kill()
