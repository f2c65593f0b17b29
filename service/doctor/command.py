"""`multilora doctor`: examines all that serving needs, and reports faults, cures and a verdict."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from rich.console import Console

from service.doctor.examination import Examination, Skipped, fault_of
from service.doctor.hardware import look_at_device, look_at_ops, measure_bandwidth
from service.doctor.model import look_at_model, look_at_store, time_adapter
from service.doctor.report import Report, Section
from service.doctor.screen import show
from service.doctor.software import look_at_environment, look_at_versions
from service.settings import SettingsError, load_settings
from service.version import server_version

# Name and title of each section, in the order of the report; what is shown while it is at work.
_PARTS: tuple[tuple[str, str, str, Callable[[Examination], Section]], ...] = (
    ("versions", "Versions", "reading versions", look_at_versions),
    ("environment", "Environment", "reading the environment", look_at_environment),
    ("device", "Device", "looking for the device", look_at_device),
    ("model", "Model", "reading the model", look_at_model),
    ("ops", "Ops", "probing the ops", look_at_ops),
    ("bandwidth", "Bandwidth", "measuring bandwidth", measure_bandwidth),
    ("adapter", "Adapter", "loading an adapter", time_adapter),
    ("store", "Adapter store", "looking at the adapter store", look_at_store),
)


def doctor(arguments: argparse.Namespace) -> int:
    """0: all that is wished for serves; 1: it serves, with fallbacks or warnings; 2: it cannot serve."""
    screen = Console(stderr=True)
    with screen.status("starting") as status:
        report = examine(arguments, tell=lambda text: status.update(text))
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console(highlight=False))
    sys.stdout.flush()
    return report.exit_code


def examine(arguments: argparse.Namespace, tell: Callable[[str], None]) -> Report:
    """Everything that can be found out; what cannot is a finding."""
    names = ("device", "model_dir", "store_dir", "dtype", "block_size_tokens")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    try:
        settings = load_settings(**given)
        settings.engine_options()
    except Exception as error:
        section = Section("settings", "Settings")
        if isinstance(error, SettingsError):
            section.find("error", "settings", str(error), "See multilora serve --help.")
        else:  # such as a working directory that is gone
            section.findings.append(fault_of(error, "settings-fault"))
        return Report(server_version(), str(given.get("device", "auto")), [section])
    examination = Examination(settings, tell)
    sections = [look_at(examination, *part) for part in _PARTS]
    return Report(server_version(), examination.device, sections)


def look_at(
    examination: Examination, name: str, title: str, doing: str, part: Callable[[Examination], Section]
) -> Section:
    examination.tell(doing)
    try:
        return part(examination)
    except Skipped as reason:
        return Section(name, title, {"skipped": str(reason)})
    except Exception as error:
        return Section(name, title, findings=[fault_of(error, f"{name}-fault")])
