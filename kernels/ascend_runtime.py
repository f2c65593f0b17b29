"""An NPU made ready for this process, and triton-ascend 3.2.0 taken as it is. Not verified on an NPU.

triton-ascend is imported as `triton`, like upstream's, so what is installed under that name is looked at before it is
imported. What 3.2.0 lacks, and is made up for here:

- its launcher drains torch_npu's queue of operators at every launch, also where the launch goes through that queue and
  the stream alone is asked for;
- two processes that build its launchers into one cache spoil each other's files, and cached kernels are not told apart
  by the compiler (CANN) that built them: each process has a cache of its own, by CANN's version;
- a grid beyond 65535 programs and a tensor on the host are found out by the device only, as a fault;
- on CANN 9 and later its runtime helper does not build unless it is patched (deploy/image/patch_triton_ascend.py, which
  the image applies).
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.metadata
import importlib.util
import logging
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kernels.platform import BackendError

log = logging.getLogger(__name__)

SERVED_VERSION = "3.2."
MAX_PROGRAMS = 65_535
_CACHE_IN_USE = "MULTILORA_TRITON_CACHE_IN_USE"
_MAX_CACHES = 64
_BROKEN_NAME = "RT_LIMIT_TYPE_SIMT"


@cache
def torch_npu() -> ModuleType:
    """torch_npu, imported. Raises BackendError, one sentence, where that cannot be."""
    if importlib.util.find_spec("torch_npu") is None:
        raise BackendError("An NPU was asked for, but torch_npu is not installed; see docs/ascend.md.")
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        cause = " ".join(str(error).split())
        raise BackendError(
            f"An NPU was asked for, but torch_npu cannot be imported ({cause}); has CANN's set_env.sh been sourced?"
        ) from error


def prepare(device: str) -> None:
    """Make `device` this thread's NPU, set what holds for the whole process, and get Triton ready.

    Raises BackendError where torch_npu is missing, or all caches of Triton kernels are in use. What else is wrong with
    Triton, `kernels.platform` tells, or a warning here, after which the probe finds its ops unusable.
    """
    npu = torch_npu().npu
    if not npu.is_available():
        return  # `kernels.platform.detect` says so
    npu.set_device(device)
    # Operators compiled anew for each shape would stall the first step of every length.
    npu.set_compile_mode(jit_compile=False)
    # Convolutions in float32 would otherwise round their inputs to 10 bits.
    npu.conv.allow_hf32 = False
    log.info("torch_npu %s, CANN %s", torch_npu().__version__, cann_version())
    if triton_fault() is None:
        _prepare_triton()


def cann_version() -> str:
    """CANN's version, such as "9.1.0"; empty where it is not known."""
    try:
        return str(torch_npu().npu.utils.get_cann_version("CANN"))
    except (AttributeError, RuntimeError):
        return ""


@cache
def triton_fault() -> str | None:
    """Why Triton kernels cannot run on an NPU in this environment, as a sentence; None if nothing is known against it.

    Looks at files only: importing an upstream Triton would fail later and say less.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "Triton kernels are off: triton-ascend is not installed (see docs/ascend.md)."
    backend = Path(spec.origin).parent / "backends" / "ascend"
    if not backend.is_dir():
        return (
            "Triton kernels are off: the package `triton` is upstream's, not triton-ascend. Uninstall both, then "
            "install triton-ascend last and without dependencies (see docs/ascend.md)."
        )
    version = installed_version("triton-ascend")
    if version is not None and not version.startswith(SERVED_VERSION):
        return f"Triton kernels are off: they are made for triton-ascend {SERVED_VERSION}x, and {version} is installed."
    helper = backend / "npu_utils.cpp"
    if helper.is_file() and _BROKEN_NAME in helper.read_text(errors="replace") and _is_cann_9():
        return (
            f"Triton kernels are off: {helper} does not build on CANN {cann_version()}; "
            "run `python deploy/image/patch_triton_ascend.py` once (the image has done so)."
        )
    return None


def check_launch(grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """Assert what a launch on an NPU would fail on without a word: its grid, and tensors that are elsewhere.

    Triton's interpreter runs on the host, so there tensors are to be there.
    """
    assert 0 < math.prod(grid) <= MAX_PROGRAMS, f"a grid has 1 to {MAX_PROGRAMS} programs, not {grid}"
    for name, argument in arguments.items():
        if isinstance(argument, torch.Tensor):
            assert argument.device.type == launch_device_type(), f"{name} is on {argument.device}"
            assert argument.numel(), f"{name} is empty"


@cache
def launch_device_type() -> str:
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "npu"


def cache_in_use() -> dict[str, str]:
    """The environment that gives another process this one's cache of kernels; empty where none is claimed.

    For a process that was started before the claim. The two must not compile at the same time.
    """
    if _CACHE_IN_USE not in os.environ:
        return {}
    return {name: os.environ[name] for name in ("TRITON_CACHE_DIR", _CACHE_IN_USE) if name in os.environ}


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_cann_9() -> bool:
    """An unknown version counts as a new one."""
    major = cann_version().partition(".")[0]
    return not major.isdigit() or int(major) >= 9


def _prepare_triton() -> None:
    """A Triton that cannot be made ready, be it without pybind11 or with a closed cache, costs its ops, not the start.

    Where other processes hold all caches Triton would work, in one that is theirs: that remains an error.
    """
    try:
        _claim_cache()
        _let_launches_queue()
    except BackendError:
        raise
    except Exception as error:
        log.warning("Triton cannot be prepared: %s: %s", type(error).__name__, " ".join(str(error).split()))


def _let_launches_queue() -> None:
    """Ask for the stream without waiting for the queue, where launches go through the same queue, so order is kept."""
    if not _launches_queue():
        log.info("each Triton launch waits for the operators before it: TRITON_ENABLE_TASKQUEUE is off")
        return
    stream_of = getattr(torch_npu()._C, "_npu_getCurrentRawStreamNoWait", None)
    driver = importlib.import_module("triton.backends.ascend.driver").NPUDriver
    if stream_of is None:
        log.info(
            "each Triton launch waits for the operators before it: this torch_npu cannot tell its stream otherwise"
        )
        return

    def get_current_stream(self: Any, device: int | None = None) -> int:
        return int(stream_of(self.get_current_device() if device is None else device))

    driver.get_current_stream = get_current_stream


def _launches_queue() -> bool:
    """As the driver reads it: otherwise launches pass torch_npu's queue, which its own way to the stream drains."""
    return os.environ.get("TRITON_ENABLE_TASKQUEUE", "true").lower() in ("true", "1")


def _claim_cache() -> None:
    """Point TRITON_CACHE_DIR at a directory that no other process uses, below the one that it names.

    The directory stays, so that a later process finds the kernels; the claim is a lock that ends with this process.
    Processes that this one starts use it too, which therefore must not compile while this one does.
    """
    global _claim
    if os.environ.get(_CACHE_IN_USE):
        return
    root = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    for number in range(_MAX_CACHES):
        directory = root / f"cann-{cann_version() or 'unknown'}" / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        claim = (directory / "claim").open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            claim.close()
            continue
        _claim = claim
        os.environ["TRITON_CACHE_DIR"] = os.environ[_CACHE_IN_USE] = str(directory)
        return
    raise BackendError(f"All {_MAX_CACHES} caches of Triton kernels in {root} are in use by other processes.")


_claim: Any = None
