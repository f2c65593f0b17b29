"""The server on Ray Serve: an ingress and two engines on CPUs. Ray has an environment: make clients."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.blocks import ROOT
from tests.support.http.client_environments import environment
from tests.support.http.server import is_alive, on_ray, running_server, standing_still, wait_for
from tests.support.http.small_disk import filled, small_disk_if_allowed
from tests.support.limits import LIMIT_SECONDS
from tests.support.on_ray.checkpoints import NAMES, make_checkpoints
from tests.support.processes import command_line, descendants, parent

pytestmark = pytest.mark.wide

# Of Ray's environment only what the server itself does not bring; both are pinned by constraints.txt.
_PATHS = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])


@dataclass
class RayServer:
    process: subprocess.Popen[bytes]
    http: httpx.Client

    def text(self, model: str, **fields: Any) -> str:
        answer = self.http.post("/v1/completions", json=_body(model, **fields))
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def replicas(self) -> dict[str, str]:
        replicas: dict[str, str] = self.http.get("/health").json()["replicas"]
        return replicas

    def is_whole(self) -> bool:
        return list(self.replicas().values()) == ["ready", "ready"]

    def engine_pids(self) -> list[int]:
        return self.pids_of(b"service.engine.process")

    def pids_of(self, title: bytes) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if title in command_line(pid)]

    def is_back(self) -> bool:
        """Whole, by whatever ingress there is: while there is none, Ray's proxy lets who asks wait, or says 503."""
        try:
            answer = self.http.get("/health")
        except httpx.TransportError:
            return False
        return answer.is_success and list(answer.json()["replicas"].values()) == ["ready", "ready"]


def _body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ray")
    make_checkpoints(root)
    return root


@pytest.fixture(scope="module")
def small_store(checkpoints: Path) -> Iterator[str | None]:
    """Why the disk of the store cannot be filled; None where it can."""
    with small_disk_if_allowed(checkpoints / "disk") as refusal:
        yield refusal


@pytest.fixture(scope="module")
def server(checkpoints: Path, small_store: str | None) -> Iterator[RayServer]:
    del small_store  # the store lies there, small or not
    settings = {
        "model_name": "tiny",
        "preload_adapters_dir": checkpoints / "adapters",
        "store_dir": checkpoints / "disk" / "store",
        "min_free_disk_bytes": 0,
        "kv_bytes": "24MiB",
    }
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")  # Ray's own proxy is its default
        one = stack.enter_context(running_server(checkpoints / "base", checkpoints / "ray", **on_ray(), **settings))
        http = stack.enter_context(httpx.Client(base_url=one.url, timeout=LIMIT_SECONDS))
        yield RayServer(one.process, http)


def test_answers_are_those_of_a_server_without_ray(server: RayServer, checkpoints: Path) -> None:
    settings = {"model_name": "tiny", "preload_adapters_dir": checkpoints / "adapters", "kv_bytes": "24MiB"}
    with running_server(checkpoints / "base", checkpoints / "alone", **settings) as alone:
        for model in ("tiny", *NAMES):
            theirs = alone.post("/v1/completions", json=_body(model)).json()["choices"][0]["text"]
            assert server.text(model) == theirs
        missing, theirs = (one.post("/v1/completions", json=_body("nobody")) for one in (server.http, alone))
        assert (missing.status_code, missing.json()) == (theirs.status_code, theirs.json())
    events = server.http.post("/v1/completions", json=_body(NAMES[0], stream=True)).text
    pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == server.text(NAMES[0])


def test_what_serves_gets_its_turn_as_other_processes_do(server: RayServer) -> None:
    titles = (b"ray::ServeReplica:multilora:Ingress", b"ray::ServeReplica:multilora:EngineReplica")
    pids = [*server.engine_pids(), *(pid for title in titles for pid in server.pids_of(title))]
    assert len(pids) == 5
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_an_upload_is_there_for_the_next_request_on_every_replica(server: RayServer, checkpoints: Path) -> None:
    names = "adapter_config.json", "adapter_model.safetensors"
    files = {name.partition(".")[0]: (checkpoints / "uploaded" / name).read_bytes() for name in names}
    answer = server.http.put("/v1/adapters/mine", files=files)
    assert answer.status_code == 201, answer.text
    # More than one engine is to have alone.
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda _: server.text("mine", max_tokens=200, n=8), range(32)))
    assert len(set(texts)) == 1
    assert texts[0] != server.text("tiny", max_tokens=200)
    (row,) = [one for one in server.http.get("/v1/adapters").json()["data"] if one["name"] == "mine"]
    assert row["replicas"].keys() == server.replicas().keys()
    assert server.http.delete("/v1/adapters/mine").status_code == 200
    assert server.http.post("/v1/completions", json=_body("mine")).status_code == 404


