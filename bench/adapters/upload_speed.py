"""What the upload of a large adapter takes, beside what one core takes to hash its bytes.

    .venv/bin/python -m bench.adapters.upload_speed [--rank 1064] [--uploads 7] [--delete] [--chunk-bytes 65536]
                                                    [--form durable|ephemeral|tensors]

Adapters on every projection of the bundled model, which at rank 1,064 have 84 MB as those of rank 16 of an 8B model
have, each of another content, over HTTP, one after the other; before each the same bytes are hashed in this process
(SHA-256). Bodies are written before the clock starts. Prints a JSON line: medians in seconds, and the median of the
ratio of the two rates (MB of the upload a second over MB hashed a second); by the clock, and by processor time, of the
API process and of the hash, which other work on the machine changes less. `first_token_seconds` are from the first byte
to a token that the new adapter has made.

--form says how they are sent: as files that are stored, as files of an ephemeral version, or by
/load_lora_adapter_from_tensors, in base64.

With --clients it sends them as people do instead, by `curl -F` and by `multilora upload` in turn, and asks each
new adapter for one token. Prints medians in seconds, from the client's start to its end and to the token, and the
median ratio of the two clients.

With --chunk-bytes bodies come in chunks of so many bytes, without a Content-Length.

With --delete each adapter is deleted before the next one is sent, so that its pages of the disk's cache are used again.
A virtual machine's first touch of a page may cost ten times as much as the copy into it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.adapters.__main__ import api_cpu_seconds
from service.settings import BUNDLED_MODEL_DIR
from tests.support.http.server_process import Server, running_server, wait_for
from tests.support.limits import LIMIT_SECONDS
from tests.support.peft_files import adapter_files


def measure(
    work_dir: Path, rank: int, num_uploads: int, *, are_deleted: bool, chunk_bytes: int, form: str
) -> dict[str, Any]:
    """Figures by name; the first upload, which finds nothing warm, is not counted. chunk_bytes 0: no chunks"""
    (work_dir / "none").mkdir()  # no adapters but those made here
    samples = []
    settings = {"adapter_row_bytes": "512MiB", "host_tier_bytes": "512MiB", "preload_adapters_dir": work_dir / "none"}
    with running_server(BUNDLED_MODEL_DIR, work_dir, **settings) as server:
        wait_for(lambda: server.get("/ready").status_code == 200, "the server to be ready")
        for at in range(num_uploads + 1):
            samples.append(_upload(server, at, rank, chunk_bytes, form))
            if are_deleted:
                server.http.delete(f"{server.url}/v1/adapters/n{at}").raise_for_status()
    del samples[0]

    def median(value: Callable[[Sample], float]) -> float:
        return round(statistics.median(map(value, samples)), 3)

    return {
        "megabytes": median(lambda one: one.num_bytes / 1e6),
        "upload_seconds": median(lambda one: one.upload_seconds),
        "first_token_seconds": median(lambda one: one.first_token_seconds),
        "hash_seconds": median(lambda one: one.hash_seconds),
        "rate_of_hashing": median(lambda one: one.hash_seconds / one.upload_seconds),
        "upload_cpu_seconds": median(lambda one: one.upload_cpu_seconds),
        "hash_cpu_seconds": median(lambda one: one.hash_cpu_seconds),
        "rate_of_hashing_by_cpu": median(lambda one: one.hash_cpu_seconds / one.upload_cpu_seconds),
    }


@dataclass(frozen=True)
class Sample:
    """One upload. `upload_cpu_seconds` are the API process's, in steps of 10 ms."""

    num_bytes: int
    upload_seconds: float
    first_token_seconds: float
    upload_cpu_seconds: float
    hash_seconds: float
    hash_cpu_seconds: float


def _request(server: Server, at: int, rank: int, form: str) -> tuple[httpx.Request, bytes]:
    """The upload of adapter number `at`, whose body has been written, and the tensors in it."""
    files = adapter_files(at, rank, is_whole=True)
    (_, (_, config)), (_, (_, tensors)) = files
    if form == "tensors":
        body = {"lora_name": f"n{at}", "config_dict": json.loads(config)}
        body["serialized_tensors"] = base64.b64encode(tensors).decode()
        return server.http.build_request("POST", f"{server.url}/load_lora_adapter_from_tensors", json=body), tensors
    query = "?ephemeral=true" if form == "ephemeral" else ""
    request = server.http.build_request("PUT", f"{server.url}/v1/adapters/n{at}{query}", files=files)
    request.read()
    return request, tensors


