"""How much memory captured steps will take: measured at the start on a few of them, before the KV cache is sized.

A trial runner has the model, its rows and tables as wide as they will be, but a KV cache of a few blocks: what a graph
takes depends on a step's sizes alone. Its steps are captured and then let go, since graphs hold the addresses of the
caches. Graphs share one pool of memory, and those that are captured first are the largest: of each kind of step the
first may make the pool grow, and every graph takes something for its own nodes. Not verified on
an NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from service.engine.ipc.config import EngineConfig
from service.engine.loras.interfaces import Rows
from service.engine.model.padding import StepSizes
from service.engine.model.runner import ModelRunner
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.step.launcher import StepLauncher

# Blocks of a trial's caches: the null block, and one.
TRIAL_BLOCKS = 2


def measure_graphs(trial: ModelRunner, rows: Rows | None, config: EngineConfig, free_bytes: Callable[[], int]) -> int:
    """Bytes that the graphs of all sizes will take together. The trial's kernels are compiled; its graphs are its own.
    Where a capture fails, that of the engine will, and nothing is captured from then on.

    free_bytes  of the device, now
    """
    launcher = StepLauncher(trial, rows, BlockPool(trial.capacity.num_blocks), config, keeps_tokens=False)
    first, later = trial.sizes_to_capture()
    launcher.run_eagerly(first[0])  # what ops make at their first call is no graph's
    return estimate_bytes([*first, *later], trial.captured.max_graphs, launcher.capture, free_bytes)


def estimate_bytes(
    sizes: Sequence[StepSizes], num_graphs: int, capture: Callable[[StepSizes], None], free_bytes: Callable[[], int]
) -> int:
    """Bytes of num_graphs graphs, from two of each kind of step: the largest, which bring the pool, and the next.

    sizes    of all that are to be captured, the largest of each kind first
    capture  captures steps of one size
    """
    kinds: dict[tuple[bool, bool, bool], list[StepSizes]] = {}
    for one in sizes:
        kinds.setdefault((one.all_decode, one.has_lora, one.window_rows > 0), []).append(one)
    before = free_bytes()
    for kind in kinds.values():
        capture(kind[0])
    with_pool = free_bytes()
    pairs = [kind[1] for kind in kinds.values() if len(kind) > 1]
    for one in pairs:
        capture(one)
    # Without pairs each kind has one size, and the largest stand for all.
    each = (with_pool - free_bytes()) / len(pairs) if pairs else (before - with_pool) / len(kinds)
    return max(0, round(before - with_pool + max(0, num_graphs - len(kinds)) * max(each, 0)))
