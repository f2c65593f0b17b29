"""Whether what is freed is seen to be freed: the engine's memory before adapters come, while they are there, and after
they are gone.

    .venv/bin/python -m tests.api.operation.freed_memory [--adapters 220] [--rank 16]

Uploads adapters of the bundled model, on all projections of all layers, one after the other, has each answer one
request, and deletes them all. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from service.settings import BUNDLED_MODEL_DIR
from tests.support.http.server_process import Server, running_server, wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.peft_files import adapter_files

MIB = 1 << 20
# Of the memory at the start.
MOST_LEFT = 0.10


def engine_mb(server: Server) -> float:
    """Resident memory of the engine process."""
    status = Path(f"/proc/{server.engine_pid()}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return round(int(line.split()[1]) / 1024, 1)


def measure(work_dir: Path, num_adapters: int, rank: int, **settings: Any) -> dict[str, Any]:
    """Figures by name; `seconds_until_back` from the last deletion until at most a tenth more than at the start is
    left."""
    (work_dir / "none").mkdir()  # no adapters but those made here
    settings = {"adapter_row_bytes": "512MiB", "host_tier_bytes": "512MiB", **settings}
    with running_server(BUNDLED_MODEL_DIR, work_dir, preload_adapters_dir=work_dir / "none", **settings) as server:
        ask(server, server.get("/v1/models").json()["data"][0]["id"])
        start_mb = engine_mb(server)
        for at in range(num_adapters):
            path = f"{server.url}/v1/adapters/n{at}"
            server.http.put(path, files=adapter_files(at, rank, is_whole=True)).raise_for_status()
            ask(server, f"n{at}")
        full_mb = engine_mb(server)
        for at in range(num_adapters):
            server.http.delete(f"{server.url}/v1/adapters/n{at}").raise_for_status()
        deleted = time.perf_counter()
        wait_for(lambda: engine_mb(server) <= (1 + MOST_LEFT) * start_mb, f"memory to be given back ({start_mb} MB)")
        seconds = time.perf_counter() - deleted
        wait_for(lambda: server.metric("adapter_rows_used") == 0, "rows to be free")
        wait_for(lambda: server.metric("adapters", tier="host") == 0, "host memory to be free")
        return {
            "adapters": num_adapters,
            "rank": rank,
            "start_mb": start_mb,
            "full_mb": full_mb,
            "end_mb": engine_mb(server),
            "seconds_until_back": round(seconds, 1),
        }


def ask(server: Server, model: str) -> None:
    """One token."""
    body = {"model": model, "prompt": "the", "max_tokens": 1}
    server.post("/v1/completions", json=body, timeout=LIMIT_SECONDS).raise_for_status()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.api.operation.freed_memory", description=__doc__)
    parser.add_argument("--adapters", type=int, default=220)
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(Path(scratch), arguments.adapters, arguments.rank)))


if __name__ == "__main__":
    main()
