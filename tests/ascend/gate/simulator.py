"""Execute the final device IR of a kernel (Ascend910 chips) on torch tensors, and count what it does.

Global memory is the arguments' own storage, every access bounds-checked; on-chip memory has the addresses that the
compiler planned, and starts as NaN. The cube core and the two vector cores of a block run as coroutines joined by their
flags. What one core writes, no other may touch (`touches`), but for the compiler's own workspace. Missing
synchronisation *within* a core is not noticed, and library functions are modelled, not executed.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tests.ascend.gate import library, timing
from tests.ascend.gate.memory import DTYPES, MemRef, SimulationError, Storage, contiguous_strides, parse_type
from tests.ascend.gate.mlir import Op, parse
from tests.ascend.gate.touches import CORES_PER_PROGRAM, Touches
from tests.ascend.gate.translate import constant, translate

ON_CHIP_BYTES = {"ub": 196608, "cbuf": 524288, "cc": 131072}
_RUNAWAY_ROUNDS = 10
DEAREST_ITEM = "scalar loads of one work item"


# ---------------------------------------------------------------- names that translated code uses
def wrap(value: int, bits: int) -> int:
    """Two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def round_to(value: float, kind: str) -> float:
    """The nearest value of a floating-point type."""
    if kind == "f32":
        return struct.unpack("f", struct.pack("f", value))[0] if abs(value) < 3.4e38 else value
    return torch.tensor(value, dtype=DTYPES[kind]).item()


def divsi(a: int, b: int) -> int:
    """Division that truncates towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remsi(a: int, b: int) -> int:
    """The remainder that belongs to `divsi`."""
    return a - divsi(a, b) * b


def reinterpret_cast(ref: MemRef, offsets: list[int], sizes: list[int], strides: list[int]) -> MemRef:
    """Another view of the whole buffer; of a bare base (no sizes) relative to its offset."""
    return ref.like(offsets[0] if ref.sizes else ref.offset + offsets[0], sizes, strides)


def subview(ref: MemRef, offsets: list[int], sizes: list[int], strides: list[int], kept: list[int | None]) -> MemRef:
    """A part of a view; unit dimensions that the result type lacks are dropped."""
    start = ref.offset + sum(offset * stride for offset, stride in zip(offsets, ref.strides, strict=True))
    steps = [step * stride for step, stride in zip(strides, ref.strides, strict=True)]
    axes: list[int] = []
    for axis, size in enumerate(sizes):
        surplus = len(sizes) - axis > len(kept) - len(axes)
        wanted = kept[len(axes)] if len(axes) < len(kept) else 0
        if not (surplus and size == 1 and wanted != 1):
            axes.append(axis)
    return ref.like(start, [sizes[axis] for axis in axes], [steps[axis] for axis in axes])


def collapse_shape(ref: MemRef, groups: list[list[int]]) -> MemRef:
    """Join neighbouring dimensions."""
    sizes = [math.prod(ref.sizes[axis] for axis in group) for group in groups]
    lasts = [([axis for axis in group if ref.sizes[axis] != 1] or group)[-1] for group in groups]
    return ref.like(ref.offset, sizes, [ref.strides[axis] for axis in lasts])


def expand_shape(ref: MemRef, groups: list[list[int]], sizes: list[int]) -> MemRef:
    """Split dimensions."""
    strides = [0] * len(sizes)
    for group, stride in zip(groups, ref.strides, strict=True):
        for axis in reversed(group):
            strides[axis] = stride
            stride *= sizes[axis]
    return ref.like(ref.offset, sizes, strides)


def view(ref: MemRef, byte_offset: int, sizes: list[int], kind: str) -> MemRef:
    """Bytes seen as another type."""
    return MemRef(ref.storage, int(ref.address) + byte_offset, kind, 0, sizes, contiguous_strides(sizes), ref.space)


# ---------------------------------------------------------------- cores and chip
class Core:
    """One cube or vector core of one block, with its own on-chip memory and counts."""

    def __init__(self, chip: Chip, kind: str, block_idx: int, sub_block_idx: int) -> None:
        self.chip = chip
        self.kind = kind
        self.block_idx = block_idx
        self.sub_block_idx = sub_block_idx
        self.counts: Counter[str] = Counter()
        self.loads_of_item = 0
        self.is_first_item = True
        self.memory = {
            # All ones is a NaN in every floating-point type, so that reading what nobody wrote shows.
            space: Storage(torch.full((size,), 0xFF, dtype=torch.uint8), space)
            for space, size in ON_CHIP_BYTES.items()
        }

    @property
    def block_num(self) -> int:
        return self.chip.num_blocks

    def count(self, key: str, amount: int = 1) -> None:
        self.counts[key] += amount

    def begin_iteration(self, depth: int) -> None:
        """A loop that is the depth-th around its body begins another round.

        A round of the loop over work items ends the item before it. What the loops around that one load is charged to
        the first item that follows.
        """
        if depth > self.chip.work_loop_depth:
            return
        if depth < self.chip.work_loop_depth or not self.is_first_item:
            self.end_item()
        self.is_first_item = depth < self.chip.work_loop_depth

    def end_item(self) -> None:
        """Note the item's scalar loads if it is the dearest so far."""
        self.counts[DEAREST_ITEM] = max(self.counts[DEAREST_ITEM], self.loads_of_item)
        self.loads_of_item = 0

    @property
    def number(self) -> int:
        """Which of the chip's cores this is, from 1: vector cores 0 and 1 of the block, then its cube core."""
        return 1 + self.block_idx * CORES_PER_PROGRAM + (2 if self.kind == "AIC" else self.sub_block_idx)

    def touch(self, action: Literal["load", "store"], ref: MemRef) -> None:
        """Note an access to global memory. Raises SimulationError where another core's makes it a race."""
        touches = self.chip.touches.get(ref.storage.raw.data_ptr())
        if touches is not None:
            touches.note(action, ref, self.number)

    def at_address(self, address: int, sizes: list[int], kind: str, space: str) -> MemRef:
        """Planned on-chip memory, or global memory through a pointer that was loaded from a table."""
        if space != "gm":
            return MemRef(self.memory[space], address, kind, 0, sizes, contiguous_strides(sizes), space)
        return self.chip.global_pointer(address, sizes, kind)

    def load(self, ref: MemRef, *indices: int) -> float:
        value = ref.load(indices)
        self._count_scalar("load", ref, indices)
        return value

    def store(self, value: float, ref: MemRef, *indices: int) -> None:
        ref.store(value, indices)
        self._count_scalar("store", ref, indices)

    def _count_scalar(self, action: Literal["load", "store"], ref: MemRef, indices: Sequence[int]) -> None:
        if ref.space == "gm":
            offset = sum(index * stride for index, stride in zip(indices, ref.strides, strict=True))
            self.touch(action, ref.like(ref.offset + offset, [], []))
        where = f"global:{ref.storage.owner}" if ref.space == "gm" else "on_chip"
        self.loads_of_item += action == "load" and ref.space == "gm"
        self.counts[f"scalar_{action}_{where}"] += 1

    def call(self, name: str, *arguments: Any) -> None:
        library.call(self, name, *arguments)

    def set_flag(self, flag: int) -> None:
        """The cube core signals both vector cores; each of them signals the cube core."""
        for lane in (0, 1) if self.kind == "AIC" else (self.sub_block_idx,):
            self.chip.flags[(self.kind, lane, flag)] += 1

    def take_flag(self, flag: int) -> bool:
        keys = [("AIC", self.sub_block_idx, flag)] if self.kind == "AIV" else [("AIV", 0, flag), ("AIV", 1, flag)]
        if not all(self.chip.flags[key] for key in keys):
            return False
        self.chip.flags.subtract(keys)
        self.chip.num_taken += 1
        return True


