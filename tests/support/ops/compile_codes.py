"""Compile the product of quantised weights for compute capability 9.0 on a machine without a GPU, in each form and each
configuration for up to 64 tokens; print the form, the configuration, and the shared memory in bytes.

Fails where registers do not reach, where the codes' values pass through shared memory, and on a descriptor of shared
memory that comes from nowhere (tests/support/ops/sass.py): the first two take half as long again.

Run as a script, without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from kernels.linear.quantised import NF4, Quantised
from kernels.linear.triton_cuda_configs import TABLE, TileConfig, TiledCodes, configs_for, tiled_codes
from kernels.linear.triton_cuda_kernels import quantised_linear_kernel
from tests.support.ops.compile_lora import compiled_for_hopper
from tests.support.ops.sass import disassemble, foreign_descriptors

INPUTS, OUTPUTS, MAX_TOKENS = 512, 64, 64
POINTERS = {
    **dict.fromkeys(("x_ptr", "ordered_ptr", "rows_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("scales_ptr", "partials_ptr"), "*fp32"),
    **dict.fromkeys(("codes_ptr", "offsets_ptr"), "*i32"),
}
FORMS = {
    "fp8": (torch.float8_e4m3fn, INPUTS),
    "fp8 in blocks": (torch.float8_e4m3fn, 128),
    "int8": (torch.int8, INPUTS),
    "int4": (torch.uint8, 128),
    "nf4": (torch.uint8, 64),
}


def weight_of(form: str) -> TiledCodes:
    dtype, group = FORMS[form]
    columns = INPUTS // 2 if dtype == torch.uint8 else INPUTS
    codes = torch.zeros(OUTPUTS, columns, dtype=torch.uint8).view(dtype)
    table = torch.tensor(NF4) if form == "nf4" else None
    tiled = tiled_codes(
        Quantised(codes, torch.ones(OUTPUTS, INPUTS // group), None, table, group, None), torch.bfloat16
    )
    assert tiled is not None
    return tiled


def compile_product(tiled: TiledCodes, config: TileConfig) -> int:
    """Bytes of shared memory."""
    constants: dict[str, Any] = {
        **tiled.constants(),
        "TABLE": tiled.table,
        "SCALES_PRODUCTS": tiled.scales_products,
        "CODES_OF_GROUP": tiled.codes_of_group,
        "HAS_BIAS": False,
        "IS_EVEN": True,
        "BLOCK_ROWS": 64,
        "BLOCK_OUT": config.block_out,
        "BLOCK_TOKENS": config.block_tokens,
        "STAGES": config.stages,
        "IS_INTERPRETED": False,
        "DEPENDENT_LAUNCH": True,
        "bias_ptr": None,
        **({} if tiled.offsets is not None else {"offsets_ptr": None}),
    }
    kernel = quantised_linear_kernel
    types = {name: POINTERS.get(name, "i32") for name in kernel.arg_names}
    options = {"num_warps": config.num_warps, "launch_pdl": True, "enable_fp_fusion": False}
    compiled = compiled_for_hopper(kernel, types, constants, options, kernel.do_not_specialize)
    sass = disassemble(compiled.asm["cubin"])
    assert "HGMMA" in sass, "the product is not one of Hopper's"
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers do not reach"
    assert not re.search(r"ttg\.local_alloc %", compiled.asm["ttgir"]), "values pass through shared memory"
    assert not foreign_descriptors(sass)
    return compiled.metadata.shared


if __name__ == "__main__":
    for form in FORMS:
        weight = weight_of(form)
        for tokens in (most for most in TABLE if most <= MAX_TOKENS):
            for config in dict.fromkeys((*configs_for(tokens, 4), *configs_for(tokens, 1))):
                print(form.replace(" ", "-"), config, compile_product(weight, config))
