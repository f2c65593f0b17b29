"""Hosts of this machine: each has an address, a loopback, processes, a name, /tmp and /dev/shm of its own (namespaces
of Linux), and one directory in common, /mnt. A bridge joins them and this process, which is no host. Root on Linux,
with iproute2 and util-linux.

What is sent to a host that is cut off, and by it, is lost without a word, as if a cable had been cut behind a switch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.limits import LIMIT_SECONDS

SHARED = "/mnt"
_NETWORK = "10.93.0."
OUR_ADDRESS = f"{_NETWORK}254"
# `cat` is the first process of its host, with which all others of it end; it ends with this one.
_BEGIN = f"""
mount --make-rprivate / && mount --bind "$0" {SHARED} && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm &&
hostname "$1" && ip link set lo up && echo begun && exec cat
"""


class Host:
    """number  from 1 on; `address` ends with it"""

    def __init__(self, number: int, bridge: str, shared: Path) -> None:
        self.number, self.address = number, f"{_NETWORK}{number}"
        self.name = f"host-{number}"
        self._bridge, self._link = bridge, f"{bridge}{number}"
        unshare = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._first = subprocess.Popen(
            [*unshare, "sh", "-c", _BEGIN, str(shared), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == "begun\n", "no namespaces: this wants root"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self.pid = int(children.split()[0])
        _ip(f"link add {self._link} type veth peer name eth0 netns {self.pid}")
        self.join()
        self.run(["ip", "addr", "add", f"{self.address}/24", "dev", "eth0"])
        self.run(["ip", "link", "set", "eth0", "up"])

    def within(self, command: Sequence[str]) -> list[str]:
        """The same command, on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--ipc", "--pid", "--", *command]

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """What it says; CalledProcessError if it fails."""
        everything = {**os.environ, **(environment or {})}
        done = subprocess.run(
            self.within(command), env=everything, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_SECONDS
        )
        return done.stdout

    def cut(self) -> None:
        """Nothing reaches it, and nothing of it anybody; it goes on."""
        _ip(f"link set {self._link} nomaster")

    def join(self) -> None:
        """As before it was cut off."""
        _ip(f"link set {self._link} master {self._bridge} up")

    def unplug(self) -> None:
        """For good; of a host that has ended the system may keep the link for minutes."""
        subprocess.run(["ip", "link", "delete", self._link], check=False, stderr=subprocess.DEVNULL)

    def power_off(self) -> None:
        """All its processes end at once, and nobody is told."""
        self.cut()
        self.end()

    def end(self) -> None:
        """All its processes end, and what they were connected to is told."""
        self._first.kill()
        self._first.wait()
        for pipe in (self._first.stdin, self._first.stdout):
            assert pipe is not None
            pipe.close()


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


@contextlib.contextmanager
def hosts(count: int, shared: Path) -> Iterator[list[Host]]:
    """So many hosts, with this directory in common; they and all their processes are gone afterwards."""
    bridge = f"h{os.getpid()}"
    _ip(f"link add {bridge} type bridge")
    made: list[Host] = []
    try:
        _ip(f"addr add {OUR_ADDRESS}/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for number in range(1, count + 1):
            made.append(Host(number, bridge, shared))
        yield made
    finally:
        for one in made:
            one.end()
            one.unplug()
        _ip(f"link delete {bridge}")
