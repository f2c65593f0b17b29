"""An engine that computes nothing: each step gives every sequence a token of some text, at a pace. Behind a real
server, what the API process does with it is all that is left to measure.

`python -m bench.steps.fake_engine serve ...` is `multilora serve` with this engine; STEP_SECONDS is the time of a step.
"""

from __future__ import annotations

import atexit
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from typing import Any

from msgspec import structs

from service.engine.ipc.messages import Abort, Finished, FromEngine, Ping, Ready, Stats, Submit, ToEngine, Tokens
from service.engine.ipc.wire import EngineSide
from service.text.tokenizer import TextTokenizer

VARIABLE = "STEP_SECONDS"
# Set: the server tells at its end, in a line that begins so, what the calls for traces have cost its event loop.
TRACED_VARIABLE, TRACED_LINE = "TIME_TRACES", "traces on the event loop:"
_TEXT = "The quick boat jumps over seven lazy wizards near brown oxygen, and nobody asks why it does."
_SIZE = 1 << 20
_STATS_SECONDS = 0.5


def main(file_descriptor: int) -> None:
    """Until the server goes."""
    side = EngineSide(file_descriptor)
    options = side.read_options()
    assert options is not None
    tokenizer = TextTokenizer.load(Path(options.model_dir))
    side.write([Ready(_SIZE, _SIZE, tokenizer.vocab_size, 1, "float32", "cpu", os.getpid())])
    asked: queue.SimpleQueue[list[ToEngine] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(side, asked), daemon=True).start()
    _run(side, asked, cycle(tokenizer.encode(_TEXT, add_special_tokens=False)), float(os.environ[VARIABLE]))


def _read(side: EngineSide, asked: queue.SimpleQueue[list[ToEngine] | None]) -> None:
    while (messages := side.read()) is not None:
        asked.put(messages)
    asked.put(None)


def _run(
    side: EngineSide, asked: queue.SimpleQueue[list[ToEngine] | None], tokens: cycle[int], step_seconds: float
) -> None:
    """Steps while there are sequences, each no earlier than its time."""
    left: dict[str, int] = {}
    told, due = 0.0, time.monotonic()
    for num_steps in count():
        said: list[FromEngine] = []
        while not left or not asked.empty():
            messages = asked.get()
            if messages is None:
                return
            for message in messages:
                if isinstance(message, Submit):
                    left[message.request_id] = message.sampling.max_tokens
                elif isinstance(message, Abort):
                    left.pop(message.request_id, None)
                elif isinstance(message, Ping):
                    said.append(_stats(len(left), num_steps))
        due = max(due + step_seconds, time.monotonic())
        time.sleep(max(due - time.monotonic(), 0.0))
        for request_id in tuple(left):
            said.append(Tokens(request_id, (next(tokens),)))
            left[request_id] -= 1
            if not left[request_id]:
                del left[request_id]
                said.append(Finished(request_id, "length"))
        if time.monotonic() - told > _STATS_SECONDS:
            told = time.monotonic()
            said.append(_stats(len(left), num_steps))
        side.write(said)


def _stats(num_running: int, num_steps: int) -> Stats:
    zeros: dict[str, Any] = {field.name: 0 for field in structs.fields(Stats) if field.required}
    return Stats(**zeros | {"num_running": num_running, "num_steps": num_steps})


def time_traces() -> None:
    """Have this process time the calls for traces, and tell of them at its end."""
    from service.api.entry.middleware import EntryMiddleware
    from service.api.metrics.traces import RequestTrace, Tracing

    spent: dict[str, list[int]] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        spent[name] = []

        def run(*args: Any) -> Any:
            before = time.perf_counter_ns()
            try:
                return call(*args)
            finally:
                spent[name].append(time.perf_counter_ns() - before)

        return run

    def tell() -> None:
        for which, take in (("median", statistics.median), ("least", min)):  # a mean would count other processes
            costs = {name: take(times) / 1e3 for name, times in spent.items() if times}
            parts = ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items())
            print(f"{TRACED_LINE} {which} {sum(costs.values()):.1f} us a request ({parts})", file=sys.stderr)

    Tracing.begin = timed("begin", Tracing.begin)  # type: ignore[method-assign]
    EntryMiddleware._end_trace = timed("end", EntryMiddleware._end_trace)  # type: ignore[method-assign]
    header = vars(RequestTrace)["header"].fget
    type.__setattr__(RequestTrace, "header", property(timed("header", header)))
    atexit.register(tell)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        main(int(sys.argv[1]))
        sys.exit()
    from service.cli.main import main as multilora
    from service.engine.ipc import client

    if TRACED_VARIABLE in os.environ:
        time_traces()
    client.ENGINE_MODULE = "bench.steps.fake_engine"
    sys.exit(multilora(sys.argv[1:]))
