"""`multilora doctor --deep` with planted steps: `python -m tests.support.planted_checks STEP[,STEP...] FLAG...`.

Each step is a function of this module, with what may happen to a step on an unknown host, or has a real step's name.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from kernels import child_process
from service.cli.main import make_parser
from service.doctor import supervise
from service.doctor.checks.step_process import NotApplicable, StepFailed, StepHost
from service.doctor.deep import examine_deeply
from service.doctor.plan import STEPS, Step

# Where steps meet the test: a directory with a named pipe `gate` and a list of what was begun, `begun`.
MEETING = "DOCTOR_MEETING"
# How large files may grow that the command writes; no bound without it.
MAX_FILE_BYTES = "DOCTOR_MAX_FILE_BYTES"
# Where no directory for temporary files has room, as on a host whose disk is full but for the report's.
NO_TEMPORARY_FILES = "DOCTOR_NO_TEMPORARY_FILES"


def works(host: StepHost) -> None:
    _note("works")
    host.facts(device=host.device, answer=42, cases=[{"name": "<b>bold</b>", "value": 1.5}])


def warns(host: StepHost) -> None:
    host.find("warning", "planted", "Something is slow.", "Report it.")


def fails(host: StepHost) -> None:
    host.facts(before="kept")
    raise StepFailed("The planted fault is here.")


def raises(_host: StepHost) -> None:
    raise RuntimeError("two\n  lines")


def means_nothing(_host: StepHost) -> None:
    raise NotApplicable("there is nothing of the kind here")


def aborts(host: StepHost) -> None:
    host.facts(before="kept")
    print("the last words", file=sys.stderr)
    os.abort()


def exits(_host: StepHost) -> None:
    os._exit(7)


def is_mended(_host: StepHost) -> None:
    """Fails, until somebody has mended the host."""
    if not (_meeting() / "mended").exists():
        raise StepFailed("The device cannot be used.")


def needed_aborts(_host: StepHost) -> None:
    os.abort()


def hangs(host: StepHost) -> None:
    """With a process of its own that hangs too, and holds the pipe open; when both do, the step's time is over."""
    host.facts(before="kept")
    code = f"import os; gate = open({str(_meeting() / 'gate')!r}, 'w'); print(flush=True); os.read(os.pipe()[0], 1)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        (_meeting() / "late").touch()
        host.tell("hangs")  # who waits for the step looks at the clock again


needed_hangs = hangs


def waits(host: StepHost) -> None:
    """For whoever reads from the gate, and, the first time, for ever."""
    _note("waits")
    if _begun().count("waits") == 1:
        with (_meeting() / "gate").open("w") as gate:
            gate.write("here\n")
            gate.flush()
            os.read(os.pipe()[0], 1)
    host.facts(answer=43)


def always_waits(host: StepHost) -> None:
    with (_meeting() / "gate").open("w") as gate:
        gate.write("here\n")
        gate.flush()
        os.read(os.pipe()[0], 1)
    host.facts(answer=44)


def meets(_host: StepHost) -> None:
    """Somebody who reads from the gate, and then writes to it."""
    (_meeting() / "gate").write_text("here\n")
    (_meeting() / "gate").read_text()


def launches(host: StepHost) -> None:
    """The LoRA kernels' first launch."""
    from service.doctor.checks.first_launch import triton

    triton(replace(host, options={**host.options, "model_dir": ""}))


def adds(host: StepHost) -> None:
    """One addition, on a device whose package waits for ever where it is imported."""
    from service.doctor.checks.machine_facts import permissions

    permissions(replace(host, device="npu:0"))


def _meeting() -> Path:
    return Path(os.environ[MEETING])


def _begun() -> list[str]:
    return (_meeting() / "begun").read_text().split()


def _clock() -> float:
    """Of whoever waits for a step: a day passes when the meeting has a file `late`."""
    return time.monotonic() + 86_400.0 * (_meeting() / "late").exists()


def _note(name: str) -> None:
    with (_meeting() / "begun").open("a") as file:
        file.write(f"{name}\n")


def _no_temporary_file() -> None:
    """As `tempfile` raises it."""
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory")


def _planted(name: str) -> Step:
    return Step(
        name=name,
        title=f"Planted: {name}",
        asks="What then?",
        work=f"tests.support.planted_checks:{name}",
        limit_seconds=float(os.environ.get("DOCTOR_LIMIT", "60")),
        devices=("npu",) if name == "fails_on_npu" else ("cpu", "cuda", "npu"),
        is_needed=name in ("is_mended", "needed_aborts", "needed_hangs"),
    )


def main() -> int:
    supervise.time = SimpleNamespace(monotonic=_clock)  # type: ignore[assignment]
    if MAX_FILE_BYTES in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ[MAX_FILE_BYTES]),) * 2)
    if NO_TEMPORARY_FILES in os.environ:
        child_process.tempfile = SimpleNamespace(TemporaryFile=_no_temporary_file)  # type: ignore[assignment]
    real = {step.name: step for step in STEPS}
    steps = [real.get(name) or _planted(name) for name in sys.argv[1].split(",")]
    return examine_deeply(make_parser().parse_args(["doctor", "--deep", *sys.argv[2:]]), steps)


if __name__ == "__main__":
    sys.exit(main())
