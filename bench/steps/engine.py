"""Output tokens/s and decode steps of an engine in this process: without LoRA, with LoRA unused, with adapters.

python -m bench.steps.engine --device cuda --shape 8b --requests 64 --prompt-tokens 128 --output-tokens 128
                       --adapters 0,1,8,64 --rank 16 [--resident 160] [--long-prompt] [--profile] [--only CASE ...]
                       [--json FILE]

Weights and adapters are random and made on the device, so nothing is downloaded and no checkpoint is written. All
requests come at once, are greedy, and go on to their last token. Cases run forth and back in each round; tokens/s and
its share of the base are medians over rounds, step times and gaps are those of all rounds together.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.arguments import facts_of, load_of, parser_of
from bench.rounds import cell, forth_and_back, percentile
from bench.steps import long_prompt, step_profile
from bench.steps.in_process import EngineLoad, WarmEngine, build_warm_engine
from service.doctor.checks.probe_engine import Run, run_to_the_end
from service.engine.engine import Engine
from service.engine.ipc.messages import Submit

BASE, SINGLE = "base", "single-base"
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """`num_adapters` None: on the engine without LoRA. `reference`: the case whose tokens/s are this one's 1.00."""

    name: str
    num_adapters: int | None
    num_requests: int
    reference: str

    @property
    def has_lora(self) -> bool:
        return self.num_adapters is not None


def cases_of(num_requests: int, adapters: list[int]) -> list[Case]:
    """0 adapters are two cases: LoRA off, and LoRA on and unused."""
    several = [n for n in adapters if n > 0]
    cases = [Case(BASE, None, num_requests, BASE)]
    if 0 in adapters:
        cases.append(Case("lora-unused", 0, num_requests, BASE))
    cases += [Case(f"adapters-{n}", n, num_requests, BASE) for n in several]
    cases.append(Case(SINGLE, None, 1, SINGLE))
    if several:
        cases.append(Case("single-adapter", 1, 1, SINGLE))
    return cases


def main() -> None:
    parser = parser_of("bench.steps.engine", __doc__)
    parser.add_argument("--adapters", default="0,1,8,64", help="distinct adapters in use together, one case for each")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--expert-rank", type=int, default=0, help="of adapters on every expert, beside --rank elsewhere"
    )
    parser.add_argument(
        "--resident",
        type=int,
        default=0,
        metavar="N",
        help="adapters on the device, of which each case uses those that came last; 0: those of the cases alone",
    )
    parser.add_argument("--long-prompt", type=int, nargs="?", const=8192, default=0, metavar="TOKENS")
    parser.add_argument("--profile", nargs="*", metavar="CASE", help="20 decode steps of these cases (all), on a GPU")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases of all that there are")
    arguments = parser.parse_args()
    adapters = [int(count) for count in arguments.adapters.split(",")]
    cases = cases_of(arguments.requests, adapters)
    unknown = {*(arguments.only or ()), *(arguments.profile or ())} - {case.name for case in cases}
    if unknown:
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(case.name for case in cases)}")
    if arguments.profile is not None and not arguments.device.startswith("cuda"):
        parser.error("--profile looks at the kernels of a GPU; add --device cuda")
    if arguments.only:
        cases = [case for case in cases if case.name in arguments.only]
    load = load_of(
        arguments,
        max_adapters=max(*adapters, arguments.resident),
        rank=arguments.rank,
        expert_rank=arguments.expert_rank,
        long_prompt_tokens=arguments.long_prompt,
    )
    profiled = set() if arguments.profile is None else set(arguments.profile or [case.name for case in cases])
    result = facts_of(arguments)
    for _ in measure(load, cases, arguments.rounds, profiled, result, arguments.resident):
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=1))
    show(result)


@dataclass(frozen=True, slots=True)
class Sides:
    """The engines by whether they have LoRA, and what each case sends to which.

    num_resident  adapters that are on the device before; 0: those of the cases alone
    """

    load: EngineLoad
    num_resident: int
    subjects: dict[bool, WarmEngine]

    def engine(self, case: Case) -> Engine:
        return self.subjects[case.has_lora].engine

    def work(self, case: Case, num_output_tokens: int) -> list[Submit]:
        """With those adapters that came to the device last, above all others."""
        num_adapters = case.num_adapters or 0
        first = max(0, self.num_resident - num_adapters)
        return self.subjects[case.has_lora].requests(case.num_requests, num_adapters, num_output_tokens, first)

    def bring_residents(self) -> None:
        """All adapters to the device, one after the other."""
        if True in self.subjects:
            subject = self.subjects[True]
            for index in range(self.num_resident):
                run_to_the_end(subject.engine, subject.requests(1, 1, 1, index))

    def run(self, case: Case) -> Run:
        return run_to_the_end(self.engine(case), self.work(case, self.load.num_output_tokens))


