"""What HTTP costs: the same requests to an engine in this process and to a server on this machine, whole and streamed.

python -m bench.http.http [--device cpu] [--shape bundled] [--requests 64] [--prompt-tokens 128] [--output-tokens 128]
                     [--rounds 3] [--json FILE]

Prompts are text; all requests come at once, are greedy, and go on to their last token. The three sides run forth and
back in each round. The API process's share of a processor is what the system counted for it, over all of its tokens;
times between tokens are those between events of a stream that carry text. A shape other than the bundled model is
written to a temporary directory first: 16 GB for 8b.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.arguments import facts_of, load_of, parser_of
from bench.http.http_client import complete_all
from bench.rounds import cell, forth_and_back, percentile
from bench.shapes import BUNDLED, SEED, SHAPES, write_checkpoint
from bench.steps.in_process import EngineLoad, WarmEngine, build_warm_engine, config_for
from service.doctor.checks.probe_engine import greedy, run_to_the_end
from service.engine.ipc.messages import Submit
from tests.support.http.server_process import Server, running_server

_WORDS = ("quick", "lazy", "seven", "wizards", "boat", "near", "over", "jumps", "oxygen", "brown")
IN_PROCESS, WHOLE, STREAMED = "in-process", "whole", "streamed"


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of the load. api_seconds: processor time of the API process, 0 in process."""

    seconds: float
    num_tokens: int
    gaps_ms: list[float]
    first_token_ms: list[float]
    api_seconds: float = 0.0


def main() -> None:
    arguments = parser_of("bench.http.http", __doc__).parse_args()
    result = facts_of(arguments) | {"sides": measure(load_of(arguments), arguments.rounds)}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    show(result)


def measure(load: EngineLoad, num_rounds: int) -> dict[str, Any]:
    """Figures by side. Both engines live at the same time, and one of them works."""
    with tempfile.TemporaryDirectory() as scratch:
        model_dir, shape = BUNDLED, SHAPES[load.shape]
        if shape is not None:
            model_dir = Path(scratch) / "model"
            model_dir.mkdir()
            write_checkpoint(model_dir, shape, load.device, load.dtype)
        with running_server(model_dir, Path(scratch) / "server", **_settings(load, model_dir)) as server:
            sides = Sides(load, build_warm_engine(load, has_lora=False), server)
            runs: dict[str, Callable[[], Sample]] = {
                IN_PROCESS: sides.in_process,
                WHOLE: lambda: sides.over_http(stream=False),
                STREAMED: lambda: sides.over_http(stream=True),
            }
            for run in runs.values():
                run()
            samples: list[dict[str, list[Sample]]] = []
            for _ in range(num_rounds):
                samples.append({name: [] for name in runs})
                for name in forth_and_back(runs):
                    samples[-1][name].append(runs[name]())
    return {name: figures(name, samples) for name in runs}


def _settings(load: EngineLoad, model_dir: Path) -> dict[str, Any]:
    """Of a server whose engine is the one in this process."""
    config = config_for(load, model_dir, has_lora=False)
    names = ("device", "dtype", "token_budget", "max_sequences", "kv_bytes", "block_size_tokens", *load.engine_fields)
    same = {name: getattr(config, name) for name in names}
    return {"model_name": "base", "num_threads": torch.get_num_threads(), "adapter_row_bytes": 0} | same


