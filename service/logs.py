"""Logging of both processes, as text or JSON, without secrets; the API process adds one line per request."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

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


def configure(log_format: str, log_level: str) -> None:
    """Send everything to stderr in one format; uvicorn's own lines too, its access log excepted."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logging.basicConfig(handlers=[handler], level=log_level.upper(), force=True)
    _AUDIT_LOGGER.setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # The multipart parser logs single bytes of uploads at debug level.
    for noisy in ("python_multipart", "httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
