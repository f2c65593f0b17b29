"""What the server's two processes weigh beyond weights and runtime, and whether they grow.

"Runtime" is the same server with tiny budgets and steps of few tokens, before any request, minus its weights:
interpreter, torch, HTTP.

The system gives out a page when it is first written, so budgets that are not in use would hide what the server takes
beside them: prompts and adapters fill them before anything is weighed. The host tier, a budget for adapters in host
memory beside the rows, is off.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.server import complete, delete, pss_bytes, start, upload
from bench.workload import (
    NUM_ADAPTERS,
    SEED,
    VOCABULARY,
    BenchRequest,
    adapter_name,
    kv_bytes_per_token,
    make_model,
    requests,
)
from tests.support.http.server_process import Server

MIB = 1 << 20
KV_BYTES = 768 * MIB
ROW_BYTES = 256 * MIB
SMALL_BYTES = 2 * MIB  # a block of 16 tokens; the floor says nothing about pages of a budget that nobody has written
# An adapter is 16.5 MiB of float32 rows: fifteen of these fill the row budget to 97 %.
NUM_FILLERS = 16
FILLER_TOKENS = 1000


def measure(dtype: str, num_threads: int, progress: Progress, num_requests: int = 1000) -> dict[str, object]:
    root = make_model(dtype)
    with tempfile.TemporaryDirectory() as scratch:
        common: dict[str, Any] = {"dtype": dtype, "num_threads": num_threads, "host_tier_bytes": 0}
        small: dict[str, Any] = {"kv_bytes": SMALL_BYTES, "adapter_row_bytes": SMALL_BYTES, "token_budget": 8}
        small |= {"max_sequences": 8}
        idle = start(root / "base", Path(scratch) / "a", **common, **small)
        floor_bytes = pss_bytes(idle) - 2 * SMALL_BYTES
        idle.stop()
        full: dict[str, Any] = {"kv_bytes": KV_BYTES, "adapter_row_bytes": ROW_BYTES}
        server = start(root / "base", Path(scratch) / "b", **common, **full)
        try:
            _fill(root, server, dtype, progress)
            return {"dtype": dtype, "floor_bytes": floor_bytes} | _load(
                root, server, floor_bytes, num_requests, progress
            )
        finally:
            server.stop()


def _fill(root: Path, server: Server, dtype: str, progress: Progress) -> None:
    """Ask for more KV blocks at the same time, and for more rows one after another, than there are."""
    rng = random.Random(SEED)
    num_prompts = KV_BYTES * 5 // 4 // kv_bytes_per_token(dtype) // FILLER_TOKENS
    task = progress.add_task(f"{dtype}: filling the budgets", total=NUM_FILLERS + 1)

    def filler(num_tokens: int, num_output_tokens: int, adapter: int) -> BenchRequest:
        return BenchRequest(
            tuple(rng.randrange(300, VOCABULARY) for _ in range(num_tokens)), num_output_tokens, adapter
        )

    for index in range(NUM_FILLERS):
        upload(server, filler_name(index), root / adapter_name(0), lora_alpha=100 + index)
        complete(server, [filler(8, 1, index)], with_adapters=True, name_of=filler_name)
        progress.advance(task)
    # So many output tokens that the first prompt still holds its blocks when the last one comes in.
    complete(server, [filler(FILLER_TOKENS, 128, 0) for _ in range(num_prompts)], with_adapters=False)
    progress.advance(task)
    for index in range(NUM_FILLERS):
        delete(server, filler_name(index))


def filler_name(index: int) -> str:
    return f"filler-{index}"


def _load(root: Path, server: Server, floor_bytes: int, num_requests: int, progress: Progress) -> dict[str, object]:
    for index in range(NUM_ADAPTERS):
        upload(server, adapter_name(index), root / adapter_name(index))
    complete(server, requests(), with_adapters=True)
    loaded_bytes = pss_bytes(server)
    budget_bytes = KV_BYTES + ROW_BYTES
    above_floor = (loaded_bytes - floor_bytes) / budget_bytes
    if above_floor < 0.95:
        raise RuntimeError(f"only {above_floor:.0%} of the budgets are in use, so nothing can be said about the rest")
    short = [BenchRequest(request.prompt_token_ids[:16], 4, request.adapter) for request in requests()]
    task = progress.add_task("sequential requests, uploads and deletes", total=num_requests)
    at: dict[int, int] = {}
    loads_before = server.metric("adapter_loads_total")
    for count in range(1, num_requests + 1):
        if count % 10 == 0:  # an adapter of its own, so that files, rows and host memory come and go
            upload(server, filler_name(count), root / adapter_name(0), lora_alpha=1000 + count)
            complete(server, [replace(short[0], adapter=count)], with_adapters=True, name_of=filler_name)
            delete(server, filler_name(count))
        complete(server, [short[count % len(short)]], with_adapters=True)
        if count in (200, num_requests):
            at[count] = pss_bytes(server)
        progress.advance(task)
    num_loads = server.metric("adapter_loads_total") - loads_before
    if num_loads < num_requests // 10:
        raise RuntimeError(f"only {num_loads} of {num_requests // 10} adapters that came and went were loaded")
    return {
        "budget_bytes": budget_bytes,
        "loaded_bytes": loaded_bytes,
        "above_floor_over_budget": above_floor,
        "after_200_bytes": at[200],
        "after_all_bytes": at[num_requests],
        "growth": (at[num_requests] - floor_bytes) / (at[200] - floor_bytes) - 1,
    }
