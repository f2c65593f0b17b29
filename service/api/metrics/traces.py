"""Traces for OpenTelemetry: a request that runs models or changes adapters is a span, with its phases below it.

The event loop draws a request's ids when it comes, and hands over what there is to tell when it has ended: plain
numbers and the times that the metrics go by. A thread makes spans of them, and the SDK's own thread sends these.
Neither is waited for: what does not fit their queues is dropped. The SDK is an extra, imported by the first `Tracing`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import getrandbits
from typing import TYPE_CHECKING, Any, NamedTuple

from service import server_version
from service.api.http_rules import INFERENCE_PATHS
from service.api.metrics.metrics import SequenceTimer
from service.logs import LOGGER

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.sampling import SamplingResult
    from starlette.datastructures import Headers

# Those that run a model, by what the conventions call that; "": the body decides.
_OPERATIONS = dict.fromkeys(INFERENCE_PATHS, "chat") | {
    "/v1/completions": "text_completion",
    "/v1/completions/batch": "",
    "/inference/v1/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/invocations": "",
    **{path: path.rpartition("/")[2] for path in INFERENCE_PATHS if path.endswith(("classify", "pooling", "score"))},
    **{path: "rerank" for path in INFERENCE_PATHS if path.endswith("rerank")},
}
_TEXT_PATHS = frozenset(path for path in INFERENCE_PATHS if "token" in path)
# W3C's header; version 00 has no fifth part.
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.{0,450})?", re.DOTALL
)
_SAMPLED, _RANDOM = 1, 2
_MOST_STATE_CHARS = 512  # as in the SDK
# The last parts of paths that change adapters, beside all below /v1/adapters.
_CHANGES = frozenset({"adapters", "load_lora_adapter", "unload_lora_adapter", "load_lora_adapter_from_tensors"})
# Requests that wait for the thread, and sequences of one request that have spans of their own.
_MOST_WAITING, _MOST_SEQUENCES = 4096, 64
# The thread looks so often for those that are over: to wake it would cost the event loop more than all else.
_LOOK_SECONDS = 0.1
# What is left is sent for so long at the end; a collector that hangs delays it no longer.
_FLUSH_SECONDS = 2.0
# Their lines are one for each attempt to send, or for each header of a client.
_NOISY = ("opentelemetry.trace", "urllib3")
_EXPORTER_LOGGER = logging.getLogger("opentelemetry.exporter")


class Phase(NamedTuple):
    """A part of a request, by `time.perf_counter`."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, Any] = {}


@dataclass(slots=True)
class Answered:
    """The answer of a model, one of several of a request or its only one, and what was asked.

    timers  one for each sequence
    phases  beside those of the sequences
    events  name, time by `time.perf_counter`, attributes
    """

    attributes: dict[str, Any]
    timers: list[SequenceTimer]
    phases: list[Phase] = field(default_factory=list)
    events: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)


@dataclass(slots=True)
class RequestTrace:
    """The ids of a request's span, in hex.

    parent_id  of the client's span; "" without one
    flags      1: it is sampled; as the client's header has the others
    states     the client's `tracestate`
    decided    by the sampler; None where it does as the parent did
    """

    name: str
    operation: str
    trace_id: str
    span_id: str
    parent_id: str
    flags: int
    states: list[bytes]
    decided: SamplingResult | None = None

    @property
    def header(self) -> str:
        """The answer's `traceresponse`."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


@dataclass(slots=True)
class Ended:
    """A request that is over. `began` and `ended` by `time.perf_counter`; `ended_ns` is the same moment's date."""

    trace: RequestTrace
    attributes: dict[str, Any]
    answers: list[Answered]
    phases: list[Phase]
    began: float
    ended: float = field(default_factory=time.perf_counter)
    ended_ns: int = field(default_factory=time.time_ns)

    def at_ns(self, seconds: float) -> int:
        """The date of a moment by `time.perf_counter`."""
        return self.ended_ns - int((self.ended - seconds) * 1e9)


