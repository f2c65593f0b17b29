"""What a streamed token costs the API process: a real server whose engine computes nothing, and many streams.

python -m bench.steps.stream_cost [--streams 64] [--tokens 128] [--step-ms 12] [--rounds 5]
    [--tree DIR | --messages | --traced]

The processor time is that of all threads of the API process, over the tokens of its streams; the client is this
process. With --tree a server of another checkout of this project is measured beside this one's, forth and back in each
round, and what this one costs is told as a share of it: only that means something on a machine that others use.
With --messages the sides are /v1/messages and /v1/chat/completions of one server. With --traced they are this server
with traces, which this process collects, and without; the server tells what a trace has cost its event loop.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.http.http_client import complete_all
from bench.rounds import forth_and_back, percentile
from bench.shapes import BUNDLED
from bench.steps.fake_engine import TRACED_LINE, TRACED_VARIABLE, VARIABLE
from tests.support.http.collector import collecting
from tests.support.http.server_process import Server, start_server

_ROOT = Path(__file__).resolve().parents[2]


class Sample(NamedTuple):
    """Figures of one run: processor microseconds per token, and milliseconds between the tokens of a stream."""

    us_per_token: float
    tokens_per_second: float
    gaps_ms: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.steps.stream_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=12.0, help="of the made-up engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", type=Path, help="another checkout, measured beside this one")
    parser.add_argument("--messages", action="store_true", help="/v1/messages beside /v1/chat/completions")
    parser.add_argument("--traced", action="store_true", help="with traces, beside the same without")
    arguments = parser.parse_args()
    os.environ[VARIABLE] = str(arguments.step_ms / 1e3)
    body = {"model": "base", "max_tokens": arguments.tokens, "stream": True, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        this = stack.enter_context(_serving(_ROOT))
        if arguments.messages:
            body["messages"] = [{"role": "user", "content": "Once upon a time"}]
            counted = body | {"stream_options": {"include_usage": True}}
            sides = {"messages": (this, "/v1/messages", body), "chat": (this, "/v1/chat/completions", counted)}
        else:
            body |= {"prompt": "Once upon a time", "stream_options": {"include_usage": True}}
            sides = {"this": (this, "/v1/completions", body)}
            if arguments.tree:
                other = stack.enter_context(_serving(arguments.tree.resolve()))
                sides["other"] = (other, "/v1/completions", body)
            if arguments.traced:
                os.environ[TRACED_VARIABLE] = "1"
                endpoint = stack.enter_context(collecting()).url
                traced = stack.enter_context(_serving(_ROOT, otlp_endpoint=endpoint))
                sides = {"traced": (traced, "/v1/completions", body), **sides}

        def run(name: str) -> Sample:
            server, path, body = sides[name]
            return measure(server, path, [body] * arguments.streams)

        for name in sides:
            run(name)
        rounds: list[dict[str, list[Sample]]] = []
        for _ in range(arguments.rounds):
            rounds.append({name: [] for name in sides})
            for name in forth_and_back(sides):
                rounds[-1][name].append(run(name))
        if arguments.traced:
            sides["traced"][0].stop()
            print(*(line for line in sides["traced"][0].log.splitlines() if line.startswith(TRACED_LINE)), sep="\n")
    show(rounds)


@contextlib.contextmanager
def _serving(tree: Path, **settings: Any) -> Any:
    settings |= {"model_name": "base", "adapter_row_bytes": 0, "module": "bench.steps.fake_engine"}
    with tempfile.TemporaryDirectory() as scratch:
        server = start_server(BUNDLED, Path(scratch), tree=tree, **settings)
        try:
            yield server
        finally:
            server.stop()


def measure(server: Server, path: str, bodies: list[dict[str, Any]]) -> Sample:
    """One run of all streams."""
    before = processor_seconds(server.process.pid)
    answers, began, ended = complete_all(server.url, bodies, path)
    seconds = processor_seconds(server.process.pid) - before
    gaps = [(later - earlier) * 1e3 for one in answers for earlier, later in pairwise(one.token_seconds)]
    num_tokens = sum(answer.num_tokens for answer in answers)
    return Sample(seconds / num_tokens * 1e6, num_tokens / (ended - began), gaps)


def processor_seconds(pid: int) -> float:
    """Of all threads of a process, to the nanosecond: the clock that Linux has for each."""
    return time.clock_gettime(~pid << 3 | 2)


def show(rounds: list[dict[str, list[Sample]]]) -> None:
    """A line for each side, and their ratio."""
    for name in rounds[0]:
        own = [sample for one in rounds for sample in one[name]]
        costs = [sample.us_per_token for sample in own]
        gaps = [gap for sample in own for gap in sample.gaps_ms]
        half, most = percentile(gaps, 50), percentile(gaps, 99)
        between = f"; between tokens {half:.2f} ms, p99 {most:.2f} ({most / half:.2f} times)" if half and most else ""
        per_second = statistics.median(sample.tokens_per_second for sample in own)
        print(
            f"{name:6} {statistics.median(costs):6.1f} us a token ({min(costs):.1f} to {max(costs):.1f}), "
            f"{per_second:.0f} tokens/s{between}"
        )
    if len(rounds[0]) > 1:
        means = [[statistics.mean(one.us_per_token for one in a_round[name]) for name in a_round] for a_round in rounds]
        ratios = [this / other for this, other in means]
        least = [min(one.us_per_token for a_round in rounds for one in a_round[name]) for name in rounds[0]]
        print(
            f"ratio  {statistics.median(ratios):.3f} of the rounds ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"{least[0] / least[1]:.3f} of the least, to which other work adds nothing"
        )


if __name__ == "__main__":
    main()
