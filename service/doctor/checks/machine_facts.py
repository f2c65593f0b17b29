"""Checks of the machine: installed software, and the users of the device.

`python -m service.doctor.checks.machine_facts DEVICE` makes one addition there, and prints a line of it; else the last
line is an error's.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernels.child_process import child_environment, die_with_parent
from service.doctor.checks.step_process import StepFailed, StepHost
from service.machine import DEVICE_NODES, DEVICES

_TOOLS = {"npu": ("npu-smi", "info"), "cuda": ("nvidia-smi",)}
_TOOL_SECONDS = 15.0
# For one addition. This user's answer decides whether anything else is run, and comes with the first start of the
# device's package, from a disk that may be slow; the others find it in memory.
_OWN_ADD_SECONDS, _ADD_SECONDS = 75.0, 30.0
# The image's user, the usual first one of a machine, and root.
_USERS = (10001, 1000, 0)
_INSTALL_INFO = Path("/etc/ascend_install.info")
_MAX_SAID_CHARACTERS = 300


def environment(host: StepHost) -> None:
    """Versions, variables, the device and the known problems, as the doctor has them; what the vendor's tool says."""
    from service.doctor.checks.hardware import look_at_device
    from service.doctor.checks.software import look_at_environment, look_at_versions
    from service.doctor.report import Examination
    from service.settings import load_settings

    host.facts(device=host.device)
    examination = Examination(load_settings(device=host.device, model_dir=host.options["model_dir"]), host.tell)
    for look in (look_at_versions, look_at_environment, look_at_device):
        section = look(examination)
        host.facts(**{section.name if section.name != "device" else "chip": section.facts})
        for finding in section.findings:
            host.find(finding.level, finding.code, finding.message, finding.cure)
    if host.options["device"] == "auto" and host.device_type == "cpu":
        _look_for_devices(host)
    tool = _TOOLS.get(host.device_type)
    if tool is not None:
        host.facts(**{tool[0].replace("-", "_"): _output_of(tool)})


def _look_for_devices(host: StepHost) -> None:
    """Those that nobody asked for by name, and torch does not see: what is wrong with one, its own steps tell."""
    for kind, (numbered, *_) in DEVICE_NODES.items():
        if found := sorted(path.name for path in DEVICES.glob(numbered)):
            host.find(
                "warning", "device-not-seen",
                f"torch does not see the device of {DEVICES / found[0]}, so the CPU was looked at.",
                f"Run the command again with --device {kind} and another --report-dir: it says what is wrong.",
            )  # fmt: skip


def permissions(host: StepHost) -> None:
    """Device nodes and their groups, this user's groups, and who can put a number on the device and add to it.

    Root tries it as other users too, each with and without the group of the device nodes: what a container's
    `--group-add` does.
    """
    # A device may let each of those who try wait to the end, and what it means for this user must be told all the same.
    until = time.monotonic() + host.limit_seconds - 1.5 * _ADD_SECONDS
    nodes = sorted(node for pattern in DEVICE_NODES[host.device_type] for node in DEVICES.glob(pattern))
    host.facts(
        uid=os.getuid(),
        gid=os.getgid(),
        groups=[_group(gid) for gid in os.getgroups()],
        nodes=[_node(path) for path in nodes],
    )
    if host.device_type == "npu":
        host.facts(install_info=_read(_INSTALL_INFO), is_in_passwd=_is_known(os.getuid()))
    node_groups = sorted({path.stat().st_gid for path in nodes} - {0})
    tried: list[dict[str, Any]] = []
    for uid, groups in _users(node_groups):
        if tried and time.monotonic() > until:
            host.facts(not_tried="further users: there was no time")
            break
        host.tell(f"adding on {host.device} as user {os.getuid() if uid is None else uid}")
        most_seconds = _OWN_ADD_SECONDS if uid is None else _ADD_SECONDS
        limit_seconds = min(most_seconds, 0.7 * host.limit_seconds)  # so that the report names a user who cannot add
        tried.append({"user": os.getuid() if uid is None else uid, "groups": [_group(gid) for gid in groups],
                      **_try_to_add(host.device, uid, groups, limit_seconds)})  # fmt: skip
        host.facts(tried=tried)
    if os.getuid() != 0:
        host.facts(not_tried="other users than this one: only root can become them; run the command as root once")
    if not tried[0]["works"]:
        raise StepFailed(f"This user cannot use {host.device}: {tried[0]['said']}")
    for one in tried[1:]:
        if one["user"] == _USERS[0] and one["groups"] and not one["works"]:
            host.find(
                "warning", "image-user-refused",
                f"User {one['user']} with {', '.join(one['groups'])} cannot use {host.device}: {one['said']}",
                "Run the image as a user that works (docker run --user), and send this report.",
            )  # fmt: skip


def _users(node_groups: Sequence[int]) -> Iterator[tuple[int | None, Sequence[int]]]:
    """This process's own user first (None), then others where this is root."""
    yield None, os.getgroups()
    if os.getuid() != 0:
        return
    for uid in _USERS:
        if uid == 0:
            continue  # this process
        yield uid, ()
        if node_groups:
            yield uid, node_groups


def _try_to_add(device: str, uid: int | None, groups: Sequence[int], limit_seconds: float) -> dict[str, Any]:
    """In a process of its own, which may crash or hang."""
    as_user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": list(groups)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "service.doctor.checks.machine_facts", device],
            env={**child_environment(), **({} if uid is None else {"HOME": "/"})},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_seconds,
            check=False,
            **as_user,
        )
    except subprocess.TimeoutExpired:
        return {"works": False, "said": f"did not end within {limit_seconds:.0f} s"}
    except (OSError, subprocess.SubprocessError) as error:
        return {"works": False, "said": f"could not be started ({error})"}
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().rpartition("\n")[2]
    return {"works": done.returncode == 0, "said": said[-_MAX_SAID_CHARACTERS:] or f"exit code {done.returncode}"}


def _node(path: Path) -> dict[str, Any]:
    facts = path.stat()
    return {
        "node": str(path),
        "owner": facts.st_uid,
        "group": _group(facts.st_gid),
        "mode": stat.filemode(facts.st_mode),
        "may_open": os.access(path, os.R_OK | os.W_OK),
    }


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} ({gid})"
    except KeyError:
        return str(gid)


def _is_known(uid: int) -> bool:
    """Whether /etc/passwd has the user; HCCL, which is not used here, wants it there."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _output_of(command: Sequence[str]) -> str | None:
    """None if there is no such program."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TOOL_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout or done.stderr).strip()


def main(device: str) -> None:
    die_with_parent()
    # Only now: with torch comes a device's own package, which takes seconds, and may not return.
    import torch

    from kernels.platform import detect, prepare

    prepare(device)
    detect(device)
    ones = torch.ones(16, device=device)
    assert (ones + ones).cpu().tolist() == [2.0] * 16, "1 + 1 is not 2 on this device"
    print(f"1 + 1 is 2 on {device}")


if __name__ == "__main__":
    main(sys.argv[1])
