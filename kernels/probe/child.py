"""A process that probes ops and says what it is about to do: `python -m kernels.probe.child FD [early]`, started by
`probe_process.py`; "early" before it is known what to ask.

Imports what it needs, reads one JSON request from stdin, and writes one JSON line for each thing that begins or has
ended to the descriptor.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from kernels.child_process import die_with_parent

DEVICE_IS_LOST = 3


def main() -> int:
    """The exit code. What stops the whole probe, such as an absent device, is a line of its own."""
    die_with_parent()
    # The parent waits for the end of this stream, which a compiler started here would keep open.
    os.set_inheritable(int(sys.argv[1]), False)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as channel:

        def say(**line: Any) -> None:
            channel.write(json.dumps(line) + "\n")

        try:
            _probe(say)
        except Exception as error:
            say(fault=f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return 1
        say(end=True)
    return 0


def _probe(say: Any) -> None:
    import torch

    from kernels.platform import detect, prepare
    from kernels.probe.precompile import compile_ahead_of
    from kernels.probe.run import try_op
    from kernels.shapes import ProbeShapes

    if sys.argv[2:]:  # what ends here costs no more than what ends while it compiles ahead
        say(ahead=True)
        _get_ready()
        say(ahead=False)
    request = json.load(sys.stdin)
    os.environ.update(request["environ"])
    prepare(request["device"])
    platform = detect(request["device"])
    device, shapes = torch.device(request["device"]), ProbeShapes(**request["shapes"])
    if device.type != "cpu":
        # The truths of an 8B shape take 0.8 s of one core. More threads would wait for one another while the parent
        # copies the weights: 16 of them took 2 to 3 s longer.
        torch.set_num_threads(1)
    if request["compiles_ahead"]:
        say(ahead=True)
        compile_ahead_of(platform, device, request["ops"], shapes)
        require_alive(device)
        say(ahead=False)
    for op in request["ops"]:
        trials = try_op(
            platform,
            device,
            op,
            shapes,
            excluded=request["excluded"].get(op, ()),
            num_repeats=request["num_repeats"],
            begin=functools.partial(_say_begin, say, op),
        )
        for trial in trials:
            say(trial=asdict(trial))
            if trial.status == "raised":
                require_alive(device)
        say(done=op)


def _get_ready() -> None:
    """Do the slow work of every probe on an NVIDIA GPU (a second) while the parent decides what to probe: imports, and
    reading Triton's own files, which it hashes once. A failure here will happen again in the probe, and is reported
    there."""
    import torch

    if not torch.cuda.is_available():
        return
    with suppress(Exception):
        from kernels.platform import IMPLEMENTATIONS

        for op, names in IMPLEMENTATIONS["cuda"].items():
            importlib.import_module(f"kernels.{op}.{names[0]}")
        importlib.import_module("triton.runtime.cache").triton_key()


def _say_begin(say: Any, op: str, implementation: str, case: str) -> None:
    say(begin=op, implementation=implementation, case=case)


def require_alive(device: Any) -> None:
    """End this process if the device no longer computes: its word on further implementations would be worth nothing."""
    import torch

    try:
        if float(torch.ones(1, device=device).add(1).cpu()) == 2.0:
            return
    except Exception as error:
        print(f"The device is unusable after the fault: {error}", file=sys.stderr)
    os._exit(DEVICE_IS_LOST)


if __name__ == "__main__":
    # Without the teardown of a device's libraries, which may take seconds, or fail.
    code = main()
    sys.stderr.flush()
    os._exit(code)
