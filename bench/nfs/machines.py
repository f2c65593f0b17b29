"""Small machines under QEMU that have nothing in common but a network: one exports a directory, others mount it."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.limits import LIMIT_SECONDS

_ROOT = Path(__file__).resolve().parents[2]
_STORE = "/store"
_MOUNT = f"mkdir -p {_STORE} && mount -t nfs4 -o OPTIONS 10.9.0.1:/ {_STORE}"


class Machine:
    """number 1 exports, the others are clients; `port` is where this one gets a shell of it."""

    def __init__(self, images: Path, number: int, base_port: int, accelerator: str) -> None:
        self.number, self.port = number, base_port + number
        role = "server" if number == 1 else "client"
        kernel = f"root=/dev/vda rw console=ttyS0 net.ifnames=0 mitigations=off panic=-1 init=/guest -- {role} {number}"
        host = f"user,id=host,hostfwd=tcp:127.0.0.1:{self.port}-:7000"
        others = f"socket,id=others,mcast=230.0.0.9:{base_port},localaddr=127.0.0.1"
        shared = {"tree": _ROOT, "packages": sysconfig.get_path("purelib")}
        command = ["qemu-system-x86_64", "-accel", accelerator, "-cpu", "max", "-m", "512", "-display", "none"]
        command += ["-nodefaults", "-no-reboot", "-serial", "stdio", "-append", kernel]
        command += ["-kernel", str(images / "vmlinuz"), "-initrd", str(images / "initrd.img")]
        command += ["-drive", f"file={images / 'root.img'},if=virtio,format=raw,snapshot=on"]
        for name, network in (("host", host), ("others", others)):
            mac = f"52:54:00:00:{'0a' if name == 'host' else '0b'}:{number:02x}"
            command += ["-netdev", network, "-device", f"virtio-net-pci,netdev={name},mac={mac}"]
        for tag, path in shared.items():
            command += ["-virtfs", f"local,path={path},mount_tag={tag},security_model=none,readonly=on"]
        self._console = (images / f"console-{number}").open("wb")
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, stdout=self._console, **quiet)

    def kill(self) -> None:
        """As if its power had failed."""
        self._process.kill()
        self._process.wait()
        self._console.close()

    def run(self, command: str) -> str:
        """What a shell there says; AssertionError if it fails."""
        with self._shell() as shell:
            shell.sendall(f"({command}) 2>&1; echo =$?\nexit\n".encode())
            said = b"".join(iter(lambda: shell.recv(65536), b"")).decode()
        text, _, code = said.rpartition("=")
        assert code.strip() == "0", f"{command}: {said}"
        return text

    def mount(self, options: str) -> None:
        """The first machine's directory."""
        self.run(_MOUNT.replace("OPTIONS", options))

    def wait(self) -> None:
        """Until it has begun."""
        until_seconds = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < until_seconds:
            assert self._process.poll() is None, f"machine {self.number} has ended; see {self._console.name}"
            with contextlib.suppress(OSError, AssertionError):
                self.run("true")
                return
            time.sleep(1)
        raise AssertionError(f"machine {self.number} does not begin; see {self._console.name}")

    def _shell(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_SECONDS)


class Caller:
    """A process there that runs `bench.nfs.worker`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._shell = machine._shell()
        self._lines = self._shell.makefile("r")
        command = f"cd / && exec python3 -m bench.nfs.worker {shlex.quote(_STORE)} 2>/dev/ttyS0\n"
        self._shell.sendall(command.encode())
        self.process_id = int(self._lines.readline())

    def begin(self, *call: object) -> None:
        """Ask, and do not wait."""
        self._shell.sendall(json.dumps(call).encode() + b"\n")

    def end(self) -> Any:
        """The answer to what was begun first; AssertionError where it is an error."""
        said = json.loads(self._lines.readline())
        assert "error" not in said, said
        return said["is"]

    def call(self, *call: object) -> Any:
        self.begin(*call)
        return self.end()

    def kill(self) -> None:
        """The process; its machine goes on."""
        self._machine.run(f"kill -9 {self.process_id}")


@contextlib.contextmanager
def running(images: Path, count: int, base_port: int, accelerator: str) -> Iterator[list[Machine]]:
    """So many machines, which have begun."""
    machines = [Machine(images, number, base_port, accelerator) for number in range(1, count + 1)]
    try:
        for one in machines:
            one.wait()
        yield machines
    finally:
        for one in machines:
            one.kill()