class Sides:
    """The same requests, to the engine in this process and to the server."""

    def __init__(self, load: EngineLoad, subject: WarmEngine, server: Server) -> None:
        self._load, self._subject, self._server = load, subject, server
        words = random.Random(SEED)
        self._prompts = [self._prompt(words) for _ in range(load.num_requests)]
        self._token_ids = [self._tokens_of(prompt) for prompt in self._prompts]

    def in_process(self) -> Sample:
        sampling = greedy(self._load.num_output_tokens)
        work = [Submit(f"request-{index}", tuple(ids), sampling) for index, ids in enumerate(self._token_ids)]
        run = run_to_the_end(self._subject.engine, work)
        return Sample(run.seconds, run.num_output_tokens, run.gaps_ms(), run.first_token_ms())

    def over_http(self, *, stream: bool) -> Sample:
        num_output_tokens = self._load.num_output_tokens
        body = {"model": "base", "max_tokens": num_output_tokens, "temperature": 0, "ignore_eos": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        before = processor_seconds(self._server.process.pid)
        answers, started, ended = complete_all(self._server.url, [body | {"prompt": one} for one in self._prompts])
        api_seconds = processor_seconds(self._server.process.pid) - before
        short = [answer.num_tokens for answer in answers if answer.num_tokens != num_output_tokens]
        if short:
            raise RuntimeError(f"answers of {short} tokens instead of {num_output_tokens}")
        times = [answer.token_seconds for answer in answers if answer.token_seconds]
        gaps = [(later - earlier) * 1e3 for one in times for earlier, later in pairwise(one)]
        first = [(one[0] - started) * 1e3 for one in times]
        return Sample(ended - started, num_output_tokens * len(answers), gaps, first if stream else [], api_seconds)

    def _prompt(self, words: random.Random) -> str:
        """Text of as many tokens as asked for; where the model begins with a token of its own, one more."""
        text = " ".join(words.choices(_WORDS, k=self._load.num_prompt_tokens))
        tokens = self._tokens_of(text, add_special_tokens=False)[: self._load.num_prompt_tokens]
        answer = self._server.post("/detokenize", json={"tokens": tokens}).raise_for_status()
        return str(answer.json()["prompt"])

    def _tokens_of(self, text: str, **options: bool) -> list[int]:
        answer = self._server.post("/tokenize", json={"prompt": text, **options}).raise_for_status()
        tokens: list[int] = answer.json()["tokens"]
        return tokens


def processor_seconds(pid: int) -> float:
    """User and system time of a process, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(name: str, samples: list[dict[str, list[Sample]]]) -> dict[str, Any]:
    """Of one side, from the samples of all sides by round."""

    def seconds(side: str) -> list[float]:
        return [statistics.mean(sample.seconds for sample in one[side]) for one in samples]

    own = [sample for one in samples for sample in one[name]]
    rates = [own[0].num_tokens / taken for taken in seconds(name)]
    shares = [base / taken for base, taken in zip(seconds(IN_PROCESS), seconds(name), strict=True)]
    gaps = [ms for sample in own for ms in sample.gaps_ms]
    first = [ms for sample in own for ms in sample.first_token_ms]
    microseconds = sum(sample.api_seconds for sample in own) / sum(sample.num_tokens for sample in own) * 1e6
    return {
        "output_tokens": own[0].num_tokens,
        "output_tokens_per_second": statistics.median(rates),
        "output_tokens_per_second_min": min(rates),
        "output_tokens_per_second_max": max(rates),
        "share_of_in_process": statistics.median(shares),
        "api_us_per_token": None if name == IN_PROCESS else microseconds,
        "between_tokens_ms_p50": percentile(gaps, 50),
        "between_tokens_ms_p99": percentile(gaps, 99),
        "first_token_ms_p50": percentile(first, 50),
    }


COLUMNS = {
    "tok/s": "output_tokens_per_second",
    "of in process": "share_of_in_process",
    "API us a token": "api_us_per_token",
    "between tokens ms p50": "between_tokens_ms_p50",
    "p99": "between_tokens_ms_p99",
    "first token ms p50": "first_token_ms_p50",
}


def show(result: dict[str, Any]) -> None:
    """A table on the terminal."""
    table = Table("side", *COLUMNS, title=f"{result['shape']} on {result['device']}, torch {result['torch']}")
    for name, side in result["sides"].items():
        table.add_row(name, *(cell(side[key]) for key in COLUMNS.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
