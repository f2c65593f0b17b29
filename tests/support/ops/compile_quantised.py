"""Compile the kernels of quantised weights for compute capability 9.0 on a machine without a GPU.

As tests/support/ops/compile_lora.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from kernels.linear.triton_cuda_configs import TABLE, TileConfig
from kernels.linear.triton_cuda_kernels import dequantise_kernel, quantised_linear_kernel
from tests.support.ops.compile_lora import compile_kernel

SIZES = (
    *("num_tokens", "in_features", "out_features", "num_columns", "x_stride", "ordered_stride", "num_code_tiles"),
    *("num_blocks", "num_groups", "blocks_per_split", "row_blocks_per_split", "num_splits", "first_row", "last_row"),
)
UNALIGNED = (
    *("num_tokens", "num_code_tiles", "num_blocks", "num_groups", "blocks_per_split", "row_blocks_per_split"),
    *("num_splits", "first_row", "last_row"),
)
# Type of the codes, whether they have a table and offsets, inputs of a group.
FORMS = {
    "fp8": ("fp8e4nv", False, False, 0),
    "fp8 blocks": ("fp8e4nv", False, False, 128),
    "int8": ("i8", False, False, 0),
    "int4": ("u8", False, True, 128),
    "nf4": ("u8", True, False, 64),
}


def compile_form(form: str, config: TileConfig, dtype: str = "bf16") -> list[str]:
    """The product and the dequantisation."""
    codes, has_table, has_offsets, group = FORMS[form]
    pointers = dict.fromkeys(("x_ptr", "ordered_ptr", "bias_ptr", "rows_ptr", "out_ptr"), f"*{dtype}")
    pointers |= dict.fromkeys(("scales_ptr", "offsets_ptr", "table_ptr", "partials_ptr"), "*fp32")
    types = pointers | {"codes_ptr": f"*{codes}", "counters_ptr": "*i32", **dict.fromkeys(SIZES, "i32")}
    constants = {
        "IS_NIBBLES": codes == "u8",
        "HAS_TABLE": has_table,
        "HAS_OFFSETS": has_offsets,
        "GROUP": group,
        "BLOCK": min(group or 128, 128),
        "IS_INTERPRETED": False,
        "DEPENDENT_LAUNCH": True,
    }
    product = {"HAS_BIAS": False, "IS_EVEN": True, "BLOCK_ROWS": 64, "BLOCK_OUT": config.block_out}
    product |= {"BLOCK_TOKENS": config.block_tokens, "STAGES": config.stages, "bias_ptr": None}
    options = {"num_warps": config.num_warps, "launch_pdl": True, "enable_fp_fusion": False}
    found = compile_kernel(quantised_linear_kernel, types, constants | product, options, UNALIGNED)
    dequantised = {"HAS_ORDER": False, "BLOCK_OUT": 32, "order_ptr": None}
    return found + compile_kernel(dequantise_kernel, types, constants | dequantised, options, UNALIGNED)


if __name__ == "__main__":
    foreign = []
    for form in FORMS:
        bits = 4 if FORMS[form][0] == "u8" else 8
        for config in dict.fromkeys(TABLE[bits].values()):
            print(form, config)
            foreign += compile_form(form, config)
    print("\n".join(foreign))
    sys.exit(bool(foreign))