class _Drawn:
    """The SDK's sampler and its source of ids, for spans whose decision and ids are drawn already."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import Decision, SamplingResult

        self.random = RandomIdGenerator()
        self.is_trace_id_random = self.random.is_trace_id_random
        self._result, self._sampled = SamplingResult, Decision.RECORD_AND_SAMPLE
        self._trace: RequestTrace | None = None
        self._decided: SamplingResult | None = None
        self._is_first = False

    def draw(self, trace: RequestTrace, decided: SamplingResult) -> None:
        """The next span is this request's; those after it lie below."""
        self._trace, self._decided, self._is_first = trace, decided, True

    def should_sample(
        self, _context: object, _trace_id: int, _name: str, _kind: object, attributes: Mapping[str, Any], _links: object
    ) -> SamplingResult:
        """As it was decided."""
        drawn = self._decided
        assert drawn is not None, "a span of no request"
        own = drawn.attributes if self._is_first else {}
        return self._result(self._sampled, {**(attributes or {}), **(own or {})}, drawn.trace_state)

    def generate_trace_id(self) -> int:
        """The request's."""
        assert self._trace is not None, "a span of no request"
        return int(self._trace.trace_id, 16)

    def generate_span_id(self) -> int:
        """The request's, once."""
        if not self._is_first:
            return self.random.generate_span_id()
        assert self._trace is not None, "a span of no request"
        self._is_first = False
        return int(self._trace.span_id, 16)

    def get_description(self) -> str:
        """For the SDK's own logs."""
        return "drawn"


