"""What a kernel brings to the gate: example launches, what they must compute, and what they may cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# The chips that must take every kernel, and the one whose published compiler crashes on some by itself.
REQUIRED_TARGETS = ("Ascend910B4", "Ascend910_9382")
OPTIONAL_TARGET = "Ascend950PR_9589"
# Bytes moved, over the fewest possible, where a launch does not say otherwise.
MAX_TRAFFIC = 1.1


@dataclass(frozen=True)
class Launch:
    """One call of a kernel on example data.

    arguments      every parameter of the kernel by name, constexprs included; tensors on the CPU
    grid           number of programs in each dimension
    expected       output parameters and what they must hold afterwards, in full: cells that must stay untouched too.
                   For a tensor that is only reachable through a pointer table, the key is its name in `reachable`
    maps           parameters whose entries the scalar unit may load
    reachable      tensors behind pointer tables
    minimum_bytes  what must be moved at least, in and out; None where traffic is not judged
    max_traffic    how many times the minimum may be moved
    minimum_load_bytes  what must be read at least; None where reads are not judged by themselves
    max_load_traffic    how many times that may be read
    max_transfers    how many transfers, long and short ones; None where they are not judged
    max_scalar_loads    of one core, over all its work items; None where these are not judged by their sum
    tolerance      absolute and relative
    exact          outputs that must hold these very bits
    """

    arguments: Mapping[str, Any]
    grid: tuple[int, ...]
    expected: Mapping[str, torch.Tensor]
    maps: frozenset[str]
    reachable: Mapping[str, torch.Tensor] = field(default_factory=dict)
    minimum_bytes: int | None = None
    minimum_load_bytes: int | None = None
    max_traffic: float = MAX_TRAFFIC
    max_load_traffic: float = MAX_TRAFFIC
    max_transfers: int | None = None
    max_scalar_loads: int | None = None
    tolerance: tuple[float, float] = (1e-5, 1e-5)
    exact: frozenset[str] = frozenset()

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the launch by name."""
        found = self.reachable[name] if name in self.reachable else self.arguments[name]
        assert isinstance(found, torch.Tensor), name
        return found


@dataclass(frozen=True)
class Case:
    """A kernel in one configuration, with the launches that try it.

    kernel             the `triton.jit` function
    launches           functions that make a launch afresh (data seeded by themselves), by name
    work_loop_depth    how many loops stand around one work item; map entries may be loaded at that depth, not deeper,
                       and an item may cost `MAX_SCALAR_LOADS` of them. What the loops around load counts for the first
                       item after it
    on_chip_fraction   how much of each on-chip memory it may use
    max_us             estimated microseconds (`timing`) that launches may take, by name: all whose traffic is judged
    options            compile options of triton-ascend
    crashes            why the published compiler for `OPTIONAL_TARGET` dies on it; "" where it must compile
    compiles           launches that it compiles all the same
    """

    name: str
    kernel: Any
    launches: Mapping[str, Callable[[], Launch]]
    work_loop_depth: int = 1
    on_chip_fraction: float = 1.0
    max_us: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    crashes: str = ""
    compiles: frozenset[str] = frozenset()
