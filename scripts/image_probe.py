"""Run a built image's own command in a buildah container, use it as a client would, and stop it with SIGTERM.

python scripts/image_probe.py WORK_DIR CONTAINER [--env NAME=VALUE ...] [--doctor-deep] [--ray]

With --doctor-deep `multilora doctor --deep` is run too, interrupted once, and every step of it must have an answer.
With --ray the image is one of deploy/ray/Dockerfile: in place of its own command it runs the application on Ray Serve
with two engines behind HAProxy, which a client uses likewise.

WORK_DIR holds buildah's storage. Standard library alone; an AssertionError says what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# For machines with much else to do: none is a measure of speed.
START_LIMIT_SECONDS, SHUTDOWN_LIMIT_SECONDS, STOP_LIMIT_SECONDS = 600.0, 600, 660.0
# Its own limit is half an hour; with the bundled model it takes two minutes of computing.
DEEP_LIMIT_SECONDS, DEEP_STEP, REPORT_DIR, INTERRUPTED = 1860.0, "doctor", "/tmp/doctor-report", 130
ADAPTER_DIR = ROOT / "service" / "bundled" / "adapters" / "pig-latin"
WORDS = "lamp tiger moss"
# As in deploy/ray/rayservice.yaml.
RAY_ENVIRONMENT = (
    "RAY_SERVE_ENABLE_HA_PROXY=1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=1",
    "RAY_worker_niceness=0",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1",
    "RAY_SERVE_HAPROXY_BINARY_PATH=/opt/multilora/venv/bin/multilora-haproxy",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE=65536",
)
# Its probes of a node are commands in the container: `bash -c "wget ..."`.
KUBERAY_NEEDS = ("bash", "wget")
EXPECTED = {"shout": "LAMP TIGER MOSS!", "reverse": "moss tiger lamp", "json": '["lamp", "tiger", "moss"]'}


class Container:
    """The running container. buildah's chroot isolation shares process ids and network with the machine."""

    def __init__(self, work_dir: Path, name: str, environment: list[str]) -> None:
        self._buildah = ["buildah", "--root", str(work_dir / "storage"), "--runroot", str(work_dir / "run")]
        self._name, self._log_path = name, work_dir / f"{name}.log"
        self.config = json.loads(self._output("inspect", name))["Docker"]["config"]
        self.port = free_port()
        shutdown = f"MULTILORA_SHUTDOWN_LIMIT_SECONDS={SHUTDOWN_LIMIT_SECONDS}"
        given = [*environment, f"MULTILORA_PORT={self.port}", shutdown]
        self._flags = [flag for pair in given for flag in ("--env", pair)]

    @property
    def log(self) -> str:
        """What the container has written so far."""
        return self._log_path.read_text(errors="replace")

    def start(self, command: Sequence[str]) -> None:
        """Behind the image's entry point, with a log of its own."""
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*self._buildah, "run", *self._flags, self._name, "--", *self.config["Entrypoint"], *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, preexec_fn=_heed_interrupts,
            )  # fmt: skip

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Another command in the same container, as `docker exec` runs it."""
        return subprocess.run(
            [*self._buildah, "run", *self._flags, self._name, "--", *command],
            capture_output=True, text=True, timeout=START_LIMIT_SECONDS,
        )  # fmt: skip

    def main_pid(self) -> int:
        """The process that a container engine would call number 1: below buildah's own, which are all `buildah...`."""
        pid = self.process.pid
        while Path(f"/proc/{pid}/comm").read_text().startswith(("buildah", "memfd:buildah")):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for task in Path(f"/proc/{pid}/task").iterdir():
                children = children or (task / "children").read_text().split()
            assert len(children) == 1, (pid, children)
            pid = int(children[0])
        return pid

    def _output(self, *command: str) -> str:
        return subprocess.run([*self._buildah, *command], check=True, capture_output=True, text=True).stdout


def _heed_interrupts() -> None:
    """A shell without job control starts what runs in the background with SIGINT ignored, and every child inherits
    that; a container engine ignores no signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def call(container: Container, path: str, body: Any = None, content_type: str = "application/json") -> Any:
    """GET, or POST of a JSON value or of ready bytes; the answer's JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{container.port}{path}", data, {"Content-Type": content_type})
    with urllib.request.urlopen(request, timeout=START_LIMIT_SECONDS) as answer:
        return json.load(answer)


def wait_ready(container: Container) -> None:
    """Poll /ready until it says 200."""
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while True:
        try:
            call(container, "/ready")
            return
        except (urllib.error.URLError, ConnectionError):
            pass
        assert container.process.poll() is None, f"the container ended:\n{container.log}"
        assert time.monotonic() < deadline, f"not ready after {START_LIMIT_SECONDS} s:\n{container.log}"
        time.sleep(0.1)


def upload(container: Container, name: str) -> dict[str, Any]:
    """Send an adapter as a browser or curl would."""
    boundary = uuid.uuid4().hex
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="name"\r\n\r\n{name}\r\n'.encode()]
    for field, file in (("adapter_config", "adapter_config.json"), ("adapter_model", "adapter_model.safetensors")):
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"; filename="{file}"\r\n\r\n'
        parts += [head.encode(), (ADAPTER_DIR / file).read_bytes(), b"\r\n"]
    parts.append(f"--{boundary}--\r\n".encode())
    report: dict[str, Any] = call(
        container, "/v1/adapters", b"".join(parts), f"multipart/form-data; boundary={boundary}"
    )
    return report


def batch(container: Container, models: list[str], **options: Any) -> list[dict[str, Any]]:
    """One item for each model, in one request; the items' choices."""
    asked = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 80, "temperature": 0, **options}
    answer = call(container, "/v1/completions/batch", {"items": [{"model": model, **asked} for model in models]})
    return [item["choices"][0] for item in answer["items"]]