class _Sender:
    """The SDK's exporter; says when the collector is lost, by the SDK's own lines too, and when it is back."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._endpoint, self._is_lost = endpoint, False
        self._exporter = OTLPSpanExporter(endpoint)
        self.shutdown, self.force_flush = self._exporter.shutdown, self._exporter.force_flush

    def export(self, spans: Any) -> Any:
        """Send them; those that the collector does not take are lost."""
        _EXPORTER_LOGGER.setLevel(logging.CRITICAL if self._is_lost else logging.WARNING)
        result = self._exporter.export(spans)
        is_lost = result.name != "SUCCESS"
        if is_lost != self._is_lost:
            self._is_lost = is_lost
            if is_lost:
                LOGGER.warning("Traces are lost: %s does not take them.", self._endpoint)
            else:
                LOGGER.info("Traces are sent again.")
        return result


class Tracing:
    """Makes the traces of one server and sends them to a collector. The event loop's but for `close`.

    Raises ImportError without the SDK, and ValueError for OTEL_* variables that it cannot follow, one sentence each.

    endpoint  full URL of the collector's OTLP over HTTP
    """

    def __init__(self, endpoint: str) -> None:
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        if protocol not in (None, "", "http/protobuf"):
            raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; set it to http/protobuf, or unset it")
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        version = server_version()
        own = Resource.create({"service.name": "multilora", "service.version": version})
        self._api, self._no_context = trace, Context()
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler  # that of OTEL_TRACES_SAMPLER
        self._follows_parent = os.environ.get("OTEL_TRACES_SAMPLER", "") in ("", "parentbased_always_on")
        drawn: Any = _Drawn()
        self._drawn: _Drawn = drawn
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(sampler=drawn, id_generator=drawn, resource=resource, shutdown_on_exit=False)
        sender: Any = _Sender(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(sender))
        self._tracer = self._provider.get_tracer("multilora", version)
        self._waiting: deque[Ended] = deque()
        self._is_full, self._closing = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, method: str, path: str, headers: Headers) -> RequestTrace | None:
        """The ids of a request that comes; None for one that has no span."""
        if not _is_traced(method, path):
            return None
        parent, states = None, list[bytes]()
        for key, value in headers.raw:
            if key == b"traceparent":
                parent = parent or _TRACEPARENT.fullmatch(value.strip())
            elif key == b"tracestate":
                states.append(value)
        if parent is None or (parent[4] and parent[0].startswith(b"00")):
            ids, flags, states = (f"{getrandbits(128) or 1:032x}", ""), _SAMPLED | _RANDOM, []
        else:
            ids, flags = (parent[1].decode(), parent[2].decode()), int(parent[3], 16)
        trace = RequestTrace(
            f"{method} {path}", _OPERATIONS.get(path, ""), ids[0], f"{getrandbits(64) or 1:016x}", ids[1], flags, states
        )
        if not self._follows_parent:
            trace.decided = self._decide(trace, self._parent(trace))
            trace.flags = flags & ~_SAMPLED | trace.decided.decision.is_sampled()
        return trace

    def _parent(self, trace: RequestTrace) -> Context | None:
        """The client's span."""
        if not trace.parent_id:
            return None
        api, states = self._api, [state.decode("latin-1") for state in trace.states]
        fits = sum(map(len, states)) <= _MOST_STATE_CHARS
        state = api.TraceState.from_header(states) if fits else None
        ids, flags = (int(trace.trace_id, 16), int(trace.parent_id, 16)), api.TraceFlags(trace.flags)
        span = api.NonRecordingSpan(api.SpanContext(*ids, is_remote=True, trace_flags=flags, trace_state=state))
        return api.set_span_in_context(span, self._no_context)

    def _decide(self, trace: RequestTrace, parent: Context | None) -> SamplingResult:
        return self._sampler.should_sample(parent, int(trace.trace_id, 16), trace.name, self._api.SpanKind.SERVER)

    def end(self, ended: Ended) -> None:
        """The request is over."""
        if not ended.trace.flags & _SAMPLED:
            return
        num_waiting = len(self._waiting)
        if num_waiting < _MOST_WAITING:
            self._is_full &= num_waiting > _MOST_WAITING // 2
            self._waiting.append(ended)
        elif not self._is_full:
            self._is_full = True
            LOGGER.warning("Requests come faster than their traces can be written; some have none.")

    def close(self) -> None:
        """Send what is left, which a collector that hangs does not prolong."""
        self._closing.set()
        self._thread.join(_FLUSH_SECONDS)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(_LOOK_SECONDS)
            while self._waiting:
                try:
                    self._write(self._waiting.popleft())
                except Exception:  # a trace is lost, and nothing else
                    LOGGER.exception("A trace could not be written.")
        self._provider.shutdown()

    def _write(self, ended: Ended) -> None:
        trace, answers = ended.trace, ended.answers
        parent = self._parent(trace)
        self._drawn.draw(trace, trace.decided or self._decide(trace, parent))
        attributes = ended.attributes
        name = trace.name
        if len(answers) == 1:
            attributes = {**answers[0].attributes, **attributes}
            name = _name_of(answers[0], name)
        elif route := attributes.get("http.route"):
            name = f"{attributes['http.request.method']} {route}"
        root = self._tracer.start_span(
            name, parent, self._api.SpanKind.SERVER, attributes, start_time=ended.at_ns(ended.began)
        )
        below = self._api.set_span_in_context(root)
        for phase in ended.phases:
            self._phase(ended, below, phase)
        for answer in answers:
            self._answer(ended, below, root, answer, is_only=len(answers) == 1)
        self._finish(root, attributes.get("error.type"), ended.ended_ns)

    def _answer(self, ended: Ended, below: Context, root: Any, answer: Answered, *, is_only: bool) -> None:
        """The spans of one answer; the request's own span is that of the only one."""
        timers = answer.timers
        span, last = root, max((timer.ended for timer in timers), default=ended.ended)
        began = min((timer.started for timer in timers), default=ended.began)
        if not is_only:
            span = self._tracer.start_span(
                _name_of(answer, "answer"), below, attributes=answer.attributes, start_time=ended.at_ns(began)
            )
            below = self._api.set_span_in_context(span)
        span.set_attributes(_latencies(timers, (ended.began, ended.ended) if is_only else (began, last)))
        for name, at, attributes in answer.events:
            span.add_event(name, attributes, ended.at_ns(at))
        for timer in timers[:_MOST_SEQUENCES]:
            self._sequence(ended, below, timer, is_only=len(timers) == 1)
        for phase in answer.phases:
            self._phase(ended, below, phase)
        if not is_only:
            self._finish(span, answer.attributes.get("error.type"), ended.at_ns(last))

    def _sequence(self, ended: Ended, below: Context, timer: SequenceTimer, *, is_only: bool) -> None:
        span = None
        if not is_only:
            attributes: dict[str, Any] = {"gen_ai.usage.output_tokens": timer.num_tokens, **_latencies([timer], None)}
            if timer.num_tokens and timer.outcome is not None:
                attributes["gen_ai.response.finish_reasons"] = [timer.outcome]
            span = self._tracer.start_span(
                "sequence", below, attributes=attributes, start_time=ended.at_ns(timer.started)
            )
            below = self._api.set_span_in_context(span)
        for phase in _phases(timer):
            inner = self._phase(ended, below, phase)
            for tier, began, over in timer.loads if phase.name == "queue" else ():
                load = Phase("adapter_load", timer.started + began, timer.started + over, {"multilora.tier": tier})
                self._phase(ended, self._api.set_span_in_context(inner), load)
        if span is not None:
            self._finish(span, timer.outcome if timer.outcome in ("abort", "error") else None, ended.at_ns(timer.ended))

    def _phase(self, ended: Ended, below: Context, phase: Phase) -> Any:
        began = ended.at_ns(phase.began)
        span = self._tracer.start_span(phase.name, below, attributes=phase.attributes, start_time=began)
        span.end(ended.at_ns(phase.ended))
        return span

    def _finish(self, span: Any, error_type: str | None, at_ns: int) -> None:
        if error_type is not None:
            span.set_status(self._api.StatusCode.ERROR, error_type)
        span.end(at_ns)


