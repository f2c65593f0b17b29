"""`multilora doctor --deep`: runs the steps in order, each in a process of its own, and keeps one report of them.

This process imports no torch and never touches the device. What it owns: the report's directory, and one process at a
time. After `kill -9` of either the report on disk is whole, the other one is gone, and `--resume` goes on:
`report.json` and `report.html` are each replaced by one rename. One command at a time writes to the directory;
the lock is the kernel's and ends with its process.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec
from safetensors import SafetensorError, safe_open

from adapters.files.durable_files import replace_file
from service import server_version
from service.doctor.checks.sections import SETTINGS
from service.doctor.checks.step_process import not_applicable_on
from service.doctor.deep_report import ENDED, FAILED, DeepReport, Outcome, conclude, page_of, read_report
from service.doctor.plan import EVERYWHERE, STEPS, Step
from service.doctor.supervise import run_step
from service.models.gguf_directory import model_directory
from service.models.gguf_file import LINK
from service.models.spec.config_json import ModelError
from service.settings import Settings, SettingsError, load_settings

JSON_NAME, PAGE_NAME = "report.json", "report.html"
_LOCK_NAME = ".in-use"


class JournalError(Exception):
    """The directory cannot be used; one sentence."""


class Journal:
    """See the module's docstring. Use it inside `opened`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def page(self) -> Path:
        return self.directory / PAGE_NAME

    def read(self) -> DeepReport | None:
        """The report of an earlier command; None if there is none. Raises JournalError if it cannot be read."""
        path = self.directory / JSON_NAME
        try:
            return read_report(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise JournalError(f"{path} is no report of this command ({error}); name another --report-dir.") from error

    def write(self, report: DeepReport) -> None:
        """Both files. JournalError, with the files as they were, if the disk is full or the directory has gone."""
        try:
            replace_file(self.directory / JSON_NAME, report.as_json())
            replace_file(self.directory / PAGE_NAME, page_of(report).encode())
        except OSError as error:
            raise JournalError(
                f"The report cannot be written to {self.directory}: {error.strerror}. Make room, and go on with "
                "--resume; what was written before is whole."
            ) from error


@contextmanager
def opened(directory: Path) -> Iterator[Journal]:
    """A journal that no other command writes. JournalError if there is one, or the directory cannot be made."""
    lock: IO[bytes] | None = None
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = (directory / _LOCK_NAME).open("wb")
        except OSError as error:
            raise JournalError(
                f"The report's directory {directory} cannot be written: {error.strerror}; name another --report-dir."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(
                f"Another multilora doctor --deep is at work on {directory}; wait for its end. Two at a time would "
                "spoil each other's times."
            ) from error
        except OSError as error:
            raise JournalError(
                f"The report's directory {directory} cannot be locked: {error.strerror}; name another --report-dir, on "
                "a disk of this machine."
            ) from error
        yield Journal(directory)
    finally:
        if lock is not None:
            lock.close()


# A step that was at work each time the command was killed is passed over by the next: it may be what kills.
MAX_BEGUN = 2
MINUTES, REPORT_DIR = 30.0, Path("doctor-report")
BAD_INPUT, INTERRUPTED = 2, 130
# Ctrl-C, the end of a container, and that of a terminal whose connection is lost.
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def examine_deeply(arguments: argparse.Namespace, steps: Sequence[Step] = STEPS) -> int:
    """0: every step has its answer, and no fault was found; 1: there are faults; 2: nothing could be begun, or the
    report cannot be written; 130: interrupted."""
    for ending in _ENDINGS:
        if signal.getsignal(ending) != signal.SIG_IGN:  # as nohup has it
            signal.signal(ending, _interrupt)
    try:
        settings = _settings(arguments)
        with opened(arguments.report_dir or REPORT_DIR) as journal:
            report = _report(journal, settings, steps, is_resumed=arguments.resume)
            return _Run(journal, report, settings, steps, arguments.minutes or MINUTES).to_the_end()
    except (JournalError, SettingsError, _Refused) as error:
        print(f"multilora: {error}", file=sys.stderr)
        return BAD_INPUT


def _interrupt(_signal: int, _frame: object) -> None:
    """Raise KeyboardInterrupt, once: what follows from it is not to be interrupted."""
    # For a signal between two of these calls, Python would print that it was too late for its handler.
    sys.unraisablehook = lambda _late: None
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Refused(Exception):
    """The command cannot be begun; one sentence."""


def _settings(arguments: argparse.Namespace) -> Settings:
    settings = load_settings(**{name: value for name in SETTINGS if (value := getattr(arguments, name)) is not None})
    if settings.device.partition(":")[0] not in ("auto", *EVERYWHERE):
        raise _Refused(
            f"There are no steps for the device '{settings.device}'; --device is one of {', '.join(EVERYWHERE)} (npu:1 "
            "the second one of its kind) or auto."
        )
    try:
        served_dir = model_directory(settings.model_dir, settings.store_root / "gguf")
    except ModelError as error:
        raise _Refused(f"{error}.") from None
    _refuse_unreadable(served_dir)
    return settings.model_copy(update={"model_dir": served_dir})


def _refuse_unreadable(model_dir: Path) -> None:
    """Refuse model directories that every step would fail on, such as a download that was cut short."""
    at_work = model_dir / "config.json"
    try:
        if not model_dir.is_dir():
            raise _Refused(f"{model_dir} is no directory; --model-dir names a Hugging Face model's.")
        json.loads(at_work.read_bytes())
        weights = [path for path in model_dir.iterdir() if path.suffix == ".safetensors"]
        for at_work in weights:
            with at_work.open("rb") as file:
                file.read(1)
            with safe_open(at_work, framework="numpy"):  # looks at its header and its length
                pass
    except FileNotFoundError as error:
        if at_work.is_symlink():
            raise _Refused(f"{at_work} is a link to a file that is not here; give the file itself.") from error
        raise _Refused(f"{model_dir} holds no model: there is no config.json in it.") from error
    except (OSError, ValueError, SafetensorError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise _Refused(f"The model in {model_dir} cannot be read: {at_work}: {what}.") from error
    if not weights and not (model_dir / LINK).exists():
        raise _Refused(f"{model_dir} holds no weights: there is no *.safetensors in it.")


def _asked(settings: Settings) -> dict[str, Any]:
    return msgspec.structs.asdict(settings.engine_options())


def _report(journal: Journal, settings: Settings, steps: Sequence[Step], *, is_resumed: bool) -> DeepReport:
    """A new one, or the one to go on with."""
    asked = hashlib.sha256(json.dumps(_asked(settings), sort_keys=True).encode()).hexdigest()
    known = journal.read()
    if known is None:
        if is_resumed:
            raise _Refused(f"There is no report in {journal.directory} to go on with; leave --resume out.")
        outcomes = [Outcome(name=step.name, title=step.title, asks=step.asks) for step in steps]
        begun = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        return DeepReport(multilora=server_version(), device=settings.device, model=str(settings.model_dir),
                      asked=asked, begun=begun, steps=outcomes)  # fmt: skip
    if not is_resumed:
        raise _Refused(
            f"{journal.directory} holds a report already; --resume goes on with it, --report-dir names another place."
        )
    if known.multilora != server_version():
        raise _Refused(
            f"The report in {journal.directory} is of multilora {known.multilora}, and this is {server_version()}; "
            "name another --report-dir."
        )
    if known.asked != asked:
        raise _Refused(
            f"The report in {journal.directory} is of other settings (model {known.model}); give the same ones, or "
            "name another --report-dir."
        )
    if [step.name for step in known.steps] != [step.name for step in steps]:
        raise _Refused(f"The report in {journal.directory} has other steps; name another --report-dir.")
    for index, (step, outcome) in enumerate(zip(steps, known.steps, strict=True)):
        if step.is_needed and outcome.status in FAILED:  # the host may have been mended since
            known.steps[: index + 1] = [Outcome(name=one.name, title=one.title, asks=one.asks)
                                        for one in steps[: index + 1]]  # fmt: skip
    return known


class _Run:
    """One run of the command over a report."""

    def __init__(
        self, journal: Journal, report: DeepReport, settings: Settings, steps: Sequence[Step], minutes: float
    ) -> None:
        self._journal = journal
        self._report = report
        self._request = {"options": _asked(settings)}
        self._steps = steps
        self._scale = minutes / MINUTES
        begun = time.monotonic()
        self._deadline = begun + self._left_over()
        self._end = begun + minutes * 60

    def to_the_end(self) -> int:
        """The exit code."""
        conclude(self._report)
        self._journal.write(self._report)
        try:
            for number, (step, outcome) in enumerate(zip(self._steps, self._report.steps, strict=True), 1):
                needed = self._failed_before(number - 1)
                if outcome.status not in ENDED and needed and not self._is_elsewhere(step):
                    outcome.status = "not run"
                    outcome.reason = f"{needed.name} {needed.status}, without which there is no answer"
                elif outcome.status not in ENDED:
                    self._one(step, outcome, f"[{number}/{len(self._steps)}] {step.name}")
        except KeyboardInterrupt:
            self._interrupted()
            return INTERRUPTED
        conclude(self._report)
        self._journal.write(self._report)
        self._report_all()
        return 1 if self._report.faults else 0

    def _left_over(self) -> float:
        """Seconds that steps of an earlier run, which have their answers, have left of their time."""
        steps = zip(self._steps, self._report.steps, strict=True)
        ended = [(step, outcome) for step, outcome in steps if outcome.num_begun and outcome.status in ENDED]
        return sum(max(step.limit_seconds * self._scale - outcome.seconds, 0.0) for step, outcome in ended)

    def _failed_before(self, index: int) -> Outcome | None:
        """A step before this one that it needs, and that has no answer."""
        before = zip(self._steps[:index], self._report.steps, strict=False)
        return next((outcome for step, outcome in before if step.is_needed and outcome.status in FAILED), None)

    def _is_elsewhere(self, step: Step) -> bool:
        """Whether it is for other devices."""
        return self._report.device_type not in ("auto", *step.devices)

    def _one(self, step: Step, outcome: Outcome, shown: str) -> None:
        if self._is_elsewhere(step):
            outcome.status, outcome.reason = "not applicable", not_applicable_on(self._report.device_type)
        elif outcome.num_begun >= MAX_BEGUN:
            outcome.status = "crashed"
            outcome.reason = f"the command was killed each of the {MAX_BEGUN} times that this step was at work"
        else:
            # Time that earlier steps have not used belongs to this one, too.
            self._deadline = min(self._deadline + step.limit_seconds * self._scale, self._end)
            limit_seconds = max(self._deadline - time.monotonic(), 0.0)
            print(f"{shown}: {step.asks} (at most {limit_seconds:.0f} s)", flush=True)
            outcome.status, outcome.num_begun = "running", outcome.num_begun + 1
            self._journal.write(self._report)
            request = {**self._request, "device": self._report.device, "limit_seconds": limit_seconds}
            run_step(step, request, outcome, limit_seconds, _progress_printer())
            self._report.device = outcome.facts.get("device", self._report.device)
        conclude(self._report)
        self._journal.write(self._report)
        why = f": {outcome.reason}" if outcome.reason else ""
        print(f"{shown}: {outcome.status} after {outcome.seconds:.0f} s{why}", flush=True)

    def _interrupted(self) -> None:
        for outcome in self._report.steps:
            if outcome.status == "running":  # it is begun anew, and is not to blame
                outcome.status, outcome.reason, outcome.num_begun = "not run", "interrupted", outcome.num_begun - 1
        conclude(self._report)
        self._journal.write(self._report)
        with suppress(OSError):  # of a terminal that is gone
            print(f"multilora: interrupted; what was found is in {self._journal.page}, and --resume goes on.",
                  file=sys.stderr)  # fmt: skip

    def _report_all(self) -> None:
        report = self._report
        print("\nSettings to use:")
        for setting in report.settings:
            print(f"  {setting.setting}  ({setting.why})")
        print("Faults to report:" if report.faults else "Faults to report: none")
        for fault in report.faults:
            print(f"  {fault.level} in {fault.step}: {fault.message} ({fault.code})")
        print(f"{report.summary} To read: {self._journal.page}; to send: {self._journal.directory / 'report.json'}",
              flush=True)  # fmt: skip


def _progress_printer() -> Callable[[str], None]:
    """Shows on a terminal what a step is doing; a log needs no more than its beginning and its end."""
    if sys.stdout is None or not sys.stdout.isatty():  # it is None where it is closed
        return lambda _text: None
    return lambda text: print(f"      {text}", flush=True)
