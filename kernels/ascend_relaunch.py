"""A compiled Triton kernel launched again without Triton's own Python, which takes longer than the launch itself.

triton-ascend's `JITFunction.run` asks for device, stream and target, builds a backend and joins a key at each launch,
and reads the address of each tensor through Python. A launch that differs from an earlier one in a few addresses alone
needs none of that: the compiled kernel's own launcher takes its arguments by place, and addresses as integers. Not
verified on an NPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kernels.ascend_runtime import check_launch

# Leading arguments before the kernel's own: three grid sizes, stream, function, metadata, and three hooks.
_STREAM = 3
_NUM_BEFORE = 9


def sizes_of(*tensors: torch.Tensor | None) -> tuple[object, ...]:
    """All that a plan, which looks at sizes and never at values, can see of tensors: what tells kept launches apart."""
    return tuple([None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


@dataclass(frozen=True)
class AscendLaunch:
    """A Triton kernel, its grid, and all of its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> Any:
        """Launch it. Returns the compiled kernel; None from Triton's interpreter."""
        check_launch(self.grid, self.arguments)
        return self.kernel[self.grid](**self.arguments)

    def repeated(self, compiled: Any, *, changing: str, following: Sequence[str]) -> Relaunch:
        """The same launch with other tensors; see `Relaunch`."""
        names = [param.name for param in self.kernel.params if not param.is_constexpr]
        return Relaunch(compiled, self.grid, self.arguments, names, changing=changing, following=following)


class Relaunch:
    """A launch with all of its arguments, of which one tensor and some neighbouring ones are passed anew each time.

    The other tensors must outlive it; like the kernel's workspace, it serves one thread at a time.
    """

    __slots__ = ("_arguments", "_changing", "_following", "_run")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        arguments: Mapping[str, Any],
        names: Sequence[str],
        *,
        changing: str,
        following: Sequence[str],
    ) -> None:
        """
        compiled   what Triton returned for the first launch
        arguments  of that launch, by name
        names      the kernel's run-time parameters in order
        changing   name of a tensor that is given anew
        following  names of neighbouring parameters, all tensors, that are given anew
        """
        values = [arguments[name] for name in names]
        kept = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
        first = _NUM_BEFORE + list(names).index(following[0])
        assert tuple(names[first - _NUM_BEFORE :][: len(following)]) == tuple(following), "they are neighbours"
        self._run: Callable[..., None] = compiled.run
        self._arguments = [*(*grid, 1, 1)[:3], 0, compiled.function, compiled.packed_metadata, None, None, None, *kept]
        self._changing = _NUM_BEFORE + list(names).index(changing)
        self._following = slice(first, first + len(following))

    def __call__(self, stream: int, address: int, following: tuple[int | None, ...]) -> None:
        """Launch on a stream, with the addresses of the tensors passed anew; None stays None."""
        arguments = self._arguments
        arguments[_STREAM] = stream
        arguments[self._changing] = address
        arguments[self._following] = following
        self._run(*arguments)


@cache
def current_stream() -> Callable[[], int]:
    """A function that returns the current stream of this process's device, without other queries.

    Call it for each op: a capture changes the stream between two runs of one step.
    """
    active = importlib.import_module("triton.runtime.driver").driver.active
    device, stream_of = active.get_current_device(), active.get_current_stream
    return lambda: stream_of(device)
