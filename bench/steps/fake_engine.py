"""An engine that computes nothing: each step gives every sequence a token of some text, at a pace. Behind a real
server, what the API process does with it is all that is left to measure.

`python -m bench.steps.fake_engine serve ...` is `multilora serve` with this engine; STEP_SECONDS is the time of a step.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from itertools import count, cycle
from pathlib import Path
from typing import Any

from msgspec import structs

from service.engine.ipc.messages import Abort, Finished, FromEngine, Ping, Ready, Stats, Submit, ToEngine, Tokens
from service.engine.ipc.wire import EngineSide
from service.text.tokenizer import TextTokenizer

VARIABLE = "STEP_SECONDS"
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


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        main(int(sys.argv[1]))
        sys.exit()
    from service.cli.main import main as multilora
    from service.engine.ipc import client

    client.ENGINE_MODULE = "bench.steps.fake_engine"
    sys.exit(multilora(sys.argv[1:]))
