"""Logging of both processes, as text or JSON, without secrets; the API process adds one line per request."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

# Clients beyond so many in one minute count as one.
_MOST_CLIENTS, _OTHERS = 256, "others"
_WINDOW_SECONDS = 60.0

LOGGER = logging.getLogger("multilora")
REQUEST_LOGGER = logging.getLogger("multilora.request")
_AUDIT_LOGGER = logging.getLogger("multilora.audit")


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record)} {record.levelname.lower():7} {record.getMessage()}"
        fields = getattr(record, "fields", {})
        line += "".join(f" {name}={_quoted(value)}" for name, value in fields.items() if value is not None)
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _timestamp(record), "level": record.levelname.lower()}
        line |= {"logger": record.name, "message": record.getMessage()}
        line |= {name: value for name, value in getattr(record, "fields", {}).items() if value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _quoted(value: Any) -> str:
    """A value in a text line: JSON-quoted where a space, quote or control character would make it ambiguous."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') and text else json.dumps(text)


def audit(event: str, **fields: Any) -> None:
    """One line about a change of adapters or keys, whatever level is logged. Never anything secret."""
    _AUDIT_LOGGER.info("audit", extra={"fields": {"event": event, **fields}})


class RefusalLines:
    """Limits the log lines about refusals: clients can have requests refused as fast as they can send them. The lines
    beyond the limit are counted, and one line for each client reports their number when the minute is over; /metrics
    counts all refusals.

    One thread.

    most_lines  of a client in a minute; may be set
    clock       monotonic, in seconds
    """

    def __init__(self, most_lines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_lines = most_lines
        self._clock = clock
        self._ends_at_seconds = 0.0
        self._num_lines: Counter[str] = Counter()

    def may_write(self, client: str) -> bool:
        """Whether one more line of this client is written; if not, it is counted."""
        self.report()
        if not self._num_lines:
            self._ends_at_seconds = self._clock() + _WINDOW_SECONDS
        if client not in self._num_lines and len(self._num_lines) >= _MOST_CLIENTS:
            client = _OTHERS
        self._num_lines[client] += 1
        return self._num_lines[client] <= self.most_lines

    def report(self) -> None:
        """Where the minute is over, say how many lines were left out in it; to be called now and then."""
        if not self._num_lines or self._clock() < self._ends_at_seconds:
            return
        num_lines, self._num_lines = self._num_lines, Counter()
        for client, number in num_lines.items():
            if number > self.most_lines:
                fields = {"payer": client, "left_out": number - self.most_lines, "written": self.most_lines}
                LOGGER.warning("Lines about refused requests were left out.", extra={"fields": fields})


# This process's limiter; see `configure`.
REFUSAL_LINES = RefusalLines(60)


def configure(log_format: str, log_level: str, refusal_lines_per_minute: int | None = None) -> None:
    """Send everything to stderr in one format; uvicorn's own lines too, its access log excepted.

    refusal_lines_per_minute  of a client; None where nothing is refused
    """
    if refusal_lines_per_minute is not None:
        REFUSAL_LINES.most_lines = refusal_lines_per_minute
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logging.basicConfig(handlers=[handler], level=log_level.upper(), force=True)
    _AUDIT_LOGGER.setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").disabled = True
    # Its warnings are of what clients send, a line for each; the protocol writes those.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # The multipart parser logs single bytes of uploads at debug level.
    for noisy in ("python_multipart", "httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
