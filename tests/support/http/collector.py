"""An OpenTelemetry collector in the test's own process: OTLP over HTTP, as its protobuf says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """One span. `began` and `ended` in ns; ids in hex, "" for no parent."""

    name: str
    trace_id: str
    id: str
    parent_id: str
    trace_state: str
    kind: int
    began: int
    ended: int
    is_error: bool
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]


@dataclass
class Collector:
    """Spans and requests that came. While `answers` is not set, requests wait for it; `status` answers them."""

    url: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)

    def of(self, trace_id: str) -> list[Span]:
        """A trace's spans in the order of their beginnings, those that contain others first."""
        return sorted((one for one in self.spans if one.trace_id == trace_id), key=lambda one: (one.began, -one.ended))

    def take(self, body: bytes, headers: dict[str, str]) -> int:
        """Note what was sent; the status of the answer."""
        self.bodies.append(body)
        self.headers.append(headers)
        self.answers.wait()
        if self.status == 200:
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = _plain(group.resource.attributes)
                self.spans += [_span(one, resource) for scope in group.scope_spans for one in scope.spans]
        return self.status


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    collector = Collector()
    collector.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with contextlib.suppress(OSError):  # the sender has gone
                self.send_response(collector.take(body, {**dict(self.headers), ":path": self.path}))
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _span(one: trace_pb2.Span, resource: dict[str, Any]) -> Span:
    return Span(
        one.name,
        one.trace_id.hex(),
        one.span_id.hex(),
        one.parent_span_id.hex(),
        one.trace_state,
        one.kind,
        one.start_time_unix_nano,
        one.end_time_unix_nano,
        one.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        _plain(one.attributes),
        [(event.name, _plain(event.attributes)) for event in one.events],
        resource,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))
