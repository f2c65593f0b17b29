"""A long prompt that arrives among running decodes: how long do those wait for their next token?"""

from __future__ import annotations

import random
from itertools import pairwise

from bench.rounds import percentile
from bench.shapes import SEED
from bench.steps.in_process import WarmEngine
from service.doctor.checks.probe_engine import Driver, Run, greedy
from service.engine.ipc.messages import Submit

_STEPS_BEFORE = 8
_NAME = "long-prompt"


def measure(subject: WarmEngine) -> dict[str, object]:
    """All requests but one decode when the long prompt comes; until it has its first token, the largest gap of each of
    their streams is noted, in milliseconds and in steps (1: it had a token in each step).

    The streams end after the measurement, by being aborted; so many output tokens that none ends by itself.
    """
    load = subject.load
    budget = max(load.token_budget - load.num_requests, 1)  # of a step, beside the decodes
    num_steps_to_start = load.num_requests * -(-load.num_prompt_tokens // budget)
    num_output_tokens = num_steps_to_start + 2 * _STEPS_BEFORE + 4 * -(-load.long_prompt_tokens // budget)
    work = subject.requests(load.num_requests - 1, 0, num_output_tokens)
    driver = Driver(subject.engine)
    run = driver.run
    driver.submit(work)
    while len(run.arrivals) < len(work):
        driver.step()
    for _ in range(_STEPS_BEFORE):
        driver.step()
    prompt = subject.prompt(load.long_prompt_tokens, random.Random(SEED + 1))
    long = Submit(_NAME, prompt, greedy(4))
    num_steps = len(run.steps)
    driver.submit([long])
    while _NAME not in run.arrivals:
        driver.step()
    driver.step()  # streams that had no token beside its last chunk have theirs now
    figures = _figures(run, num_steps)
    driver.abort([*work, long])
    return figures | {"long_prompt_tokens": load.long_prompt_tokens, "running_streams": len(work)}


def _figures(run: Run, num_steps: int) -> dict[str, object]:
    """Of the steps from `num_steps` on."""
    before, gaps_ms, gaps_steps = [], [], []
    for name, times in run.arrivals.items():
        if name == _NAME:
            continue
        for (earlier, earlier_step), (later, later_step) in pairwise(times):
            if later_step <= num_steps:
                before.append((later - earlier) * 1e3)
            else:
                gaps_ms.append((later - earlier) * 1e3)
                gaps_steps.append(later_step - earlier_step)
    steps = run.steps[num_steps:]
    return {
        "gap_ms_before_p50": percentile(before, 50),
        "largest_gap_ms": max(gaps_ms, default=None),
        "largest_gap_steps": max(gaps_steps, default=None),
        "steps_with_prompt_tokens": sum(prompt > 0 for _, _, prompt in steps),
        "longest_step_ms": max(seconds for seconds, _, _ in steps) * 1e3,
    }
