"""`multilora doctor`: examines all that serving needs, and reports faults, cures and a verdict."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console

from service.doctor.checks.sections import examine
from service.doctor.deep import BAD_INPUT, examine_deeply
from service.doctor.screen import show


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
