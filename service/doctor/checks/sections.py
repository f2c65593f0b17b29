"""The sections of the doctor's report, and the deep step that makes them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from service import server_version
from service.doctor.checks.hardware import look_at_device, look_at_ops, measure_bandwidth
from service.doctor.checks.model import look_at_model, look_at_store, time_adapter
from service.doctor.checks.software import look_at_environment, look_at_versions
from service.doctor.checks.step_process import StepFailed, StepHost
from service.doctor.report import Examination, Report, Section, Skipped, fault_of
from service.models.gguf_directory import model_directory
from service.models.spec.config_json import ModelError
from service.settings import SettingsError, load_settings

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
# Settings that decide what is examined.
SETTINGS = ("device", "model_dir", "store_dir", "dtype", "weights", "block_size_tokens")


def examine(arguments: argparse.Namespace, tell: Callable[[str], None]) -> Report:
    """Everything that can be found out; what cannot is a finding."""
    given = {name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None}
    try:
        settings = load_settings(**given)
        settings.engine_options()
        served_dir = model_directory(settings.model_dir, settings.store_root / "gguf")
        settings = settings.model_copy(update={"model_dir": served_dir})
    except Exception as error:
        section = Section("settings", "Settings")
        if isinstance(error, SettingsError | ModelError):
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


def sections(host: StepHost) -> None:
    """The whole report without --deep, as one step on the model that is to be served."""
    given = {**host.options, "device": host.device, "store_dir": host.options["store_root"]}
    report = examine(argparse.Namespace(**{name: given[name] for name in SETTINGS}), host.tell).as_json()
    ops = report["sections"].get("ops", {}).get("ops", [])
    used: list[dict[str, Any]] = [{"op": one["op"], "wished": one["wished"], "used": one["used"]} for one in ops]
    host.facts(verdict=report["sentence"], ops=used, report=report["sections"])
    for finding in report["findings"]:
        if finding["section"] not in ("versions", "environment", "device"):  # the first step has told
            host.find(finding["level"], finding["code"], finding["message"], finding["cure"])
    if report["exit_code"] == 2 and not any(one["level"] == "error" for one in report["findings"]):
        raise StepFailed(report["sentence"])
