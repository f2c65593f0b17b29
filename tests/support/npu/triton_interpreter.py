"""Mends of Triton's interpreter for the tests: wrong results, and work that it does again and again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from kernels import platform


@contextmanager
def kernels_wished_for(ops: Iterable[str], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """For the length of a block, a CPU is a device whose table wishes for the kernels of an NVIDIA GPU."""
    wished = {**platform.IMPLEMENTATIONS["cpu"], **dict.fromkeys(ops, ("triton_cuda",))}
    patch.setitem(platform.IMPLEMENTATIONS, "cpu", wished)
    platform.forget_detected()
    with platform.installed(platform.detect("cpu")):
        yield
    platform.forget_detected()


def look_up_once(patch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces all of Triton's language at each call of a function by a kernel, as it did when the
    kernel was launched, and writes a table of types for each load and cast. It computes whether a sum or a product
    overflows, and asks nobody where it does not debug. That is most of the time of a launch."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, tl

    replace, launch, numpy_type = interpreter._patch_lang, GridExecutor.__call__, interpreter._get_np_dtype
    replaced: set[ModuleType] = set()
    numpy_types: dict[str, Any] = {}

    @functools.cache
    def languages(function: Callable[..., Any]) -> frozenset[ModuleType]:
        return frozenset(value for value in function.__globals__.values() if value is tl or value is tl.core)

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(executor, *args, **kwargs)

    def replace_once(function: Callable[..., Any]) -> Any:
        if languages(function) <= replaced:
            return None
        replaced.update(languages(function))
        return replace(function)

    def known_numpy_type(dtype: Any) -> Any:
        scalar = dtype.scalar  # blocks cannot be hashed
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type(scalar)
        return numpy_types[scalar.name]

    patch.setattr(GridExecutor, "__call__", launch_afresh)
    patch.setattr(interpreter, "_patch_lang", replace_once)
    patch.setattr(interpreter, "_get_np_dtype", known_numpy_type)
    options = interpreter.interpreter_builder.options
    options = dataclasses.replace(options, sanitize_overflow=options.debug)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    _make_once(patch, tl.core.block_type, lambda element_type, shape: (element_type.name, *map(int, shape)))
    _make_once(patch, tl.core.tensor, lambda _, block_type: block_type.name, "handle")


def _make_once(patch: pytest.MonkeyPatch, made: type, key: Callable[..., Any], first: str | None = None) -> None:
    """Objects of equal keys share what is computed of the arguments, but for that which is the argument `first`."""
    make: Callable[..., None] = made.__init__  # type: ignore[misc]
    known: dict[Any, dict[str, Any]] = {}

    def make_once(self: Any, *args: Any) -> None:
        parts = known.get(wanted := key(*args))
        if parts is None:
            make(self, *args)
            known[wanted] = vars(self).copy()
        else:
            vars(self).update(parts)
            if first is not None:
                setattr(self, first, args[0])

    patch.setattr(made, "__init__", make_once)


def multiply_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as its bits in uint16, and its `dot` multiplies those bits as integers."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    original = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widened(a), widened(b), *rest)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


def multiply_rows_alike(patch: pytest.MonkeyPatch) -> None:
    """The interpreter's `dot` is BLAS's, which sums a row otherwise in another place of the tile where the processor
    has AVX2 and no AVX-512; a GPU does not. For two-dimensional tiles."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:  # noqa: ARG001
        return TensorHandle(np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


def round_floats(patch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts float32 off where it becomes bfloat16 or float8; GPUs round it to the nearest."""
    import numpy as np
    import torch
    from triton.runtime import interpreter
    from triton.runtime.interpreter import tl

    original = interpreter._convert_float

    def convert_float(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target in (tl.bfloat16, tl.float8e4nv):
            narrow = torch.bfloat16 if target == tl.bfloat16 else torch.float8_e4m3fn
            bits = torch.from_numpy(np.ascontiguousarray(values)).to(narrow).view(torch.uint8).numpy()
            return bits.view(np.dtype(f"uint{8 * narrow.itemsize}")).reshape(values.shape)
        return original(values, source, target, rounding_mode)

    patch.setattr(interpreter, "_convert_float", convert_float)
