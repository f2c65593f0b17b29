"""What a flood costs others: a request of one adapter while hundreds of another one run and wait, over HTTP.

python -m bench.steps.fairness [--flood 320] [--places 64] [--prompt-tokens 64] [--output-tokens 96] [--rounds 3]

Each round, forth and back: requests of the second adapter one after another on an idle server, the flood of the first
adapter alone, and that flood with requests of the second one after another all the while. The first two bundled
adapters; all greedy, to their last token. Ratios are taken inside of a round. The second adapter's have one token each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.http.http_client import complete_all
from bench.rounds import forth_and_back, percentile
from tests.support.http.server_process import Server, running_server

_SEED = 20_26
_NUM_IDLE = 20
_PAUSE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. first_token_ms: of the second adapter's requests; tokens_per_second: of the flood, 0 without one."""

    first_token_ms: list[float]
    tokens_per_second: float = 0.0


class Sides:
    """The three loads, on one server."""

    def __init__(self, server: Server, given: argparse.Namespace) -> None:
        self._server, self._given = server, given
        self._random = random.Random(_SEED)
        names = sorted(one["name"] for one in server.get("/v1/adapters").json()["data"])
        self._flooding, self._other = names[:2]

    def idle(self) -> Sample:
        """No flood."""
        return Sample([self._first_token_ms() for _ in range(_NUM_IDLE)])

    def alone(self) -> Sample:
        """Nobody else."""
        return Sample([], self._flood())

    def both(self) -> Sample:
        """The second adapter's requests begin when all places of the flood run, and end with it."""
        waits: list[float] = []
        has_ended = threading.Event()

        def ask() -> None:
            while self._server.metric("num_requests_running") < self._given.places and not has_ended.wait(0.05):
                pass
            while not has_ended.wait(_PAUSE_SECONDS):
                waits.append(self._first_token_ms())

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            tokens_per_second = self._flood()
        finally:
            has_ended.set()
            thread.join()
        return Sample(waits, tokens_per_second)

    def _flood(self) -> float:
        bodies = [self._body(self._flooding, self._given.output_tokens) for _ in range(self._given.flood)]
        answers, started, ended = complete_all(self._server.url, bodies)
        return sum(answer.num_tokens for answer in answers) / (ended - started)

    def _first_token_ms(self) -> float:
        _, started, ended = complete_all(self._server.url, [self._body(self._other, 1)])
        return (ended - started) * 1e3

    def _body(self, model: str, max_tokens: int) -> dict[str, Any]:
        prompt = [self._random.randrange(1, 200) for _ in range(self._given.prompt_tokens)]
        return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.steps.fairness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flood", type=int, default=320, help="requests of the first adapter")
    parser.add_argument("--places", type=int, default=64, help="that run at the same time")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    given = parser.parse_args()
    settings = {
        "max_sequences": given.places,
        "max_queued_requests": 2 * given.flood,
        "max_batch_items": 1,  # as many as that at the most
        "kv_bytes": "256MiB",
        "num_threads": given.threads,
    }
    with tempfile.TemporaryDirectory() as scratch, running_server(None, Path(scratch), **settings) as server:
        sides = Sides(server, given)
        runs: dict[str, Callable[[], Sample]] = {"idle": sides.idle, "alone": sides.alone, "both": sides.both}
        for run in runs.values():
            run()
        rounds = []
        for _ in range(given.rounds):
            samples: dict[str, list[Sample]] = {name: [] for name in runs}
            for name in forth_and_back(runs):
                samples[name].append(runs[name]())
            rounds.append(samples)
    show(rounds)


def show(rounds: list[dict[str, list[Sample]]]) -> None:
    """A row for each round."""
    print("| round | first token, idle, ms p50 | in the flood, p50 | p99 | ratio of p50 | flood with others / alone |")
    print("|---|---|---|---|---|---|")
    for index, samples in enumerate(rounds):
        waits = {name: sorted(ms for one in samples[name] for ms in one.first_token_ms) for name in ("idle", "both")}
        idle, flooded = (statistics.median(waits[name]) for name in ("idle", "both"))
        tokens = {name: statistics.mean(one.tokens_per_second for one in samples[name]) for name in ("alone", "both")}
        print(
            f"| {index + 1} | {idle:.1f} | {flooded:.1f} | {percentile(waits['both'], 99):.1f} | {flooded / idle:.2f} "
            f"| {tokens['both'] / tokens['alone']:.3f} |"
        )


if __name__ == "__main__":
    main()
