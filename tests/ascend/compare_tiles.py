"""Bytes moved and on-chip memory of the LoRA kernels for other tiles than the table's, without an NPU.

    .venv-ascend/bin/python -m tests.ascend.compare_tiles [--tokens 16 32 64] [--inputs 256 512] [--columns 128 256 512]

For each combination, and each mix of 64 tokens that the gate judges: bytes in both directions over the minimum, work
items (of 40 vector cores), estimated microseconds (gate/timing.py), and the part of the unified buffer that is planned
for; read from the compiled code for an Ascend910B4. A tile that does not fit is printed as such. Not verified on an
NPU.
"""

from __future__ import annotations

import argparse
import itertools

from kernels.lora.ascend import kernels
from kernels.lora.ascend.tiles import Regime, Tiles
from tests.ascend.cases.lora_cases import JUDGED, NUM_VECTOR_CORES, expand, shrink
from tests.ascend.gate import checks, report
from tests.ascend.gate.cases import REQUIRED_TARGETS, Case, Launch
from tests.ascend.gate.compiler import CompileError


def describe(name: str, launch: Launch) -> str:
    """One cell: bytes over the minimum, work items, estimated time, part of the unified buffer."""
    kernel = getattr(kernels, name)
    case = Case(name, kernel, {}, work_loop_depth=2)
    try:
        compiled = checks.compile_launch(case, launch, REQUIRED_TARGETS[0])
    except CompileError as error:
        return f"{str(error)[:28]:>28}"
    counts = checks.run_simulated(case, launch, compiled)
    checks.check_values(launch)
    assert launch.minimum_bytes is not None
    ratio = (counts.total("load_bytes") + counts.total("store_bytes")) / launch.minimum_bytes
    arguments = launch.arguments
    num_tiles = -(-arguments["num_tokens"] // arguments["T"])
    num_items = num_tiles * arguments.get("num_chunks", arguments["num_splits"])
    return f"{ratio:8.2f} {num_items:6d} {counts.estimate_us():6.1f} {report.read(compiled).fractions()['ub']:6.0%}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--inputs", type=int, nargs="+", default=[512])
    parser.add_argument("--columns", type=int, nargs="+", default=[128, 256, 512])
    chosen = parser.parse_args()
    print(f"{'kernel':16} {'tile':>12}  " + "".join(f"{mix:>30}" for mix in JUDGED))
    print(" " * 31 + "     x min  items     us     ub " * len(JUDGED))
    for name, make, blocks in (("lora_shrink_few", shrink, chosen.inputs), ("lora_expand_few", expand, chosen.columns)):
        for tokens, block in itertools.product(chosen.tokens, blocks):
            tiles = Tiles(tokens, (block,), (block,))
            regime = Regime("few", tiles, NUM_VECTOR_CORES)
            cells = [describe(name, make(step, regime, judge_traffic=True)) for step in JUDGED.values()]
            print(f"{name:16} {f'{tokens} x {block}':>12}  " + "".join(f"{cell:>30}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
