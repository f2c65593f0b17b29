"""`multilora serve` on a Ray of its own: `python -m tests.support.on_ray.ray_server serve FLAGS` takes the same flags.

`replicas` are engines of the application (2), each with a CPU, and with a GPU where `device` is cuda. `port` is a free
one, as everywhere in tests; the line with "listening" is written when all of them serve. HAProxy is in front, as in
deploy/ray, or Ray's own proxy with RAY_SERVE_ENABLE_HA_PROXY=0 in the environment. TEST_RAY_ARGS there are further
arguments of the application, as JSON. All that Ray's processes say goes to stderr. Ends with SIGTERM. Runs in an
environment that has Ray, and goes on in the one of `make clients` where its own has none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

_ROOT = Path(__file__).resolve().parents[3]
_ENGINES = 2
_DRAIN_SECONDS = 5
# Settings that all of Ray's processes have from the environment.
_OF_HAPROXY_TOO = {
    "max_connections": "RAY_SERVE_HAPROXY_MAXCONN",
    "stall_limit_seconds": "MULTILORA_STALL_LIMIT_SECONDS",
    "trusted_proxies": "MULTILORA_TRUSTED_PROXIES",
}
# Below those that the system gives out.
_FIRST_PORT, _PORTS = 20_000, 50


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    if importlib.util.find_spec("ray") is None:
        _go_on_where_ray_is(arguments)
    from service.cli.help import flag_parser

    given = vars(flag_parser().parse_args(arguments[1:]))
    settings = {name: value for name, value in given.items() if value is not None}
    for name in ("host", "port", "store_shared", "shutdown_limit_seconds"):  # for Ray to say
        settings.pop(name, None)
    for name, variable in _OF_HAPROXY_TOO.items():
        if name in settings:
            os.environ[variable] = str(settings.pop(name))
    _serve(settings, int(settings.pop("replicas", _ENGINES)))
    return 0


def _go_on_where_ray_is(arguments: Sequence[str]) -> NoReturn:
    from tests.support.http.client_environments import environment

    python = str(environment("ray") / "bin" / "python")
    # Of that environment only what the server itself does not bring; both are pinned by constraints.txt.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    before = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    own = {
        "PYTHONPATH": os.pathsep.join([*before, str(_ROOT), *packages]),
        "RAY_SERVE_ENABLE_HA_PROXY": os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_LOG_TO_STDERR": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray kills a proxy that has not started after three checks of 5 s.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        **_ports(),
    }
    os.execve(python, [python, "-m", "tests.support.on_ray.ray_server", *arguments], {**os.environ, **own})


def _ports() -> dict[str, str]:
    """Those that would be the same for each Ray of a machine: HAProxy's own, those of ingresses, and those of Ray's own
    proxy, to which HAProxy goes while it knows of no ingress."""
    first = _FIRST_PORT + _PORTS * (os.getpid() % 200)
    ports = {"DIRECT_INGRESS_MIN_HTTP_PORT": first, "DIRECT_INGRESS_MAX_HTTP_PORT": first + _PORTS - 1}
    names = "HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT", "FALLBACK_PROXY_GRPC_PORT"
    with ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        ports |= {name: one.getsockname()[1] for name, one in zip(names, free, strict=True)}
    return {f"RAY_SERVE_{name}": str(port) for name, port in ports.items()}


def _serve(settings: dict[str, Any], engines: int) -> None:
    import ray
    from ray import serve

    from service.ray_serve.app import RayArgs, build
    from tests.support.on_ray.own_ray import start_ray
    from tests.support.processes import command_line, descendants

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Ray's sockets lie there, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as temp_dir:
        others = json.loads(os.environ.get("TEST_RAY_ARGS", "{}"))
        own = {"drain_seconds": _DRAIN_SECONDS, "num_gpus": int(settings["device"] == "cuda")}
        args = RayArgs(settings=settings, engines=engines, **{**own, **others})
        most = args.max_engines or engines
        start_ray(temp_dir, num_cpus=most + 2, num_gpus=int(most * args.num_gpus))
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(build(args), name="multilora", route_prefix="/")
            told = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: told.set())
            print(f"listening on http://127.0.0.1:{port}", flush=True)
            told.wait()
        finally:
            # Not serve.shutdown, which takes half a minute; without it a HAProxy may outlive Ray.
            started = descendants(os.getpid())
            ray.shutdown()
            for pid in started:
                if b"haproxy" in command_line(pid):
                    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
