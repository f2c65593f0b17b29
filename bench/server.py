"""What the benchmarks do with a real server: upload, complete many requests at once, weigh the processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.workload import BenchRequest, adapter_name
from tests.support.http.server_process import Server, start_server

REQUEST_LIMIT_SECONDS = 900.0


def start(model_dir: Path, work_dir: Path, *, dtype: str, num_threads: int, **settings: Any) -> Server:
    """A ready server whose base is called "base"."""
    return start_server(model_dir, work_dir, model_name="base", dtype=dtype, num_threads=num_threads, **settings)


def upload(
    server: Server, name: str, directory: Path, *, lora_alpha: int | None = None, is_version: bool = False
) -> None:
    """Another `lora_alpha` than the adapter's own makes it another adapter. is_version: of a name that there is."""
    config = json.loads((directory / "adapter_config.json").read_text())
    if lora_alpha is not None:
        config["lora_alpha"] = lora_alpha
    parts: dict[str, Any] = {
        "adapter_config": ("adapter_config.json", json.dumps(config).encode()),
        "adapter_model": ("adapter_model.safetensors", (directory / "adapter_model.safetensors").read_bytes()),
    }
    if is_version:
        answer = server.http.put(f"{server.url}/v1/adapters/{name}", files=parts)
    else:
        answer = server.post("/v1/adapters", files=parts | {"name": (None, name)})
    if answer.is_error:
        raise RuntimeError(f"{name} was refused: {answer.text}")


def delete(server: Server, name: str) -> None:
    httpx.delete(f"{server.url}/v1/adapters/{name}", timeout=60).raise_for_status()


def complete(
    server: Server, work: list[BenchRequest], *, with_adapters: bool, name_of: Callable[[int], str] = adapter_name
) -> float:
    """Send all requests at once; seconds until the last answer. Every answer must have the length asked for."""
    models = [name_of(request.adapter) if with_adapters else "base" for request in work]
    return asyncio.run(_complete(server.url, work, models))


async def _complete(url: str, work: list[BenchRequest], models: list[str]) -> float:
    limits = httpx.Limits(max_connections=len(work))
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_LIMIT_SECONDS, limits=limits) as client:
        start_seconds = time.perf_counter()
        await asyncio.gather(*(_one(client, *one) for one in zip(work, models, strict=True)))
        return time.perf_counter() - start_seconds


async def _one(client: httpx.AsyncClient, request: BenchRequest, model: str) -> None:
    answer = await client.post(
        "/v1/completions",
        json={
            "model": model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
    )
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == request.num_output_tokens


def pss_bytes(server: Server) -> int:
    """Proportional set size of the API process and the engine process."""
    return sum(_pss_bytes(pid) for pid in (server.process.pid, server.engine_pid()))


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no Pss in /proc/{pid}/smaps_rollup")