def test_a_pinned_adapter_is_on_every_replica(server: RayServer) -> None:
    wait_for(server.is_whole, "both engines")
    path = f"/v1/adapters/{NAMES[1]}"
    assert server.http.put(f"{path}/pin").status_code == 200
    pinned = dict.fromkeys(server.replicas(), "device")
    wait_for(lambda: server.http.get(path).json()["replicas"] == pinned, "both to have it")
    assert server.http.delete(f"{path}/pin").status_code == 200


def _lose(server: RayServer, pid: int) -> None:
    """Requests all the while; a stream with each engine, of which one is cut off."""
    expected = {name: server.text(name) for name in NAMES}
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(lambda name=name: (name, server.text(name))) for name in NAMES * 10]
        os.kill(pid, signal.SIGKILL)
        asking += [pool.submit(lambda name=name: (name, server.text(name))) for name in NAMES * 20]
        wait_for(lambda: set(server.replicas().values()) != {"ready"}, "the loss being seen")
        for one in asking:
            name, text = one.result()
            assert text == expected[name]
    assert "ready" in server.replicas().values()


def test_an_engine_that_is_killed_costs_no_unstreamed_request(server: RayServer) -> None:
    wait_for(server.is_whole, "both engines")
    names = set(server.replicas())
    _lose(server, server.engine_pids()[0])
    wait_for(server.is_whole, "both engines")
    assert set(server.replicas()) == names


def test_a_replica_that_is_killed_is_named_and_replaced(server: RayServer) -> None:
    wait_for(server.is_whole, "both engines")
    names = set(server.replicas())
    _lose(server, parent(server.engine_pids()[0]))
    wait_for(server.is_whole, "both engines")
    assert len(names & set(server.replicas())) == 1


def test_a_replica_that_stands_still_gets_nothing(server: RayServer) -> None:
    wait_for(server.is_whole, "both engines")
    expected = {name: server.text(name, max_tokens=60) for name in NAMES}
    with standing_still(parent(server.engine_pids()[0])), ThreadPoolExecutor(len(NAMES)) as pool:
        texts = list(pool.map(lambda name: server.text(name, max_tokens=60), NAMES))
        assert dict(zip(NAMES, texts, strict=True)) == expected
        wait_for(lambda: "ready" in server.replicas().values() and not server.is_whole(), "it to leave the rotation")
    wait_for(server.is_whole, "both engines")


def test_replicas_whose_disk_is_full_are_named_and_not_started_anew(
    server: RayServer, checkpoints: Path, small_store: str | None
) -> None:
    if small_store is not None:
        pytest.skip(small_store)
    wait_for(server.is_whole, "both engines")
    pids, names = server.engine_pids(), set(server.replicas())
    with filled(checkpoints / "disk") as fill:

        def is_seen() -> bool:
            fill()
            health = server.http.get("/health").json()
            return set(health["replicas"].values()) == {"disk-full"} and health.get("store") == "full"

        wait_for(is_seen, "the full disk to be seen")
        # They are all that there is, and can compute.
        assert server.text("tiny")
    wait_for(server.is_whole, "both to be back")
    assert (server.engine_pids(), set(server.replicas())) == (pids, names)


@pytest.mark.parametrize("title", [b"ray::ServeReplica:multilora:Ingress", b"ray::ServeController"])
def test_what_was_acknowledged_outlives_ray_s_processes(server: RayServer, checkpoints: Path, title: bytes) -> None:
    wait_for(server.is_whole, "both engines")
    names = "adapter_config.json", "adapter_model.safetensors"
    files = {name.partition(".")[0]: (checkpoints / "uploaded" / name).read_bytes() for name in names}
    answer = server.http.put("/v1/adapters/kept", files=files)
    assert answer.is_success, answer.text
    (pid,) = server.pids_of(title)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid) and server.pids_of(title), "the next one")
    wait_for(server.is_back, "full service")
    assert server.text("kept") == server.text(f"kept@{answer.json()['version']}")
    assert server.http.delete("/v1/adapters/kept").status_code == 200


def test_a_stream_that_had_begun_ends_with_an_error_event(server: RayServer) -> None:
    wait_for(server.is_whole, "both engines")
    with server.http.stream("POST", "/v1/completions", json=_body("tiny", max_tokens=15_000, stream=True)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        for pid in server.engine_pids():
            os.kill(pid, signal.SIGKILL)
        events = [json.loads(line[6:]) for line in lines if re.match("data: {", line)]
    assert events[-1]["error"]["message"]
    wait_for(server.is_whole, "both engines")


def test_in_ray_s_event_loop_what_is_sent_to_a_lost_engine_is_lost_with_it() -> None:
    code = """
import asyncio, uvloop
from service.ray_serve.remote import Address, RemoteEngine
from service.engine.ipc.messages import Ready
from service.engine.ipc.link import EngineDied
from service.engine.ipc.wire import frame
from tests.support.engine.engine_process import request, soon

async def drive():
    async def relay(reader, writer):
        writer.write(frame([Ready(64, 64, 64, 64, "float32", "cpu", 1)]))
        await reader.read()
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    engine = RemoteEngine(Address(*server.sockets[0].getsockname(), "00"))
    await engine.start()
    await soon(engine.wait_ready())
    engine.kill()
    streams = []
    while engine.state == "ready":  # nobody has been told yet
        engine.load("digest")
        streams.append(engine.submit(request(f"lost-{len(streams)}")))
        await asyncio.sleep(0)
    for stream in streams:
        try:
            stream.poll()
        except EngineDied as died:
            print(died)
    await engine.close()

uvloop.run(drive())
"""
    command = [str(environment("ray") / "bin" / "python"), "-c", code]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": _PATHS}, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The connection to the engine has ended.") > 1


