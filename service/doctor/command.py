"""`multilora doctor`: examines all that serving needs, and reports faults, cures and a verdict to a person at a
terminal, where colour only repeats the words."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.doctor.checks.sections import examine
from service.doctor.deep import BAD_INPUT, examine_deeply
from service.doctor.report import Report, Section, clean

_MIB, _GIB = 2**20, 2**30
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_VERDICT_COLOURS = ("green", "yellow", "red")


def show(report: Report, console: Console) -> None:
    """All sections, then all findings, then the verdict, which is the last line."""
    for section in report.sections:
        console.print(f"\n[bold]{section.title}[/bold]")
        if "ops" in section.facts:
            console.print(_ops_table(section.facts["ops"]))
        elif section.facts:
            console.print(_facts_table(section))
        elif not section.findings:
            console.print("  nothing that matters is set")
    findings = [finding for section in report.sections for finding in section.findings]
    if findings:
        console.print("\n[bold]Findings[/bold]")
    for finding in findings:
        colour = _COLOURS[finding.level]
        message = escape(clean(finding.message))
        console.print(f"  [{colour}]{finding.level}[/{colour}] {message} [dim]({finding.code})[/dim]", soft_wrap=True)
        if finding.cure:
            console.print(f"      what to do: {escape(clean(finding.cure))}", soft_wrap=True)
    colour = _VERDICT_COLOURS[report.exit_code]
    console.print(f"\n[bold {colour}]{escape(report.sentence)}[/bold {colour}]", soft_wrap=True)


def _facts_table(section: Section) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in section.facts.items():
        spoken = name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")
        table.add_row(
            escape(name if section.name == "environment" else spoken), escape(_shown(section.name, name, value))
        )
    return table


def _ops_table(ops: list[dict[str, Any]]) -> Table:
    """One line for each case of each implementation that was tried; the last one of an op serves it."""
    table = Table(box=None, padding=(0, 1))
    for name in ("op", "implementation", "status", "error", "allowed", "µs"):
        table.add_column(name, no_wrap=True, min_width=22 if name == "op" else None)
    for op in ops:
        for trial in op["trials"]:
            colour = "green" if trial["status"] == "ok" else "red"
            table.add_row(
                trial["case"] or op["op"],
                trial["implementation"],
                f"[{colour}]{trial['status']}[/{colour}]",
                _number(trial["error"], "{:.1e}"),
                _number(trial["tolerance"], "{:.0e}"),
                _number(trial["microseconds"], "{:.0f}"),
            )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _shown(section: str, name: str, value: Any) -> str:
    """A value with its unit, for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if section == "bandwidth" and isinstance(value, float):
        return f"{value / _GIB:.1f} GiB/s"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / _GIB:.1f} GiB" if value >= _GIB else f"{value / _MIB:.1f} MiB"
    if name.endswith("_seconds"):
        return f"{value * 1e3:.1f} ms"
    return str(clean(str(value)))


def doctor(arguments: argparse.Namespace) -> int:
    """0: all that is wished for serves; 1: it serves, with fallbacks or warnings; 2: it cannot serve, or bad flags."""
    given = {"--resume": arguments.resume, "--report-dir": arguments.report_dir, "--minutes": arguments.minutes}
    if arguments.deep and arguments.json:
        return _refuse("--deep writes its JSON to report.json of --report-dir; leave --json out.")
    if arguments.deep:
        return examine_deeply(arguments)
    if unused := [flag for flag, value in given.items() if value]:
        return _refuse(f"{', '.join(unused)} only means something with --deep.")
    screen = Console(stderr=True)
    with screen.status("starting") as status:
        report = examine(arguments, tell=lambda text: status.update(text))
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console(highlight=False))
    sys.stdout.flush()
    return report.exit_code


def _refuse(sentence: str) -> int:
    print(f"multilora: {sentence}", file=sys.stderr)
    return BAD_INPUT