def _upload(server: Server, at: int, rank: int, chunk_bytes: int, form: str) -> Sample:
    request, tensors = _request(server, at, rank, form)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    hashlib.sha256(tensors)
    hashed, hashed_cpu = time.perf_counter(), time.process_time()
    api_cpu = api_cpu_seconds(server)
    send(str(request.url), request.method, request.content, request.headers["content-type"], chunk_bytes)
    uploaded, uploaded_cpu = time.perf_counter(), api_cpu_seconds(server)
    server.post("/v1/completions", json={"model": f"n{at}", "prompt": "the", "max_tokens": 1}).raise_for_status()
    return Sample(
        num_bytes=len(tensors),
        upload_seconds=uploaded - hashed,
        first_token_seconds=time.perf_counter() - hashed,
        upload_cpu_seconds=uploaded_cpu - api_cpu,
        hash_seconds=hashed - begin,
        hash_cpu_seconds=hashed_cpu - begin_cpu,
    )


def measure_clients(work_dir: Path, rank: int, num_rounds: int) -> dict[str, Any]:
    """Figures by name; the first round is not counted."""
    (work_dir / "none").mkdir()
    rounds: list[dict[str, tuple[float, float]]] = []
    settings = {"adapter_row_bytes": "2GiB", "host_tier_bytes": "1GiB", "preload_adapters_dir": work_dir / "none"}
    with running_server(BUNDLED_MODEL_DIR, work_dir, **settings) as server:
        wait_for(lambda: server.get("/ready").status_code == 200, "the server to be ready")
        for at in range(num_rounds + 1):
            each = {}
            for seed, client in enumerate(("curl", "multilora"), start=2 * at):
                directory = work_dir / f"sent-{client}"
                directory.mkdir(exist_ok=True)
                for _, (name, content) in adapter_files(seed, rank, is_whole=True):
                    (directory / name).write_bytes(content)
                each[client] = _sent_by(client, server, directory, f"{client}-{at}")
                server.http.delete(f"{server.url}/v1/adapters/{client}-{at}").raise_for_status()
            rounds.append(each)
    del rounds[0]
    figures = {}
    for client in rounds[0]:
        for at, what in enumerate(("upload", "first_token")):
            figures[f"{client}_{what}_seconds"] = round(statistics.median(one[client][at] for one in rounds), 3)
    ratio = statistics.median(one["multilora"][0] / one["curl"][0] for one in rounds)
    return {**figures, "multilora_by_curl": round(ratio, 3)}


def _sent_by(client: str, server: Server, directory: Path, name: str) -> tuple[float, float]:
    """Seconds until the client has ended, and until the adapter has answered with a token."""
    command = [sys.executable, "-m", "service.cli.main", "upload", str(directory), "--name", name, "--url", server.url]
    if client == "curl":
        files = [flag for file in sorted(directory.iterdir()) for flag in ("-F", f"file=@{file}")]
        command = ["curl", "-sfS", "-X", "PUT", *files, f"{server.url}/v1/adapters/{name}"]
    # What is installed has its bytecode; without it Python compiles the client before it sends.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    uploaded = time.perf_counter()
    body = {"model": name, "prompt": "the", "max_tokens": 1, "temperature": 0}
    server.post("/v1/completions", json=body).raise_for_status()
    return uploaded - begin, time.perf_counter() - begin


def send(url: str, method: str, content: bytes, content_type: str, chunk_bytes: int = 0) -> bytes:
    """The answer to a request with this body; AssertionError for a refusal.

    With the standard library's client, which hands a body to the kernel as it is. httpx copies all that is left of one
    after each part that a socket takes: 0.4 s of processor time for 84 MB, with the clock running."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=LIMIT_SECONDS)
    chunks = (content[start : start + chunk_bytes] for start in range(0, len(content), chunk_bytes or len(content)))
    try:
        path, headers = f"{parts.path}?{parts.query}", {"content-type": content_type}
        connection.request(method, path, chunks if chunk_bytes else content, headers, encode_chunked=bool(chunk_bytes))
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status in (200, 201), text
        return text
    finally:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters.upload_speed", description=__doc__)
    parser.add_argument("--rank", type=int, default=1064)
    parser.add_argument("--uploads", type=int, default=7)
    parser.add_argument("--delete", action="store_true", help="delete each adapter before the next one is sent")
    parser.add_argument("--chunk-bytes", type=int, default=0, help="send bodies in chunks of so many bytes")
    parser.add_argument("--form", choices=("durable", "ephemeral", "tensors"), default="durable")
    parser.add_argument("--clients", action="store_true", help="send them by curl and by multilora upload")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.clients:
            print(json.dumps(measure_clients(Path(scratch), arguments.rank, arguments.uploads)))
            return
        given = {"are_deleted": arguments.delete, "chunk_bytes": arguments.chunk_bytes, "form": arguments.form}
        figures = measure(Path(scratch), arguments.rank, arguments.uploads, **given)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