def test_an_engine_s_replica_does_not_wait_for_the_http_application() -> None:
    """Ray starts each in a new process, whose imports are most of what a lost one takes to be replaced."""
    heavy = "{'service.server.app', 'service.api', 'tokenizers'}"
    code = f"import sys, service.ray_serve.replicas; print(sorted({heavy} & {{*sys.modules}}))"
    command = [str(environment("ray") / "bin" / "python"), "-c", code]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": _PATHS}, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_ray_takes_the_files_of_deploy() -> None:
    code = """
import sys, yaml
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as as_ray_builds
from ray.serve.schema import ServeDeploySchema
from service.ray_serve.app import RayArgs, build
from service.settings import SettingsError
for text in (open(sys.argv[1]).read(), yaml.safe_load(open(sys.argv[2]))["spec"]["serveConfigV2"]):
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    as_ray_builds(build, application.args)
    args = RayArgs(**application.args)
    print(application.import_path)
# An old cluster of KubeRay's stays until the requests that it has may be over.
assert yaml.safe_load(open(sys.argv[2]))["spec"]["rayClusterDeletionDelaySeconds"] >= args.drain_seconds
for wrong in ({"engines": 3, "max_engines": 2}, {"tokens_per_engine": 9}, {"downscale_delay_seconds": 9}):
    try:
        RayArgs(**wrong)
    except ValueError as error:
        print("refused" if "max_engines" in str(error) else error)
for name, where in (("replicas", "engines"), ("stall_limit_seconds", "environment")):
    try:
        build(RayArgs(settings={name: 2}))
    except SettingsError as error:
        print("refused" if name in str(error) and where in str(error) else error)
"""
    files = [str(ROOT / "deploy" / "ray" / name) for name in ("serve.yaml", "rayservice.yaml")]
    command = [str(environment("ray") / "bin" / "python"), "-c", code, *files]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": _PATHS}, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["service.ray_serve.app:build"] * 2 + ["refused"] * 5


def test_the_file_of_deploy_starts_a_server_that_serves(tmp_path: Path) -> None:
    """With `serve run`, which gives it to Ray as `serve deploy` does; one engine, on a CPU."""
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        config["http_options"] = {"host": "127.0.0.1", "port": free.getsockname()[1]}
    args = config["applications"][0]["args"]
    args.update(engines=1, num_gpus=0, num_cpus=1, settings={"store_dir": str(tmp_path / "store"), "kv_bytes": "24MiB"})
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    bin_dir, log = environment("ray") / "bin", tmp_path / "log"
    command = [
        str(bin_dir / "python"),
        str(bin_dir / "serve"),
        "run",
        "--address",
        "local",
        str(tmp_path / "serve.yaml"),
    ]
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_ENABLE_HA_PROXY": "0",
        # Ray kills a proxy that has not started after three checks of 5 s, and with it the command.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    env = {**os.environ, **own, "PYTHONPATH": _PATHS, "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{config['http_options']['port']}"
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as http:
            server = RayServer(process, http)

            def is_there() -> bool:
                text = log.read_text()
                assert process.poll() is None and "failed with exception" not in text, text
                try:
                    return http.get("/v1/models").is_success
                except httpx.TransportError:
                    return False

            wait_for(is_there, "the server")
            assert server.text("shout")
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_serve_build_writes_a_file_that_serve_deploy_takes(tmp_path: Path) -> None:
    """Of a module such as docs/scale.md has it."""
    arguments = f"settings={{'store_dir': {str(tmp_path)!r}}}, engines=2, max_engines=3, drain_seconds=50"
    (tmp_path / "mine.py").write_text(
        f"from service.ray_serve.app import RayArgs, build\napp = build(RayArgs({arguments}))\n"
    )
    code = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
(application,) = ServeDeploySchema.model_validate(yaml.safe_load(open(sys.argv[1]))).applications
engine, ingress = application.deployments
print(application.import_path, engine.autoscaling_config["min_replicas"], engine.autoscaling_config["max_replicas"])
assert min(one.graceful_shutdown_timeout_s for one in application.deployments) > 50
"""
    bin_dir, built = environment("ray") / "bin", str(tmp_path / "built.yaml")
    commands = [
        [str(bin_dir / "python"), str(bin_dir / "serve"), "build", "mine:app", "--app-dir", str(tmp_path), "-o", built],
        [str(bin_dir / "python"), "-c", code, built],
    ]
    for command in commands:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": _PATHS}, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "mine:app 2 3\n"
