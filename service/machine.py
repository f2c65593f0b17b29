"""CPUs and memory that this process may use, within the limits of its control groups.

Imports no torch. Control groups of both versions are read, from the process's own group up to the root that is seen.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
DEVICES = Path("/dev")
# By kind of device; the numbered ones, which are the devices themselves, first.
DEVICE_NODES = {
    "npu": ("davinci[0-9]*", "davinci_manager", "devmm_svm", "hisi_hdc"),
    "cuda": ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm"),
}
CGROUPS = Path("/sys/fs/cgroup")
# Files that a server opens beside its connections: the store's, the engine's socket, what uploads write; and 256
# ephemeral versions.
OTHER_FILES = 512
_MOST_CONNECTIONS = 1 << 14


def num_usable_cpus() -> int:
    """CPUs of the affinity mask, or the whole ones of the quota if that is less; at least 1."""
    num_cpus = len(os.sched_getaffinity(0))
    for group in _groups("cpu"):
        quota = _cpu_quota(group)
        if quota is not None:
            num_cpus = min(num_cpus, int(quota))
    return max(num_cpus, 1)


def memory_bytes() -> tuple[int, int]:
    """Memory in all, and what is available without swapping: of the machine, or of the group with least."""
    lines = (PROC / "meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for group in _groups("memory"):
        limit, used = _memory_of(group)
        if limit is not None:
            total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def usual_connections() -> int:
    """As many as this machine has memory for, 4 MiB each, and this process may open files, 1,024 at least."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (
        _MOST_CONNECTIONS if most_files == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, most_files - OTHER_FILES)
    )
    return max(1024, min(memory_bytes()[0] >> 22, most))


def usual_queue() -> int:
    """Sequences that may wait or run for one client: as many as there is memory for, 8 MiB each, which a prompt of the
    longest contexts takes; 512 at least, and no more than one client ever waits for."""
    return max(512, min(memory_bytes()[0] >> 23, 4096))


def may_find_accelerator(device: str) -> bool:
    """Whether a device that is named so may turn out to be no CPU, before torch is there to tell."""
    if device != "auto":
        return not device.startswith("cpu")
    return any(any(DEVICES.glob(numbered)) for numbered, *_ in DEVICE_NODES.values())


def _groups(controller: str) -> Iterator[Path]:
    """Directories of this process's group and those above it. In a container the path may be one of the host's, which
    is not there: the container's own group is then what stands at the root."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 is mounted beside version 1 where there are both.
        names = (controllers, controller) if controllers else ("", "unified")
        for root in dict.fromkeys(CGROUPS / name for name in names):
            group = root / path.lstrip("/")
            yield from (one for one in (group, *group.parents) if one.is_relative_to(root) and one.is_dir())


def _cpu_quota(group: Path) -> float | None:
    """CPUs, such as 1.5; None without a limit."""
    if (given := _words(group / "cpu.max")) is not None:
        quota, period = given[0], given[1]
    else:
        quota, period = ((_words(group / f"cpu.cfs_{name}_us") or ["max"])[0] for name in ("quota", "period"))
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _memory_of(group: Path) -> tuple[int | None, int]:
    """The limit in bytes, None without one, and what is in use beside pages of files, which can be dropped."""
    for limit_name, used_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _words(group / limit_name), _words(group / used_name)
        if limit is None or used is None or limit == ["max"]:
            continue
        stat = (group / "memory.stat").read_text().splitlines()
        pages = dict(line.split() for line in stat)
        dropped = sum(int(pages.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return int(limit[0]), max(int(used[0]) - dropped, 0)
    return None, 0


def _words(path: Path) -> list[str] | None:
    try:
        return path.read_text().split() or None
    except OSError:
        return None
