"""Cost of scores: pairs of texts sent to /v1/score in one request, beside the prefill of the same tokens by an engine
in this process, without LoRA and HTTP.

python -m bench.http.scores [--pairs 1000] [--words 40] [--rounds 5] [--threads 2] [--json FILE]

The bundled model, on a CPU; the adapter has LoRA on two projections and a head of one label. No query comes twice, and
the prefix cache is off. The sides run forth and back in each round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.rounds import forth_and_back
from bench.shapes import BUNDLED, SEED
from bench.steps.in_process import EngineLoad, build_warm_engine
from service.doctor.checks.probe_engine import greedy, run_to_the_end
from service.engine.ipc.messages import Submit
from tests.support.http.server_process import Server, running_server
from tests.support.peft_files import adapter_files

_WORDS = ("quick", "lazy", "seven", "wizards", "boat", "near", "over", "jumps", "oxygen", "brown")
_TOKEN_BUDGET, _MAX_SEQUENCES = 256, 64


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.http.scores", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--words", type=int, default=40, help="of a document; a query has a fifth of that")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    words = random.Random(SEED)
    pairs = [(_text(words, arguments.words // 5), _text(words, arguments.words)) for _ in range(arguments.pairs)]
    result = measure(pairs, arguments.rounds, arguments.threads)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def measure(pairs: list[tuple[str, str]], num_rounds: int, num_threads: int) -> dict[str, Any]:
    """Tokens per second of both sides, and the median of their ratio by round."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(*pair).ids) for pair in pairs]
    num_tokens = sum(map(len, prompts))
    longest = max(map(len, prompts))
    load = EngineLoad(
        shape="bundled",
        device="cpu",
        num_requests=_MAX_SEQUENCES,
        num_prompt_tokens=longest,
        num_output_tokens=1,
        token_budget=_TOKEN_BUDGET,
    )
    settings: dict[str, Any] = {"model_name": "base", "num_threads": num_threads, "prefix_cache": False}
    settings |= {"token_budget": _TOKEN_BUDGET, "max_sequences": _MAX_SEQUENCES, "device": "cpu", "dtype": "float32"}
    with tempfile.TemporaryDirectory() as scratch, running_server(BUNDLED, Path(scratch), **settings) as server:
        server.post("/v1/adapters", data={"name": "judge"}, files=adapter_files(1, num_labels=1)).raise_for_status()
        subject = build_warm_engine(load, has_lora=False)

        def prefill() -> float:
            work = [Submit(f"request-{index}", ids, greedy(1)) for index, ids in enumerate(prompts)]
            return run_to_the_end(subject.engine, work).seconds

        sides = {"prefill": prefill, "scores": lambda: _score(server, pairs, num_tokens)}
        for run in sides.values():
            run()
        rounds: list[dict[str, list[float]]] = []
        for _ in range(num_rounds):
            rounds.append({name: [] for name in sides})
            for name in forth_and_back(sides):
                rounds[-1][name].append(sides[name]())
    means = [{name: statistics.mean(taken) for name, taken in one.items()} for one in rounds]
    ratios = [one["prefill"] / one["scores"] for one in means]
    return {
        "pairs": len(pairs),
        "tokens": num_tokens,
        "threads": num_threads,
        "tokens_per_second": {name: num_tokens / statistics.median(one[name] for one in means) for name in sides},
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _score(server: Server, pairs: list[tuple[str, str]], num_tokens: int) -> float:
    """Seconds of one request with all pairs."""
    queries, documents = zip(*pairs, strict=True)
    started = time.perf_counter()
    answer = server.post("/v1/score", json={"model": "judge", "queries": queries, "documents": documents})
    seconds = time.perf_counter() - started
    answer.raise_for_status()
    found = answer.json()
    if (len(found["data"]), found["usage"]["prompt_tokens"]) != (len(pairs), num_tokens):
        raise RuntimeError(f"{len(found['data'])} scores of {found['usage']} tokens instead of {num_tokens}")
    return seconds


def _text(words: random.Random, num_words: int) -> str:
    return " ".join(words.choices(_WORDS, k=num_words))


if __name__ == "__main__":
    main()
