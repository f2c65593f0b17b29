"""How long the loss of an engine is felt on Ray Serve, with a model of some size, and what it costs requests.

python -m bench.scale.ray_losses [--device cpu] [--shape tiny] [--replicas 2] [--requests 16] [--adapters 8]

Takes the flags of `bench.scale.cluster`. While waves of requests that are not streamed go on, an engine's process is
killed, then the replica that owns one, and then such a replica is stopped (SIGSTOP) for good. Of each, in seconds:
until /health no longer calls all ready, until it does again, and how many requests were answered meanwhile; ends with
an error if one fails. Ray has an environment of its own: `make clients CLIENTS=ray`.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

from bench.scale.cluster import Side, Way, parser, serving, write_model
from tests.support.http.server_process import Server, wait_for
from tests.support.processes import command_line

_REPLICA = b"ray::ServeReplica:multilora:EngineReplica"
_ENGINE = b"service.engine.process"
_LOSSES = (
    ("engine killed", _ENGINE, signal.SIGKILL),
    ("replica killed", _REPLICA, signal.SIGKILL),
    ("replica stopped", _REPLICA, signal.SIGSTOP),
)


class Waves(threading.Thread):
    """One after the other, until `end`; `num_answered` requests."""

    def __init__(self, side: Side, num_requests: int) -> None:
        super().__init__(daemon=True)
        self.num_answered = 0
        self._side, self._num_requests = side, num_requests
        self._stopping = threading.Event()
        self._failure: Exception | None = None

    def run(self) -> None:
        """See Thread."""
        try:
            while not self._stopping.is_set():
                self._side.wave()
                self.num_answered += self._num_requests
        except Exception as error:
            self._failure = error

    def end(self) -> None:
        """Wait for the last one; raises what has failed."""
        self._stopping.set()
        self.join()
        if self._failure is not None:
            raise self._failure


def lose(server: Server, title: bytes, how: signal.Signals) -> tuple[float, float]:
    """Seconds until that is noticed, and until all serve again."""
    pid = next(pid for pid in server.child_pids() if title in command_line(pid))
    began_seconds = time.monotonic()
    os.kill(pid, how)
    wait_for(lambda: not is_whole(server), "the loss to be noticed")
    noticed_seconds = time.monotonic() - began_seconds
    wait_for(lambda: is_whole(server), "all to serve again")
    return noticed_seconds, time.monotonic() - began_seconds


def is_whole(server: Server) -> bool:
    """Whether all engines are ready."""
    return set(server.get("/health").json()["replicas"].values()) == {"ready"}


def main() -> None:
    flags = parser(prog="python -m bench.scale.ray_losses", description=__doc__)
    flags.set_defaults(replicas=[2], requests=16, adapters=8)
    given = flags.parse_args()
    way = Way("on Ray Serve", max(given.replicas), "ray")
    with tempfile.TemporaryDirectory() as scratch:
        write_model(given, Path(scratch))
        with serving(given, Path(scratch), way) as side:
            (server,) = side.servers
            for name, title, how in _LOSSES:
                waves = Waves(side, given.requests * way.num_engines)
                waves.start()
                noticed, back = lose(server, title, how)
                waves.end()
                times = f"noticed {noticed:5.1f} s, all serve {back:5.1f} s"
                print(f"{name:16} {times}, {waves.num_answered} answered", flush=True)


if __name__ == "__main__":
    main()
