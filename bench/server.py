"""A real `multilora serve` process on a free loopback port, and what it weighs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from bench.workload import Request, adapter_name

START_LIMIT_SECONDS = 120.0
REQUEST_LIMIT_SECONDS = 900.0


class Server:
    """Started by the constructor, ready when it returns, ended by `stop`."""

    def __init__(self, model_dir: Path, store_dir: Path, log: Path, **settings: object) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = os.environ | {
            "MULTILORA_MODEL_DIR": str(model_dir),
            "MULTILORA_MODEL_NAME": "base",
            "MULTILORA_STORE_DIR": str(store_dir),
            "MULTILORA_PORT": str(self.port),
            **{f"MULTILORA_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.url = f"http://127.0.0.1:{self.port}"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve"], env=environment, stdout=output, stderr=output
            )
        self._wait_until_ready(log)

    def _wait_until_ready(self, log: Path) -> None:
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.returncode}; see {log}")
            try:
                if httpx.get(f"{self.url}/ready", timeout=2.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the server was not ready within {START_LIMIT_SECONDS:.0f} s; see {log}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)

    def upload(self, name: str, directory: Path) -> None:
        parts = {
            "name": (None, name),
            "adapter_config": ("adapter_config.json", (directory / "adapter_config.json").read_bytes()),
            "adapter_model": ("adapter_model.safetensors", (directory / "adapter_model.safetensors").read_bytes()),
        }
        httpx.post(f"{self.url}/v1/adapters", files=parts, timeout=60).raise_for_status()

    def delete(self, name: str) -> None:
        httpx.delete(f"{self.url}/v1/adapters/{name}", timeout=60).raise_for_status()

    def complete(self, work: list[Request], *, with_adapters: bool) -> float:
        """Send all requests at once; seconds until the last answer. Every answer must have the length asked for."""
        return asyncio.run(self._complete(work, with_adapters))

    async def _complete(self, work: list[Request], with_adapters: bool) -> float:
        limits = httpx.Limits(max_connections=len(work))
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_LIMIT_SECONDS, limits=limits) as client:
            start = time.perf_counter()
            await asyncio.gather(*(self._one(client, request, with_adapters) for request in work))
            return time.perf_counter() - start

    async def _one(self, client: httpx.AsyncClient, request: Request, with_adapters: bool) -> None:
        answer = await client.post(
            "/v1/completions",
            json={
                "model": adapter_name(request.adapter) if with_adapters else "base",
                "prompt": list(request.prompt_token_ids),
                "max_tokens": request.num_output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == request.num_output_tokens

    def metrics(self) -> dict[str, float]:
        """Unlabelled samples of /metrics by name."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#") and "{" not in line)
        return {name: float(value) for name, value in samples}

    def pss_bytes(self) -> int:
        """Proportional set size of the API process and all its descendants."""
        return sum(_pss_bytes(pid) for pid in _descendants(self.process.pid))


def _descendants(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.extend(int(child) for child in (task / "children").read_text().split())
    return found


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no Pss in /proc/{pid}/smaps_rollup")
