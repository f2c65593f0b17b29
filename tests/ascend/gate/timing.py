"""Estimated time of a launch, from what the simulator counted and from the public tables of Huawei's msopmodeling.

The tables hold bandwidths by the number of cores at work and cycles of vector instructions, measured on an Ascend910B4
and 910B1. Not verified on an NPU: good for ranking tiles, not for quoting. A core's units work side by side, so its
time is its slowest unit's; caches, latencies and waits within a core are left out.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from tests.ascend.gate.memory import ELEMENT_BYTES, MemRef

_CLOCK_MHZ = 1650
_REPEAT_BYTES = 256  # that one vector instruction computes
_CUBE_BYTES = 32  # of the summed dimension, in each step of 16 x 16 outputs
_BYTES_PER_US = 1024**3 / 1e6  # of 1 GB/s, as the tables count it
_CORE_KINDS = {
    "AIV": {"load": ("GM", "UB"), "store": ("UB", "GM")},
    "AIC": {"load": ("GM", "L1"), "store": ("L0C", "GM")},
}
# Library functions whose names are not those of their instructions. A cast reads and writes in float32's rhythm.
_INSTRUCTIONS = {
    "vcast": "CONV_BF162F32", "reduce": "VCADD", "broadcast": "VECTOR_DUP", "vln": "LOG", "copy": "VCOPY",
}  # fmt: skip


def transfer_effort(action: str, num_bytes: int, moved_bytes: int) -> int:
    """Bytes that a vector core could move in the time of one transfer, which below some KB is not that of its bytes.

    The line is the one that msopmodeling 1.0.9 has fitted (`time_mte2_aiv` and `time_mte3`).
    """
    slope, start = (1.533e-4, 0.0084369) if action == "load" else (7.37e-5, 0.0061727)
    return round(moved_bytes / min(slope * num_bytes + start, 1))


def vector_cycles(function: str, operands: list[MemRef]) -> int:
    """Cycles of a library function on the vector unit; 0 for functions of other units."""
    name = function.removeprefix("enablevc_").removeprefix("disablevc_").partition("_")[0]
    if not operands or not (name.startswith(("v", "reduce", "broadcast")) or "ubuf_to_ubuf" in function):
        return 0
    largest = max(operands, key=lambda ref: ref.num_elements)
    if largest.empty:
        return 0
    each, head, interval = _cycles().get(_INSTRUCTIONS.get(name, name.upper()), _cycles()["VADD"])
    repeats = math.ceil(largest.num_elements * max(ELEMENT_BYTES[largest.kind], 1) / _REPEAT_BYTES)
    return head + interval + each * repeats


def cube_cycles(m: int, k: int, n: int, element_bytes: float) -> int:
    """Cycles of a product on the cube unit."""
    cycles = math.ceil(m / 16) * math.ceil(n / 16) * math.ceil(k * element_bytes / _CUBE_BYTES)
    return cycles * (2 if element_bytes == 4 else 1)


def estimate_us(per_core: dict[tuple[int, str, int], Counter[str]]) -> float:
    """Microseconds of the slowest core, from the counts of `simulator.Counts`."""
    working = Counter(kind for (_, kind, _), counts in per_core.items() if counts["load_bytes"] + counts["store_bytes"])
    slowest = 0.0
    for (_, kind, _), counts in per_core.items():
        moves = [
            counts[f"{action}_effort" if kind == "AIV" else f"{action}_bytes"] / _bytes_per_us(*ends, working[kind])
            for action, ends in _CORE_KINDS[kind].items()
        ]
        slowest = max(slowest, *moves, (counts["vector_cycles"] + counts["cube_cycles"]) / _CLOCK_MHZ)
    return slowest


def _tables() -> Path:
    found = find_spec("tilesim")
    assert found is not None and found.submodule_search_locations, "msopmodeling is not installed"
    return Path(found.submodule_search_locations[0]) / "core" / "config" / "arc_config"


@functools.cache
def _bandwidths() -> dict[tuple[str, str, int], float]:
    """GB/s of a core by (from, to, cores at work), -1 for any number."""
    with (_tables() / "910B4" / "bandwidth_910B4.csv").open() as file:
        rows = [*csv.DictReader(file)]
    return {(row["src_mem"], row["dst_mem"], int(row["core_num"])): float(row["bandwidth(GB/s)"]) for row in rows}


def _bytes_per_us(source: str, target: str, num_cores: int) -> float:
    """Bandwidth of a core; more cores than the table knows have that of its last row."""
    known = {cores: each for (*ends, cores), each in _bandwidths().items() if ends == [source, target]}
    return _BYTES_PER_US * known.get(num_cores, known.get(-1, known[max(known)]))


@functools.cache
def _cycles() -> dict[str, tuple[int, int, int]]:
    """(cycles of a repeat, before the first, between instructions) by the vector instruction, on float32."""
    with (_tables() / "910B1" / "vec_cycle_910B1.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["d_type"] == "FP32"]
    return {
        row["intrinsic"]: (int(row["computing_cycles"]), int(row["head_cycles"]), int(row["interval_cycles"]))
        for row in rows
    }
