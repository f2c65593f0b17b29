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
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from service.cli.client import (
    TIMEOUT_SECONDS,
    ClientError,
    connect,
    error_sentence,
    event_of,
    headers_of,
    pages,
    sentences,
)

_WORDS = ("quick", "lazy", "seven", "wizards", "boat", "near", "over", "jumps", "oxygen", "brown")
_SEED = 0
# Raised when a field of the JSON goes or changes its meaning; new fields do not count.
FORMAT = 1
PERCENTS = (50, 90, 99)
# As --json, standard output in place of the tables.
STDOUT = Path("-")
# Field of the JSON, and what the table calls it.
_KINDS = {"first_token_ms": "first token", "between_tokens_ms": "between tokens", "answer_ms": "answer"}


@dataclass
class Timing:
    """One request, in seconds. `between_tokens` has one entry for each token after the first; tokens that came in one
    event share the time since the last."""

    num_tokens: int
    to_first_token: float
    between_tokens: list[float]
    whole: float


@dataclass
class Tally:
    """All requests of one model name."""

    timings: list[Timing] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def bench(arguments: argparse.Namespace) -> int:
    """Send the requests, show the tables, write the JSON; 1 if a request failed."""
    _check_writable(arguments.json)
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        known = pages(client, "/v1/models", lambda card: str(card["id"]))
    models = arguments.model or known
    if not models:
        raise ClientError(f"The server at {arguments.url} has no models; set --url (MULTILORA_URL) to another.")
    with sentences(arguments.url):
        tallies, seconds = asyncio.run(_load(arguments, models))
    report = _report(arguments, tallies, seconds)
    if arguments.json == STDOUT:
        print(json.dumps(report, indent=2))
    else:
        _show(report, Console())
    if arguments.json not in (None, STDOUT):
        arguments.json.write_text(f"{json.dumps(report, indent=2)}\n")
    for error in sorted({error for tally in tallies.values() for error in tally.errors}):
        Console(stderr=True).print(f"[red]{escape(error)}[/red]")
    return int(any(tally.errors for tally in tallies.values()))


def _check_writable(path: Path | None) -> None:
    """ClientError, before the load and not after it, if the JSON could not be written."""
    if path in (None, STDOUT):
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise ClientError(f"{path} cannot be written: {error.strerror or error}; name another --json.") from error


async def _load(arguments: argparse.Namespace, models: Sequence[str]) -> tuple[dict[str, Tally], float]:
    """Round robin over the models, `concurrency` requests at a time. Returns the tallies and the wall time."""
    tallies = {name: Tally() for name in models}
    chosen = random.Random(_SEED)
    bodies = [_body(arguments, models[index % len(models)], chosen) for index in range(arguments.requests)]
    headers = headers_of(arguments.api_key)
    places = asyncio.Semaphore(arguments.concurrency)
    limits = httpx.Limits(max_connections=arguments.concurrency)
    timeout = httpx.Timeout(**TIMEOUT_SECONDS)
    async with httpx.AsyncClient(base_url=arguments.url, headers=headers, timeout=timeout, limits=limits) as client:
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
    between: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise ClientError(error_sentence((await response.aread()).decode(errors="replace"), response.status_code))
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            new = event_of(response, line, _num_tokens)
            if not new:
                continue
            now = time.perf_counter()
            if first is None:
                first, last, new = now, now, new - 1
            between += [(now - last) / new] * new if new else []
            last = now
    if first is None:
        raise ClientError("The answer has no tokens.")
    return Timing(1 + len(between), first - started, between, last - started)


def _num_tokens(event: Any) -> int:
    return sum(len(choice.get("token_ids") or ()) for choice in event["choices"])


def _report(arguments: argparse.Namespace, tallies: dict[str, Tally], seconds: float) -> dict[str, Any]:
    """The measurements as plain values for JSON: of each model, and of all requests together."""
    whole = Tally()
    for tally in tallies.values():
        whole.timings += tally.timings
        whole.errors += tally.errors
    names = ("requests", "concurrency", "prompt_words", "max_tokens")
    return {
        "format": FORMAT,
        "load": {name: getattr(arguments, name) for name in names},
        "seconds": seconds,
        "models": {name: _summary(tally, seconds) for name, tally in tallies.items()},
        "all": _summary(whole, seconds),
    }


def _summary(tally: Tally, seconds: float) -> dict[str, Any]:
    """Tokens per second over the whole run; percentiles in milliseconds."""
    timings = tally.timings
    num_tokens = sum(timing.num_tokens for timing in timings)
    return {
        "requests": len(timings),
        "errors": len(tally.errors),
        "output_tokens": num_tokens,
        "output_tokens_per_second": num_tokens / seconds,
        "first_token_ms": percentiles([timing.to_first_token for timing in timings]),
        "between_tokens_ms": percentiles([one for timing in timings for one in timing.between_tokens]),
        "answer_ms": percentiles([timing.whole for timing in timings]),
    }


def percentiles(seconds: list[float]) -> dict[str, float] | None:
    """p50, p90 and p99 in milliseconds, between the two nearest values; None if there are no values."""
    if not seconds:
        return None
    # quantiles wants two values.
    cuts = quantiles(seconds if len(seconds) > 1 else seconds * 2, n=100, method="inclusive")
    return {f"p{percent}": cuts[percent - 1] * 1e3 for percent in PERCENTS}


def _show(report: dict[str, Any], console: Console) -> None:
    """A table of what was done and one of how long it took."""
    rows = [*report["models"].items(), ("all", report["all"])]
    done = Table("model", "requests", "errors", "tokens", "tok/s")
    took = Table(Column("model", overflow="fold"))
    for kind in _KINDS.values():
        # One column for all percents of a kind: with nine of them figures are cut off on narrow terminals.
        took.add_column(f"{kind}, ms\n{' / '.join(f'p{percent}' for percent in PERCENTS)}", justify="right")
    for name, summary in rows:
        if name == "all" and summary is report["all"]:
            done.add_section()
            took.add_section()
        speed = f"{summary['output_tokens_per_second']:.1f}"
        done.add_row(escape(name), *(str(summary[one]) for one in ("requests", "errors", "output_tokens")), speed)
        took.add_row(escape(name), *(_cell(summary[kind]) for kind in _KINDS))
    console.print(done)
    console.print(took)


def _cell(percentiles: dict[str, float] | None) -> str:
    """Three digits of each, or all those before the point."""
    if percentiles is None:
        return "-"
    return " / ".join(f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}" for value in percentiles.values())
