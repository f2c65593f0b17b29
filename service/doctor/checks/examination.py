"""The subject of an examination, and the facts that one part has found for the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.doctor.report import Finding
from service.settings import Settings

if TYPE_CHECKING:
    from kernels.platform import Platform
    from kernels.shapes import ProbeShapes
    from service.engine.ipc.config import EngineConfig


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
