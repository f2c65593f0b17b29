"""What is tried with hostile input, and what may come of it: an answer, or an error of ours.

A `Target` that has `values` is tried with what Hypothesis makes of them, one that has `seeds` with what atheris makes
of these bytes, led by the code that they reach. `check` raises for anything that is no proper answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from adapters.errors import AdapterError
from adapters.store.store import AdapterStore, StoreLimits
from adapters.upload.staging import Staging
from adapters.upload.validate import bind_header, check_binding
from service.api.errors import ApiError
from service.api.http.h11_bounds import BoundedConnection
from service.api.uploads.multipart import MultipartUpload
from service.tenants.keys_file import KeysFileError, parse_keys
from service.text.stop_strings import StopAutomaton, StopStrings
from service.text.template_sandbox import TemplateError
from service.text.template_worker import AdapterTemplate, TemplateWorkers
from service.text.tokenizer import TextError
from tests.hostile.application import application
from tests.hostile.constraints import constrained, with_tools
from tests.hostile.tenants import TwoTenants, keys_files, questions
from tests.hostile.values import (
    GOOD_TENSORS,
    LAYOUT,
    REQUESTS,
    a_body,
    archives,
    bodies,
    configs,
    headers,
    stop_strings,
    templates,
    uploads,
)
from tests.support.adapter_files import config_bytes
from tests.support.http.uploads import MULTIPART, multipart

LIMITS = StoreLimits(max_upload_bytes=4 << 20, free_disk_floor_bytes=0, max_staging_bytes=64 << 20)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


@dataclass(frozen=True)
class Target:
    """found: values that did harm once, tried each time besides."""

    name: str
    check: Callable[[Any], None]
    values: st.SearchStrategy[Any] | None = None
    found: tuple[Any, ...] = ()
    seeds: tuple[bytes, ...] = field(default=())


def _with_length(length: bytes) -> tuple[str, str, list[tuple[bytes, bytes]]]:
    return "PUT", "/v1/adapters/a", [(b"content-length", length)]


class Targets:
    """All of them, over one application and one store below `root`. Close it: that checks the stores."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.application = application(root / "app")
        self.store = AdapterStore(root / "store", LAYOUT, LIMITS, base_name="base")
        self.workers = TemplateWorkers(max_seconds=0.3)
        self.tenants = TwoTenants(root / "tenants")
        self._num_staged = 0

    def close(self) -> None:
        self.application.close()
        self.tenants.application.close()
        self.store.check_integrity()
        self.store.close()
        self.workers.close()
        left = list(self.root.glob("*/staging/*")) + list(self.root.glob("*/*/staging/*"))
        assert not left, f"left in staging: {left[:3]}"

    def all(self) -> dict[str, Target]:
        targets = (
            Target("JSON bodies", self.json_body, bodies()),
            Target(
                "headers", self.headers, headers(), found=tuple(_with_length(one) for one in (b"", b",", b"9" * 700))
            ),
            Target("structured output", self.json_body, constrained()),
            Target("tools", self.json_body, with_tools()),
            Target("another tenant's adapter", self.tenants.check, questions()),
            Target("keys files", self.keys_file, keys_files()),
            Target("configs", self.config, configs()),
            Target("templates", self.template, templates()),
            Target("stop strings", self.stop_strings, stop_strings()),
            Target("uploads", self.upload, uploads()),
            Target("archive bytes", self.archive, seeds=archives()),
            Target("tensor file bytes", self.tensors, seeds=(GOOD_TENSORS[:600], b"\x02" + b"\0" * 7 + b"{}")),
            Target("config bytes", self.config, seeds=(config_bytes(), config_bytes(rank_pattern={"q": 8}))),
            Target("multipart bytes", self.multipart, seeds=(a_body(), a_body()[:-9])),
            Target("JSON bytes", self.json_bytes, seeds=(b'{"prompt": "a", "max_tokens": 2}', b'{"tokens": [1, 2]}')),
            Target("HTTP bytes", self.http, seeds=REQUESTS),
        )
        return {target.name: target for target in targets}

    # ---- over the application

    def json_body(self, value: tuple[str, Any]) -> None:
        path, body = value
        self.application.call("POST", path, json.dumps(body).encode(), ((b"content-type", b"application/json"),))

    def json_bytes(self, body: bytes) -> None:
        for path in ("/v1/completions", "/tokenize"):
            self.application.call("POST", path, body, ((b"content-type", b"application/json"),))

    def headers(self, value: tuple[str, str, list[tuple[bytes, bytes]]]) -> None:
        method, path, sent = value
        body = b'{"prompt": "a", "max_tokens": 1}'
        self.application.call(method, path, body if method == "POST" else b"", tuple(sent))

    def upload(self, value: list[tuple[str, bytes]]) -> None:
        kind = MULTIPART["Content-Type"].encode()
        body = multipart(value)
        self.application.call(
            "POST", "/v1/adapters", body, ((b"content-type", kind), (b"content-length", str(len(body)).encode()))
        )

    # ---- parts by themselves

    def config(self, value: bytes | dict[str, Any]) -> None:
        path = self.root / "tensors"
        if not path.exists():
            path.write_bytes(GOOD_TENSORS)
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        with suppress(AdapterError):
            check_binding(bind_header(data, path, LAYOUT), path, None, None)

    def tensors(self, data: bytes) -> None:
        path = self.root / "some-tensors"
        path.write_bytes(data)
        with suppress(AdapterError):
            check_binding(bind_header(config_bytes(), path, LAYOUT), path, None, None)

    def archive(self, data: bytes) -> None:
        self._num_staged += 1
        staging = Staging(self.root / f"staged-{self._num_staged}", LIMITS)
        try:
            staging.files["archive"] = staging.directory / "part-archive"
            staging.files["archive"].write_bytes(data)
            with suppress(AdapterError):
                staging.unpack_archive()
        finally:
            staging.remove()

    def multipart(self, body: bytes) -> None:
        with self.store.begin() as upload:
            parts = MultipartUpload(lambda name: self.store.check_name(name, ""), upload, b"frontier")
            try:
                with suppress(ApiError, AdapterError):
                    for at in range(0, len(body), 100):
                        parts.feed(body[at : at + 100])
                    upload.finish(parts.finish().name_for(None))
            finally:
                parts.close()

    def template(self, value: tuple[str, list[dict[str, Any]], dict[str, Any]]) -> None:
        source, messages, variables = value
        template = AdapterTemplate(self.workers, source, {"bos_token": "<s>"})
        try:
            told = template.render(messages, variables=variables)
        except (TemplateError, TextError) as error:
            told = str(error)
        assert not _ADDRESS.search(told), told

    def keys_file(self, text: str) -> None:
        with suppress(KeysFileError):
            parse_keys(text)

    def stop_strings(self, value: tuple[list[str], list[str]]) -> None:
        """Nothing of a stop string is given out, and nothing but what comes before the first one to end."""
        stop, texts = value
        found, given = StopStrings(StopAutomaton(stop)), ""
        for text in texts:
            given += found.push(text)
            if found.matched is not None:
                break
        whole = "".join(texts)
        ends = [whole.find(one) + len(one) for one in stop if one in whole]
        if not ends:
            assert found.matched is None
            assert given + found.finish() == whole
            return
        assert found.matched is not None
        first = min(ends)
        assert whole[:first].startswith(given)
        assert not any(one in given for one in stop)

    def http(self, data: bytes) -> None:
        """Only h11's own error, or ours, which is one; heads and bodies that it takes are bounded."""
        import h11

        connection = BoundedConnection()
        try:
            for at in range(0, len(data), 50):
                connection.receive_data(data[at : at + 50])
                while True:
                    event = connection.next_event()
                    if event is h11.NEED_DATA or event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                        break
                    if isinstance(event, h11.EndOfMessage):
                        return
        except h11.RemoteProtocolError:
            return


def writes_outside(root: Path) -> tuple[Callable[[str, tuple[Any, ...]], None], list[str]]:
    """An audit hook, and what it has seen written elsewhere than below `root`."""
    inside, seen = str(root), list[str]()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for path in _written(event, arguments):
            name = path.decode("utf-8", "replace") if isinstance(path, bytes) else str(path)
            if not name.startswith((inside, "/dev/")):
                seen.append(f"{event} {name[:200]}")

    return hook, seen


def _written(event: str, arguments: tuple[Any, ...]) -> Iterator[Any]:
    if event == "open" and not isinstance(arguments[0], int):
        mode, flags = arguments[1] or "", arguments[2]
        if any(char in mode for char in "wax+") or flags & 0o103:  # write, read and write, create
            yield arguments[0]
    elif event in ("os.mkdir", "os.remove", "os.rmdir") and arguments[-1] == -1:  # else within an open directory
        yield arguments[0]
    elif event in ("os.rename", "os.link", "os.symlink"):
        yield from arguments[:2]
