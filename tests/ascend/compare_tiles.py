"""Estimated time, bytes and on-chip memory of the LoRA kernels with other tiles than the table's, without an NPU.

    .venv-ascend/bin/python -m tests.ascend.compare_tiles [--kernels shrink expand] [--tokens 8 16 32 64]
        [--inputs 512 256 128] [--columns 256 128]

For each kernel whose name has one of these words, each number of tokens, and each mix that the gate judges:
microseconds (gate/timing.py), bytes in both directions over the minimum, programs' work items (of 40 vector cores), and
the part of the unified buffer that is planned for; read from the compiled code for an Ascend910B4. Then the worst time
and the mean. Blocks of inputs and columns are the table's unless told, and so are the splits that an expand meets. A
tile that does not fit is printed as such. Not verified on an NPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from kernels.lora.ascend import kernels
from kernels.lora.ascend.tiles import TABLES, Regime
from kernels.lora_window import triton_ascend_kernels
from tests.ascend.cases import lora_cases, window_cases
from tests.ascend.gate import checks, report
from tests.ascend.gate.cases import REQUIRED_TARGETS, Case, Launch
from tests.ascend.gate.compiler import CompileError

_JUDGED = {
    "lora_shrink_few": (kernels, lora_cases.shrink, lora_cases.JUDGED),
    "lora_expand_few": (kernels, lora_cases.expand, lora_cases.JUDGED),
    "lora_expand_window_few": (triton_ascend_kernels, window_cases.expand, window_cases.JUDGED_EXPANDS),
    "swiglu_window_few": (triton_ascend_kernels, window_cases.swiglu, window_cases.JUDGED_GATES),
}


def measure(kernel: Any, launch: Launch) -> tuple[float, str]:
    """Estimated microseconds; and printed with them: bytes over the minimum, items, part of the unified buffer."""
    case = Case(kernel.fn.__name__, kernel, {}, work_loop_depth=2)
    compiled = checks.compile_launch(case, launch, REQUIRED_TARGETS[0])
    counts = checks.run_simulated(case, launch, compiled)
    checks.check_values(launch)
    assert launch.minimum_bytes is not None
    ratio = (counts.total("load_bytes") + counts.total("store_bytes")) / launch.minimum_bytes
    us, used = counts.estimate_us(), report.read(compiled).fractions()["ub"]
    return us, f"{us:8.2f} us {ratio:8.2f} x min {_num_items(launch.arguments):6d} items {used:6.0%}"


def _num_items(arguments: Any) -> int:
    """Work items of the launch; those of a shrink, for the ranks that every adapter has."""
    num_tiles = -(-arguments["num_tokens"] // arguments["T"])
    if "size" in arguments:  # of the gate
        return num_tiles * -(-arguments["size"] // arguments["chunk_columns"])
    return num_tiles * (arguments.get("num_chunks") or arguments["num_splits"] * arguments["num_slices"])


def main() -> None:
    """Print the table."""
    table = TABLES[0].few
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=["shrink", "expand", "swiglu"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--inputs", type=int, nargs="+", default=table.inputs)
    parser.add_argument("--columns", type=int, nargs="+", default=table.columns)
    chosen = parser.parse_args()
    for name, (module, make, judged) in _JUDGED.items():
        if not any(word in name for word in chosen.kernels):
            continue
        for tokens in chosen.tokens:
            tile = {"shrink_tokens" if "shrink" in name else "expand_tokens": tokens}
            tiles = dataclasses.replace(table, inputs=tuple(chosen.inputs), columns=tuple(chosen.columns), **tile)
            regime = Regime("few", tiles, lora_cases.NUM_VECTOR_CORES)
            found: list[float] = []
            for mix, step in judged.items():
                try:
                    us, line = measure(getattr(module, name), make(step, regime, judge_traffic=True))
                except CompileError as error:
                    line = str(error)[:60]
                else:
                    found.append(us)
                print(f"{name:23} {tokens:3} tokens, {mix:22} {line}", flush=True)
            if found:
                print(f"{name:23} {tokens:3} tokens, worst {max(found):.1f} us, mean {sum(found) / len(found):.2f} us")


if __name__ == "__main__":
    main()
