"""CUDA graphs behind the protocol of `graphs.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from service.models.step_batch import StepBatch


class CudaGraph:
    """See `captured_steps.Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def update(self, batch: StepBatch) -> None:
        """Kernels read all from the batch's tensors."""

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs:
    """Graphs of one device. All share one pool of memory: only one of them runs at a time, in the order of the steps,
    and nothing of a step is read after the next has begun but its logits, which lie outside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        # cuBLAS makes its handle and its workspace at first use, which a capture does not allow.
        with torch.cuda.stream(self._stream):
            small = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
            torch.mm(small, small)
        torch.cuda.synchronize(device)

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        """See `captured_steps.Graphs`. The thread that reads adapters may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        # The outer context brings the stream of the steps back even where the end of a capture raises.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        return CudaGraph(graph)
