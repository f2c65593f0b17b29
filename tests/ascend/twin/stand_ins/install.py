"""Makes this process, and those it starts, a twin: torch_npu without CANN, and stand-ins for what the service calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import MappingProxyType
from unittest import mock

import pytest
import torch

from kernels.platform import IMPLEMENTATIONS, Platform, installed
from kernels.probe import isolated
from tests.ascend.twin.stand_ins import stand_ins
from tests.ascend.twin.stand_ins.cann import provide_stub_cann
from tests.support.npu.triton_interpreter import multiply_bfloat16

# Few, since the interpreter visits one core after the other.
NUM_CORES = 3
UNIFIED_BUFFER_BYTES = 192 * 1024

_registrations: list[torch.library.Library] = []  # each ends with its object


def import_torch_npu() -> None:
    """Import torch_npu and register the stand-ins; once per process."""
    if not _registrations:
        provide_stub_cann()
        import torch_npu  # noqa: F401 - registers the operators

        _registrations.append(stand_ins.register())


def prepare_interpreter() -> None:
    """For this process: bfloat16 matrices are multiplied as such, and the language is patched once for each helper
    function instead of at each call of one."""
    from triton.runtime import interpreter

    multiply_bfloat16(pytest.MonkeyPatch())
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)


def npu_platform() -> Platform:
    """An Ascend910B4 with every implementation that is wished for, to be installed for the CPU."""
    wished = {op: names[0] for op, names in IMPLEMENTATIONS["npu"].items()}
    return Platform(
        "npu",
        "twin of Ascend910B4",
        NUM_CORES,
        UNIFIED_BUFFER_BYTES,
        row_alignment=16,
        implementations=MappingProxyType(wished),
    )


@contextlib.contextmanager
def npu_path(*, float32_attention: bool = False) -> Iterator[Platform]:
    """Tensors on the CPU are served as if they lay on an NPU.

    float32_attention  lift the rule that attention computes in 16 bits, which the service itself keeps too
    """
    from kernels.paged_attention import npu

    platform = npu_platform()
    with contextlib.ExitStack() as stack:
        npu.call_memory.cache_clear()  # a workspace is asked for once for each size
        # What the probe has found out under one set of rules does not hold under another.
        isolated.probe_here.cache_clear()
        stack.callback(isolated.probe_here.cache_clear)
        if float32_attention:
            stack.enter_context(stand_ins.float32_attention())
            stack.enter_context(mock.patch.object(npu, "DTYPES", stand_ins.FLOATS))
        stack.enter_context(installed(platform, "cpu"))
        yield platform
