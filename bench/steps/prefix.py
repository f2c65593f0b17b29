"""The prefix cache in this process: its cost where nothing is found, and the time of a first token where much is.

python -m bench.steps.prefix [--device cuda] [--shape 8b] [--requests 64] [--prompt-tokens 128] [--output-tokens 128]
                             [--long-prompt 8192] [--rounds 3] [--json FILE]

    cost    requests whose prompts are all different, to an engine with the cache and to one without, forth and back
    long    a prompt of --long-prompt tokens whose last 64 are new, beside one of 128 new tokens and beside itself new
    equal   --requests equal prompts at once, of a quarter of --long-prompt: tokens computed, of those of one prompt
"""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.arguments import facts_of, load_of, parser_of
from bench.rounds import forth_and_back
from bench.shapes import SEED
from bench.steps.in_process import WarmEngine, build_warm_engine
from service.doctor.checks.probe_engine import Run, greedy, run_to_the_end
from service.engine.ipc.messages import Submit

NUM_NEW_TOKENS, NUM_SHORT_TOKENS = 64, 128


class Subject:
    """An engine, and prompts that no other request has had."""

    def __init__(self, warm: WarmEngine) -> None:
        self._warm, self._numbers, self._num_sent = warm, random.Random(SEED), 0

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return self._warm.prompt(num_tokens, self._numbers)

    def run(self, prompts: list[tuple[int, ...]], num_output_tokens: int) -> Run:
        work = []
        for prompt in prompts:
            self._num_sent += 1
            work.append(Submit(f"request-{self._num_sent}", prompt, greedy(num_output_tokens)))
        return run_to_the_end(self._warm.engine, work)

    def first_token_ms(self, prompt: tuple[int, ...]) -> float:
        return self.run([prompt], 1).first_token_ms()[0]


def cost(
    sides: dict[str, Subject], num_requests: int, num_prompt: int, num_output: int, num_rounds: int
) -> dict[str, Any]:
    """Tokens per second and decode steps with the cache, of those without it. Medians over rounds."""
    shares, steps = [], []
    for number in range(num_rounds + 1):
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for name in forth_and_back(sides):
            prompts = [sides[name].prompt(num_prompt) for _ in range(num_requests)]
            runs[name].append(sides[name].run(prompts, num_output))
        if number:  # the first one warms
            seconds = {name: statistics.mean(run.seconds for run in some) for name, some in runs.items()}
            shares.append(seconds["off"] / seconds["on"])
            decode = {
                name: [ms for run in some for ms in run.decode_step_ms(num_requests)] for name, some in runs.items()
            }
            steps.append((statistics.median(decode["on"]) - statistics.median(decode["off"])) * 1e3)
    return {
        "tokens_per_second_of_off": statistics.median(shares),
        "decode_step_us_more": statistics.median(steps),
    }


def long_prompt(subject: Subject, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Milliseconds until the first token, alone on the engine."""
    new: list[float] = []
    found: list[float] = []
    short: list[float] = []
    for number in range(num_rounds + 1):
        start = subject.prompt(num_tokens - NUM_NEW_TOKENS)
        times = [
            subject.first_token_ms(prompt)
            for prompt in (
                start + subject.prompt(NUM_NEW_TOKENS),
                start + subject.prompt(NUM_NEW_TOKENS),
                subject.prompt(NUM_SHORT_TOKENS),
            )
        ]
        if number:
            for one, ms in zip((new, found, short), times, strict=True):
                one.append(ms)
    of_new, of_found, of_short = (statistics.median(one) for one in (new, found, short))
    return {
        "first_token_ms_new": of_new,
        "first_token_ms_found": of_found,
        "first_token_ms_short": of_short,
        "times_faster": of_new / of_found,
        "found_of_short": of_found / of_short,
    }


def equal(subject: Subject, num_requests: int, num_tokens: int) -> dict[str, Any]:
    prompt = subject.prompt(num_tokens)
    run = subject.run([prompt] * num_requests, 2)
    computed = sum(num_prompt for _, _, num_prompt in run.steps)
    return {"requests": num_requests, "prompt_tokens": num_tokens, "computed_of_one": computed / num_tokens}


def main() -> None:
    parser = parser_of("bench.steps.prefix", __doc__)
    parser.add_argument("--long-prompt", type=int, default=8192, metavar="TOKENS")
    arguments = parser.parse_args()
    load = load_of(arguments, long_prompt_tokens=arguments.long_prompt)
    with_cache = replace(load, engine_fields=load.engine_fields | {"prefix_cache": True})
    sides = {"on": Subject(build_warm_engine(with_cache, has_lora=False))}
    sides["off"] = Subject(build_warm_engine(load, has_lora=False))
    size = arguments.requests, arguments.prompt_tokens, arguments.output_tokens, arguments.rounds
    figures = {
        "cost": cost(sides, *size),
        "long": long_prompt(sides["on"], arguments.long_prompt, arguments.rounds),
        "equal": equal(sides["on"], arguments.requests, arguments.long_prompt // 4),
    }
    result = facts_of(arguments) | figures
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
