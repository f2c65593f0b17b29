"""Compile the kernels of the gated delta rule for compute capability 9.0 without a GPU, at the sizes of Qwen3.5-9B in
bfloat16; print name, bytes of shared memory, registers of a thread, bytes that it spills, and threads of each.

As tests/support/ops/compile_lora.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.gated_delta.triton_cuda import gated_delta_kernel
from kernels.gated_delta.triton_cuda_chunks import (
    CHUNK,
    MAX_SHORT_TOKENS,
    NARROW_SCAN,
    SIDE,
    WIDE_SCAN,
    plan_kernel,
    prepare_kernel,
    scan_kernel,
)
from kernels.gated_delta.triton_cuda_decode import MAX_BLOCK_V, NUM_WARPS, gated_delta_decode_kernel

TARGET = GPUTarget("cuda", 90, 32)
# As pointers; all others are int32 numbers.
FLOATS = ("a_log_ptr", "dt_bias_ptr", "norm_ptr", "states_ptr", "total_ptr", "written_ptr", "erased_ptr", "scores_ptr")
INTS = ("starts_ptr", "lines_ptr", "sources_ptr", "ends_ptr")
# Nothing is known of where these begin.
UNALIGNED = ("b_ptr", "a_ptr")


def type_of(name: str) -> str:
    if not name.endswith("_ptr"):
        return "fp32" if name == "eps" else "i32"
    if name in FLOATS:
        return "*fp32"
    return "*i32" if name in INTS else "*i1" if name == "continued_ptr" else "*bf16"


def compile_one(kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of shared memory, registers of a thread, and bytes that it spills."""
    signature, known, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            known[(index,)] = constants[parameter.name]
            continue
        signature[parameter.name] = type_of(parameter.name)
        if parameter.name.endswith("_ptr") and parameter.name not in UNALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, known, attributes), target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return compiled.metadata.shared, int(found[1]), int(found[2])


def main() -> None:
    sizes = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128}
    whole, tile = {"BLOCK_K": 128, "BLOCK_V": 128}, {"BLOCK_K": 128, "BLOCK_V": 32}
    walk = {"BLOCK_K": 128, "BLOCK_V": MAX_BLOCK_V, "BLOCK_HEAD": 128, "BLOCK_SHARED": 2}
    decode = {"DEPENDENT_LAUNCH": True, "WIDTH": 4, **walk}
    chunks = {"CHUNK": CHUNK, "PRECISION": "tf32"}
    options = {"num_warps": 4}
    for kernel, constants, chosen in (
        (gated_delta_decode_kernel, decode, {"num_warps": NUM_WARPS, "launch_pdl": True}),
        (gated_delta_kernel, {"MAX_TOKENS": MAX_SHORT_TOKENS, **tile}, options),
        (plan_kernel, {"MAX_SHORT": MAX_SHORT_TOKENS, "CHUNK": CHUNK, "BLOCK": 128}, options),
        (prepare_kernel, {**chunks, **whole, "SIDE": SIDE}, options),
        (scan_kernel, {**chunks, **tile, **NARROW_SCAN}, options),
        (scan_kernel, {**chunks, **tile, **WIDE_SCAN}, options),
    ):
        print(kernel.__name__, *compile_one(kernel, {**sizes, **constants}, chosen), 32 * chosen["num_warps"])


if __name__ == "__main__":
    main()
