"""The limits of control groups, in made-up trees of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service import machine

KIB = 1024
MEMINFO = "MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:    800 kB\n"
STAT = "anon 1\n{0}active_file 2048\n{0}inactive_file 1024\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 CPUs and 1000 KiB without control groups."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path / "proc" / "meminfo", MEMINFO)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def version_2(root: Path, group: str, *, cpu: str | None = None, limit: str = "max", used: int = 0) -> None:
    directory = root / "cgroup" / group
    if cpu is not None:
        write(directory / "cpu.max", f"{cpu}\n")
    write(directory / "memory.max", f"{limit}\n")
    write(directory / "memory.current", f"{used}\n")
    write(directory / "memory.stat", STAT.format(""))


def test_without_groups_the_machine_is_the_limit(root: Path) -> None:
    assert machine.num_usable_cpus() == 8
    assert machine.memory_bytes() == (1000 * KIB, 800 * KIB)
    write(root / "proc" / "self" / "cgroup", "0::/gone\n")
    assert machine.num_usable_cpus() == 8


def test_the_affinity_mask_is_kept_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert machine.num_usable_cpus() == 2
    write(root / "proc" / "self" / "cgroup", "0::/\n")
    version_2(root, "", cpu="400000 100000")
    assert machine.num_usable_cpus() == 2


@pytest.mark.parametrize(("cpu", "num_cpus"), [("max 100000", 8), ("350000 100000", 3), ("20000 100000", 1)])
def test_the_quota_counts_in_whole_cpus(cpu: str, num_cpus: int, root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", "0::/service\n")
    version_2(root, "service", cpu=cpu)
    assert machine.num_usable_cpus() == num_cpus


def test_groups_above_count_too_and_pages_of_files_are_free(root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", "0::/pod/service\n")
    version_2(root, "pod", cpu="200000 100000", limit=str(500 * KIB), used=450 * KIB)
    version_2(root, "pod/service", cpu="max 100000")
    assert machine.num_usable_cpus() == 2
    assert machine.memory_bytes() == (500 * KIB, 53 * KIB)


def test_a_groups_limit_counts_no_more_than_the_machine(root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", "0::/\n")
    version_2(root, "", limit=str(1 << 40), used=0)
    assert machine.memory_bytes() == (1000 * KIB, 800 * KIB)


@pytest.mark.parametrize("path", ["/docker/0815", "/"])
def test_version_1_with_a_path_of_the_host(path: str, root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", f"5:memory:{path}\n4:cpu,cpuacct:{path}\n0::/\n")
    write(root / "cgroup" / "cpu,cpuacct" / "cpu.cfs_quota_us", "250000\n")
    write(root / "cgroup" / "cpu,cpuacct" / "cpu.cfs_period_us", "100000\n")
    write(root / "cgroup" / "memory" / "memory.limit_in_bytes", f"{300 * KIB}\n")
    write(root / "cgroup" / "memory" / "memory.usage_in_bytes", f"{100 * KIB}\n")
    write(root / "cgroup" / "memory" / "memory.stat", STAT.format("total_"))
    assert machine.num_usable_cpus() == 2
    assert machine.memory_bytes() == (300 * KIB, 203 * KIB)


def test_version_1_without_a_quota(root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", "4:cpu:/\n")
    write(root / "cgroup" / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(root / "cgroup" / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert machine.num_usable_cpus() == 8


def test_this_machine_has_some_of_both() -> None:
    total, available = machine.memory_bytes()
    assert 1 <= machine.num_usable_cpus() <= len(os.sched_getaffinity(0))
    assert 0 < available <= total


@pytest.mark.parametrize(
    ("device", "nodes", "expected"),
    [
        ("cpu", ["nvidia0"], False),
        ("cuda:1", [], True),
        ("npu", [], True),
        ("auto", ["tty0", "nvidiactl"], False),
        ("auto", ["nvidia0"], True),
        ("auto", ["davinci0"], True),
    ],
)
def test_an_accelerator_is_looked_for_without_torch(
    device: str, nodes: list[str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes:
        (tmp_path / node).touch()
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    assert machine.may_find_accelerator(device) is expected
