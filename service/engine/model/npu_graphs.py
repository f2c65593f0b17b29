"""NPU graphs behind the protocol of `graphs.py`. Not verified on an NPU.

Fused attention takes the sequences' lengths from the host, so a captured call would keep those of its capture.
`auto_dispatch_capture` has torch_npu record each such call as a task that waits for an event of its own;
`NPUGraph.update` issues the calls again with other lengths, on a stream of torch_npu's, and records these events. Hence

- each replay needs one update: without it, it would wait for ever. `CapturedSteps.run` calls the two in turn;
- a replay does not overtake its update: each of its tasks waits for the event that the update records;
- an update must not overtake the replay before it, which may still have to read what the update rewrites: nobody but
  this module sees to that. The stream of the updates waits for an event behind each replay, the host does not.

One pool of memory and one stream of captures serve all graphs: they run one at a time, in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels.ascend_runtime import torch_npu
from kernels.platform import DECODE_REGIMES, contract
from service.models.step_batch import StepBatch


class NpuGraph:
    """See `captured_steps.Graph`."""

    def __init__(self, graph: Any, graphs: NpuGraphs) -> None:
        self._graph = graph
        self._graphs = graphs

    def update(self, batch: StepBatch) -> None:
        """Hand the step's lengths to its attention calls, once the replay before has ended on the device."""
        updates = contract("paged_attention", batch.token_ids.device, DECODE_REGIMES).updates
        assert updates is not None, "captured steps have an attention whose calls can be updated"
        if self._graphs.replayed is not None:
            self._graph.graph_dispatch_mode.update_stream.wait_event(self._graphs.replayed)
        self._graph.update(cpu_update_input=[dict(updates(batch.attention))])

    def replay(self) -> None:
        self._graph.replay()
        self._graphs.note_replay()


class NpuGraphs:
    """Graphs of one device. `replayed`: an event behind the latest replay of any of them."""

    def __init__(self, device: torch.device) -> None:
        npu = torch_npu().npu
        self._pool = npu.graph_pool_handle()
        self._stream = npu.Stream(device)
        self.replayed: Any = None

    def capture(self, work: Callable[[], None]) -> NpuGraph:
        """See `captured_steps.Graphs`. The thread that reads adapters may use the device meanwhile."""
        npu = torch_npu().npu
        graph = npu.NPUGraph()
        # Copies into the step's inputs are under way on the stream of the steps.
        npu.current_stream().synchronize()
        # The outer context brings the stream of the steps back even where the end of a capture raises.
        with (
            npu.stream(self._stream),
            npu.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                auto_dispatch_capture=True,
                capture_error_mode="thread_local",
            ),
        ):
            work()
        return NpuGraph(graph, self)

    def note_replay(self) -> None:
        """Leave an event behind the replay that was just asked for. A fresh one: the last may still be waited for."""
        npu = torch_npu().npu
        self.replayed = npu.Event()
        self.replayed.record(npu.current_stream())
