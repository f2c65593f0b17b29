"""Execute the linalg that triton-ascend lowers a kernel to, on this CPU: MLIR 19 -> LLVM -> clang 19 -> ctypes.

This proves the lowering, not only the Triton source. Not covered: calls of the device library on tensors. Memory is
not bounds-checked here (the simulator does that), and buffers leak until the process ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch

from tests.ascend.gate.compiler import CACHE, ONE_THREAD
from tests.ascend.gate.mlir import split_top

_RUNTIME = Path(__file__).with_name("runtime.c")

_PIPELINE = [
    "canonicalize",
    "convert-elementwise-to-linalg",
    "eliminate-empty-tensors",
    "empty-tensor-to-alloc-tensor",
    "one-shot-bufferize=allow-return-allocs-from-loops=true",
    "convert-linalg-to-loops",
    "expand-strided-metadata",
    "memref-expand",
    "lower-affine",
    "convert-scf-to-cf",
    "arith-expand=include-bf16=true",
    "convert-arith-to-llvm",
    "convert-math-to-llvm",
    "convert-math-to-libm",
    "convert-complex-to-llvm",
    "convert-index-to-llvm",
    "finalize-memref-to-llvm",
    "convert-cf-to-llvm",
    "convert-func-to-llvm",
    "lower-affine",
    "convert-arith-to-llvm",
    "reconcile-unrealized-casts",
]

_SCALARS = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "index": ctypes.c_int64,
}
_DESCRIPTOR = "!llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>"
# Grid sizes and program ids, three each, and two more that the launcher passes.
_NUM_TRAILING = 8


class LinalgError(RuntimeError):
    """Stock MLIR or clang refused the lowered kernel."""


def available() -> bool:
    """Whether the three system tools are here."""
    return all(shutil.which(tool) for tool in ("mlir-opt-19", "mlir-translate-19", "clang-19"))


Order = Literal["forward", "reverse", "random"]


def run(linalg: str, arguments: list[Any], grid: tuple[int, ...], order: Order = "forward") -> None:
    """Run every program of the grid, one after another in that order; tensors among the arguments change in place."""
    name, types = _signature(linalg)
    function = getattr(ctypes.CDLL(str(_build(linalg))), name)
    function.restype = None
    assert len(types) - _NUM_TRAILING == len(arguments), f"{name} wants {types}, got {len(arguments)} arguments"
    sizes = (*grid, 1, 1)[:3]
    scratch = torch.zeros(1 << 16, dtype=torch.uint8)
    programs = list(itertools.product(range(sizes[2]), range(sizes[1]), range(sizes[0])))
    if order == "reverse":
        programs.reverse()
    if order == "random":
        random.Random(linalg).shuffle(programs)
    for z, y, x in programs:
        values = [scratch, scratch, *arguments, *sizes, x, y, z]
        function(*(item for kind, value in zip(types, values, strict=True) for item in _flatten(kind, value)))


def _flatten(kind: str, value: Any) -> list[Any]:
    """A memref travels as allocated pointer, aligned pointer, offset, size, stride."""
    if not kind.startswith("memref"):
        return [_SCALARS[kind](value)]
    pointer = ctypes.c_void_p(value.data_ptr())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(value.numel()), ctypes.c_int64(1)]


def _signature(linalg: str) -> tuple[str, list[str]]:
    found = re.search(r"func\.func @(\w+)\((.*?)\) attributes", linalg, re.S)
    assert found is not None
    types = [argument.split(":", 1)[1].strip() for argument in split_top(found.group(2))]
    return found.group(1), [re.sub(r"\s*\{.*\}$", "", kind) for kind in types]


def _build(linalg: str) -> Path:
    text = _without_ascend_ops(linalg)
    digest = hashlib.sha256(text.encode() + _RUNTIME.read_bytes() + " ".join(_PIPELINE).encode()).hexdigest()[:24]
    library = CACHE / f"{digest}.so"
    if library.exists():
        return library
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        base = Path(directory) / "kernel"
        base.with_suffix(".mlir").write_text(text)
        passes = [f"--{name}" for name in _PIPELINE]
        _tool("mlir-opt-19", f"{base}.mlir", ONE_THREAD, *passes, "-o", f"{base}.llvm.mlir")
        _tool("mlir-translate-19", "--mlir-to-llvmir", f"{base}.llvm.mlir", "-o", f"{base}.ll")
        sources = [str(_RUNTIME), "-x", "ir", f"{base}.ll"]
        _tool("clang-19", "-O2", "-w", "-shared", "-fPIC", *sources, "-o", f"{base}.so", "-lm")
        Path(f"{base}.so").rename(library)
    return library


def _tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinalgError(f"{command[0]}: {done.stderr[-3000:]}")


def _without_ascend_ops(linalg: str) -> str:
    """Rewrite the few Ascend-only ops of a lowered module in stock MLIR."""
    counter = itertools.count()

    def pointer_cast(found: re.Match[str]) -> str:
        result, address, size, kind = found.groups()
        v = f"%pointer{next(counter)}_"
        length = f"arith.index_cast {size} : index to i64" if size else "llvm.mlir.constant(1 : i64) : i64"
        return "\n".join(
            [
                f"{v}p = llvm.inttoptr {address} : i64 to !llvm.ptr",
                f"{v}n = {length}",
                f"{v}zero = llvm.mlir.constant(0 : i64) : i64",
                f"{v}one = llvm.mlir.constant(1 : i64) : i64",
                f"{v}0 = llvm.mlir.undef : {_DESCRIPTOR}",
                f"{v}1 = llvm.insertvalue {v}p, {v}0[0] : {_DESCRIPTOR}",
                f"{v}2 = llvm.insertvalue {v}p, {v}1[1] : {_DESCRIPTOR}",
                f"{v}3 = llvm.insertvalue {v}zero, {v}2[2] : {_DESCRIPTOR}",
                f"{v}4 = llvm.insertvalue {v}n, {v}3[3, 0] : {_DESCRIPTOR}",
                f"{v}5 = llvm.insertvalue {v}one, {v}4[4, 0] : {_DESCRIPTOR}",
                f"{result} = builtin.unrealized_conversion_cast {v}5 : {_DESCRIPTOR} to {kind}",
            ]
        )

    cast = r"(%\w+) = hivm\.hir\.pointer_cast\((%[\w#]+)\)(?: \[(%[\w#]+)\])? : (memref<\?x\w+>)"
    linalg = re.sub(cast, pointer_cast, linalg)
    ignored = r"^\s*(?:gpu\.barrier|annotation\.mark [^\n]*|hivm\.hir\.(?:pipe_barrier|sync_block)[^\n]*)$"
    return re.sub(ignored, "", linalg, flags=re.M)
