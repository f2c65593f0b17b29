"""The process of one step: `python -m service.doctor.checks.step_process FD`, started by `supervise.py`.

Reads one JSON request from stdin, and writes one JSON line for each report to the descriptor.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from kernels.child_process import die_with_parent
from service.doctor.report import Level

if TYPE_CHECKING:
    from service.engine.ipc.config import EngineOptions

_MAX_SENTENCE_CHARACTERS = 500


class NotApplicable(Exception):
    """Raised with the reason where a step does not apply to this device."""


class StepFailed(Exception):
    """The step's question has no answer, for a reason that was foreseen; one sentence."""


@dataclass(frozen=True, slots=True)
class StepHost:
    """The options of a step, and the channel for its reports.

    device   one that torch knows: "npu", "cuda:1"
    options  fields of EngineOptions that the command was given, and those that the step tries
    """

    device: str
    options: Mapping[str, Any]
    limit_seconds: float
    channel: IO[str]

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    def engine_options(self, **changed: Any) -> EngineOptions:
        from service.engine.ipc.config import EngineOptions

        return EngineOptions(**{**self.options, "device": self.device, **changed})

    def tell(self, text: str) -> None:
        """Report the current work, in a few words."""
        self._say(tell=text)

    def facts(self, **facts: Any) -> None:
        """Report plain values at once, so that they survive this process."""
        self._say(facts=facts)

    def find(self, level: Level, code: str, message: str, cure: str | None = None) -> None:
        self._say(fault={"level": level, "code": code, "message": message, "cure": cure})

    def end(self, status: str, reason: str | None = None) -> None:
        self._say(end=status, reason=reason)

    def _say(self, **word: Any) -> None:
        self.channel.write(json.dumps(word, default=str) + "\n")
        self.channel.flush()


def main() -> int:
    """The exit code."""
    die_with_parent()
    request = json.load(sys.stdin)
    os.set_inheritable(int(sys.argv[1]), False)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    with os.fdopen(int(sys.argv[1]), "w") as channel:
        host = StepHost(request["device"], request["options"] | request["changed"], request["limit_seconds"], channel)
        try:
            _work(host, request["work"], request["devices"])
            host.end("ok")
        except NotApplicable as reason:
            host.end("not applicable", str(reason))
        except Exception as error:
            traceback.print_exc()
            host.end("failed", _sentence(error))
    return 0


def _work(host: StepHost, work: str, devices: Sequence[str]) -> None:
    if host.device == "auto":
        from kernels.platform import find_device

        host = StepHost(find_device("auto"), host.options, host.limit_seconds, host.channel)
    if host.device_type not in devices:
        raise NotApplicable(not_applicable_on(host.device_type))
    module, _, function = work.partition(":")
    getattr(importlib.import_module(module), function)(host)


def not_applicable_on(device_type: str) -> str:
    return f"not applicable on {device_type}"


def _sentence(error: Exception) -> str:
    """Errors that were foreseen are sentences already: StepFailed, ModelError, BackendError and AdapterError."""
    text = " ".join(str(error).split())[:_MAX_SENTENCE_CHARACTERS]
    foreseen = isinstance(error, StepFailed) or type(error).__name__ in ("ModelError", "BackendError", "AdapterError")
    return text if foreseen and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    # Steps import this module by its name, so it is that one's exceptions that must be known.
    from service.doctor.checks import step_process

    code = step_process.main()
    # Without the teardown of torch's threads and of drivers, which may hang; all reports are written by now.
    sys.stderr.flush()
    os._exit(code)
