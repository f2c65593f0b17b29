"""Clients that do not read their answers: what they hold, and for how long."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server, wait_for

NUM_PLACES = 32
# More than kernels hold for a connection: each token has twenty alternatives.
UNREAD: dict[str, Any] = {
    "model": BASE,
    "prompt": "the",
    "n": 16,
    "max_tokens": 300,
    "ignore_eos": True,
    "logprobs": 20,
}


def send_and_read_nothing(server: Server, body: dict[str, Any]) -> socket.socket:
    """A completion whose answer fills what the kernel holds."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connection


@pytest.fixture(scope="module")
def patient(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Waits long for those who do not read."""
    settings: dict[str, Any] = {"max_queued_requests": NUM_PLACES, "max_batch_items": 8, "kv_bytes": "32MiB"}
    with running_server(
        checkpoints.base, tmp_path_factory.mktemp("patient"), model_name=BASE, stall_limit_seconds=300, **settings
    ) as running:
        yield running


def num_ended(server: Server) -> float:
    """Sequences that the engine has brought to their end."""
    return server.metric("requests_total", outcome="length")


def test_answers_that_nobody_reads_take_no_places_when_the_engine_is_done_and_are_whole(patient: Server) -> None:
    """A stream and an answer in one piece."""
    ended = num_ended(patient)
    with ExitStack() as opened:
        stream, whole = (
            opened.enter_context(closing(send_and_read_nothing(patient, {**UNREAD, "stream": streams})))
            for streams in (True, False)
        )
        wait_for(lambda: num_ended(patient) == ended + NUM_PLACES, "the engine to be done with both")
        wait_for(lambda: patient.metric("num_requests_open") == 0, "their places to be free")
        everything = {"model": BASE, "prompt": ["the"] * 2, "n": 16, "max_tokens": 1}
        assert patient.post("/v1/completions", json=everything).status_code == 200
        whole.shutdown(socket.SHUT_RD)
        answer = bytearray()
        while b"data: [DONE]" not in answer:
            answer += stream.recv(1 << 16)
    events = [line.partition(b"data: ")[2] for line in bytes(answer).split(b"\n") if line.startswith(b"data: {")]
    choices = [json.loads(event)["choices"][0] for event in events]
    for index in range(16):
        mine = [choice for choice in choices if choice["index"] == index]
        assert sum(len(choice["logprobs"]["tokens"]) for choice in mine) == 300
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
