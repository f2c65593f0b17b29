"""An op of a device, served by another implementation than its table's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

from kernels import platform


@contextmanager
def serving(op: str, module: ModuleType, device: str, *, num_cores: int | None = None) -> Iterator[None]:
    """For the length of a block. num_cores: of the device; None: as many as it has."""
    served = platform.detect(device).with_fallback(op, module.__name__.rpartition(".")[2], "for the test")
    with platform.installed(served if num_cores is None else replace(served, num_cores=num_cores), device):
        yield
