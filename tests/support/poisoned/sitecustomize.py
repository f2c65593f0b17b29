"""Python imports this at its start where this directory is on PYTHONPATH: the server's processes that tests start.

As in the tests' own process (`tests/conftest.py`), fresh floating-point memory of torch is NaN then, and the seeds that
an engine draws are the same each time, so that no answer is sampled by luck. Only a process that imports torch or an
engine is changed; nothing is imported here that the API process may not have.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def _poison(torch: ModuleType) -> None:
    # What use_deterministic_algorithms calls, without its import of torch's compiler and of Triton with it.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(True)


def _seed(requests: ModuleType) -> None:
    requests.random = requests.random.Random(0)  # type: ignore[attr-defined]


class _Changer(importlib.abc.MetaPathFinder):
    """Finds these modules as the others do, once each, and changes them when they have been imported."""

    def __init__(self) -> None:
        self._changes = {"torch": _poison, "service.engine.requests": _seed}

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Changer())
