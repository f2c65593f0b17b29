"""A scheduler over made-up loads, without a model: what a rule costs, counted in steps.

    python -m tests.support.engine.step_counts              # or --seed=..., --num-requests=...

A step here takes as long as any other, so that the figures tell of the order alone: who runs, who waits for how long,
what is computed twice and what is loaded. They are the same on every machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from service.engine.ipc.messages import Sampling, Submit
from service.engine.loras.prefetch import AdapterLoads
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.scheduling.prefix_cache import PrefixCache
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.state_lines import StateLines
from service.engine.sequences.sequence import ScheduledChunk, Sequence
from service.engine.sequences.slots import Slots
from tests.support.engine.engine_mock import LruHost, MockHost, MockRows, MockWeights, SlowMarks
from tests.support.engine.stepped_loader import SteppedLoader


@dataclass
class Counted:
    """Of one request: the steps in which it came, joined first, had its first token and ended; -1: not yet."""

    sequence: Sequence
    came: int
    joined: int = -1
    first_token: int = -1
    ended: int = -1


@dataclass
class CountedSteps:
    """A scheduler whose steps happen at once; integrity is checked after each with `checks`."""

    num_rows: int
    max_sequences: int = 64
    token_budget: int = 256
    num_blocks: int = 4096
    max_steps_waiting_for_rows: int = 32
    steps_per_read: int = 2
    checks: bool = False
    prompts_apart: bool = False
    has_cache: bool = False
    num_steps: int = 0
    num_computed: int = 0
    num_sampled: int = 0
    requests: dict[str, Counted] = field(default_factory=dict)
    num_open: int = 0
    host: MockHost = field(default_factory=MockHost)

    def __post_init__(self) -> None:
        self.rows, self.loader = MockRows(self.num_rows), SteppedLoader()
        self.adapter_loads = AdapterLoads(self.rows, self.host, self.loader, max_loads_ahead=4, wake=lambda: None)
        blocks, lines = BlockPool(self.num_blocks), StateLines(self.max_sequences + 1, self.max_sequences + 1)
        self.scheduler = Scheduler(
            blocks,
            PrefixCache(blocks, lines, block_size_tokens=16, token_budget=self.token_budget, is_on=self.has_cache),
            Slots(self.max_sequences + 1),
            lines,
            self.adapter_loads,
            block_size_tokens=16,
            token_budget=self.token_budget,
            max_steps_waiting_for_rows=self.max_steps_waiting_for_rows,
            max_prompt_logits=64,
            prompts_apart=self.prompts_apart,
        )

    def submit(
        self, name: str, num_prompt: int, num_output: int, adapter: str | None = None, **paid: object
    ) -> Counted:
        sampling, rows = Sampling(max_tokens=num_output), {} if adapter is None else {**MockWeights(adapter).rows}
        request = Submit(name, (1,) * num_prompt, sampling, adapter, rows, **paid)  # type: ignore[arg-type]
        sequence = Sequence(
            request=request,
            key=len(self.requests),
            seed=0,
            parameters=np.zeros(0),
            stop_ids=frozenset(),
            token_ids=[1] * num_prompt,
            num_prompt=num_prompt,
        )
        self.requests[name] = counted = Counted(sequence, self.num_steps)
        self.scheduler.add(sequence)
        self.num_open += 1
        return counted

    def step(self) -> list[ScheduledChunk]:
        """One step, and what is read meanwhile."""
        self.num_steps += 1
        self.adapter_loads.settle_loads(is_idle=not self.scheduler.running)
        chunks = self.scheduler.schedule()
        if self.checks:
            self.scheduler.check_integrity()
        for chunk in chunks:
            self._collect(chunk)
        if self.num_steps % self.steps_per_read == 0:
            self.loader.do_next()
        return chunks

    def _collect(self, chunk: ScheduledChunk) -> None:
        sequence, counted = chunk.sequence, self.requests[chunk.sequence.request_id]
        self.num_computed += chunk.num_tokens
        if counted.joined < 0:
            counted.joined = self.num_steps
        if not chunk.samples:
            return
        self.num_sampled += 1
        sequence.num_in_flight -= 1
        sequence.token_ids.append(1)
        if counted.first_token < 0:
            counted.first_token = self.num_steps
        if len(sequence.token_ids) == sequence.max_total:
            counted.ended = self.num_steps
            self.scheduler.remove(sequence)
            self.num_open -= 1


# ---- loads


def zipf(rng: random.Random, num_adapters: int, ranks: tuple[int, ...]) -> Callable[[], str]:
    """Adapters, the k-th of them asked for in proportion to 1 / k."""
    names = [f"a{i}-{ranks[i % len(ranks)]}" for i in range(num_adapters)]
    weights = [1 / (i + 1) for i in range(num_adapters)]
    return lambda: rng.choices(names, weights)[0]


def closed_loop(
    steps: CountedSteps, rng: random.Random, pick: Callable[[], str | None], num_requests: int, num_clients: int
) -> None:
    """So many clients, each of which asks again when it has been answered."""
    while len(steps.requests) < num_requests or steps.num_open:
        while steps.num_open < num_clients and len(steps.requests) < num_requests:
            steps.submit(f"r{len(steps.requests)}", rng.randint(16, 256), rng.randint(16, 256), pick())
        steps.step()


def first_token_steps(
    *,
    num_requests: int,
    seed: int,
    are_copies_slow: bool,
    num_adapters: int = 300,
    num_rows: int = 64,
    num_on_host: int = 160,
    num_clients: int = 32,
) -> dict[str, list[int]]:
    """Steps from the arrival of a request to its first token, by where its adapter was when it came: uniform traffic
    over adapters of one row, requests one after the other of each client. A read takes a step, and so does a copy if
    they are slow, else no time. What came before the device was full is left out."""
    steps = CountedSteps(num_rows, steps_per_read=1 << 60, host=LruHost(num_on_host))
    marks, rng = SlowMarks(), random.Random(seed)
    if are_copies_slow:
        steps.rows.new_mark = marks
    came_from: dict[str, str] = {}
    residency = steps.adapter_loads.residency
    assert residency is not None
    while len(steps.requests) < num_requests or steps.num_open:
        # One new client a step in the beginning, so that they are not in step with one another.
        while steps.num_open < min(num_clients, steps.num_steps + 1) and len(steps.requests) < num_requests:
            name, adapter = f"r{len(steps.requests)}", f"a{rng.randrange(num_adapters)}"
            came_from[name] = residency.tier_of(adapter)
            steps.submit(name, 16, rng.randint(16, 64), adapter)
        steps.step()
        marks.num_reached = marks.num_made
        steps.loader.do_all()
    waits: dict[str, list[int]] = {"device": [], "host": [], "disk": []}
    for name, one in list(steps.requests.items())[num_requests // 10 :]:
        waits[came_from[name]].append(one.first_token - one.came)
    return waits


def cases(seed: int, num_requests: int) -> Iterator[tuple[str, CountedSteps]]:
    """Loads, run."""
    for num_rows in (256, 1024):
        for name, num_adapters, ranks in (
            ("Zipf over 1,000 adapters of rank 16", 1000, (16,)),
            ("Zipf over 1,000 adapters of rank 8 to 128", 1000, (16, 8, 64, 8, 32, 128, 16)),
            ("Zipf over 100 adapters of rank 8 to 128", 100, (16, 8, 64, 8, 32, 128, 16)),
        ):
            steps, rng = CountedSteps(num_rows), random.Random(seed)
            closed_loop(steps, rng, zipf(rng, num_adapters, ranks), num_requests, 128)
            yield f"{name}, {num_rows} rows", steps
    steps, rng = CountedSteps(256), random.Random(seed)
    closed_loop(steps, rng, lambda: "a1-256" if rng.random() < 0.02 else f"a{rng.randint(2, 21)}-16", num_requests, 128)
    yield "20 adapters of rank 16, one of rank 256 in 50, 256 rows", steps
    steps, rng = CountedSteps(256), random.Random(seed)
    closed_loop(steps, rng, lambda: "a1-16", num_requests, 320)
    yield "one adapter, 256 waiting", steps


def figures(steps: CountedSteps) -> str:
    """A row of a table: see `main`."""
    waits = sorted(one.first_token - one.came for one in steps.requests.values())
    useful = sum(len(one.sequence.token_ids) - 1 for one in steps.requests.values())
    columns = (
        f"{steps.num_sampled / steps.num_steps:.1f}",
        f"{steps.num_computed / useful:.3f}",
        f"{statistics.median(waits):.0f}",
        f"{waits[len(waits) * 99 // 100]}",
        f"{waits[-1]}",
        f"{steps.rows.loads}",
        f"{steps.scheduler.num_preemptions}",
    )
    return " | ".join(columns)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="What the order of requests costs, counted in steps.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-requests", type=int, default=1500)
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.num_requests} requests")
    print(
        "| load | output tokens/step | computed/needed | steps to first token p50 | p99 | max | loads | preemptions |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, steps in cases(given.seed, given.num_requests):
        print(f"| {name} | {figures(steps)} |", flush=True)
    print("\n| steps to the first token, 64 of 300 adapters fit | requests | p50 | p99 | max |\n|---|---|---|---|---|")
    for are_slow, kind in ((False, "a copy takes no time"), (True, "a copy takes a step")):
        waits = first_token_steps(num_requests=2 * given.num_requests, seed=given.seed, are_copies_slow=are_slow)
        for tier, found in waits.items():
            found.sort()
            middle, late = found[len(found) // 2], found[len(found) * 99 // 100]
            print(f"| {kind}, from {tier} | {len(found)} | {middle} | {late} | {found[-1]} |")


if __name__ == "__main__":
    main()