@dataclass(frozen=True)
class Counts:
    """What a launch did.

    per_core  for each block, core kind and lane: "load_bytes" and "store_bytes" (to and from global memory, in whole
              pieces of 128 bytes), "load_in_256", "load_in_512" and those of stores (in larger pieces),
              "short_transfers" and "long_transfers" (of 16 KB at least), what `timing` counts, "load:<parameter>",
              "scalar_load_global:<parameter>", "library_scalar_elements", ...;
              and DEAREST_ITEM, the scalar loads from global memory of the work item that has most
    """

    per_core: dict[tuple[int, str, int], Counter[str]]

    def total(self, prefix: str) -> int:
        """Sum of all counts whose name begins with the prefix, over all cores."""
        return sum(n for counts in self.per_core.values() for key, n in counts.items() if key.startswith(prefix))

    def estimate_us(self) -> float:
        """Estimated microseconds of the launch (`timing`)."""
        return timing.estimate_us(self.per_core)

    def largest(self, name: str) -> int:
        """The largest of one count over all cores."""
        return max((counts[name] for counts in self.per_core.values()), default=0)

    def largest_total(self, prefix: str) -> int:
        """Of one core: the sum of all counts whose name begins with the prefix, of the core that has most."""
        sums = (sum(n for key, n in one.items() if key.startswith(prefix)) for one in self.per_core.values())
        return max(sums, default=0)

    def names(self, prefix: str) -> set[str]:
        """What follows the prefix in the names of counts that are not zero."""
        return {
            key.removeprefix(prefix)
            for counts in self.per_core.values()
            for key, n in counts.items()
            if n and key.startswith(prefix)
        }


