"""Python imports this at its start where this directory is on PYTHONPATH: the server's processes that tests start.

As in the tests' own process (`tests/conftest.py`), fresh floating-point memory of torch is NaN then. Only a process
that imports torch is changed; nothing is imported here that the API process may not have.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Poisoner(importlib.abc.MetaPathFinder):
    """Finds torch as the others do, once, and sets it up when it has been imported."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_poison(module: ModuleType) -> None:
            run(module)
            # What use_deterministic_algorithms calls, without its import of torch's compiler and of Triton with it.
            module._C._set_deterministic_algorithms(True, warn_only=True)
            module._C._set_deterministic_fill_uninitialized_memory(True)

        spec.loader.exec_module = run_and_poison  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Poisoner())
