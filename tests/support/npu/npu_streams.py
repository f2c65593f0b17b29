"""An NPU's streams, events and graphs that are not there: what is asked of them runs late, and in any order that the
streams and events allow. It knows what torch_npu's own code does at captures and updates, and no more.

A captured attention call is a task of its graph: it waits for its event, resets it, and gives the lengths that it holds
by then. Its graph's `update` rewrites the lengths on a stream of its own, and records the events.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Action = Callable[[], bool]  # does one thing; False: it cannot be done yet


class Device:
    """All that is queued. `results`: what attention gave, in the order of the device. `order`: prefers a stream."""

    def __init__(self, order: Callable[[list[Stream]], Stream]) -> None:
        self.streams: list[Stream] = []
        self.results: list[tuple[int, ...]] = []
        self.current = Stream(self)
        self.updates = Stream(self)
        self.capturing: Graph | None = None
        self._order = order

    def run(self) -> None:
        """All to its end. Raises AssertionError if nothing can go on."""
        while any(stream.queue for stream in self.streams):
            waiting = [stream for stream in self.streams if stream.queue]
            while waiting:
                stream = self._order(waiting)
                if stream.queue[0]():
                    stream.queue.popleft()
                    break
                waiting.remove(stream)
            else:
                raise AssertionError("the device waits for ever")

    def attend(self, lengths: list[int]) -> None:
        """A call of fused attention, in a capture or not."""
        if self.capturing is None:
            self.current.ask(lambda: self.results.append(tuple(lengths)))
        else:
            self.capturing.tasks.append(Task(list(lengths)))


class Stream:
    def __init__(self, device: Device) -> None:
        self.queue: deque[Action] = deque()
        self._device = device
        device.streams.append(self)

    def ask(self, work: Callable[[], object]) -> None:
        self.queue.append(lambda: (work(), True)[1])

    def wait_event(self, event: Event) -> None:
        awaited = event.number
        self.queue.append(lambda: event.reached >= awaited)

    def synchronize(self) -> None:
        self._device.run()


class Event:
    """`number`: how often its record was asked for; `reached`: how often it has happened."""

    def __init__(self) -> None:
        self.number = self.reached = 0

    def record(self, stream: Stream) -> None:
        self.number += 1
        number = self.number

        def reach() -> None:
            self.reached = number

        stream.ask(reach)


class Task:
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.is_updated = False


class Graph:
    """torch.npu.NPUGraph, and what `update` needs of its dispatch mode."""

    def __init__(self, device: Device) -> None:
        self.tasks: list[Task] = []
        self.is_updatable = False
        self.graph_dispatch_mode = self
        self.update_stream = device.updates
        self._device = device

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        assert self.is_updatable, "captured without auto_dispatch_capture"
        (given,) = cpu_update_input
        for task in self.tasks:
            self.update_stream.ask(lambda task=task: setattr(task, "lengths", list(given["lengths"])))  # type: ignore[misc]
            self.update_stream.ask(lambda task=task: setattr(task, "is_updated", True))  # type: ignore[misc]

    def replay(self) -> None:
        for task in self.tasks:
            self._device.current.queue.append(lambda task=task: self._do(task))  # type: ignore[misc]

    def _do(self, task: Task) -> bool:
        if self.is_updatable and not task.is_updated:
            return False
        task.is_updated = False
        self._device.results.append(tuple(task.lengths))
        return True


def answers(device: Device) -> dict[str, Any]:
    """What torch_npu is asked for by `service.engine.model.npu_graphs`, as the device answers it."""
    graphs: list[Graph] = []
    pool, side = object(), Stream(device)

    def new_graph() -> Graph:
        graphs.append(Graph(device))
        return graphs[-1]

    def new_stream(place: Any) -> Stream:
        assert str(place) == "npu:3"
        return side

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        assert stream is side, "captures have a stream of their own"
        before, device.current = device.current, stream
        yield
        device.current = before

    @contextmanager
    def capture(
        graph: Graph, *, pool: Any, stream: Stream, auto_dispatch_capture: bool, capture_error_mode: str
    ) -> Iterator[None]:
        assert pool is given_pool and stream is device.current is side, "one pool, and the stream of the captures"
        # Another thread copies adapters to the device meanwhile.
        assert capture_error_mode == "thread_local"
        assert not any(one.queue for one in device.streams), "something else is under way"
        graph.is_updatable = auto_dispatch_capture
        device.capturing = graph
        yield
        device.capturing = None

    given_pool = pool
    return {
        "npu.graph_pool_handle": lambda: pool,
        "npu.Stream": new_stream,
        "npu.NPUGraph": new_graph,
        "npu.current_stream": lambda: device.current,
        "npu.stream": on,
        "npu.graph": capture,
        "npu.Event": Event,
    }


def updates_first(device_streams: list[Stream]) -> Stream:
    """The later made stream first: updates before the steps."""
    return device_streams[-1]


def steps_first(device_streams: list[Stream]) -> Stream:
    return device_streams[0]


def at_random(seed: int) -> Callable[[list[Stream]], Stream]:
    return random.Random(seed).choice
