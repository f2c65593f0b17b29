"""The chip's device library, as far as the project's kernels call it, modelled on torch.

Each function does what its name and its published source say, and counts what it costs: bytes moved (in the pieces of
global memory that the chip moves), and elements that the library would copy one by one with the scalar unit because
strides or alignment do not suit its instructions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from tests.ascend.gate import timing
from tests.ascend.gate.memory import DTYPES, ELEMENT_BYTES, MemRef, SimulationError, indices

BLOCK_BYTES = 32
# Huawei documents that transfers are split into aligned pieces of global memory of these sizes, and that transfers
# below 16 KB do not reach the full bandwidth. Memory of a tensor begins at a multiple of 512 bytes, as torch_npu
# allocates it.
PIECE_BYTES = 128
LARGER_PIECES_BYTES = (256, 512)
SHORT_TRANSFER_BYTES = 16 * 1024


class Core(Protocol):
    """What a library function may do to the core that calls it."""

    def count(self, key: str, amount: int = 1) -> None: ...

    def touch(self, action: Literal["load", "store"], ref: MemRef) -> None: ...


Function = Callable[..., None]
_FUNCTIONS: list[tuple[re.Pattern[str], Function]] = []


def _models(pattern: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        _FUNCTIONS.append((re.compile(pattern), function))
        return function

    return register


def call(core: Core, name: str, *arguments: Any) -> None:
    """Run a library function by name. Raises SimulationError for one that is not modelled."""
    for pattern, function in _FUNCTIONS:
        if found := pattern.fullmatch(name):
            function(core, found, *arguments)
            core.count(
                "vector_cycles", timing.vector_cycles(name, [one for one in arguments if isinstance(one, MemRef)])
            )
            return
    raise SimulationError(f"library function not modelled: {name}")


# ---------------------------------------------------------------- moving data
def _count_transfer(core: Core, key: Literal["load", "store"], outside: MemRef) -> None:
    """Note a transfer by its strided side in global memory, and count it: every burst moves all pieces it touches."""
    outside.tensor()  # within bounds, else it says so
    core.touch(key, outside)
    run, rows = 1, list(zip(outside.sizes, outside.strides, strict=True))
    while rows and (rows[-1][0] == 1 or rows[-1][1] == run):
        run *= rows.pop()[0]
    element_bytes = ELEMENT_BYTES[outside.kind]
    offsets = indices(tuple(size for size, _ in rows), tuple(stride for _, stride in rows))
    first = offsets * element_bytes + outside.address
    last = first + max(run * element_bytes, 1) - 1
    moved, *larger = (
        int((last // size - first // size + 1).sum()) * size for size in (PIECE_BYTES, *LARGER_PIECES_BYTES)
    )
    core.count(f"{key}_bytes", moved)
    for size, num_bytes in zip(LARGER_PIECES_BYTES, larger, strict=True):
        core.count(f"{key}_in_{size}", num_bytes)
    core.count(f"{key}:{outside.storage.owner}", outside.num_bytes)
    length = "short" if outside.num_bytes < SHORT_TRANSFER_BYTES else "long"
    core.count(f"{length}_transfers")
    core.count(f"{key}_effort", timing.transfer_effort(key, outside.num_bytes, moved))


def _unsuited(memref: MemRef) -> bool:
    """Whether an on-chip operand's strides are not whole blocks, so that the library falls back to scalar code."""
    block = int(BLOCK_BYTES / ELEMENT_BYTES[memref.kind])
    return any(
        size > 1 and stride != 1 and stride % block for size, stride in zip(memref.sizes, memref.strides, strict=True)
    )


def _breaks_lines(on_chip: MemRef, outside: MemRef) -> bool:
    return on_chip.strides[-1] == 1 and outside.strides[-1] != 1 and outside.sizes[-1] > 1