def measure(
    load: EngineLoad,
    cases: list[Case],
    num_rounds: int,
    profiled: set[str],
    result: dict[str, Any],
    num_resident: int = 0,
) -> Iterator[None]:
    """One engine for the cases without LoRA, one for the others; then the rounds, the long prompt, the profiles.

    Puts the figures into `result`, and yields whenever there are more of them.
    """
    wanted = sorted({case.has_lora for case in cases})
    sides = Sides(load, num_resident, {has_lora: build_warm_engine(load, has_lora=has_lora) for has_lora in wanted})
    sides.bring_residents()
    for case in cases:  # brings the adapters to the device
        run_to_the_end(sides.engine(case), sides.work(case, min(_WARM_UP_TOKENS, load.num_output_tokens)))
    result |= {
        "starts": {
            "lora" if has_lora else "base": {"build_seconds": one.build_seconds, "warm_up_seconds": one.warm_up_seconds}
            for has_lora, one in sides.subjects.items()
        },
        "cases": rounds(sides, cases, num_rounds),
    }
    yield
    if load.long_prompt_tokens:
        result["long_prompt"] = long_prompt.measure(sides.subjects[wanted[0]])
        yield
    for case in cases:
        if case.name in profiled:
            work = sides.work(case, max(load.num_output_tokens, 2 * step_profile.NUM_STEPS))
            result["cases"][case.name]["profile"] = step_profile.measure(sides.engine(case), work)
            yield


def rounds(sides: Sides, cases: list[Case], num_rounds: int) -> dict[str, dict[str, Any]]:
    """Figures by case."""
    by_name = {case.name: case for case in cases}
    runs: dict[str, list[Run]] = {name: [] for name in by_name}
    seconds: dict[str, list[float]] = {name: [] for name in by_name}  # by round: the mean of its runs
    for _ in range(num_rounds):
        taken: dict[str, list[float]] = {name: [] for name in by_name}
        for name in forth_and_back(by_name):
            run = sides.run(by_name[name])
            runs[name].append(run)
            taken[name].append(run.seconds)
        for name in by_name:
            seconds[name].append(statistics.mean(taken[name]))
    return {case.name: figures(case, runs[case.name], seconds) for case in cases}


def figures(case: Case, runs: list[Run], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Of one case; `share_of_base` is None where its base was not run."""
    rates = [runs[0].num_output_tokens / taken for taken in seconds[case.name]]
    share = None
    if case.reference in seconds:
        pairs = zip(seconds[case.reference], seconds[case.name], strict=True)
        share = statistics.median(base / own for base, own in pairs)
    steps = [ms for run in runs for ms in run.decode_step_ms(case.num_requests)]
    gaps = [ms for run in runs for ms in run.gaps_ms()]
    first = [ms for run in runs for ms in run.first_token_ms()]
    return {
        "requests": case.num_requests,
        "output_tokens": runs[0].num_output_tokens,
        "rounds": len(rates),
        "output_tokens_per_second": statistics.median(rates),
        "output_tokens_per_second_min": min(rates),
        "output_tokens_per_second_max": max(rates),
        "share_of_base": share,
        "decode_steps": len(steps),
        "decode_step_ms_p50": percentile(steps, 50),
        "decode_step_ms_p99": percentile(steps, 99),
        "between_tokens_ms_p50": percentile(gaps, 50),
        "between_tokens_ms_p99": percentile(gaps, 99),
        "first_token_ms_p50": percentile(first, 50),
        "first_token_ms_max": max(first),
    }


COLUMNS = {
    "tok/s": "output_tokens_per_second",
    "of base": "share_of_base",
    "step ms p50": "decode_step_ms_p50",
    "p99": "decode_step_ms_p99",
    "between tokens ms p50": "between_tokens_ms_p50",
    "p99 ": "between_tokens_ms_p99",
    "first token ms p50": "first_token_ms_p50",
}


def show(result: dict[str, Any]) -> None:
    """Tables on the terminal."""
    console = Console(width=140)
    table = Table("case", *COLUMNS, title=f"{result['shape']} on {result['device']}, torch {result['torch']}")
    for name, case in result["cases"].items():
        table.add_row(name, *(cell(case[key]) for key in COLUMNS.values()))
    console.print(table)
    for name, start in result["starts"].items():
        console.print(f"{name}: built in {start['build_seconds']:.1f} s, warm {start['warm_up_seconds']:.1f} s later")
    for name, case in result["cases"].items():
        if "profile" in case:
            step_profile.show(console, name, case["profile"])
    if "long_prompt" in result:
        table = Table("a long prompt among running decodes", "")
        for name, value in result["long_prompt"].items():
            table.add_row(name, cell(value))
        console.print(table)


if __name__ == "__main__":
    main()
