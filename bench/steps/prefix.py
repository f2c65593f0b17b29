"""The prefix cache in this process: its cost where nothing is found, and the time of a first token where much is.

python -m bench.steps.prefix [--device cuda] [--shape 8b] [--requests 64] [--prompt-tokens 128] [--output-tokens 128]
                             [--long-prompt 8192] [--rounds 3] [--json FILE]

    cost    requests whose prompts are all different, to an engine with the cache and to one without, forth and back
    long    a prompt of --long-prompt tokens whose last 64 are new, beside one of 128 new tokens and beside itself new
    equal   --requests equal prompts at once, of a quarter of --long-prompt: tokens computed, of those of one prompt
    alora   an adapter that begins behind --long-prompt tokens that the base has had, beside the same computed anew
    chats   eight chats of six turns each, over a system prompt of a fifth of --long-prompt, whose template drops all
            but the end of an answer: prompt tokens found, of all and of those that a cache without bounds would find;
            and whether replayed steps give the tokens of eager ones
    host    with `--engine prefix_host_bytes=BYTES kv_bytes=BYTES`: the prompt of `long` when it has left the device
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from bench.arguments import facts_of, load_of, parser_of
from bench.rounds import forth_and_back
from bench.shapes import SEED
from bench.steps.in_process import WarmEngine, build_warm_engine
from service.doctor.checks.probe_engine import Run, greedy, run_to_the_end
from service.engine.ipc.messages import Submit
from service.engine.model.graphs import CapturedSteps

NUM_NEW_TOKENS, NUM_SHORT_TOKENS = 64, 128
NUM_CHATS, NUM_TURNS = 8, 6
_NUM_INVOCATION_TOKENS, _RANK = 16, 16
# Of decode, in which blocks are copied to host memory.
_STEPS_BETWEEN = 48
# Of a turn: the beginning of its prompt's end, as a template writes it, and of its answer in the next prompt.
_OPENING = (5, 6, 7)


class Subject:
    """An engine, and prompts that no other request has had."""

    def __init__(self, warm: WarmEngine) -> None:
        self._warm, self._numbers, self._num_sent = warm, random.Random(SEED), 0

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return self._warm.prompt(num_tokens, self._numbers)

    def run(
        self,
        prompts: list[tuple[int, ...]],
        num_output_tokens: int,
        salt: str = "",
        keep_at: tuple[int, ...] = (),
        adapter_start: int | None = None,
    ) -> Run:
        """All at once. keep_at: as in `Submit`, from a prompt's end on where it is negative; adapter_start: of the
        engine's adapter, None for the base."""
        work = []
        for prompt in prompts:
            self._num_sent += 1
            places = tuple(at % len(prompt) for at in keep_at)
            request = Submit(
                f"request-{self._num_sent}", prompt, greedy(num_output_tokens), cache_salt=salt, keep_at=places
            )
            if adapter_start is not None:
                rows = self._warm.adapter_rows
                request = structs.replace(request, adapter="adapter-0", adapter_rows=rows, adapter_start=adapter_start)
            work.append(request)
        return run_to_the_end(self._warm.engine, work)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Prompt tokens of all requests, those found, and states that were given up."""
        counts, lines = self._warm.engine.cache.counts, self._warm.engine.lines
        return counts.queried_tokens, counts.hit_tokens, lines.num_evicted

    @property
    def num_states(self) -> tuple[int, int]:
        """Kept now, and at most."""
        return self._warm.engine.lines.num_kept, self._warm.engine.lines.most_kept

    @property
    def num_host_hit_tokens(self) -> int:
        return self._warm.engine.cache.counts.host_hit_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the blocks on the device hold at most."""
        return self._warm.engine.blocks.num_blocks * self.block_size_tokens

    @property
    def block_size_tokens(self) -> int:
        return self._warm.engine.config.block_size_tokens

    @property
    def num_replayed(self) -> int:
        return self._warm.engine.runner.captured.num_replayed

    @contextmanager
    def eager(self) -> Iterator[None]:
        """No step is replayed meanwhile."""
        runner = self._warm.engine.runner
        captured, runner.captured = runner.captured, CapturedSteps(None, "for comparison", max_graphs=0)
        try:
            yield
        finally:
            runner.captured = captured

    def first_token_ms(self, prompt: tuple[int, ...]) -> float:
        """A state is kept before the prompt's last tokens."""
        return self.run([prompt], 1, keep_at=(-NUM_NEW_TOKENS,)).first_token_ms()[0]


