"""Steps that are captured once for their sizes and replayed with any contents, so that the host launches them at once.

A step is captured when its sizes are met first, or before the first request (`Engine.capture_steps`), and kept for the
life of the engine, up to the number that memory was kept for. Whatever a launcher decides on the host follows from the
sizes, and all inputs lie where they lay: nothing else of the host runs at a replay. Larger steps, and those that want
logits of many tokens or hidden states, run eagerly; so do all where an op's implementation looks at the host's view of
a step, or where `eager` asks for it, and those that were not captured yet when a capture failed.
Both ways take the same padded sizes and the same kernels, so their results are equal bit for bit.

Who owns: the graphs own the memory of what lies between their inputs and the logits, which are written to one buffer
that all share. A graph holds no lock and no file; it goes with the process.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from kernels.platform import DECODE_REGIMES, IMPLEMENTATIONS, contract, in_use
from service.engine.model.padding import StepSizes
from service.models.step_batch import StepBatch

log = logging.getLogger(__name__)

# A capture takes as long as a few steps, and what replaces it meanwhile a tenth longer than its replay.
MEETINGS_WORTH_A_CAPTURE = 8
LARGE = "more tokens than are captured"
MANY_LOGITS = "logits of many tokens"
TOO_MANY = "too many sizes"
FAILED = "a capture failed"
UPDATE_FAILED = "an update of a captured step failed"
HIDDEN = "hidden states are asked for"
EXPERTS = "adapters of experts"


class Graph(Protocol):
    """One captured step."""

    def update(self, batch: StepBatch) -> None:
        """Take over what the device does not read from the batch's tensors (on NVIDIA GPUs there is nothing such)."""

    def replay(self) -> None:
        """Run the step on what its tensors hold now, behind all that was asked of the device before."""


class Graphs(Protocol):
    """A device's way to capture."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what `work` asks of the device; nothing of it need have run. All its kernels are compiled."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Whatever is freed on a device while it captures, a graph or an event that lay in a cycle, ends the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CapturedSteps:
    """See the module's docstring. `eager_reason`: why nothing is captured at all; None where steps are.

    max_graphs    that memory is kept for
    has_eager_experts  steps with adapters of experts are not captured: their op looks at the host's view of a step
    num_replayed  steps so far
    eager         steps that ran otherwise, by their reason
    """

    def __init__(
        self, graphs: Graphs | None, eager_reason: str | None, *, max_graphs: int, has_eager_experts: bool = False
    ) -> None:
        assert (graphs is None) == (eager_reason is not None), "either graphs, or why not"
        self._graphs = graphs
        self._reason = eager_reason
        self._has_eager_experts = has_eager_experts
        self.max_graphs = max_graphs
        self._captured: dict[StepSizes, Graph] = {}
        self._num_met: Counter[StepSizes] = Counter()  # steps that could have been replayed, and were not captured
        self.num_replayed = 0
        self.eager: Counter[str] = Counter()

    @property
    def is_off(self) -> bool:
        """Nothing is captured at all."""
        return self._graphs is None

    @property
    def sizes(self) -> Collection[StepSizes]:
        """Sizes of the captured steps."""
        return self._captured.keys()

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def serves(self, sizes: StepSizes) -> bool:
        """Whether steps of these sizes, of those that are captured, are replayed, or will be from the next on."""
        return sizes in self._captured or self._reason_for(sizes, True) is None

    def is_missing(self, sizes: StepSizes) -> bool:
        """Whether the next step of these sizes, of those that are captured, would be."""
        return sizes not in self._captured and self._reason_for(sizes, True) is None

    def nearest(self, sizes: StepSizes, larger: Iterable[StepSizes]) -> StepSizes:
        """The sizes in which a step of these sizes is to run now, where steps of `larger` would do as well, and take
        longer: its own, once they are captured; before, the first of those that are, so that the step waits for no
        capture until it has come often enough to be worth one, or for good where none can be made."""
        if sizes in self._captured:
            return sizes
        self._num_met[sizes] += 1
        if self._num_met[sizes] >= MEETINGS_WORTH_A_CAPTURE and self.is_missing(sizes):
            return sizes
        return next((one for one in larger if one in self._captured), sizes)

    def note_eager(self, sizes: StepSizes, reason: str | None = None) -> None:
        """A step of these sizes ran otherwise: for this reason, or since they are not among those that are captured."""
        self.eager[reason or self._reason_for(sizes, False) or LARGE] += 1

    def run(self, batch: StepBatch, sizes: StepSizes, is_padded: bool, work: Callable[[], None]) -> None:
        """Have `work` done for the batch: by a replay, if steps of its sizes are captured.

        is_padded  the sizes are among those that are captured
        """
        graph = self._graph(sizes, is_padded, work)
        if graph is None:
            work()
            return
        try:
            graph.update(batch)
        except Exception:  # nothing of the step has run yet, and no graph can be trusted any more
            log.warning("steps are no longer replayed: the update of %s failed", sizes, exc_info=True)
            self._reason = UPDATE_FAILED
            self._captured.clear()
            self.eager[UPDATE_FAILED] += 1
            work()
            return
        graph.replay()
        self.num_replayed += 1

    def _graph(self, sizes: StepSizes, is_padded: bool, work: Callable[[], None]) -> Graph | None:
        graph = self._captured.get(sizes)
        if graph is not None:
            return graph
        reason = self._reason_for(sizes, is_padded)
        if reason is not None:
            self.eager[reason] += 1
            return None
        assert self._graphs is not None
        try:
            with _without_collections():
                graph = self._graphs.capture(work)
        except Exception:  # torch's, Triton's, or an assertion of ours that holds in captures only
            # Slower steps are better than none; what was captured before is replayed on.
            log.warning("steps are no longer captured: %s failed", sizes, exc_info=True)
            self._reason = FAILED
            self.eager[FAILED] += 1
            return None
        self._captured[sizes] = graph
        return graph

    def _reason_for(self, sizes: StepSizes, is_padded: bool) -> str | None:
        """Why a step of these sizes is not captured; None if it is to be."""
        if self._reason is not None:
            return self._reason
        if sizes.has_experts and self._has_eager_experts:
            return EXPERTS
        if not is_padded:
            has_many = sizes.num_rows is not None and sizes.num_rows > sizes.num_sequences
            return MANY_LOGITS if has_many else LARGE
        return TOO_MANY if len(self._captured) >= self.max_graphs else None

    def forget_graphs(self) -> None:
        """Release all graphs, whose memory is about to move; steps are captured again."""
        self._captured.clear()

    def forget_history(self) -> None:
        """Reset the counters; the graphs stay."""
        self.num_replayed = 0
        self.eager.clear()


def unreplayable_ops(device: torch.device, unused: Collection[str] = ()) -> Sequence[str]:
    """Ops whose implementation here looks at the host's view of a step, beside those that the model does not use.
    Sampling is not captured, and without windows nobody calls their op."""
    platform = in_use(device)
    idle = {"sampling"} if platform.window_rows else {"sampling", "lora_window"}
    ops = (op for op in IMPLEMENTATIONS[platform.device] if op not in idle and op not in unused)
    can_update = platform.device == "npu"  # where nothing but decode steps is captured
    contracts = {op: contract(op, device, DECODE_REGIMES if can_update else None) for op in ops}
    return [op for op, one in contracts.items() if not one.replayable and not (can_update and one.updates)]


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
