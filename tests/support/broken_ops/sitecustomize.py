"""Puts a broken implementation first in the table of ops, in every Python process that has this directory on its path.

    PYTHONPATH=tests/support/broken_ops BROKEN_OPS="lora=differs paged_attention=raises" multilora serve

The service has no switch for this: it finds real modules of the ops' packages, which break on their own.

missing  imports what is not there
raises   raises when it is called
differs  gives the reference's results, a tenth too large
kills    kills its process
never    never returns

With "!" behind it ("lora=raises!") the broken implementation is the only one of its op.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PREFIX = "broken_"


def _wishes() -> dict[str, str]:
    return dict(entry.split("=") for entry in os.environ.get("BROKEN_OPS", "").split())


class _Broken(importlib.abc.Loader):
    """Makes the module `kernels.<op>.broken_<kind>`: the functions of the op's reference, spoilt."""

    def __init__(self, op: str, kind: str) -> None:
        self._op, self._kind = op, kind

    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._kind == "missing":
            raise ModuleNotFoundError("No module named 'language_of_another_device'")
        reference = importlib.import_module(f"kernels.{self._op}.reference")
        module.CONTRACT = reference.CONTRACT  # type: ignore[attr-defined]
        for name, value in vars(reference).items():
            if getattr(value, "__module__", "") == reference.__name__ and not name.startswith("_"):
                setattr(module, name, _spoilt(value, self._kind))


def _spoilt(function: Any, kind: str) -> Any:
    import torch

    def call(*arguments: Any, **options: Any) -> Any:
        if kind == "raises":
            raise RuntimeError("the kernel does not know\n  this size")
        if kind == "kills":
            os.abort()
        if kind == "never":
            import threading

            threading.Event().wait()
        result = function(*arguments, **options)
        spoilt = next(one for one in (result, options.get("out"), arguments[1]) if isinstance(one, torch.Tensor))
        spoilt.mul_(1.1)
        return result

    return call


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the broken modules, and lets the table name them as soon as it is there."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = name.split(".")
        if len(parts) == 3 and parts[0] == "kernels" and parts[2].startswith(_PREFIX):
            return importlib.util.spec_from_loader(name, _Broken(parts[1], parts[2].removeprefix(_PREFIX)))
        if name == "kernels.platform":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            sys.meta_path.insert(0, self)
            assert spec is not None and spec.loader is not None
            spec.loader = _AndThen(spec.loader)
            return spec
        return None


class _AndThen(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for op, kind in _wishes().items():
            broken = _PREFIX + kind.removesuffix("!")
            for table in module.IMPLEMENTATIONS.values():  # type: ignore[attr-defined]
                table[op] = (broken,) if kind.endswith("!") else (broken, *table[op])


if _wishes():
    sys.meta_path.insert(0, _Finder())