class Chip:
    """A translated kernel; `run` executes it. `work_loop_depth` as in `cases.Case`."""

    def __init__(self, device: str, work_loop_depth: int = 0) -> None:
        module, maps = parse(device)
        self.work_loop_depth = work_loop_depth
        self.num_blocks = 0
        self.flags: Counter[tuple[str, int, int]] = Counter()
        self.num_taken = 0
        self.storages: list[Storage] = []
        self.touches: dict[int, Touches] = {}  # by the address of the memory, which several arguments may share
        self.workspace_bytes = 0
        self.functions: dict[str, tuple[str, Op]] = {}
        sources: list[str] = []
        for function in module.regions[0].ops:
            if function.name != "func.func" or not function.regions or not function.regions[0].ops:
                continue
            name = function.attribute("sym_name").strip('"')
            if "HOST" in function.attribute("hacc.function_kind"):
                if "infer_workspace" in name:
                    constants = [op for op in function.regions[0].ops if op.name == "arith.constant"]
                    self.workspace_bytes = max(int(constant(op.attribute("value"))) for op in constants)
                continue
            kind = re.search(r"<(\w+)>", function.attribute("hivm.func_core_type"))
            self.functions[name] = (kind.group(1) if kind else "AIV", function)
            sources.append(translate(function, maps))
        self.namespace: dict[str, Any] = dict(globals())
        exec(compile("\n\n".join(sources), "<device code>", "exec"), self.namespace)

    def _register(self, owner: str, tensor: torch.Tensor) -> Storage:
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        storage = Storage(raw, f"{owner} {tuple(tensor.shape)}", owner)
        self.storages.append(storage)
        return storage

    def global_pointer(self, address: int, sizes: list[int], kind: str) -> MemRef:
        for storage in self.storages:
            offset = address - storage.raw.data_ptr()
            if 0 <= offset < storage.raw.numel():
                return MemRef(storage, offset, kind, 0, sizes, contiguous_strides(sizes), "gm")
        raise SimulationError(f"a loaded pointer ({address:#x}) belongs to no tensor of the launch")

    def run(
        self, arguments: Mapping[str, Any], grid: Sequence[int], reachable: Mapping[str, torch.Tensor] | None = None
    ) -> Counts:
        """Run the grid, block after block; tensors change in place.

        arguments  the run-time arguments in order, by parameter name
        reachable  tensors that are reached through pointer tables, by the name to count them under
        """
        self.num_blocks = math.prod(grid)
        self.storages = []
        self.touches = {}
        owned = {name: self._register(name, v) for name, v in arguments.items() if isinstance(v, torch.Tensor)}
        for name, tensor in (reachable or {}).items():
            self._register(name, tensor)
        self.touches = {storage.raw.data_ptr(): Touches(storage.raw.numel()) for storage in self.storages}
        scratch = [
            self._register("lock", torch.zeros(1 << 16, dtype=torch.uint8)),
            self._register(
                "workspace", torch.zeros(max(64, self.workspace_bytes * self.num_blocks), dtype=torch.uint8)
            ),
        ]
        per_core: dict[tuple[int, str, int], Counter[str]] = {}
        mixed = any(kind == "AIC" for kind, _ in self.functions.values())
        for block in range(self.num_blocks):
            self.flags = Counter()
            running: list[Generator[None, None, None]] = []
            for name, (kind, function) in self.functions.items():
                for lane in (0, 1) if kind == "AIV" and mixed else (0,):
                    core = Core(self, kind, block, lane)
                    values = self._values(function, arguments, owned, scratch, grid)
                    running.append(self.namespace[name](core, *values))
                    per_core[block, kind, lane] = core.counts
            self._run_block(running)
        return Counts(per_core)

    def _values(
        self,
        function: Op,
        arguments: Mapping[str, Any],
        owned: Mapping[str, Storage],
        scratch: list[Storage],
        grid: Sequence[int],
    ) -> list[Any]:
        """[sync base], lock, workspace, the kernel's arguments, three grid sizes."""
        types = [kind for _, kind in function.regions[0].arguments]
        values: list[Any] = [0] if types[0] == "i64" else []
        values += [MemRef(storage, 0, "i8", 0, [storage.raw.numel()], [1], "gm") for storage in scratch]
        user_types = types[len(values) : -3]
        for kind, (name, value) in zip(user_types, arguments.items(), strict=True):
            if kind.startswith("memref"):
                base = value.data_ptr() - value.untyped_storage().data_ptr()
                values.append(MemRef(owned[name], base, parse_type(kind).kind, 0, [value.numel()], [1], "gm"))
            else:
                values.append(float(value) if kind.startswith(("f", "b")) else int(value))
        return [*values, *(*grid, 1, 1)[:3]]

    def _run_block(self, running: list[Generator[None, None, None]]) -> None:
        idle_rounds = 0
        while running:
            before = self.num_taken, dict(self.flags)
            alive = [core for core in running if next(core, StopIteration) is not StopIteration]
            # Cores in step take in each round what is signalled in it, so that the flags alone stay the same.
            is_idle = len(alive) == len(running) and before == (self.num_taken, dict(self.flags))
            idle_rounds = idle_rounds + 1 if is_idle else 0
            if idle_rounds > _RUNAWAY_ROUNDS:
                raise SimulationError("the cores of a block wait for each other for ever")
            running = alive
