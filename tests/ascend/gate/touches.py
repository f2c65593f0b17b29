"""Which program wrote, and which read, each byte of global memory: what one writes, no other may touch.

The programs of a launch run at the same time, in no order, and our kernels have no barrier between them. So a byte that
one program writes and another one reads or writes is an error, even if in some order the values come out right.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from tests.ascend.gate.memory import DTYPES, MemRef, SimulationError

CORES_PER_PROGRAM = 3
_MAX_CORES = 254
_SEVERAL = 255


class Touches:
    """Of each byte of one tensor: the number (from 1) of the core that wrote it, and of the one that read it.

    A program of the cube runs on three cores, two of which may compute the same, where the compiler sees to it that one
    of them stores: among these only two that store to one byte are an error.
    """

    def __init__(self, num_bytes: int) -> None:
        # Zeros that numpy asks the system for cost nothing until they are touched; some tensors have gigabytes.
        self._writer = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))
        self._reader = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))

    def note(self, action: Literal["load", "store"], ref: MemRef, core: int) -> None:
        """Record an access. Raises SimulationError if somebody else has been there, and either of them writes."""
        assert 0 < core <= _MAX_CORES, f"the simulator tells {_MAX_CORES} cores apart"
        writer, reader = _bytes_of(self._writer, ref), _bytes_of(self._reader, ref)
        if action == "store":
            _refuse((writer != 0) & (writer != core), f"core {core} stores", "wrote", ref)
            _refuse((reader != 0) & ~_is_of_program(reader, core), f"core {core} stores", "read", ref)
            writer.fill_(core)
            return
        _refuse((writer != 0) & ~_is_of_program(writer, core), f"core {core} loads", "wrote", ref)
        if bool((reader != core).any()):
            reader.copy_(torch.where((reader == 0) | _is_of_program(reader, core), core, _SEVERAL))


def _is_of_program(numbers: torch.Tensor, core: int) -> torch.Tensor:
    """Whether a number is that of a core of this core's program."""
    first = (core - 1) // CORES_PER_PROGRAM * CORES_PER_PROGRAM + 1
    return (numbers >= first) & (numbers < first + CORES_PER_PROGRAM)


def _bytes_of(numbers: torch.Tensor, ref: MemRef) -> torch.Tensor:
    """What is known of the bytes of a view; a byte that the view has several times is there once."""
    size = DTYPES[ref.kind].itemsize
    extents, strides = [size], [1]
    for extent, stride in zip(reversed(ref.sizes), reversed(ref.strides), strict=True):
        if stride == 1 and len(extents) == 1:
            extents = [extent * size]
        elif extent > 1 and stride:
            extents.insert(0, extent)
            strides.insert(0, stride * size)
    return torch.as_strided(numbers, extents, strides, ref.base + ref.offset * size)


def _refuse(mine_is_not: torch.Tensor, does: str, did: str, ref: MemRef) -> None:
    if count := int(mine_is_not.sum()):
        raise SimulationError(
            f"a race: {does} {count} bytes of {ref.storage.name} that another core {did}, and nothing puts the two in "
            "order"
        )
