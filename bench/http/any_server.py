"""The load of docs/comparison.md against any server that speaks OpenAI's completions: ours, vLLM, SGLang.

python -m bench.http.any_server --url http://127.0.0.1:8000 --models base [ADAPTER ...] [--requests 64]
                                [--prompt-words 100] [--output-tokens 128] [--rounds 3] [--seed N] [--json FILE]

All requests of a round come at once and are streamed; the models named are asked in turn. No two prompts are the same,
in no round either, so that no prefix cache answers. Answers are greedy and go on to their last token (`ignore_eos`,
which the three servers know). A first round warms the server and is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.http.http_client import complete_all
from bench.rounds import cell, percentile

_WORDS = ("quick", "lazy", "seven", "wizards", "boat", "near", "over", "jumps", "oxygen", "brown")


@dataclass(frozen=True, slots=True)
class Figures:
    """One round. Times are milliseconds at the client; first tokens count from the moment all requests are sent."""

    output_tokens_per_second: float
    first_token_ms_p50: float | None
    first_token_ms_p99: float | None
    between_tokens_ms_p50: float | None
    between_tokens_ms_p99: float | None


def bodies(
    models: Sequence[str], num_requests: int, num_words: int, num_output_tokens: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Requests of one round."""
    same: dict[str, Any] = {"max_tokens": num_output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    same |= {"stream_options": {"include_usage": True}}
    return [
        {
            "model": models[index % len(models)],
            # The number stands first: what is shared by two prompts, a prefix cache may keep.
            "prompt": f"{rng.randrange(10**9)} " + " ".join(rng.choices(_WORDS, k=num_words)),
            **same,
        }
        for index in range(num_requests)
    ]


def measure(url: str, requests: Sequence[dict[str, Any]]) -> Figures:
    """Raises RuntimeError for an answer that is no success or is shorter than asked for."""
    answers, started, ended = complete_all(url, requests)
    asked = [body["max_tokens"] for body in requests]
    if [answer.num_tokens for answer in answers] != asked:
        raise RuntimeError(f"answers of {sorted({answer.num_tokens for answer in answers})} tokens, not {asked[0]}")
    times = [answer.token_seconds for answer in answers if answer.token_seconds]
    first = [(one[0] - started) * 1e3 for one in times]
    gaps = [(later - earlier) * 1e3 for one in times for earlier, later in pairwise(one)]
    return Figures(
        sum(asked) / (ended - started),
        percentile(first, 50),
        percentile(first, 99),
        percentile(gaps, 50),
        percentile(gaps, 99),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    size = arguments.requests, arguments.prompt_words, arguments.output_tokens
    rounds = []
    for number in range(arguments.rounds + 1):
        try:
            figures = measure(arguments.url, bodies(arguments.models, *size, rng))
        except (RuntimeError, OSError) as error:
            parser.exit(1, f"{arguments.url}: {error}\n")
        if number:
            rounds.append(asdict(figures))
            print("  ".join(f"{name} {cell(value)}" for name, value in rounds[-1].items()), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"models": arguments.models, "size": size, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
