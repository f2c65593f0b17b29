"""Finds where the service's code waits for the device: what is free on a CPU stalls an NPU's queue.

Seen are tensors that become Python values or host memory, and operators whose results have shapes that depend on
values. Not seen are copies into tensors that lie on another device, which on a CPU are none; on a GPU
tests/parity/test_waits.py has CUDA itself look for those.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ascend.twin.stand_ins.calls import PACKAGES

# Methods of tensors that give a value, or memory of the host.
_METHODS = (
    *("item", "tolist", "numpy", "cpu", "to", "__array__", "__iter__"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
)
# Operators that must know values before their result has a shape.
_OPERATORS = (
    *("nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
    "equal",  # whose result is a value of Python's
)


@contextlib.contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """The waits of the block, as "module.function: what"."""
    waits: list[str] = []
    patched = {name: _noting(name, getattr(torch.Tensor, name), waits) for name in _METHODS}
    inherited = [name for name in _METHODS if name not in torch.Tensor.__dict__]
    own = {name: torch.Tensor.__dict__[name] for name in _METHODS if name not in inherited}
    for name, method in patched.items():
        setattr(torch.Tensor, name, method)
    try:
        with _Shapeless(waits):
            yield waits
    finally:
        for name in inherited:
            delattr(torch.Tensor, name)
        for name, method in own.items():
            setattr(torch.Tensor, name, method)


class _Shapeless(TorchDispatchMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        has_mask = name.startswith("index") and any(
            isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in pytree.tree_leaves(args[1:2])
        )
        is_sized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None
        if has_mask or (name in _OPERATORS and not is_sized):
            where = caller(sys._getframe(1))
            if where is not None:
                self._waits.append(f"{where}: {name}{' by a mask' if has_mask else ''}")
        return func(*args, **(kwargs or {}))


def _noting(name: str, method: Callable[..., Any], waits: list[str]) -> Callable[..., Any]:
    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if name == "to" and not any(str(argument).startswith("cpu") for argument in (*args, *kwargs.values())):
            return method(self, *args, **kwargs)
        if frame.f_globals.get("__name__", "").partition(".")[0] in PACKAGES:
            waits.append(f"{caller(frame)}: {name.strip('_')}")
        return method(self, *args, **kwargs)

    return noted


def caller(frame: Any) -> str | None:
    """The innermost function of the service around the frame."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in PACKAGES:
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return None
