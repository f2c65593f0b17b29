"""What many adapters cost: restart, memory, uploads, listings, metrics, and the tokens of others.

    .venv/bin/python -m bench.adapters [--adapters 10000] [--json FILE]

Starts a server of the bundled model on this machine, uploads adapters over HTTP, and stops it again. The store needs
about 12 KB of disk for each adapter. The longest that a callback keeps the event loop is noted beside (processor time,
see `bench.steps.loop_stretches`; what takes less than 1 ms is 0).

`python -m tests.api.adapter_routes.moves` has requests while names move.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench.adapters.poller import polling
from bench.http.http_client import complete_all
from bench.rounds import percentile
from bench.steps import loop_stretches
from service.settings import BUNDLED_MODEL_DIR
from tests.support.http.server_process import Server, running_server, wait_for
from tests.support.peft_files import adapter_files

NUM_SAMPLES = 100
POLLED = ("/v1/adapters", "/v1/models", "/metrics")
POLL_SECONDS = 0.25


def measure(num_adapters: int, num_rounds: int, work_dir: Path) -> dict[str, Any]:
    """Every figure by name; seconds, milliseconds and MB as the names say."""
    figures: dict[str, Any] = {"adapters": num_adapters}

    def start(name: str) -> AbstractContextManager[Server]:
        return _started(work_dir, figures, name)

    (work_dir / "none").mkdir()  # no adapters but those made here
    longest: dict[str, float] = {}
    figures["longest_on_the_loop_ms"] = longest
    with start("empty") as server:
        with _noted(longest, "uploads", server):
            figures["upload_ms"] = upload_all(server, num_adapters)
        figures["api_mb_after_uploads"] = api_mb(server)
    with start("restarted") as server:
        figures["page_ms"] = {}
        for path in _pages(num_adapters):
            with _noted(longest, path, server):
                figures["page_ms"][path] = _times(server, path)
        figures["metrics_bytes"] = len(server.get("/metrics").content)
        figures["between_tokens"] = between_tokens(server, num_rounds, longest)
    return figures


@contextmanager
def _started(work_dir: Path, figures: dict[str, Any], name: str) -> Iterator[Server]:
    begin = time.perf_counter()
    os.environ[loop_stretches.VARIABLE] = str(work_dir / "stretches")
    settings: dict[str, Any] = {"store_dir": work_dir / "store", "preload_adapters_dir": work_dir / "none"}
    with running_server(BUNDLED_MODEL_DIR, work_dir, module="bench.steps.loop_stretches", **settings) as server:
        wait_for(lambda: server.get("/ready").status_code == 200, "the server to be ready")
        figures[f"{name}_start_seconds"] = round(time.perf_counter() - begin, 2)
        figures[f"{name}_api_cpu_seconds"] = round(api_cpu_seconds(server), 2)
        figures[f"{name}_api_mb"] = api_mb(server)
        yield server


@contextmanager
def _noted(longest: dict[str, float], name: str, server: Server) -> Iterator[None]:
    """The longest stretch on the event loop meanwhile, in milliseconds; of several times the longest of all."""
    begun = time.monotonic()
    yield
    seconds = loop_stretches.longest_since(server.store_dir.parent / "stretches", begun)
    longest[name] = max(round(seconds * 1e3, 1), longest.get(name, 0.0))


def api_mb(server: Server) -> float:
    """Resident memory of the API process."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return round(int(line.split()[1]) / 1024, 1)


def api_cpu_seconds(server: Server) -> float:
    """Processor time of the API process since its start: what other load on the machine does not change."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def upload_all(server: Server, num_adapters: int) -> dict[str, float]:
    """p50 of the first and of the last uploads, and the API process's processor time for one of all, of the first tenth
    and of the last, which other work on the machine changes less."""
    times, tenth = [], max(1, num_adapters // 10)
    cpu_seconds = {0: api_cpu_seconds(server)}  # by the number of uploads
    for at in range(num_adapters):
        files = adapter_files(at)
        begin = time.perf_counter()
        server.http.put(f"{server.url}/v1/adapters/n{at:06}", files=files).raise_for_status()
        times.append(round((time.perf_counter() - begin) * 1e3, 2))
        if at + 1 in (tenth, num_adapters - tenth, num_adapters):
            cpu_seconds[at + 1] = api_cpu_seconds(server)

    def cpu_ms(begin: int, end: int) -> float:
        return round((cpu_seconds[end] - cpu_seconds[begin]) * 1e3 / (end - begin), 2)

    return {
        "p50_of_the_first": statistics.median(times[:NUM_SAMPLES]),
        "p50_of_the_last": statistics.median(times[-NUM_SAMPLES:]),
        "cpu": cpu_ms(0, num_adapters),
        "cpu_of_the_first_tenth": cpu_ms(0, tenth),
        "cpu_of_the_last_tenth": cpu_ms(num_adapters - tenth, num_adapters),
    }


def _pages(num_adapters: int) -> list[str]:
    middle = f"after=n{num_adapters // 2:06}"
    filters = ["", middle, "limit=1000", "rank=2", "state=disk", "state=device", "prefix=n0001", "owner=nobody"]
    return [*(f"/v1/adapters?{one}" for one in filters), "/v1/models", f"/v1/models?{middle}&limit=100", "/metrics"]


def _times(server: Server, path: str) -> dict[str, float]:
    """Of the whole request as a client sees it, and the API process's processor time for one."""
    times, cpu_seconds = [], api_cpu_seconds(server)
    for _ in range(NUM_SAMPLES):
        begin = time.perf_counter()
        server.get(path).raise_for_status()
        times.append(round((time.perf_counter() - begin) * 1e3, 2))
    cpu_ms = (api_cpu_seconds(server) - cpu_seconds) * 1e3 / NUM_SAMPLES
    return {"p50": round(statistics.median(times), 2), "max": max(times), "cpu": round(cpu_ms, 2)}


def between_tokens(server: Server, num_rounds: int, longest: dict[str, float]) -> dict[str, float]:
    """p99 between the tokens of 8 streams in ms, with listings and metrics polled and without, in turn; and, in
    `longest`, what kept the loop longest in both."""
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for at in range(2 * num_rounds):
        is_polled = at % 2 == 1
        noted = _noted(longest, "streams, polled" if is_polled else "streams", server)
        with noted, polling(server.url, POLL_SECONDS, POLLED) if is_polled else nullcontext():
            gaps[is_polled] += _gaps(server)
    quiet, polled = (percentile(gaps[is_polled], 99) for is_polled in (False, True))
    assert quiet and polled
    return {"p99_ms": round(quiet, 2), "p99_polled_ms": round(polled, 2), "ratio": round(polled / quiet, 3)}


def _gaps(server: Server) -> list[float]:
    body = {"model": "n000000", "prompt": "the", "max_tokens": 150, "ignore_eos": True, "stream": True}
    answers, _, _ = complete_all(server.url, [{**body, "seed": seed} for seed in range(8)])
    pairs = (zip(one.token_seconds, one.token_seconds[1:], strict=False) for one in answers)
    return [(later - sooner) * 1e3 for each in pairs for sooner, later in each]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5, help="rounds with and without polling")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(arguments.adapters, arguments.rounds, Path(scratch))
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
