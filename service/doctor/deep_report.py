"""The outcome of a step, and the whole report: plain values that survive the process that found them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Literal

import msgspec

from service.doctor.report import Level, clean

# Raised when a field of the JSON goes or changes its meaning; new fields do not count.
FORMAT = 1

Status = Literal["not run", "running", "ok", "failed", "crashed", "timed out", "not applicable"]
# Ended without the answer, with the reason.
FAILED: tuple[Status, ...] = ("failed", "crashed", "timed out")
# The final states of a step.
ENDED: tuple[Status, ...] = ("ok", *FAILED, "not applicable")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault; see `service.doctor.report.Finding`. step: the step that found it."""

    step: str
    level: Level
    code: str
    message: str
    cure: str | None = None


class Outcome(msgspec.Struct, kw_only=True):
    """One step. `reason`: why it has failed, or does not apply. `facts` hold what it found before that, too.

    num_begun  how often it was begun; a step that was "running" when the command was killed is begun once more
    """

    name: str
    title: str
    asks: str
    status: Status = "not run"
    reason: str | None = None
    seconds: float = 0.0
    num_begun: int = 0
    facts: dict[str, Any] = {}
    faults: list[Fault] = []


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One that is recommended, as a user writes it, and why."""

    setting: str
    why: str


class DeepReport(msgspec.Struct, kw_only=True):
    """Everything. `device` as it was asked for, until the first step has found which it is.

    asked  digest of what the command was asked, so that no other one goes on with the report
    begun  when, UTC
    """

    multilora: str
    device: str
    model: str
    asked: str
    begun: str
    steps: list[Outcome]
    format: int = FORMAT
    settings: list[Setting] = []
    faults: list[Fault] = []
    summary: str = ""

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    def step(self, name: str) -> Outcome:
        return next(step for step in self.steps if step.name == name)

    def as_json(self) -> bytes:
        """For people and programs. No home directory is named; numbers that JSON lacks are null."""
        return msgspec.json.format(msgspec.json.encode(clean(msgspec.to_builtins(self))), indent=1)


def read_report(encoded: bytes) -> DeepReport:
    """Raises ValueError, one line, for what is no report."""
    return msgspec.json.decode(encoded, type=DeepReport)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 2em 0 .3em; border-top: 1px solid #ccc; padding-top: .8em; }
table { border-collapse: collapse; margin: .5em 0 1em; font-size: .9em; }
th, td { border: 1px solid #ddd; padding: .2em .6em; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { background: #f4f4f4; font-weight: 600; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.status { font-weight: 600; } .ok { color: #176b2c; } .bad { color: #a11; } .none { color: #666; }
.asks { color: #555; margin: 0; } pre { background: #f4f4f4; padding: .7em; overflow-x: auto; white-space: pre-wrap; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } th, pre { background: #262626; }
  th, td { border-color: #444; } .ok { color: #6c6; } .bad { color: #f77; } .asks, .none { color: #aaa; } }
"""
_CLASSES = {"ok": "ok", "not applicable": "none", "not run": "none"}


def page_of(report: DeepReport) -> str:
    """The whole page."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>multilora doctor --deep: {_text(report.device)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>multilora doctor --deep on {_text(report.device)}</h1>",
        f"<p>multilora {_text(report.multilora)}, model {_text(report.model)}, begun {_text(report.begun)}. "
        f"{_text(report.summary)}</p>",
        "<h2>Settings to use</h2>",
        _rows([{"setting": one.setting, "why": one.why} for one in report.settings]) or "<p>None known yet.</p>",
        "<h2>Faults to report</h2>",
        _faults(report.faults) or "<p>None.</p>",
        "<h2>Steps</h2>",
        _rows([{"step": one.title, "status": one.status, "seconds": one.seconds, "reason": one.reason or ""}
               for one in report.steps]),
        *(_step(step) for step in report.steps),
        "</body></html>",
    ]  # fmt: skip
    return "\n".join(parts)


def _step(step: Outcome) -> str:
    kind = _CLASSES.get(step.status, "bad")
    parts = [
        f"<h2 id='{escape(step.name)}'>{_text(step.title)}: <span class='status {kind}'>{_text(step.status)}</span>"
        "</h2>",
        f"<p class='asks'>{_text(step.asks)}</p>",
        f"<p>{_text(step.reason)}</p>" if step.reason else "",
        _faults(step.faults),
        _value(step.facts) if step.facts else "",
    ]
    return "\n".join(part for part in parts if part)


def _faults(faults: Sequence[Fault]) -> str:
    return _rows(
        [
            {"step": one.step, "level": one.level, "what": one.message, "what to do": one.cure or "", "code": one.code}
            for one in faults
        ]
    )


def _value(value: Any) -> str:
    """Any fact: mappings as tables of two columns, lists of mappings as tables, long text as it is."""
    match value:
        case dict():
            rows = (f"<tr><th>{_spoken(name)}</th>{_cell(one)}</tr>" for name, one in value.items())
            return f"<table>{''.join(rows)}</table>" if value else "-"
        case [dict(), *_]:
            return _rows(value)
        case list() | tuple():
            return _text(", ".join(map(str, value)) or "-")
        case str() if "\n" in value:
            return f"<pre>{_text(value)}</pre>"
    return _text(_shown(value))


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{_spoken(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in names)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"<td{' class=number' if is_number else ''}>{_value(value)}</td>"


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
    return str(value)


def _spoken(name: Any) -> str:
    return _text(str(name).replace("_", " "))


def _text(value: Any) -> str:
    """Escape the output of a host's programs, which is text here, never markup."""
    return escape(str(clean(str(value))))
