"""triton-ascend's own launching code over a driver that is not there: launches are written down instead of made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kernels import ascend_relaunch
from kernels.rotary_kv import triton_ascend as rotary

STREAM = 4096


@dataclass
class Launches:
    """
    made   arguments of each launch as the launcher takes them, tensors as their addresses
    asked  how often the driver was asked for its device, stream and target
    """

    made: list[tuple[Any, ...]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    is_recording: bool = True

    def launch(self, *arguments: Any) -> None:
        if self.is_recording:
            self.made.append(tuple(one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments))


@contextmanager
def made_up_launches(*kernels: Any) -> Iterator[Launches]:
    """Let these kernels "compile" for an NPU and be launched on it, with tensors on the CPU."""
    launches = Launches()

    def answer(name: str, value: Any) -> Any:
        def asked(*_arguments: Any) -> Any:
            launches.asked[name] += 1
            return value

        return asked

    made_up = SimpleNamespace(
        get_current_device=answer("device", 0),
        get_current_stream=answer("stream", STREAM),
        get_current_target=answer("target", GPUTarget("npu", "Ascend910B4", 0)),
    )

    def compile_nothing(source: Any, **_options: Any) -> Any:
        return SimpleNamespace(
            run=launches.launch,
            # What is compiled for other constants or types is another one.
            function=(source.fn.__name__, str(source.constants), str(source.signature)),
            packed_metadata={},
            launch_metadata=lambda *_arguments: None,
            _init_handles=lambda: None,
        )

    _forget(kernels)
    with mock.patch.object(triton.compiler, "compile", compile_nothing), mock.patch.object(driver, "active", made_up):
        yield launches
    _forget(kernels)


def _forget(kernels: tuple[Any, ...]) -> None:
    """What kernels keep of a driver and of what they compiled."""
    for kernel in kernels:
        kernel.binder = None
        kernel.cache.clear()
    ascend_relaunch.current_stream.cache_clear()
    rotary.kept_launches.clear()
