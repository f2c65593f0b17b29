"""A recording of torch operations and Triton launches that can be run again on the same tensors, as a captured graph
would be; and graphs for an engine on a CPU made of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels.platform import DECODE_REGIMES, contract


class Recording(TorchDispatchMode):
    """Runs `work` once and writes down its operations with their arguments: tensors by where they lie, all else by
    value.

    result  what work returned; `replay` fills it anew
    dtypes  of all tensors that were made
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self.dtypes: set[torch.dtype] = set()
        with self, _noted_launches(self._note_launch):
            self.result = work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        self.dtypes |= {leaf.dtype for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        return out

    def _note_launch(self, launch: Callable[..., Any], args: Any, kwargs: Any) -> None:
        # What the interpreter does with tensors on the way is not the step's.
        with _disable_current_modes():
            launch(*args, **kwargs)
        self._calls.append((launch, args, kwargs, None))

    def rewrite(self, values: Mapping[str, Any]) -> int:
        """Give recorded calls other values of these keywords, as an NPU graph's update does; how many have them all."""
        num_rewritten = 0
        for index, (func, args, kwargs, out) in enumerate(self._calls):
            if values.keys() <= kwargs.keys():
                self._calls[index] = (func, args, {**kwargs, **values}, out)
                num_rewritten += 1
        return num_rewritten

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            inputs = {_memory(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(again), strict=True):
                # What lies in an argument's memory, a view of it or itself, is there already.
                if isinstance(old, torch.Tensor) and _memory(old) not in inputs:
                    old.copy_(new)


class TwinGraph:
    """A step of an engine on a CPU; see `service.engine.model.graphs.Graph`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._has_run = True  # a recording runs what it records; a capture does not

    def update(self, batch: Any) -> None:
        updates = contract("paged_attention", batch.token_ids.device, DECODE_REGIMES).updates
        if updates is not None:
            assert self._recording.rewrite(updates(batch.attention)), "no call takes what is to be updated"

    def replay(self) -> None:
        if not self._has_run:
            self._recording.replay()
        self._has_run = False


class TwinGraphs:
    """See `service.engine.model.graphs.Graphs`."""

    def capture(self, work: Callable[[], None]) -> TwinGraph:
        return TwinGraph(Recording(work))


@contextlib.contextmanager
def _noted_launches(note: Callable[..., None]) -> Iterator[None]:
    """Have every launch of a Triton kernel in the interpreter go through `note(launch, args, kwargs)`."""
    executor = pytest.importorskip("triton.runtime.interpreter").GridExecutor
    call = executor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        note(functools.partial(call, self), args, kwargs)

    executor.__call__ = noted
    try:
        yield
    finally:
        executor.__call__ = call


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
