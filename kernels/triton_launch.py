"""Shared parts of all Triton launches: dependent launch, workspaces, and the count of compiled variants."""

from __future__ import annotations

import functools
from typing import Any

import torch

HOPPER = (9, 0)


@functools.cache
def launches_dependently(device: torch.device) -> bool:
    """Whether a launch may begin while the kernel before it ends: the instructions for it came with Hopper.

    Such a kernel waits (`gdc_wait`) before it touches what an earlier kernel of its stream reads or writes.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def launch_options(device: torch.device, *, dependent: bool = True, max_registers: int | None = None) -> dict[str, Any]:
    """Options of the CUDA backend, which the interpreter ignores.

    dependent      launch dependently, where the GPU can
    max_registers  of a thread; None: as it comes
    """
    return {"launch_pdl": dependent and launches_dependently(device), "maxnreg": max_registers}


def count_compiled(*kernels: object) -> int:
    """Number of compiled variants of these kernels in this process; it must not rise after warm-up."""
    count = 0
    for kernel in kernels:  # the interpreter's have no caches
        count += sum(len(cache[0]) for cache in getattr(kernel, "device_caches", {}).values())
        count += sum(len(cache) for cache in getattr(kernel, "cache", {}).values())  # triton-ascend
    return count


def is_capturing(device: torch.device) -> bool:
    """Whether what is asked of the device now goes into a graph, and is not done yet."""
    return device.type in ("cuda", "npu") and bool(torch.get_device_module(device).is_current_stream_capturing())


class Workspace:
    """Memory for intermediate results between the launches of one op: one buffer for each device.

    The op must run on one stream of a device at a time. A buffer grows when more is requested than before, which must
    not happen while a graph is captured; an outgrown buffer is kept, since graphs captured earlier still write to it.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """uint8, one of each device."""
        return tuple(self._buffers.values())

    def take(self, device: torch.device, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], uninitialised, aligned as fresh memory is; the same memory in each call."""
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < num_bytes:
            assert not is_capturing(device), "a workspace must be reserved before capture: call warm_up"
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = self._buffers[device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return buffer[:num_bytes]
