"""A client that costs next to nothing: it notes when bytes come, and reads them after the last.

Many streams in one process of an ordinary client would be slower than the server that they measure.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Answer:
    """token_seconds: when each event with text came, or the one answer; on the clock of `time.perf_counter`. Of the
    prompt's tokens, those that were found in a prefix cache: OpenAI's routes tell both."""

    text: str
    num_tokens: int
    token_seconds: tuple[float, ...]
    num_prompt: int = 0
    num_cached: int = 0


def complete_all(
    url: str, bodies: Sequence[dict[str, Any]], path: str = "/v1/completions"
) -> tuple[list[Answer], float, float]:
    """POST all at once, each on a connection of its own; the answers, the start, the end. Streams may be of
    /v1/chat/completions and /v1/messages too. Raises RuntimeError for an answer that is no success."""
    return asyncio.run(_complete_all(url, bodies, path))


async def _complete_all(url: str, bodies: Sequence[dict[str, Any]], path: str) -> tuple[list[Answer], float, float]:
    address = urlsplit(url)
    requests = [_request(address.netloc, path, body) for body in bodies]
    started = time.perf_counter()
    exchanges = await asyncio.gather(*(_connect(address.hostname, address.port, request) for request in requests))
    await asyncio.gather(*(one.ended for one in exchanges))
    ended = time.perf_counter()
    read = [
        _streamed(one.pieces) if body.get("stream") else _whole(one.pieces)
        for one, body in zip(exchanges, bodies, strict=True)
    ]
    return read, started, ended


async def _connect(host: str | None, port: int | None, request: bytes) -> _Exchange:
    assert host is not None and port is not None
    _, exchange = await asyncio.get_running_loop().create_connection(lambda: _Exchange(request), host, port)
    return exchange


def _request(host: str, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


class _Exchange(asyncio.Protocol):
    """One request; pieces of the answer as they came, with the time."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _checked(pieces: Sequence[tuple[float, bytes]]) -> bytes:
    head, _, content = b"".join(piece for _, piece in pieces).partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise RuntimeError(f"the server answered {head.decode()!r} {content.decode()!r}")
    return content


def _whole(pieces: Sequence[tuple[float, bytes]]) -> Answer:
    answer = json.loads(_checked(pieces))
    usage = answer["usage"]
    return Answer(answer["choices"][0]["text"], usage["completion_tokens"], (pieces[-1][0],), *_prompt_of(usage))


def _prompt_of(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage.get("prompt_tokens_details") or {}
    return usage.get("prompt_tokens", 0), details.get("cached_tokens", 0)


def _streamed(pieces: Sequence[tuple[float, bytes]]) -> Answer:
    """Each event has the time of the piece that completed it; what frames the chunks stands between events."""
    _checked(pieces)
    texts: list[str] = []
    times: list[float] = []
    num_tokens, of_prompt, is_done, rest = 0, (0, 0), False, b""
    for seconds, piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            data = event.partition(b"data: ")[2]
            if data == b"[DONE]":
                is_done = True
                continue
            message = json.loads(data)
            if "error" in message:
                raise RuntimeError(message["error"]["message"])
            is_done |= message.get("type") == "message_stop"
            if message.get("usage"):
                num_tokens = message["usage"].get("completion_tokens") or message["usage"]["output_tokens"]
                of_prompt = _prompt_of(message["usage"])
            if text := _text_of(message):
                texts.append(text)
                times.append(seconds)
    if not is_done:
        raise RuntimeError("a stream broke off")
    return Answer("".join(texts), num_tokens, tuple(times), *of_prompt)


def _text_of(event: dict[str, Any]) -> str:
    """New text of one event: of completions, of chats, thoughts too, or of Anthropic's messages."""
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    choices = event.get("choices", ())
    return "".join(choice["text"] if "text" in choice else _new_in(choice["delta"]) for choice in choices)


def _new_in(delta: dict[str, Any]) -> str:
    return (delta.get("reasoning") or "") + (delta.get("content") or "")