def _is_traced(method: str, path: str) -> bool:
    if path in _OPERATIONS:
        return method == "POST" and path not in _TEXT_PATHS
    is_change = path.rpartition("/")[2] in _CHANGES or (path.startswith("/v1/adapters/") and not path.endswith("/pin"))
    return is_change and method in ("POST", "PUT", "PATCH", "DELETE")


def _name_of(answer: Answered, default: str) -> str:
    """As the conventions want it: what is done, and by which model."""
    told = answer.attributes
    return (
        f"{told['gen_ai.operation.name']} {told['gen_ai.request.model']}" if "gen_ai.request.model" in told else default
    )


def _phases(timer: SequenceTimer) -> list[Phase]:
    """Queue, prefill and decode of a sequence; one that ended before its first token has waited, nobody knows for
    what."""
    if timer.waited_seconds is None:
        return [Phase("waiting", timer.started, timer.ended)]
    first = timer.ended if timer.first is None else timer.first  # of pooled states there is no token
    begun = min(timer.started + timer.waited_seconds, first)
    phases = [Phase("queue", timer.started, begun), Phase("prefill", begun, first)]
    return [*phases, Phase("decode", first, timer.last)] if timer.num_tokens > 1 else phases


def _latencies(timers: list[SequenceTimer], whole: tuple[float, float] | None) -> dict[str, float]:
    """The attributes that vLLM's spans have, in seconds, by the sequence that had the first token."""
    told = {} if whole is None else {"gen_ai.latency.e2e": whole[1] - whole[0]}
    begun = [timer for timer in timers if timer.first is not None]
    if not begun:
        return told
    first = min(begun, key=lambda timer: timer.first or 0.0)
    seconds = {phase.name: phase.ended - phase.began for phase in _phases(first)}
    return told | {
        "gen_ai.latency.time_in_queue": seconds["queue"],
        "gen_ai.latency.time_to_first_token": (first.first or 0.0) - first.started,
        "gen_ai.latency.time_in_model_prefill": seconds["prefill"],
        "gen_ai.latency.time_in_model_decode": seconds.get("decode", 0.0),
        "gen_ai.latency.time_in_model_inference": seconds["prefill"] + seconds.get("decode", 0.0),
    }


def tracing_to(endpoint: str | None) -> Tracing | None:
    """None without an endpoint, and where OTEL_SDK_DISABLED turns the SDK off. Raises as `Tracing` does."""
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return None if endpoint is None or is_off else Tracing(endpoint)
