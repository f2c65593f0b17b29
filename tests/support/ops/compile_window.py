"""Compile the window's Triton kernels for compute capability 9.0 on a machine without a GPU; print shared memory bytes.

As tests/support/ops/compile_lora.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from kernels.lora_window.triton_cuda_configs import TABLE, TokenConfig, WindowTileConfig
from kernels.lora_window.triton_cuda_tiles import lora_expand_tile_kernel, swiglu_tile_kernel
from kernels.lora_window.triton_cuda_tokens import lora_expand_token_kernel, swiglu_token_kernel
from tests.support.ops.compile_lora import compile_kernel

MAPS = dict.fromkeys(("token_segment_ptr", "places_ptr", "first_rows_ptr", "ranks_ptr"), "*i32")
SIZES = dict.fromkeys(("out_features", "product_stride", "num_tokens", "num_turns", "num_places", "size"), "i32")


def constants_of(chosen: WindowTileConfig | TokenConfig, even: bool) -> dict[str, int | bool]:
    tile = {"BLOCK_M": chosen.block_m, "STAGES": chosen.stages} if isinstance(chosen, WindowTileConfig) else {}
    return {**tile, "BLOCK_N": chosen.block_n, "EVEN_N": even, "DEPENDENT_LAUNCH": True}


def options_of(chosen: WindowTileConfig | TokenConfig) -> dict[str, int | bool | None]:
    return {"num_warps": chosen.num_warps, "launch_pdl": True, "maxnreg": chosen.max_registers}


def compile_expand(tile: WindowTileConfig | TokenConfig, num_slices: int, even: bool, dtype: str = "bf16") -> list[str]:
    return compile_kernel(
        lora_expand_tile_kernel if isinstance(tile, WindowTileConfig) else lora_expand_token_kernel,
        {
            "product_ptr": f"*{dtype}",
            "b_ptrs": (f"*{dtype}",) * num_slices,
            "scalings_ptr": "*fp32",
            "widths": ("i32",) * num_slices,
            "slice_starts": ("i32",) * num_slices,
            **MAPS,
            **SIZES,
        },
        {"NUM_SLICES": num_slices, **constants_of(tile, even)},
        options_of(tile),
        ("num_tokens", "num_turns")
        if even
        else ("num_tokens", "num_turns", "widths", "slice_starts", "out_features", "product_stride"),
    )


def compile_swiglu(tile: WindowTileConfig | TokenConfig, even: bool, dtype: str = "bf16") -> list[str]:
    pointers = dict.fromkeys(("product_ptr", "gate_b_ptr", "up_b_ptr", "out_ptr"), f"*{dtype}")
    return compile_kernel(
        swiglu_tile_kernel if isinstance(tile, WindowTileConfig) else swiglu_token_kernel,
        {**pointers, "scalings_ptr": "*fp32", **MAPS, **SIZES},
        constants_of(tile, even),
        options_of(tile),
        ("num_tokens", "num_turns") if even else ("num_tokens", "num_turns", "size", "product_stride"),
    )


if __name__ == "__main__":
    found = []
    for entry in dict.fromkeys(TABLE.values()):
        for chosen in (entry.expand.token, entry.expand.tile):
            for num_slices, even in ((1, True), (3, True), (3, False)):
                found += compile_expand(chosen, num_slices, even)
            found += compile_expand(chosen, 1, True, "fp16")
        for chosen in (entry.swiglu.token, entry.swiglu.tile):
            for even in (True, False):
                found += compile_swiglu(chosen, even)
    if found:
        sys.exit("descriptors that come from nowhere:\n" + "\n".join(found))
