"""Finds where the service's code brings host memory to the device: on an NPU each such copy from memory that is not
pinned waits for all that was asked of the device before, and so does an index that is a list.

On a CPU both sides are the same memory, so it is told apart by what lay there before: all tensors that live when the
watch begins are the device's, but for those that are named as the host's; so is what is computed from them, and what is
made with a device named. Every operator that takes the device's tensors and another one, of more than a single number,
is a copy from the host.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ascend.twin.stand_ins.waits import caller


@contextlib.contextmanager
def recorded_copies(host: Iterable[torch.Tensor]) -> Iterator[list[str]]:
    """The copies of the block, as "module.function: operator". host: tensors that are not the device's."""
    watch = _Watch(host)
    with watch:
        yield watch.copies


@contextlib.contextmanager
def noted_host_memory() -> Iterator[list[torch.Tensor]]:
    """The tensors whose memory numpy is given in the block, which a device's never is."""
    noted: list[torch.Tensor] = []
    numpy = torch.Tensor.numpy

    def note(tensor: torch.Tensor, **options: Any) -> Any:
        noted.append(tensor)
        return numpy(tensor, **options)

    with mock.patch.object(torch.Tensor, "numpy", note):
        yield noted


class _Watch(TorchDispatchMode):
    def __init__(self, host: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[str] = []
        not_ours = {_memory(tensor) for tensor in host}
        # Kept, so that nothing else comes to lie where they lie.
        self._alive = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        self._device = {_memory(tensor) for tensor in self._alive} - not_ours

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in inputs if _memory(tensor) in self._device]
        if ours and any(tensor.numel() > 1 for tensor in inputs if _memory(tensor) not in self._device):
            where = caller(sys._getframe(1))
            if where is not None:
                self.copies.append(f"{where}: {func.overloadpacket.__name__}")
        if ours or (kwargs or {}).get("device") is not None:
            made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            self._device |= {_memory(tensor) for tensor in made}
            self._alive += made
        return out


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
