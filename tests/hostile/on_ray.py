"""The application of `tests.hostile.application` as a server on Ray Serve, called through Ray's proxy by sockets."""

from __future__ import annotations

import atexit
import http.client
import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.hostile.application import LIMIT_SECONDS, Answer
from tests.support.http.server import running_server, wait_for
from tests.support.on_ray.through_ray import UNREADABLE

# Of a path that comes as it is, what a request line can hold.
_PLAIN = "".join(chr(code) for code in range(0x21, 0x7F))


class ApplicationOnRay:
    """Call it as a client would. What other processes hold is looked at when it is closed."""

    def __init__(self, root: Path, **more: Any) -> None:
        """more  settings"""
        self._opened, self._has_keys = ExitStack(), "keys_file" in more
        atexit.register(self._opened.close)  # of a run that fails, which closes nothing
        no_adapters = root / "preloaded"
        no_adapters.mkdir(parents=True)
        settings = {"max_upload_bytes": 4 << 20, "min_free_disk_bytes": 0, "preload_adapters_dir": no_adapters, **more}
        self._server = self._opened.enter_context(running_server(None, root, **settings))

    def close(self) -> None:
        """AssertionError where an answer has left anything, or the server is not as it was."""
        with self._opened:
            health = self._server.get("/health").json()
            assert set(health["replicas"].values()) == {"ready"}, health
            assert "failed unexpectedly" not in self._server.log
            if not self._has_keys:  # else /metrics needs one
                wait_for(lambda: self._server.metric("num_requests_open") == 0, "all places to be free again")

    def call(self, method: str, path: str, body: bytes = b"", headers: tuple[tuple[bytes, bytes], ...] = ()) -> Answer:
        """One request. AssertionError for a 5xx, or an answer that is no JSON and none that HAProxy gives itself."""
        head = [(b"host", b"x"), (b"connection", b"close"), *headers]
        if b"content-length" not in dict(headers):
            head.append((b"content-length", str(len(body)).encode()))
        line = f"{method} {quote(path, safe=_PLAIN, errors='replace')} HTTP/1.1\r\n".encode()
        data = line + b"".join(name + b": " + value + b"\r\n" for name, value in head) + b"\r\n" + body
        answer = self._exchange(method, data)
        assert answer.status < 500, (data, answer)
        assert b"/tmp" not in answer.body
        kind = answer.headers.get(b"content-type", b"")
        if kind.startswith(b"application/json") and method != "HEAD":
            told = json.loads(answer.body)
            assert answer.status < 400 or told["error"]["message"], (data, answer)
        elif method != "HEAD":
            assert answer.status < 400 or answer.body == UNREADABLE, (data, answer)
        return answer

    def _exchange(self, method: str, data: bytes) -> Answer:
        host, port = self._server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS) as connection:
            connection.sendall(data)
            response = http.client.HTTPResponse(connection, method=method)
            response.begin()
            named = {name.lower().encode(): value.encode("latin-1") for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
