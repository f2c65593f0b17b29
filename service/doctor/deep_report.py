"""The outcome of a step, and the whole report: plain values that survive the process that found them;
and the advice from it: the settings to use, and the faults to report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Literal

import msgspec

from service.doctor.plan import STEPS
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


# A trial's steps must be shorter by more than they vary from run to run.
MIN_GAIN = 0.03
# Trials of steps with and without graphs, skipped where one captured layer has failed.
_TRIALS_OF_CAPTURE = ("setting-npu-graphs", "setting-eager")


def conclude(report: DeepReport) -> None:
    """Fill in settings, faults and summary."""
    report.settings = list(_settings(report))
    report.faults = list(_all_faults(report))
    num = {status: sum(step.status == status for step in report.steps) for status in ("ok", "not run")}
    num_all = sum(step.status != "not applicable" for step in report.steps)
    bad = [step.name for step in report.steps if step.status in (*FAILED, "running")]
    said = [f"{num['ok']} of {num_all} steps have an answer"]
    if bad:
        said.append(f"{len(bad)} failed ({', '.join(bad)})")
    if num["not run"]:
        said.append(f"{num['not run']} were not run")
    report.summary = f"{'; '.join(said)}."


def _settings(report: DeepReport) -> Iterator[Setting]:
    needed = {step.name for step in STEPS if step.is_needed}
    if any(step.status in FAILED and step.name in needed for step in report.steps):
        return  # there is nothing to use them on
    if not any(step.status == "ok" for step in report.steps):
        return
    yield Setting(setting=f"--device {report.device}", why="the device that was looked at")
    yield from _trials(report)
    yield from _capture(report)
    for sentence in _known(report, "serving").facts.get("budgets", []):
        yield Setting(setting="sizes: leave them unset", why=sentence)


def _trials(report: DeepReport) -> Iterator[Setting]:
    """Settings that were tried, against the same load without them."""
    shown = {step.name: step.title.removeprefix("Setting: ") for step in STEPS}
    is_served = bool(_known(report, "serving").facts.get("loads"))  # else a trial has failed of what serving did
    has_no_capture = _known(report, "capture").status in FAILED
    for step in report.steps:
        if not step.name.startswith("setting-") or (has_no_capture and step.name in _TRIALS_OF_CAPTURE):
            continue
        name = shown.get(step.name, step.title)
        if step.status in FAILED and is_served:
            yield Setting(setting=f"not {name}", why=f"its trial {step.status}: {step.reason}")
        if step.status != "ok":
            continue
        gains = {
            load: 1 - step.facts[f"{load}_ms"] / without
            for load, without in _usual(report, step.facts.get("requests")).items()
            if step.facts.get(f"{load}_ms") and without
        }
        if not gains:
            continue
        sizes = {"many": "with most requests and adapters", "one": "with one of each"}
        changes = " and ".join(
            f"{abs(gain):.0%} {'shorter' if gain > 0 else 'longer'} {sizes[load]}" for load, gain in gains.items()
        )
        is_better = max(gains.values()) > MIN_GAIN and min(gains.values()) > -MIN_GAIN
        yield Setting(setting=name if is_better else f"not {name}", why=f"decode steps were {changes}")


def _usual(report: DeepReport, num_requests: int | None) -> dict[str, float | None]:
    """Milliseconds of the decode steps that a trial is compared with: of as many requests as it had, with most
    adapters, where there was time for these; and of one of each."""
    loads = _known(report, "serving").facts.get("loads", [])
    by_size = {(load["requests"], load["adapters"]): load["ms_per_token"] for load in loads}
    most = max((size for size in by_size if size[0] == num_requests and size[1] > 1), default=(0, 0))
    return {"many": by_size.get(most), "one": by_size.get((1, 1))}


def _capture(report: DeepReport) -> Iterator[Setting]:
    """Settings after a captured layer that failed; whether capture pays, its trial shows."""
    step = _known(report, "capture")
    unset = {"npu": "not --npu-graphs true", "cuda": "--eager true"}.get(report.device_type)
    if unset is not None and step.status in FAILED:
        yield Setting(setting=unset, why=f"one captured layer {step.status}: {step.reason}")


def _all_faults(report: DeepReport) -> Iterator[Fault]:
    """Errors and warnings of all steps, worst first, and steps without an answer."""
    for step in report.steps:
        if step.status in FAILED:
            how = {"failed": "failed", "crashed": "crashed", "timed out": "ran out of time"}[step.status]
            yield Fault(
                step=step.name,
                level="error",
                code=f"step-{step.status.replace(' ', '-')}",
                message=f"The step {how}: {step.reason}",
            )
    for level in ("error", "warning"):
        for step in report.steps:
            yield from (fault for fault in step.faults if fault.level == level)


def _known(report: DeepReport, name: str) -> Outcome:
    return next((step for step in report.steps if step.name == name), Outcome(name=name, title="", asks=""))
