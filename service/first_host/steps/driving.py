"""Loads on an engine in this process, and what they took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from service.engine.engine import Engine
from service.engine.ipc.messages import Abort, Finished, Sampling, Submit, Tokens

_IDLE_SECONDS = 0.001


def greedy(num_output_tokens: int) -> Sampling:
    """To the last token, whatever the tokens are."""
    return Sampling(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)


@dataclass
class Run:
    """Times of a load, in seconds, on the clock of the caller of `Engine.step`.

    steps        one entry for each call of `step` that ended a step: (seconds since the one before, decode tokens,
                 prompt tokens)
    arrivals     by request: when each message with tokens came, and how many steps had ended by then
    tokens       by request
    """

    started: float
    ended: float = 0.0
    num_output_tokens: int = 0
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    arrivals: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def decode_step_ms(self, num_sequences: int) -> list[float]:
        """Milliseconds of the steps with one token for each of so many sequences, and nothing else."""
        return [seconds * 1e3 for seconds, decode, prompt in self.steps if (decode, prompt) == (num_sequences, 0)]

    def gaps_ms(self) -> list[float]:
        """Between one message with tokens and the next of the same request."""
        return [(later[0] - earlier[0]) * 1e3 for times in self.arrivals.values() for earlier, later in pairwise(times)]

    def first_token_ms(self) -> list[float]:
        return [(times[0][0] - self.started) * 1e3 for times in self.arrivals.values()]


class Driver:
    """Steps an engine as its process does, and keeps the time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.run = Run(time.perf_counter())
        self.num_open = 0
        self._last = self.run.started

    def submit(self, work: Sequence[Submit]) -> None:
        for request in work:
            self.engine.submit(request)
        self.num_open += len(work)

    def step(self) -> None:
        """One call of `Engine.step`. Raises RuntimeError for a request that failed."""
        engine, run = self.engine, self.run
        newest = engine.step_records[-1] if engine.step_records else None
        engine.wake.clear()
        events = engine.step()
        now = time.perf_counter()
        record = engine.step_records[-1] if engine.step_records else None
        if record is not None and record is not newest:
            run.steps.append((now - self._last, record.num_decode_tokens, record.num_prefill_tokens))
            self._last = now
        elif not events:
            engine.wake.wait(_IDLE_SECONDS)  # an adapter is on its way
        for event in events:
            if isinstance(event, Tokens):
                run.num_output_tokens += len(event.token_ids)
                run.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                run.arrivals.setdefault(event.request_id, []).append((now, len(run.steps)))
            elif isinstance(event, Finished):
                self.num_open -= 1
                if event.reason == "error":
                    raise RuntimeError(event.error)
        run.ended = now

    def abort(self, work: Sequence[Submit]) -> None:
        for request in work:
            self.engine.handle(Abort(request.request_id))
        self.num_open = 0
        self.engine.run_until_idle()


def run_to_the_end(engine: Engine, work: Sequence[Submit]) -> Run:
    """All at once, until the last has its last token. Raises RuntimeError if one has more or fewer than asked for."""
    driver = Driver(engine)
    driver.submit(work)
    while driver.num_open:
        driver.step()
    wanted = sum(request.sampling.max_tokens for request in work)
    if driver.run.num_output_tokens != wanted:
        raise RuntimeError(f"{driver.run.num_output_tokens} output tokens instead of {wanted}")
    return driver.run
