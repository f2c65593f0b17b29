"""A recording of torch operations that can be run again on the same tensors, as a captured graph would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Recording(TorchDispatchMode):
    """Runs `work` once and writes down its operations with their arguments: tensors by where they lie, all else by
    value. `result` is what work returned; `replay` fills it anew."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        with self:
            self.result = work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            inputs = {_memory(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                # What lies in an argument's memory, a view of it or itself, is there already.
                if isinstance(old, torch.Tensor) and _memory(old) not in inputs:
                    old.copy_(new)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
