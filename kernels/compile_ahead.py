"""Parallel compilation of Triton kernels: compiled one after the other, a warm-up takes minutes on an empty cache.

A first run of the warm-up only notes the variants that its launches lack. Those that Triton's cache on disk lacks too
are compiled by processes without a GPU, which fill that cache; then the warm-up runs, and finds them. (Sixteen threads
are twice as fast as one, no more.)
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kernels.child_process import die_with_parent
from kernels.platform import contract, in_use

log = logging.getLogger(__name__)

MAX_PROCESSES = 16
# A process takes seconds to import torch and Triton, which is worth it for several variants only.
MIN_VARIANTS = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel, by module and name, and all that its compilation depends on, as Triton serialises it."""

    module: str
    name: str
    specialization: str

    def preload(self) -> Any:
        """Compile it, or read it from the cache, for the device of Triton's active driver; Triton's compiled kernel."""
        return getattr(importlib.import_module(self.module), self.name).preload(self.specialization)

    def fill_cache(self) -> None:
        """Compile it and, for a Triton before 3.7, the C function of its own that launches it."""
        kernel = self.preload()
        cuda = importlib.import_module("triton.backends.nvidia.driver")
        if hasattr(cuda, "make_launcher"):
            cuda.CudaLauncher(kernel.src, kernel.metadata)


def warm_up_ahead(warm_up: Callable[[], object], device_type: str) -> None:
    """Run `warm_up`, with the kernels that it launches on a CUDA device compiled before, as many at a time as this
    process has CPUs. It may run twice, the first time without any launch.

    What cannot be compiled raises in the warm-up. On other devices nothing is compiled, or by a compiler that serves
    one process at a time.
    """
    if can_compile_ahead(device_type):
        try:
            fill_cache(asked_for(warm_up))
        except Exception:  # it depends on more of Triton than a launch does, and is no more than a matter of time
            log.warning("kernels are compiled one after the other", exc_info=True)
    warm_up()


def can_compile_ahead(device_type: str) -> bool:
    """Whether other processes can compile for such a device."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device_type == "cuda" and not is_interpreted and importlib.util.find_spec("triton") is not None


def asked_for(warm_up: Callable[[], object]) -> list[Variant]:
    """The variants that the warm-up's launches lack; nothing is compiled or launched.

    Raises AssertionError where Triton would compile another variant ahead: a constant that is a text, like "int8",
    becomes the type of that name.
    """
    triton = importlib.import_module("triton")
    knobs, is_type = triton.knobs, triton.language.dtype.is_dtype
    variants: dict[Variant, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_rest: Any) -> bool:
        for constant in compile["constants"].values():
            assert not (isinstance(constant, str) and is_type(constant)), f"{fn.name}: {constant!r} is a type's name"
        variants[Variant(fn.module, fn.name, compile["specialization_data"])] = None
        return True  # Triton takes it for done

    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        warm_up()
    return list(variants)


def fill_cache(variants: list[Variant]) -> None:
    """Compile those that the cache on disk lacks, several at a time; the others are read from it."""
    started = time.monotonic()
    missing = [variant for variant in variants if not is_cached(variant)]
    if len(missing) >= MIN_VARIANTS:
        _compile(missing)
    seconds = time.monotonic() - started
    log.info("kernels: %d variants, %d of them compiled, in %.1f s", len(variants), len(missing), seconds)


class _NotCached(Exception):
    pass


def is_cached(variant: Variant) -> bool:
    """Whether it is in the cache on disk, and in this process's memory now."""
    triton = importlib.import_module("triton")

    class Reader(triton.runtime.cache.FileCacheManager):  # type: ignore[name-defined]
        def get_group(self, filename: str) -> dict[str, str]:
            group = super().get_group(filename)
            if group is None:
                raise _NotCached
            return dict(group)

    with triton.knobs.cache.scope():
        triton.knobs.cache.manager_class = Reader
        try:
            variant.preload()
        except _NotCached:
            return False
    return True


def _compile(variants: list[Variant]) -> None:
    """In processes of their own, which end before this returns. What fails there is left to the warm-up."""
    num_processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, len(variants) // 2)
    target = vars(importlib.import_module("triton.runtime").driver.active.get_current_target())
    with ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(target,)
    ) as processes:
        futures: list[Future[None]] = [processes.submit(variant.fill_cache) for variant in variants]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        log.warning("%d variants could not be compiled ahead; the first: %r", len(errors), errors[0])


def _begin(target: dict[str, Any]) -> None:
    """In a process of the pool: it dies with its parent, and takes `target` for its device."""
    die_with_parent()
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the parent's to judge
        signal.signal(ignored, signal.SIG_IGN)
    gpu_target = importlib.import_module("triton.backends.compiler").GPUTarget(**target)
    importlib.import_module("triton.runtime").driver.set_active(_Driver(gpu_target))


class _Driver:
    """A driver for Triton's compiler without a device."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def num_variants(device: torch.device) -> int:
    """Variants of kernels in this process, compiled or read from a cache, of the ops' implementations on `device`."""
    return sum(contract(op, device).compiled_count() for op in in_use(device).implementations)