@_models(r"load_gm_to_ubuf_\dd_\w+")
def _load(core: Core, _: re.Match[str], source: MemRef, target: MemRef, mode: int, value: Any, left: int) -> None:
    if source.empty:
        return
    _count_transfer(core, "load", source)
    if _unsuited(target) or _breaks_lines(target, source):
        core.count("library_scalar_elements", source.num_elements)
    elif target.kind != "i1" and (misaligned := int(target.address % BLOCK_BYTES)):
        per_row = min(source.sizes[-1], int((BLOCK_BYTES - misaligned) / ELEMENT_BYTES[target.kind]))
        core.count("library_scalar_elements", per_row * (source.num_elements // source.sizes[-1]))
    padding = value if mode == 2 else 0
    if left:
        start = target.offset - left * target.strides[-1]
        target.like(start, [*target.sizes[:-1], left], target.strides).tensor().fill_(padding)
    target.tensor().copy_(source.tensor())
    _pad_tail(target, padding)


def _pad_tail(target: MemRef, padding: Any) -> None:
    """The engine writes whole blocks: what follows the last element of a row becomes padding."""
    size = ELEMENT_BYTES[target.kind]
    if size < 1 or target.address % BLOCK_BYTES:
        return
    if target.strides[-1] != 1:
        rest = int(BLOCK_BYTES // size) - 1
        if target.strides[-1] > rest:
            target.like(target.offset + 1, [*target.sizes, rest], [*target.strides, 1]).tensor().fill_(padding)
        return
    end = target.address + target.sizes[-1] * size
    rest = int((-end) % BLOCK_BYTES // size)
    rows = list(zip(target.sizes[:-1], target.strides[:-1], strict=True))
    gap = min([stride - target.sizes[-1] for extent, stride in rows if extent > 1] or [rest])
    if rest and gap >= rest:
        tail = target.like(target.offset + target.sizes[-1], [*target.sizes[:-1], rest], target.strides)
        tail.tensor().fill_(padding)


@_models(r"store_ubuf_to_gm_\dd_\w+")
def _store(core: Core, _: re.Match[str], source: MemRef, target: MemRef, atomic: int, *_rest: Any) -> None:
    if source.empty:
        return
    _count_transfer(core, "store", target)
    if _unsuited(source) or _breaks_lines(source, target):
        core.count("library_scalar_elements", source.num_elements)
    if atomic:
        raise SimulationError("atomic stores are not deterministic, and not modelled")
    target.tensor().copy_(source.tensor())


@_models(r"copy_ubuf_to_ubuf_\dd_\w+")
def _copy(_core: Core, _: re.Match[str], source: MemRef, target: MemRef, *_rest: Any) -> None:
    if not source.empty:
        target.write(source.read().clone())


# ---------------------------------------------------------------- vector unit
_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "vadd": torch.add,
    "vsub": torch.sub,
    "vmul": torch.mul,
    "vdiv": lambda a, b: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "vmax": torch.maximum,
    "vmin": torch.minimum,
    "vand": torch.bitwise_and,
    "vor": torch.bitwise_or,
    "vxor": torch.bitwise_xor,
    "vshl": lambda a, b: a << b,
    "vshr": lambda a, b: a >> b,
    "vpow": torch.pow,
}
_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vexp": torch.exp,
    "vln": torch.log,
    "vsqrt": torch.sqrt,
    "vrsqrt": torch.rsqrt,
    "vabs": torch.abs,
    "vrec": torch.reciprocal,
    "vrelu": torch.relu,
    "vneg": torch.neg,
    "vnot": torch.bitwise_not,
    "vtanh": torch.tanh,
    "verf": torch.erf,
}
_COMPARE = {"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}


def _value(operand: Any, kind: str) -> torch.Tensor:
    return operand.read() if isinstance(operand, MemRef) else torch.tensor(operand, dtype=DTYPES.get(kind))


def _count_misfits(core: Core, *operands: Any) -> None:
    """A vector operand at an odd address or stride is processed by the scalar unit."""
    refs = [operand for operand in operands if isinstance(operand, MemRef)]
    if any(_unsuited(ref) or (ref.kind != "i1" and ref.address % BLOCK_BYTES) for ref in refs):
        core.count("library_scalar_elements", refs[-1].num_elements)


@_models(r"broadcast_scalar_\w+_to_\dd")
def _broadcast_scalar(_core: Core, _: re.Match[str], value: Any, target: MemRef) -> None:
    if not target.empty:
        filled = (
            torch.full(target.sizes, bool(value)) if target.kind == "i1" else torch.tensor(value).expand(target.sizes)
        )
        target.write(filled)


@_models(r"broadcast_(?:last|first|middle|mid)_axis\w*_\dd_\w+")
def _broadcast_axis(_core: Core, _: re.Match[str], source: MemRef, target: MemRef, *_scratch: Any) -> None:
    target.write(source.read().broadcast_to(target.sizes).clone())


_ROUNDING = {
    0: torch.round,
    1: lambda x: torch.sign(x) * torch.floor(x.abs() + 0.5),
    2: torch.floor,
    3: torch.ceil,
    4: torch.trunc,
}


@_models(r"vcast_\w+?_to_\w+_\dd\w*")
def _cast(_core: Core, _: re.Match[str], source: MemRef, target: MemRef, *rest: Any) -> None:
    if source.empty:
        return
    values = source.read()
    if target.kind == "i1":
        target.write(values != 0)
        return
    dtype = DTYPES[target.kind]
    to_integers = values.is_floating_point() and not dtype.is_floating_point
    if to_integers or (dtype == values.dtype and rest[-1] in (2, 3, 4)):
        values = _ROUNDING.get(rest[-1], torch.trunc)(values.float())
    target.write(values.clone().to(dtype))


@_models(r"vsel_(?:vv|vs|sv|ss)_\dd_\w+")
def _select(core: Core, _: re.Match[str], condition: MemRef, a: Any, b: Any, target: MemRef, *_scratch: Any) -> None:
    if target.empty:
        return
    _count_misfits(core, a, b, target)
    chosen = torch.where(condition.read() != 0, _value(a, target.kind), _value(b, target.kind))
    target.write(chosen.broadcast_to(target.sizes).clone())


@_models(r"(v[a-z]+?)s?_(?:vs|sv)_\dd_\w+")
def _with_scalar(core: Core, found: re.Match[str], a: Any, b: Any, target: MemRef, *_scratch: Any) -> None:
    if target.empty:
        return
    _count_misfits(core, a, b, target)
    target.write(_BINARY[found.group(1)](_value(a, target.kind), _value(b, target.kind)))


@_models(r"vcmps?_(eq|ne|lt|le|gt|ge)(?:_vs|_vv)?_\dd_\w+")
def _compare(core: Core, found: re.Match[str], a: MemRef, b: Any, target: MemRef, *_scratch: Any) -> None:
    if target.empty:
        return
    _count_misfits(core, b, a)
    target.write(_COMPARE[found.group(1)](a.read(), _value(b, a.kind)))


@_models(r"(v[a-z]+)_\dd_\w+")
def _elementwise(core: Core, found: re.Match[str], *operands: Any) -> None:
    name = found.group(1)
    if name in _BINARY:
        a, b, target = operands[:3]
        if not target.empty:
            _count_misfits(core, a, b, target)
            target.write(_BINARY[name](a.read(), b.read()).broadcast_to(target.sizes).clone())
    elif name in _UNARY:
        a, target = operands[:2]
        if not target.empty:
            _count_misfits(core, a, target)
            target.write(_UNARY[name](a.read().clone()))
    else:
        raise SimulationError(f"vector function not modelled: {found.group(0)}")


@_models(r"arange_\dd_\w+")
def _arange(_core: Core, _: re.Match[str], target: MemRef, offset: int, *strides: int) -> None:
    values = torch.tensor(offset)
    for size, stride in zip(target.sizes, strides, strict=False):
        values = values[..., None] + torch.arange(size) * stride
    target.write(values.to(DTYPES[target.kind]))


_REDUCED_AXIS = {"r": 0, "ar": 1, "ra": 0, "aar": 2, "ara": 1, "ra0a1": 0}
_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "prod": torch.prod,
}


@_models(r"(?:enablevc_|disablevc_)?reduce_(sum|max|min|prod)_(r|ar|ra|aar|ara|ra0a1)_\w+")
def _reduce(_core: Core, found: re.Match[str], source: MemRef, target: MemRef, *_scratch: Any) -> None:
    values = source.read()
    values = values.float() if values.is_floating_point() else values
    reduced = _REDUCTIONS[found.group(1)](values, _REDUCED_AXIS[found.group(2)])
    target.write(reduced.reshape(target.sizes).to(DTYPES[target.kind]))


@_models(r"deinterleave_channel_(\d)_from_(n|2)_channels_1d_\w+")
def _deinterleave(_core: Core, found: re.Match[str], source: MemRef, target: MemRef) -> None:
    if not target.empty:
        values = source.read()
        values = values[int(found.group(1)) :: 2] if found.group(2) == "2" else values
        target.write(values[: target.sizes[0]].clone())


@_models(r"v?transpose_\dd\w*")
def _transpose(_core: Core, _: re.Match[str], source: MemRef, target: MemRef, *_scratch: Any) -> None:
    target.write(source.read().transpose(-1, -2).clone())


# ---------------------------------------------------------------- cube unit
def _to_fractal(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[R, C] -> [C/columns, R/rows, rows, columns], zero padded: the layout that the cube unit reads."""
    outer_rows, outer_columns = -(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns)
    padded = torch.zeros(outer_rows * rows, outer_columns * columns, dtype=matrix.dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.reshape(outer_rows, rows, outer_columns, columns).permute(2, 0, 1, 3)


def _from_fractal(blocks: torch.Tensor) -> torch.Tensor:
    outer_columns, outer_rows, rows, columns = blocks.shape
    return blocks.permute(1, 2, 0, 3).reshape(outer_rows * rows, outer_columns * columns)


@_models(r"nd2nz_\w+")
def _load_fractal(core: Core, _: re.Match[str], source: MemRef, target: MemRef, *_rest: Any) -> None:
    if source.empty:
        return
    _count_transfer(core, "load", source)
    blocks = _to_fractal(source.read(), target.sizes[2], target.sizes[3])
    columns, rows = min(blocks.shape[0], target.sizes[0]), min(blocks.shape[1], target.sizes[1])
    target.tensor()[:columns, :rows].copy_(blocks[:columns, :rows])


@_models(r"set_l1_2d_\w+|set2d_\w+|brc_\w+cbuf\w*")
def _fill_l1(_core: Core, _: re.Match[str], *operands: Any) -> None:
    """What a mask hides of a matrix. Other compilers have been seen to leave there what was, so no kernel may rely on
    it: it is NaN here, whatever the code asks for."""
    for operand in operands:
        if isinstance(operand, MemRef):
            operand.tensor().fill_(math.nan)


@_models(r"mma_tile_(?:float|half|bfloat16_t|int8_t)_to_(?:float|int32_t)(_ta)?(_tb)?\w*")
def _multiply(
    core: Core, found: re.Match[str], a: MemRef, b: MemRef, init: int, m: int, k: int, n: int, c: MemRef, *_rest: Any
) -> None:
    core.count("cube_cycles", timing.cube_cycles(m, k, n, ELEMENT_BYTES[a.kind]))
    left, right = _from_fractal(a.read()).float(), _from_fractal(b.read()).float()
    left = left.t() if found.group(1) else left
    right = right.t() if found.group(2) else right
    product = _to_fractal(left[:m, :k] @ right[:k, :n], c.sizes[2], c.sizes[3])
    current = c.tensor()[: product.shape[0], : product.shape[1]]
    current.copy_(product if init else current + product)


@_models(r"fixpipe_nz2nd_\w+_to_\w+_4d_to_2d\w*")
def _store_fractal(core: Core, _: re.Match[str], source: MemRef, target: MemRef, *_rest: Any) -> None:
    if target.empty:
        return
    _count_transfer(core, "store", target)
    matrix = _from_fractal(source.read())[: target.sizes[0], : target.sizes[1]]
    target.tensor().copy_(matrix.to(DTYPES[target.kind]))