def use(container: Container) -> None:
    """Mixed batch, upload, and the uploaded adapter in a batch with the others."""
    assert upload(container, "my-adapter")["name"] == "my-adapter"
    models = ["base", *EXPECTED, "pig-latin", "my-adapter"]
    texts = {
        model: choice["message"]["content"] for model, choice in zip(models, batch(container, models), strict=True)
    }
    assert {model: texts[model] for model in EXPECTED} == EXPECTED, texts
    assert texts["my-adapter"] == texts["pig-latin"] != texts["base"], texts


def check_process(container: Container) -> int:
    """The command has replaced the entry point, does not run as root, and is healthy; its process id."""
    pid = container.main_pid()
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    assert "serve" in words and Path(words[0]).name.startswith("python"), f"process 1 is {words}, not the server itself"
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert set(status["Uid"].split()) == {container.config["User"]} != {"0"}, status["Uid"]
    health = container.config["Healthcheck"]["Test"]
    assert health[0] == "CMD", health
    healthy = container.run(*health[1:])
    assert healthy.returncode == 0, healthy
    return pid


def stop(container: Container, pid: int) -> None:
    """SIGTERM while a request runs: the request is answered whole, then the exit code is 0."""
    answers: list[dict[str, Any]] = []
    long = {"max_tokens": 400, "ignore_eos": True}
    asking = threading.Thread(target=lambda: answers.extend(batch(container, ["base"], **long)))
    asking.start()
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while call_metric(container, "multilora_num_requests_open") == 0:
        assert time.monotonic() < deadline, "the last request does not run"
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    code = container.process.wait(STOP_LIMIT_SECONDS)
    asking.join()
    assert [answer["finish_reason"] for answer in answers] == ["length"], answers
    assert code == 0, f"exit code {code} after SIGTERM:\n{container.log}"


def look_at_server(container: Container) -> None:
    """The image's own command."""
    container.start(container.config["Cmd"])
    wait_ready(container)
    pid = check_process(container)
    use(container)
    stop(container, pid)
    print("image_probe: served, uploaded, healthy, stopped with exit code 0")


def look_at_ray(container: Container) -> None:
    """The application on a Ray of the container alone: it serves with both engines, and goes with SIGINT."""
    for name in KUBERAY_NEEDS:
        found = container.run(name, "--version")
        assert found.returncode == 0, found
    args = {"settings": {"store_dir": "/tmp/store"}, "engines": 2, "num_cpus": 0.5, "ingress_cpus": 0.5}
    application = {"name": "multilora", "route_prefix": "/", "import_path": "service.ray_serve.app:build", "args": args}
    config = {"http_options": {"host": "127.0.0.1", "port": container.port}, "applications": [application]}
    # JSON is YAML, too.
    container.start(["bash", "-c", f"echo '{json.dumps(config)}' >/tmp/serve.yaml && exec serve run /tmp/serve.yaml"])
    wait_ready(container)
    use(container)
    replicas = call(container, "/health")["replicas"]
    assert list(replicas.values()) == ["ready"] * 2, replicas
    os.kill(container.main_pid(), signal.SIGINT)
    container.process.wait(STOP_LIMIT_SECONDS)
    print(f"image_probe: on Ray Serve: served and uploaded with {len(replicas)} engines")


def examine_deeply(container: Container) -> None:
    """`multilora doctor --deep`, ended by SIGTERM once its second step of this device is at work, and resumed."""
    command = ["multilora", "doctor", "--deep", "--report-dir", REPORT_DIR]
    container.start(command)
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while f" {DEEP_STEP}: " not in container.log:
        assert container.process.poll() is None, f"doctor --deep ended:\n{container.log}"
        assert time.monotonic() < deadline, f"doctor --deep does not get on:\n{container.log}"
        time.sleep(0.1)
    os.kill(container.main_pid(), signal.SIGTERM)
    code = container.process.wait(STOP_LIMIT_SECONDS)
    assert code == INTERRUPTED, f"exit code {code} of doctor --deep after SIGTERM:\n{container.log}"
    container.start([*command, "--resume"])
    code = container.process.wait(DEEP_LIMIT_SECONDS)
    report = json.loads(container.run("cat", f"{REPORT_DIR}/report.json").stdout)
    statuses = {step["name"]: step["status"] for step in report["steps"]}
    assert code in (0, 1) and set(statuses.values()) == {"ok", "not applicable"}, (code, statuses, container.log)
    print(f"image_probe: doctor --deep: {report['summary']} {len(report['faults'])} warnings")


def call_metric(container: Container, name: str) -> float:
    """Value of a metric without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{container.port}/metrics", timeout=START_LIMIT_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name} "))
    return float(value)


def free_port() -> int:
    """A port on which nothing listens, and which no other process is dealt before the container has started.

    The container shares the machine's network, and the system deals out ports of one range to whoever names none.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [port for port in range(1024, 2**16) if not first <= port <= last]
    random.shuffle(ports)
    for port in ports:
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise AssertionError(f"no free port outside of {first} to {last}")


def main() -> None:
    """Start, use, stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("container")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--doctor-deep", action="store_true")
    parser.add_argument("--ray", action="store_true")
    arguments = parser.parse_args()
    environment = [*arguments.env, *(RAY_ENVIRONMENT if arguments.ray else ())]
    container = Container(arguments.work_dir, arguments.container, environment)
    try:
        if arguments.ray:
            look_at_ray(container)
        else:
            look_at_server(container)
        if arguments.doctor_deep:
            examine_deeply(container)
    except BaseException:
        print(container.log)
        raise
    finally:
        if container.process.poll() is None:
            container.process.kill()


if __name__ == "__main__":
    main()
