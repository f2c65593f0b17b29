"""Compile the Triton paged attention for compute capability 9.0 on a machine without a GPU; print shared memory bytes.

Run as a script, without TRITON_INTERPRET: which of the two Triton is, is settled when it is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import triton

from kernels.paged_attention import triton_cuda_kernels as kernels
from kernels.paged_attention.triton_cuda_configs import MAX_SPLITS, TABLES, Heads, TileConfig, TileKind, tile_for
from tests.support.ops.compile_lora import compile_kernel

NAMES = {2: "bf16", 4: "fp32"}
POINTERS = dict.fromkeys(("starts_ptr", "kv_lens_ptr", "table_ptr"), "*i32")
INTEGERS = dict.fromkeys(
    ("num_tokens", "num_sequences", "num_splits", "min_split_blocks", "window", "table_stride", "q_stride"), "i32"
)


def compile_attention(
    tile: TileConfig,
    heads: Heads,
    block_size: int,
    *,
    is_split: bool,
    has_cap: bool = False,
    has_sinks: bool = False,
    fixed_blocks: int = 0,
    one_token: bool = False,
    loops: bool = False,
) -> None:
    """One variant; the sum of the splits with it."""
    name, head_dim = NAMES[heads.element_bytes], heads.head_dim
    constants = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    target = "*fp32" if is_split else f"*{name}"
    compile_kernel(
        kernels.paged_attention_kernel,
        {
            **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{name}"),
            "out_ptr": target,
            "lse_ptr": "*fp32",
            "scale": "fp32",
            "cap": "fp32",
            "sinks_ptr": "*fp32",
            **POINTERS,
            **INTEGERS,
        },
        {
            **constants,
            **({} if is_split else {"lse_ptr": None}),
            **({} if has_sinks else {"sinks_ptr": None}),
            "KV_HEADS": heads.kv_heads,
            "GROUPS": heads.num_heads // heads.kv_heads,
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.stages,
            "HAS_WINDOW": heads.sliding_window is not None,
            "HAS_CAP": has_cap,
            "HAS_SINKS": has_sinks,
            "SPLIT": is_split,
            "PRECISION": "ieee" if name == "fp32" else "tf32",
            "FIXED_BLOCKS": fixed_blocks,
            "ONE_TOKEN": one_token,
            "LOOPS": loops,
            "DEPENDENT_LAUNCH": True,
        },
        {"num_warps": tile.num_warps, "num_stages": 3, "enable_fp_fusion": not fixed_blocks},
    )
    if is_split and fixed_blocks:
        types = dict.fromkeys(("partial_ptr", "maxima_ptr", "sinks_ptr"), "*fp32")
        compile_kernel(
            kernels.add_parts_kernel,
            {**types, "out_ptr": f"*{name}", "num_splits": "i32"},
            {**constants, **({} if has_sinks else {"sinks_ptr": None}), "HAS_SINKS": has_sinks, "AHEAD": 4},
            {"num_warps": 1, "enable_fp_fusion": False},
        )
    elif is_split:
        compile_kernel(
            kernels.sum_splits_kernel,
            {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": f"*{name}", "num_splits": "i32"},
            {**constants, "MAX_SPLITS": MAX_SPLITS, "AHEAD": 8, "DEPENDENT_LAUNCH": True},
            {"num_warps": 1},
        )


KINDS: tuple[TileKind, ...] = ("decode", "mixed", "chunks")

if __name__ == "__main__":
    # Every tile of the table at its largest head_dim, and an awkward head_dim; pages below and above a block of keys.
    table = TABLES["any"]
    for element_bytes, head_dim in table.decode:
        for kind in KINDS:
            heads = Heads(32, 8, head_dim, element_bytes, None)
            tile, form = tile_for(table, heads, kind), {"one_token": kind == "decode", "loops": kind == "mixed"}
            compile_attention(tile, heads, 16, is_split=kind != "chunks", **form)
        for is_split in (True, False):
            tile = tile_for(table, heads, "mixed")
            form = {"fixed_blocks": 256 // tile.block_n, "loops": is_split}
            compile_attention(tile, heads, 16, is_split=is_split, **form)
    for kind in KINDS:
        heads = Heads(6, 2, 80, 2, 1024)
        tile = tile_for(table, heads, kind)
        compile_attention(tile, heads, 128, is_split=kind != "decode", has_cap=True, has_sinks=True)
