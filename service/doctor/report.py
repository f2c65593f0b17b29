"""The doctor's report: findings in sections, a verdict, and the same as JSON for a bug report;
and the subject of an examination, with the facts that one part has found for the next."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from service.settings import Settings

if TYPE_CHECKING:
    from kernels.platform import Platform
    from kernels.shapes import ProbeShapes
    from service.engine.ipc.config import EngineConfig


# Raised when a field of the JSON goes or changes its meaning; new fields do not count.
FORMAT = 1

Level = Literal["error", "warning", "note"]
VERDICTS = ("serves", "serves with fallbacks or warnings", "cannot serve")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    level    "error": nothing can be served; "warning": it is served, but slower, or not as was asked for; "note": good
             to know
    code     names the kind of finding, for search and for tests
    message  one sentence; cure: what to do, or None where nothing is to be done
    """

    level: Level
    code: str
    message: str
    cure: str | None = None


@dataclass(slots=True)
class Section:
    """A part of the report. `facts` are plain values for JSON, in the order in which they are shown."""

    name: str
    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def find(self, level: Level, code: str, message: str, cure: str | None = None) -> None:
        self.findings.append(Finding(level, code, message, cure))


@dataclass(frozen=True, slots=True)
class Report:
    """The whole of an examination of one device."""

    version: str
    device: str
    sections: Sequence[Section]

    @property
    def exit_code(self) -> int:
        """0: all that is wished for serves; 1: it serves, with fallbacks or warnings; 2: it cannot serve."""
        levels = {finding.level for section in self.sections for finding in section.findings}
        return 2 if "error" in levels else 1 if "warning" in levels else 0

    @property
    def verdict(self) -> str:
        return VERDICTS[self.exit_code]

    @property
    def sentence(self) -> str:
        """The verdict: what works, what does not and what to do next; the last line, and true without the others."""
        errors, warnings = self._codes("error"), self._codes("warning")
        if errors:
            said = [f"multilora does NOT serve on {self.device}, because of {_counted('error', errors)}"]
            said += [f"and {_counted('warning', warnings)}"] if warnings else []
            unseen = [section.name for section in self.sections if "skipped" in section.facts]
            hidden = f" (not looked at for that reason: {', '.join(unseen)})" if unseen else ""
            return f"{' '.join(said)}{hidden}; next: do what the findings above say, and run multilora doctor again."
        start = "start it with multilora serve and the same settings"
        if warnings:
            return (
                f"multilora serves on {self.device}, but not all of it as wished for: {_counted('warning', warnings)}"
                f"{self._fallbacks()}; next: do what the findings above say, or {start} as it is."
            )
        # A user who forgets --device on a machine with an accelerator must not read this as a verdict on that.
        elsewhere = "; no accelerator was looked at, which takes --device" if self.device == "cpu" else ""
        return (
            f"multilora serves on {self.device}, all of it as wished for, without a warning{elsewhere}; next: {start}."
        )

    def _codes(self, level: Level) -> list[str]:
        return [finding.code for section in self.sections for finding in section.findings if finding.level == level]

    def _fallbacks(self) -> str:
        """The ops that something else than what is wished for serves."""
        ops = [op for section in self.sections for op in section.facts.get("ops", ())]
        by_fallback = [str(op["op"]) for op in ops if op["used"] != op["wished"] or op.get("regimes")]
        return f", with fallbacks for the ops {', '.join(by_fallback)}" if by_fallback else ""

    def as_json(self) -> dict[str, Any]:
        """Plain values with stable names; home directories are shortened, numbers that JSON lacks become null."""
        plain = {
            "format": FORMAT,
            "multilora": self.version,
            "device": self.device,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "sentence": self.sentence,
            "findings": [
                {"section": section.name, **asdict(finding)}
                for section in self.sections
                for finding in section.findings
            ],
            "sections": {section.name: section.facts for section in self.sections},
        }
        cleaned = clean(plain)
        assert isinstance(cleaned, dict)
        return cleaned


def _counted(level: str, codes: Sequence[str]) -> str:
    """Such as "2 errors (a, b)"; each code once."""
    return f"{len(codes)} {level}{'s' if len(codes) > 1 else ''} ({', '.join(dict.fromkeys(codes))})"


def clean(value: Any) -> Any:
    """The same for a bug report: no home directory, no NaN or infinity."""
    match value:
        case dict():
            return {str(name): clean(one) for name, one in value.items()}
        case list() | tuple():
            return [clean(one) for one in value]
        case float() if not math.isfinite(value):
            return None
        case str() | Path():
            return shortened(str(value))
    return value


def shortened(text: str) -> str:
    """Home directory and working directory as ~ and a dot: a bug report shall not show users and places."""
    directories = {str(Path.home()): "~"}
    with suppress(OSError):  # it may be gone
        directories[os.getcwd()] = "."
    for directory, short in sorted(directories.items(), key=lambda one: -len(one[0])):
        if len(directory) > 1:
            text = text.replace(directory + os.sep, short + os.sep).replace(directory, short)
    return text


@dataclass(slots=True)
class Examination:
    """One run of the doctor.

    settings       what `multilora serve` would run with here
    tell           shows the current work, in a few words
    device         the settings' own; "auto" until torch has been asked what there is
    import_errors  torch or torch_npu -> why it cannot be imported
    platform       None if the device is not there
    shapes         of the model; None if it cannot be read
    config         what an engine would run with here; None as above
    memory_free_bytes  of the device
    """

    settings: Settings
    tell: Callable[[str], None]
    import_errors: dict[str, str] = field(default_factory=dict)
    platform: Platform | None = None
    shapes: ProbeShapes | None = None
    config: EngineConfig | None = None
    memory_free_bytes: int | None = None
    device: str = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.settings.device

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]


class Skipped(Exception):
    """The note of a part that is skipped because of an earlier fault; it names what is missing."""


def fault_of(error: Exception, code: str) -> Finding:
    """An unforeseen error, as a finding."""
    text = " ".join(str(error).split())[:500]
    return Finding("error", code, f"{type(error).__name__}: {text}" if text else type(error).__name__)
