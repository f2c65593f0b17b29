"""Clients of several addresses of one server, while hosts are lost beside them."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.limits import LIMIT_SECONDS

_NAMES = [f"adapter-{number}" for number in range(4)]
_STREAM_TOKENS = 600
_PAUSE_SECONDS = 0.2


class Traffic:
    """At each address one client that asks, one that reads streams, and one that makes changes; until `end`."""

    def __init__(self, urls: list[str], adapter: Path) -> None:
        self._urls = urls
        names = "adapter_config.json", "adapter_model.safetensors"
        self._files = {name.partition(".")[0]: (adapter / name).read_bytes() for name in names}
        self._stopping = threading.Event()
        self._counts: Counter[str] = Counter()
        self._longest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._repeat, args=(what, url), daemon=True)
            for url in urls
            for what in (self._ask, self._stream, self._change)
        ]
        for one in self._threads:
            one.start()

    def end(self) -> dict[str, Any]:
        """What came of all; the longest seconds of each kind."""
        self._stopping.set()
        for one in self._threads:
            one.join(LIMIT_SECONDS)
        assert not any(one.is_alive() for one in self._threads), "a request is not answered"
        return dict(sorted(self._counts.items())) | {
            f"longest {what}, s": round(seconds, 1) for what, seconds in sorted(self._longest.items())
        }

    def _repeat(self, what: Callable[[httpx.Client, int], str], url: str) -> None:
        number, name = 0, what.__name__.removeprefix("_")
        with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as http:
            while not self._stopping.is_set():
                began, number = time.monotonic(), number + 1
                try:
                    came = what(http, number)
                except httpx.TransportError as error:
                    came = type(error).__name__
                with self._lock:
                    self._counts[f"{name}: {came}"] += 1
                if name != "stream":
                    self._took(name, time.monotonic() - began)
                self._stopping.wait(_PAUSE_SECONDS)

    def _took(self, what: str, seconds: float) -> None:
        with self._lock:
            self._longest[what] = max(self._longest.get(what, 0.0), seconds)

    def _ask(self, http: httpx.Client, number: int) -> str:
        return str(_completion(http, _NAMES[number % len(_NAMES)], 2 if number % 2 else 40).status_code)

    def _stream(self, http: httpx.Client, _: int) -> str:
        body = {"model": "tiny", "prompt": "the", "max_tokens": _STREAM_TOKENS, "ignore_eos": True, "stream": True}
        events, last = [""], time.monotonic()
        try:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    self._took("silence of a stream", time.monotonic() - last)
                    last = time.monotonic()
                    events = [*events[-1:], line.removeprefix("data: ")] if line else events
        finally:
            self._took("silence of a stream", time.monotonic() - last)
        if answer.status_code != 200:
            return str(answer.status_code)
        has_ended = events[-1] == "[DONE]"
        return "error event" if has_ended and "error" in json.loads(events[0]) else "whole" if has_ended else "cut off"

    def _change(self, http: httpx.Client, number: int) -> str:
        """Made by one address, and known at once by all."""
        name = f"{http.base_url.host.replace('.', '-')}-{number % 3}"
        made = http.put(f"/v1/adapters/{name}", files=self._files)
        if made.status_code != 201:
            return f"upload {made.status_code}"
        self._must_be(name, 200)
        gone = http.delete(f"/v1/adapters/{name}")
        if gone.status_code != 200:
            return f"deletion {gone.status_code}"
        self._must_be(name, 404)
        return "known to all"

    def _must_be(self, name: str, status: int) -> None:
        for url in self._urls:
            with httpx.Client(base_url=url, timeout=LIMIT_SECONDS) as http:
                answer = http.get(f"/v1/adapters/{name}")
            if answer.status_code in (200, 404) and answer.status_code != status:
                with self._lock:
                    self._counts["NOT KNOWN"] += 1


def _completion(http: httpx.Client, model: str, max_tokens: int) -> httpx.Response:
    body = {"model": model, "prompt": "the cat", "max_tokens": max_tokens, "ignore_eos": True}
    return http.post("/v1/completions", json=body)