def cost(
    sides: dict[str, Subject], num_requests: int, num_prompt: int, num_output: int, num_rounds: int
) -> dict[str, Any]:
    """Tokens per second, first tokens and decode steps with the cache, of those without it. Medians over rounds."""
    shares, firsts, steps = [], [], []
    for number in range(num_rounds + 1):
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for name in forth_and_back(sides):
            prompts = [sides[name].prompt(num_prompt) for _ in range(num_requests)]
            runs[name].append(sides[name].run(prompts, num_output))
        if number:  # the first one warms
            seconds = {name: statistics.mean(run.seconds for run in some) for name, some in runs.items()}
            shares.append(seconds["off"] / seconds["on"])
            first = {
                name: statistics.median(ms for run in some for ms in run.first_token_ms())
                for name, some in runs.items()
            }
            firsts.append(first["on"] / first["off"])
            decode = {
                name: [ms for run in some for ms in run.decode_step_ms(num_requests)] for name, some in runs.items()
            }
            steps.append((statistics.median(decode["on"]) - statistics.median(decode["off"])) * 1e3)
    return {
        "tokens_per_second_of_off": statistics.median(shares),
        "first_token_of_off": statistics.median(firsts),
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


def host(subject: Subject, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Milliseconds until the first token of a prompt that others have driven to host memory, alone on the engine."""
    times, found = list[float](), list[int]()
    num_others = subject.num_cached_tokens // num_tokens + 1
    for number in range(num_rounds + 1):
        start = subject.prompt(num_tokens - NUM_NEW_TOKENS)
        subject.first_token_ms(start + subject.prompt(NUM_NEW_TOKENS))
        for _ in range(num_others):
            subject.run([subject.prompt(num_tokens)], _STEPS_BETWEEN)
        before = subject.num_host_hit_tokens
        ms = subject.first_token_ms(start + subject.prompt(NUM_NEW_TOKENS))
        if number:
            times.append(ms)
            found.append(subject.num_host_hit_tokens - before)
    return {"first_token_ms": statistics.median(times), "found_on_host": found}


def alora(subject: Subject, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Milliseconds until the first token of an adapter that begins behind the base's tokens, alone on the engine."""
    num_before = num_tokens - NUM_SHORT_TOKENS  # which leaves room for answers
    found_ms, new_ms, shares = [], [], []
    for number in range(num_rounds + 1):
        start, invocation = subject.prompt(num_before), subject.prompt(_NUM_INVOCATION_TOKENS)
        subject.run([start], 2, keep_at=(-1,))
        _, before, _ = subject.counts
        found, new = (
            subject.run([start + invocation], 2, salt, adapter_start=num_before).first_token_ms()[0]
            for salt in ("", "new")
        )
        if number:
            found_ms.append(found)
            new_ms.append(new)
            shares.append((subject.counts[1] - before) / num_before)
    return {
        "first_token_ms_found": statistics.median(found_ms),
        "first_token_ms_new": statistics.median(new_ms),
        "found_of_new": statistics.median(found_ms) / statistics.median(new_ms),
        "found_of_tokens_before": statistics.median(shares),
    }


def equal(subject: Subject, num_requests: int, num_tokens: int) -> dict[str, Any]:
    prompt = subject.prompt(num_tokens)
    run = subject.run([prompt] * num_requests, 2)
    computed = sum(num_prompt for _, _, num_prompt in run.steps)
    return {"requests": num_requests, "prompt_tokens": num_tokens, "computed_of_one": computed / num_tokens}


def chats(subject: Subject, num_system: int, num_own: int, num_answer: int, num_chats: int) -> dict[str, Any]:
    """All chats' turns of one number at once."""
    system = subject.prompt(num_system)
    own = [[subject.prompt(num_own) for _ in range(num_chats)] for _ in range(NUM_TURNS)]

    def run(salt: str) -> tuple[list[list[int]], list[float], int]:
        histories, block = [system] * num_chats, subject.block_size_tokens
        tokens: list[list[int]] = []
        first_ms: list[float] = []
        known: set[tuple[int, ...]] = set()
        num_findable = 0
        for turn in own:
            histories = [before + new for before, new in zip(histories, turn, strict=True)]
            prompts = [history + _OPENING for history in histories]
            turn_run = subject.run(prompts, num_answer, salt, (num_system, -len(_OPENING)))
            answers = list(turn_run.tokens.values())
            first_ms += turn_run.first_token_ms() if turn is not own[0] else []
            for prompt, answer in zip(prompts, answers, strict=True):
                found = (end for end in range(0, len(prompt), block) if prompt[:end] in known)
                num_findable += max(found, default=0)
                whole = (*prompt, *answer)
                known |= {whole[:end] for end in range(block, len(whole), block)}
            tokens += answers
            histories = [(*history, *answer[-8:]) for history, answer in zip(histories, answers, strict=True)]
        return tokens, first_ms, num_findable

    before, num_replayed = subject.counts, subject.num_replayed
    tokens, first_ms, num_findable = run("replayed")
    queried, hit, evicted = (now - then for now, then in zip(subject.counts, before, strict=True))
    kept, most_kept = subject.num_states
    num_replayed = subject.num_replayed - num_replayed
    with subject.eager():
        of_eager, _, _ = run("eager")
    return {
        "prompt_tokens": queried,
        "found_tokens": hit,
        "found_of_all": hit / queried,
        "found_of_unbounded": hit / num_findable,
        "first_token_ms_p50_after_first_turn": statistics.median(first_ms),
        "states_kept": kept,
        "states_at_most": most_kept,
        "states_given_up": evicted,
        "steps_replayed": num_replayed,
        "answers": len(tokens),
        "answers_as_eager": sum(one == other for one, other in zip(tokens, of_eager, strict=True)),
    }


def main() -> None:
    parser = parser_of("bench.steps.prefix", __doc__)
    parser.add_argument("--long-prompt", type=int, default=8192, metavar="TOKENS")
    arguments = parser.parse_args()
    load = load_of(arguments, long_prompt_tokens=arguments.long_prompt)
    with_cache = replace(load, engine_fields=load.engine_fields | {"prefix_cache": True})
    sides = {"on": Subject(build_warm_engine(with_cache, has_lora=False))}
    has_host = bool(load.engine_fields.pop("prefix_host_bytes", 0))
    sides["off"] = Subject(build_warm_engine(load, has_lora=False))
    size = arguments.requests, arguments.prompt_tokens, arguments.output_tokens, arguments.rounds
    figures = {
        "cost": cost(sides, *size),
        "long": long_prompt(sides["on"], arguments.long_prompt, arguments.rounds),
        "equal": equal(sides["on"], arguments.requests, arguments.long_prompt // 4),
        "chats": chats(
            sides["on"],
            arguments.long_prompt // 5,
            max(arguments.long_prompt // 80, 1),
            max(arguments.output_tokens // 2, 2),
            min(NUM_CHATS, arguments.requests),
        ),
    }
    with_adapter = replace(with_cache, max_adapters=1, rank=_RANK)
    figures["alora"] = alora(
        Subject(build_warm_engine(with_adapter, has_lora=True)), arguments.long_prompt, arguments.rounds
    )
    if has_host:
        figures["host"] = host(sides["on"], arguments.long_prompt, arguments.rounds)
    result = facts_of(arguments) | figures
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
