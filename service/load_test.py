"""`multilora bench`: a bounded load on a running server, and what each adapter's requests got of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from service.client import TIMEOUT, ClientError, answer_of, connect, error_sentence, event_of, headers_of, sentences

_WORDS = ("quick", "lazy", "seven", "wizards", "boat", "near", "over", "jumps", "oxygen", "brown")
_SEED = 0


@dataclass
class Timing:
    """One request, in seconds; `per_token` is None for answers of one token."""

    num_tokens: int
    to_first_token: float
    per_token: float | None


@dataclass
class Tally:
    """All requests of one model name."""

    timings: list[Timing] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def bench(arguments: argparse.Namespace) -> int:
    """Send the requests, show the table; 1 if a request failed."""
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        known = answer_of(client.get("/v1/models"), lambda body: [str(card["id"]) for card in body["data"]])
    models = arguments.model or known
    if not models:
        raise ClientError(f"The server at {arguments.url} has no models; set --url (MULTILORA_URL) to another.")
    with sentences(arguments.url):
        tallies, seconds = asyncio.run(_load(arguments, models))
    if arguments.json:
        print(json.dumps({name: _summary(tally, seconds) for name, tally in tallies.items()}, indent=2))
    else:
        Console().print(_table(tallies, seconds))
    for error in sorted({error for tally in tallies.values() for error in tally.errors}):
        Console(stderr=True).print(f"[red]{escape(error)}[/red]")
    return int(any(tally.errors for tally in tallies.values()))


async def _load(arguments: argparse.Namespace, models: Sequence[str]) -> tuple[dict[str, Tally], float]:
    """Round robin over the models, `concurrency` requests at a time. Returns the tallies and the wall time."""
    tallies = {name: Tally() for name in models}
    chosen = random.Random(_SEED)
    bodies = [_body(arguments, models[index % len(models)], chosen) for index in range(arguments.requests)]
    headers = headers_of(arguments.api_key)
    places = asyncio.Semaphore(arguments.concurrency)
    limits = httpx.Limits(max_connections=arguments.concurrency)
    async with httpx.AsyncClient(base_url=arguments.url, headers=headers, timeout=TIMEOUT, limits=limits) as client:
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("requests", total=len(bodies))

            async def one(body: dict[str, Any]) -> None:
                async with places:
                    try:
                        tallies[body["model"]].timings.append(await _request(client, body))
                    except ClientError as error:
                        tallies[body["model"]].errors.append(f"{body['model']}: {error}")
                progress.advance(task)

            started = time.perf_counter()
            await asyncio.gather(*(one(body) for body in bodies))
            return tallies, time.perf_counter() - started


def _body(arguments: argparse.Namespace, model: str, chosen: random.Random) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": " ".join(chosen.choices(_WORDS, k=arguments.prompt_words)),
        "max_tokens": arguments.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        # Every chunk then has its tokens, also while its text is withheld.
        "return_token_ids": True,
    }


async def _request(client: httpx.AsyncClient, body: dict[str, Any]) -> Timing:
    started = time.perf_counter()
    first: float | None = None
    last = started
    num_tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise ClientError(error_sentence((await response.aread()).decode(errors="replace"), response.status_code))
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            new = event_of(response, line, _num_tokens)
            if new:
                last = time.perf_counter()
                first = last if first is None else first
                num_tokens += new
    if first is None:
        raise ClientError("The answer has no tokens.")
    return Timing(num_tokens, first - started, (last - first) / (num_tokens - 1) if num_tokens > 1 else None)


def _num_tokens(event: Any) -> int:
    return sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


def _summary(tally: Tally, seconds: float) -> dict[str, float | int | None]:
    """Tokens per second over the whole run; milliseconds to the first token and per further token."""
    first = [timing.to_first_token * 1e3 for timing in tally.timings]
    per_token = [timing.per_token * 1e3 for timing in tally.timings if timing.per_token is not None]
    num_tokens = sum(timing.num_tokens for timing in tally.timings)
    return {
        "requests": len(tally.timings),
        "errors": len(tally.errors),
        "output_tokens": num_tokens,
        "output_tokens_per_second": num_tokens / seconds,
        "first_token_p50_ms": median(first) if first else None,
        "first_token_p95_ms": _p95(first),
        "per_token_p50_ms": median(per_token) if per_token else None,
        "per_token_p95_ms": _p95(per_token),
    }


def _p95(values: list[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=20, method="inclusive")[-1]


def _table(tallies: dict[str, Tally], seconds: float) -> Table:
    table = Table("model", "requests", "errors", "tokens", "tok/s", "TTFT ms p50", "p95", "TPOT ms p50", "p95")
    whole = Tally()
    for name, tally in tallies.items():
        table.add_row(escape(name), *_cells(_summary(tally, seconds)))
        whole.timings += tally.timings
        whole.errors += tally.errors
    table.add_section()
    table.add_row("all", *_cells(_summary(whole, seconds)))
    return table


def _cells(summary: dict[str, float | int | None]) -> list[str]:
    return [
        "-" if value is None else str(value) if isinstance(value, int) else f"{value:.1f}" for value in summary.values()
    ]
