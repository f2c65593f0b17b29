"""Seconds from the start of the process to `/ready`, as `make serve` starts it: bundled model and adapters."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from service.settings import BUNDLED_ADAPTERS_DIR
from tests.support.http.server_process import start_server

NUM_STARTS = 7


def measure(progress: Progress) -> dict[str, object]:
    """Each start has an empty store, so the bundled adapters are checked and stored in it too. The first start, which
    warms the file cache, is not counted."""
    task = progress.add_task("starts of the bundled model", total=NUM_STARTS + 1)
    seconds = []
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(NUM_STARTS + 1):
            seconds.append(_start(Path(scratch) / str(index)))
            progress.advance(task)
    counted = sorted(seconds[1:])
    return {"median": statistics.median(counted), "min": counted[0], "max": counted[-1], "seconds": seconds}


def _start(work_dir: Path) -> float:
    """No flag but the port and the store: everything else as a user's first start has it."""
    defaults: dict[str, Any] = dict.fromkeys(
        ("device", "num_threads", "kv_bytes", "adapter_row_bytes", "host_tier_bytes")
    )
    begin = time.perf_counter()
    server = start_server(None, work_dir, **defaults)
    seconds = time.perf_counter() - begin
    names = {card["name"] for card in server.get("/v1/adapters").json()["data"]}
    assert names == {path.name for path in BUNDLED_ADAPTERS_DIR.iterdir()}, names
    server.stop()
    return seconds
