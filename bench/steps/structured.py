"""What grammars cost: decode steps in which all sequences follow one, as a share of the same steps without.

python -m bench.steps.structured [--shape 200m] [--requests 32] [--output-tokens 64] [--rounds 5] [--json FILE]

One engine in this process, the same prompts, greedy, to the last token. The grammar is a JSON schema: an array of
records that is too long to be finished, so that both sides run as many steps. Each round runs without, with, and
without; a ratio is of the medians of decode steps within one round. Grammars are compiled before the first round.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.arguments import facts_of, load_of, parser_of
from bench.rounds import cell, forth_and_back
from bench.steps.in_process import WarmEngine, build_warm_engine
from service.doctor.checks.probe_engine import run_to_the_end
from service.engine.ipc.messages import Submit
from service.grammars.constraints import grammar_of, schema_constraint

FREE, CONSTRAINED = "free", "constrained"
BAR = 1.10
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["first", "second", "third"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}, "maxItems": 4},
        "parent": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["name", "kind", "count", "tags", "parent"],
    "additionalProperties": False,
}


def main() -> None:
    parser = parser_of("bench.steps.structured", __doc__)
    parser.set_defaults(shape="200m", requests=32, output_tokens=64, prompt_tokens=16, rounds=5)
    arguments = parser.parse_args()
    subject = build_warm_engine(load_of(arguments), has_lora=False)
    result = facts_of(arguments) | measure(subject, arguments.rounds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    show(result)


def measure(subject: WarmEngine, num_rounds: int) -> dict[str, Any]:
    """Decode steps in milliseconds, by side and round, and their ratios."""
    load = subject.load
    work = {FREE: subject.requests(load.num_requests, 0, load.num_output_tokens)}
    work[CONSTRAINED] = [_constrained(request) for request in work[FREE]]
    steps: dict[str, list[float]] = {name: [] for name in work}
    for name in work:
        run_to_the_end(subject.engine, work[name])
    for _ in range(num_rounds):
        taken: dict[str, list[float]] = {name: [] for name in work}
        for name in forth_and_back(work):
            taken[name] += run_to_the_end(subject.engine, work[name]).decode_step_ms(load.num_requests)
        for name, milliseconds in taken.items():
            steps[name].append(statistics.median(milliseconds))
    pairs = zip(steps[CONSTRAINED], steps[FREE], strict=True)
    return {"decode_step_ms": steps, "ratios": [constrained / free for constrained, free in pairs]}


def _constrained(request: Submit) -> Submit:
    schema = {"type": "array", "items": _RECORD, "minItems": 1000}
    grammar = grammar_of(schema_constraint(schema), {})
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar))


def show(result: dict[str, Any]) -> None:
    """A table on the terminal."""
    steps, ratios = result["decode_step_ms"], result["ratios"]
    table = Table("figure", "median", "min - max", "bar", title=f"{result['shape']} on {result['device']}")
    for name, milliseconds in steps.items():
        spread = f"{min(milliseconds):.2f} - {max(milliseconds):.2f}"
        table.add_row(f"decode step, {name}, ms", cell(statistics.median(milliseconds)), spread, "")
    spread = f"{min(ratios):.3f} - {max(ratios):.3f}"
    table.add_row("constrained / free", f"{statistics.median(ratios):.3f}", spread, f"<= {BAR:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
