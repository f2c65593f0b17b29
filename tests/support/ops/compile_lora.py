"""Compile the Triton LoRA kernels for compute capability 9.0 on a machine without a GPU; print shared memory bytes.

Fails on a descriptor of shared memory that comes from nowhere, see tests/support/ops/sass.py.

Run as a script, without TRITON_INTERPRET: which of the two Triton is, is settled when it is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.lora.cuda import one_token
from kernels.lora.cuda.configs import TABLES, ExpandConfig, OneTokenExpand, OneTokenShrink, ShrinkConfig
from kernels.lora.cuda.expand import lora_expand_kernel
from kernels.lora.cuda.shrink import lora_embedding_kernel, lora_shrink_kernel
from kernels.lora.triton_cuda import fit_columns
from tests.support.ops.sass import disassemble, foreign_descriptors

DIVISIBLE_BY_16 = [["tt.divisibility", 16]]
MAPS = dict.fromkeys(("starts_ptr", "places_ptr", "first_rows_ptr", "num_segments_ptr", "ranks_ptr"), "*i32")
STRIDES = dict.fromkeys(("h_split_stride", "h_slice_stride", "h_token_stride", "num_places"), "i32")
NUM_SLICES = 2
COLUMNS = ("widths", "slice_starts", "out_stride")
# One part, whole blocks, parts that are no powers of two, parts of several blocks.
ONE_TOKEN_FEATURES = (64, 2048, 4096, 14336, 17408)


def compiled_for_hopper(
    kernel: Any,
    types: dict[str, Any],
    constants: dict[str, Any],
    options: dict[str, Any],
    unaligned: Collection[str] = (),
) -> Any:
    """Triton's compiled kernel for arguments of these types, pointers and sizes divisible by 16 but for those named
    `unaligned`."""
    signature, attributes, values = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(index,)] = "constexpr", constants[name]
            continue
        signature[name] = types[name]
        paths = [(index, i) for i in range(len(types[name]))] if isinstance(types[name], tuple) else [(index,)]
        attributes.update(dict.fromkeys(paths, [] if name in unaligned else DIVISIBLE_BY_16))
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_kernel(
    kernel: Any,
    types: dict[str, Any],
    constants: dict[str, Any],
    options: dict[str, Any],
    unaligned: Collection[str] = (),
) -> list[str]:
    """Compile as `compiled_for_hopper` does.

    Prints name and shared memory; returns the instructions whose descriptors come from nowhere. That the search would
    find one is seen by spoiling the first descriptor of the code, if there is any.
    """
    compiled = compiled_for_hopper(kernel, types, constants, options, unaligned)
    print(kernel.__name__, compiled.metadata.shared)
    sass = disassemble(compiled.asm["cubin"])
    if "wgmma.mma_async" in compiled.asm["ptx"]:
        first = re.search(r"^.*HGMMA.*gdesc\[UR(\d+)\]", sass, re.MULTILINE)
        assert first is not None, "wgmma in PTX, but no HGMMA was found in the machine code"
        # The descriptor of the right operand lies in the second two registers, or in the first if it is alone.
        spoiling = "".join(f"/*0000*/ UMOV UR{int(first[1]) + i}, URZ ;\n" for i in (0, 2))
        assert foreign_descriptors(sass[: first.start()] + spoiling + sass[first.start() :])
    return foreign_descriptors(sass)


def compile_shrink(config: ShrinkConfig, unaligned: Collection[str] = ()) -> list[str]:
    """The shrink of a bfloat16 model with an input width of 4096, or one that is no multiple of anything."""
    return compile_kernel(
        lora_shrink_kernel,
        {
            "x_ptr": "*bf16",
            "a_ptrs": ("*bf16",) * NUM_SLICES,
            "h_ptr": "*fp32" if config.num_splits > 1 else "*bf16",
            "scalings_ptr": "*fp32",
            "in_features": "i32",
            "x_stride": "i32",
            "a_stride": "i32",
            **MAPS,
            **STRIDES,
        },
        {
            "row_index_ptr": None,
            "NUM_SLICES": NUM_SLICES,
            "NUM_SPLITS": config.num_splits,
            "MAX_SEGMENTS": 64,
            "BLOCK_M": config.block_m,
            "BLOCK_K": config.block_k,
            "BLOCKS_PER_SPLIT": 4096 // (config.num_splits * config.block_k),
            "BLOCK_R": config.block_r,
            "GROUPS": config.groups,
            "STAGES": config.stages,
            "EVEN_K": not unaligned,
            "HAS_INDEX": False,
            "DEPENDENT_LAUNCH": True,
        },
        {"num_warps": config.num_warps, "maxnreg": config.max_registers, "launch_pdl": True},
        unaligned,
    )


def compile_expand(
    config: ExpandConfig,
    num_splits: int,
    h_type: str = "",
    unaligned: Collection[str] = (),
    dtype: str = "bf16",
    num_slices: int = NUM_SLICES,
    **constants: Any,
) -> list[str]:
    """The expand into slices of even width, or of widths that are no multiple of anything."""
    given = {"row_index_ptr": "*i64"} if constants.get("HAS_INDEX") else {}
    return compile_kernel(
        lora_expand_kernel,
        {
            "h_ptr": h_type or ("*fp32" if num_splits > 1 else f"*{dtype}"),
            "b_ptrs": (f"*{dtype}",) * num_slices,
            "out_ptr": f"*{dtype}",
            **given,
            "widths": ("i32",) * num_slices,
            "slice_starts": ("i32",) * num_slices,
            "out_stride": "i32",
            **MAPS,
            **STRIDES,
        },
        {
            **({} if given else {"row_index_ptr": None}),
            "NUM_SLICES": num_slices,
            "NUM_SPLITS": num_splits,
            "MAX_SEGMENTS": 64,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_N_TALL": config.block_n_tall,
            "BLOCK_N_TALLEST": config.of_tallest[0],
            "STAGES": config.stages,
            "TALLEST_STAGES": config.of_tallest[1],
            "EVEN_N": not unaligned,
            "OVERWRITE": False,
            "HAS_INDEX": False,
            "DEPENDENT_LAUNCH": True,
            **constants,
        },
        {"num_warps": config.num_warps, "maxnreg": config.max_registers, "launch_pdl": True},
        unaligned,
    )


def compile_one_token(shrink: OneTokenShrink, expand: OneTokenExpand) -> None:
    """Both kernels of steps of one token: for inputs that are shared out in every way, and each option once."""
    maps = dict.fromkeys(("token_segment_ptr", "places_ptr", "first_rows_ptr", "ranks_ptr"), "*i32")

    def compile_both(in_features: int, block_n: int, dtype: str = "bf16", num_splits: int = 0, **options: Any) -> None:
        given = {"row_index_ptr": "*i32"} if options.get("HAS_INDEX") else {}
        num_splits = num_splits or shrink.splits(in_features)
        part = shrink.part(in_features, num_splits)
        flags = {"NUM_SLICES": NUM_SLICES, "NUM_SPLITS": num_splits, "HAS_INDEX": False, "DEPENDENT_LAUNCH": True}
        constants = ({} if given else {"row_index_ptr": None}) | flags | options
        overwrite = constants.pop("OVERWRITE", False)
        compile_kernel(
            one_token.lora_shrink_one_token_kernel,
            {
                "x_ptr": f"*{dtype}",
                "a_ptrs": (f"*{dtype}",) * NUM_SLICES,
                "h_ptr": "*fp32" if num_splits > 1 else f"*{dtype}",
                "scalings_ptr": "*fp32",
                "in_features": "i32",
                "x_stride": "i32",
                "a_stride": "i32",
                **given,
                **maps,
                **STRIDES,
            },
            constants | {"PART": part, "BLOCK_K": one_token.block_k(part)},
            {"num_warps": shrink.num_warps, "launch_pdl": True},
        )
        compile_kernel(
            one_token.lora_expand_one_token_kernel,
            {
                "h_ptr": "*fp32",
                "b_ptrs": (f"*{dtype}",) * NUM_SLICES,
                "out_ptr": f"*{dtype}",
                "widths": ("i32",) * NUM_SLICES,
                "slice_starts": ("i32",) * NUM_SLICES,
                "out_stride": "i32",
                **given,
                **maps,
                **STRIDES,
            },
            constants | {"BLOCK_S": triton.next_power_of_2(num_splits), "BLOCK_N": block_n, "OVERWRITE": overwrite},
            {"num_warps": expand.num_warps, "launch_pdl": True},
            COLUMNS if overwrite else (),
        )

    for in_features in ONE_TOKEN_FEATURES:
        compile_both(in_features, expand.block_n[-1])
    compile_both(4096, expand.block_n[0], "fp32", HAS_INDEX=True)
    compile_both(4096, expand.block_n[0], "fp16", num_splits=1, OVERWRITE=True)


def compile_embedding() -> None:
    """The embedding's gather."""
    compile_kernel(
        lora_embedding_kernel,
        {
            "token_ids_ptr": "*i64",
            "a_ptr": "*bf16",
            "h_ptr": "*fp32",
            "token_segment_ptr": "*i32",
            "scalings_ptr": "*fp32",
            "a_stride": "i32",
            **MAPS,
            **STRIDES,
        },
        {"row_index_ptr": None, "BLOCK_R": 16, "HAS_INDEX": False},
        {"num_warps": 4},
    )


if __name__ == "__main__":
    found = []
    for entry in dict.fromkeys(config for table in TABLES.values() for config in table):
        if isinstance(entry.shrink, OneTokenShrink):
            compile_one_token(entry.shrink, entry.expand)
            continue
        splits = entry.shrink.num_splits
        found += compile_shrink(entry.shrink)
        found += compile_expand(entry.expand, splits)
        found += compile_expand(entry.expand, 1, "*fp32")  # after the embedding's gather
        if entry.shrink.block_m >= 64:  # others are not multiplied by wgmma
            found += compile_shrink(entry.shrink, ("in_features", "x_stride", "a_stride"))
            found += compile_expand(fit_columns(entry.expand, 1), splits, unaligned=COLUMNS)
            # Widths that are multiples of 16, but not of a block, with each further option once.
            found += compile_expand(entry.expand, splits, dtype="fp16", num_slices=3, EVEN_N=False, HAS_INDEX=True)
            found += compile_expand(entry.expand, splits, num_slices=1, EVEN_N=False, OVERWRITE=True)
    compile_embedding()
    if found:
        sys.exit("descriptors that come from nowhere:\n" + "\n".join(found))
