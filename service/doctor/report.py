"""What the doctor says: findings in sections, a verdict, and the same as JSON for a bug report."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    """What was looked at. `facts` are plain values for JSON, in the order in which they are shown."""

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
        """The verdict with what it rests on."""
        counts = [
            f"{number} {level}{'s' if number > 1 else ''}"
            for level in ("error", "warning", "note")
            if (number := sum(finding.level == level for section in self.sections for finding in section.findings))
        ]
        return f"multilora {self.verdict} on {self.device}: {', '.join(counts) or 'nothing found'}."

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
    """Home directory and working directory as ~ and a dot: who and where is nobody's business in a bug report."""
    directories = {str(Path.home()): "~"}
    with suppress(OSError):  # it may be gone
        directories[os.getcwd()] = "."
    for directory, short in sorted(directories.items(), key=lambda one: -len(one[0])):
        if len(directory) > 1:
            text = text.replace(directory + os.sep, short + os.sep).replace(directory, short)
    return text
