"""What the server's two processes weigh beyond weights and runtime, and whether they grow.

"Runtime" is the same server with a tiny budget before any model work, minus its weights: interpreter, torch, HTTP.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.server import complete, delete, pss_bytes, start, upload
from bench.workload import NUM_ADAPTERS, Request, adapter_name, make_model, requests
from tests.support.server import Server

MIB = 1 << 20
KV_BYTES = 768 * MIB
ROW_BYTES = 256 * MIB
SMALL_BYTES = 16 * MIB


def measure(dtype: str, num_threads: int, progress: Progress, num_requests: int = 1000) -> dict[str, object]:
    root = make_model(dtype)
    with tempfile.TemporaryDirectory() as scratch:
        common: dict[str, Any] = {"dtype": dtype, "num_threads": num_threads, "host_tier_bytes": 0}
        small: dict[str, Any] = {"kv_bytes": SMALL_BYTES, "adapter_row_bytes": SMALL_BYTES}
        idle = start(root / "base", Path(scratch) / "a", **common, **small)
        floor_bytes = pss_bytes(idle) - 2 * SMALL_BYTES
        idle.stop()
        full: dict[str, Any] = {"kv_bytes": KV_BYTES, "adapter_row_bytes": ROW_BYTES}
        server = start(root / "base", Path(scratch) / "b", **common, **full)
        try:
            return {"dtype": dtype, "floor_bytes": floor_bytes} | _load(
                root, server, floor_bytes, num_requests, progress
            )
        finally:
            server.stop()


def _load(root: Path, server: Server, floor_bytes: int, num_requests: int, progress: Progress) -> dict[str, object]:
    for index in range(NUM_ADAPTERS):
        upload(server, adapter_name(index), root / adapter_name(index))
    complete(server, requests(), with_adapters=True)
    loaded_bytes = pss_bytes(server)
    budget_bytes = KV_BYTES + ROW_BYTES
    short = [Request(request.prompt_token_ids[:16], 4, request.adapter) for request in requests()]
    task = progress.add_task("sequential requests, uploads and deletes", total=num_requests)
    at: dict[int, int] = {}
    for count in range(1, num_requests + 1):
        if count % 10 == 0:
            upload(server, "passing", root / adapter_name(count // 10 % NUM_ADAPTERS))
            delete(server, "passing")
        complete(server, [short[count % len(short)]], with_adapters=True)
        if count in (200, num_requests):
            at[count] = pss_bytes(server)
        progress.advance(task)
    return {
        "budget_bytes": budget_bytes,
        "loaded_bytes": loaded_bytes,
        "above_floor_over_budget": (loaded_bytes - floor_bytes) / budget_bytes,
        "after_200_bytes": at[200],
        "after_all_bytes": at[num_requests],
        "growth": (at[num_requests] - floor_bytes) / (at[200] - floor_bytes) - 1,
    }
