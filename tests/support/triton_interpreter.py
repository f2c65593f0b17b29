"""What Triton's interpreter gets wrong, made right for the tests."""

from __future__ import annotations

from typing import Any

import pytest


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
