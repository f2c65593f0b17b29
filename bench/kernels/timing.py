"""Time an op inside a CUDA graph, its arguments rotated so that the L2 cache does not hold them.

    microseconds = time_graph([functools.partial(op, *arguments) for arguments in sets])

One callable per set of inputs, weights, states and outputs; `num_sets` says how many. Building maps on the host is not
part of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

ROTATED_BYTES = 300_000_000
# What an H200 reaches: the floors of the rows.
FLOOR_BYTES_PER_SECOND, FLOOR_FLOP_PER_SECOND = 4.3e12, 790e12
MAX_SETS = 400
NUM_REPLAYS = 30


def num_sets(bytes_per_set: int) -> int:
    """Sets that fill ROTATED_BYTES, at most MAX_SETS."""
    return max(1, min(MAX_SETS, -(-ROTATED_BYTES // bytes_per_set)))


def time_graph(calls: Sequence[Callable[[], object]], num_replays: int = NUM_REPLAYS) -> float:
    """Median microseconds per call over the replays of a graph of max(20, len(calls)) calls, one set after another."""
    num_calls = max(20, len(calls))
    torch.cuda.synchronize()  # the arguments were filled on another stream than the one that is timed
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(num_calls):
            calls[index % len(calls)]()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_replays)]
    with torch.cuda.stream(stream):
        for _ in range(3):
            graph.replay()
        for start, stop in pairs:
            start.record(stream)
            graph.replay()
            stop.record(stream)
    torch.cuda.synchronize()
    milliseconds = sorted(start.elapsed_time(stop) for start, stop in pairs)
    return milliseconds[num_replays // 2] * 1e3 / num_calls


def copy_microseconds(num_bytes: int) -> float:
    """`out.copy_(x)` over num_bytes of bf16 read and as many written, rotated alike: the ceiling of this machine."""
    sets = [
        (torch.randn(num_bytes // 2, device="cuda").bfloat16(), torch.empty(num_bytes // 2, device="cuda").bfloat16())
        for _ in range(max(3, num_sets(2 * num_bytes)))
    ]
    return time_graph([functools.partial(out.copy_, x) for x, out in sets])
