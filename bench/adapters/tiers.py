"""What it costs that not all adapters fit on the device: a load, the steps beside it, and traffic over more adapters
than have rows.

    .venv/bin/python -m bench.adapters.tiers --device cuda --shape 8b --rank 16 --adapters 200 [--traffic uniform]
    .venv/bin/python -m bench.adapters.tiers --adapters 1000 --traffic zipf        # the bundled model, on a CPU

An engine in this process with rows for --resident adapters (64), and adapters that are made up; --host-bytes of them
stay in host memory, all if it is not given. Four measurements, of which each round has the two sides of the last two:

load      host -> device of one adapter while nothing runs, from the call until the device has it
sums      the same of sums of 2, 4 and 8 adapters that host memory has, each with weights of its own: the first, for
          which the way of such adapters' rows is worked out, and later ones
beside    decode steps of --requests sequences on half of the residents, with one load begun every --every steps, and
          without
traffic   as many clients as --requests, each with one request at a time, on all adapters, and on the residents alone:
          tokens/s, tokens for each CPU second of this process, and how long requests waited for their first token: the
          opening ones of all clients, which come at once, and those that came later
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from adapters.sums import digest_of
from bench.arguments import facts_of, load_of, parser_of
from bench.rounds import percentile
from bench.steps.in_process import WarmEngine, build_warm_engine
from service.doctor.checks.probe_engine import Driver, greedy
from service.engine.ipc.messages import Submit
from service.engine.loras.residency import AdapterState, Residency

NUM_LOADS = 20


def main() -> None:
    parser = parser_of("bench.adapters.tiers", __doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--resident", type=int, default=64, help="adapters that the rows are for")
    parser.add_argument("--host-bytes", type=int, help="of adapters in host memory; default: all of them")
    parser.add_argument("--traffic", choices=("uniform", "zipf"), default="uniform")
    parser.add_argument("--every", type=int, default=8, help="steps between two loads")
    parser.add_argument("--only", nargs="*", default=None, help="measurements to make; default: all")
    parser.add_argument("--num", type=int, default=512, help="requests of a side of a round, in the traffic")
    arguments = parser.parse_args()
    load = load_of(arguments, max_adapters=arguments.resident - 1, rank=arguments.rank)
    subject = build_warm_engine(load, has_lora=True, host_bytes=arguments.host_bytes, num_on_host=arguments.adapters)
    bench = Bench(subject, arguments.resident, arguments.adapters, arguments.traffic)
    figures: dict[str, Any] = facts_of(arguments)
    parts: dict[str, Callable[[], Any]] = {
        "load": bench.loads,
        "sums": bench.sums,
        "beside": lambda: bench.beside(arguments.rounds, arguments.every),
        "traffic": lambda: bench.traffic(arguments.rounds, arguments.num),
    }
    for name, measure in parts.items():
        if arguments.only is not None and name not in arguments.only:
            continue
        figures[name] = measure()
        print(json.dumps({name: figures[name]}, indent=1), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures))


@dataclass
class Side:
    """One side of a comparison, over all rounds."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    opening_waits_ms: list[float] = field(default_factory=list)
    later_waits_ms: list[float] = field(default_factory=list)


class Bench:
    """Measures one engine; each method leaves it idle."""

    def __init__(self, subject: WarmEngine, num_resident: int, num_adapters: int, traffic: str) -> None:
        self._subject = subject
        self._engine = subject.engine
        self._num_resident = num_resident
        self._num_adapters = num_adapters
        self._traffic = traffic
        self._names = (f"run-{at}" for at in itertools.count())
        self._is_cuda = subject.load.device.startswith("cuda")

    def loads(self) -> dict[str, float]:
        """Milliseconds of loads of adapters that host memory has."""
        rows, residency = self._engine.adapter_loads.rows, self._engine.adapter_loads.residency
        assert rows is not None and residency is not None
        times, num_bytes = [], 0
        for at in range(NUM_LOADS + 3):
            digest = f"adapter-{self._num_adapters + at}"
            self._read(residency, digest)
            self._synchronize()
            begin = time.perf_counter()
            assert residency.copy(digest), "the rows in use leave no room"
            called = time.perf_counter()
            self._synchronize()
            times.append((time.perf_counter() - begin, called - begin))
            residency.settle(is_idle=True)
            num_bytes = residency.loaded_bytes["host"] // (at + 1)
            self._engine.adapter_loads.evict(digest)
        whole, call = ([one[which] * 1e3 for one in times[3:]] for which in (0, 1))
        ms = statistics.median(whole)
        return {
            "bytes": num_bytes,
            "p50_ms": round(ms, 3),
            "max_ms": round(max(whole), 3),
            "call_p50_ms": round(statistics.median(call), 3),
            "gb_per_second": round(num_bytes / ms / 1e6, 1),
        }

    def sums(self) -> dict[str, dict[str, float]]:
        """Milliseconds until the device has a sum of adapters that host memory has, by their number."""
        residency = self._engine.adapter_loads.residency
        assert residency is not None
        told = {}
        for num_parts in (2, 4, 8):
            names = [f"adapter-{at}" for at in range(num_parts)]
            times = []
            for at in range(NUM_LOADS + 1):
                digest = digest_of((name, 0.5 + (at + 1) * (place + 1) / 1000) for place, name in enumerate(names))
                assert digest is not None
                if not at:  # brings the parts to host memory
                    self._read(residency, digest)
                    residency.release(digest)
                self._synchronize()
                begin = time.perf_counter()
                residency.read(digest, lambda: True)
                assert residency.copy(digest), "the rows in use leave no room"
                self._synchronize()
                times.append((time.perf_counter() - begin) * 1e3)
                residency.settle(is_idle=True)
                self._engine.adapter_loads.evict(digest)
            told[str(num_parts)] = {
                "first_ms": round(times[0], 3),
                "p50_ms": round(statistics.median(times[1:]), 3),
                "max_ms": round(max(times[1:]), 3),
            }
        return told

    def beside(self, num_rounds: int, every: int) -> dict[str, float]:
        """Median decode step in ms with loads beside, and without."""
        self._steps_beside(0)  # brings the adapters of the requests, of which some would end before others begin
        sides: dict[bool, list[float]] = {False: [], True: []}
        for at in range(2 * num_rounds):
            sides[at % 2 == 1] += self._steps_beside(every if at % 2 else 0)
        quiet, beside = (statistics.median(sides[is_beside]) for is_beside in (False, True))
        p99 = percentile(sides[True], 99)
        assert p99 is not None
        return {
            "quiet_ms": round(quiet, 3),
            "beside_ms": round(beside, 3),
            "ratio": round(beside / quiet, 3),
            "beside_p99_ms": round(p99, 3),
        }

    def _steps_beside(self, every: int) -> list[float]:
        load, engine = self._subject.load, self._engine
        num = load.num_requests
        work = self._subject.requests(num, self._num_resident // 2, load.num_output_tokens)
        driver = Driver(engine)
        name = next(self._names)
        driver.submit([replace_id(one, f"{name}-{one.request_id}") for one in work])
        others = itertools.cycle(range(self._num_resident, self._num_resident + 8))
        for step in itertools.count():
            if not driver.num_open:
                break
            if every and step % every == 0:
                engine.adapter_loads.pin(
                    [f"adapter-{next(others)}"]
                )  # brought beside the others, in the place of the last
            driver.step()
        engine.adapter_loads.pin([])
        return driver.run.decode_step_ms(num)

    def traffic(self, num_rounds: int, num_requests: int) -> dict[str, Any]:
        """All adapters against the residents alone, which are there when the clock starts."""
        sides = {"all": Side(), "resident": Side()}
        for at in range(num_rounds):
            for name in ("all", "resident") if at % 2 else ("resident", "all"):
                self._closed_loop(name, num_requests, seed=at, side=sides[name])
        every, resident = sides["all"], sides["resident"]
        return {
            "distribution": self._traffic,
            "tokens_per_second": round(every.tokens / every.seconds, 1),
            "of_resident": round(every.tokens / every.seconds / (resident.tokens / resident.seconds), 3),
            "per_cpu_second_of_resident": round(
                every.tokens / every.cpu_seconds / (resident.tokens / resident.cpu_seconds), 3
            ),
            "first_token": {name: _told_waits(side) for name, side in sides.items()},
        }

    def _closed_loop(self, name: str, num_requests: int, *, seed: int, side: Side) -> None:
        numbers, driver = random.Random(seed), Driver(self._engine)
        pick = self._picker(numbers, self._num_adapters if name == "all" else self._num_resident)
        load = self._subject.load
        came: dict[str, float] = {}
        begin, begin_cpu = time.perf_counter(), time.process_time()
        while len(came) < num_requests or driver.num_open:
            while driver.num_open < load.num_requests and len(came) < num_requests:
                request_id, prompt = next(self._names), self._subject.prompt(load.num_prompt_tokens, numbers)
                came[request_id] = time.perf_counter()
                # Of different lengths, so that requests do not come and go together.
                sampling = greedy(numbers.randint(load.num_output_tokens // 2, load.num_output_tokens))
                driver.submit([Submit(request_id, prompt, sampling, pick(), self._subject.adapter_rows)])
            driver.step()
        side.seconds += time.perf_counter() - begin
        side.cpu_seconds += time.process_time() - begin_cpu
        side.tokens += driver.run.num_output_tokens
        arrivals = driver.run.arrivals
        waits = [(arrivals[request_id][0][0] - seconds) * 1e3 for request_id, seconds in came.items()]
        side.opening_waits_ms += waits[: load.num_requests]
        side.later_waits_ms += waits[load.num_requests :]

    def _picker(self, numbers: random.Random, num_adapters: int) -> Callable[[], str]:
        names = [f"adapter-{at}" for at in range(num_adapters)]
        is_zipf = self._traffic == "zipf"
        weights = [1 / (at + 1) if is_zipf else 1.0 for at in range(num_adapters)]
        return lambda: numbers.choices(names, weights)[0]

    def _read(self, residency: Residency, digest: str) -> None:
        """Into host memory."""
        residency.read(digest, lambda: True)
        self._until(lambda: residency.state_of(digest) is AdapterState.HOST)

    def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._engine.wake.wait(0.001)
            self._engine.wake.clear()
            assert self._engine.adapter_loads.residency is not None
            self._engine.adapter_loads.residency.settle(is_idle=True)

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def _told_waits(side: Side) -> dict[str, float]:
    """In ms, and the longest as so many times the median: of all requests, and of those after the opening ones."""
    waits = side.opening_waits_ms + side.later_waits_ms
    told = {
        "p50_ms": round(statistics.median(waits), 1),
        "max_ms": round(max(waits), 1),
        "longest_by_median": round(max(waits) / statistics.median(waits), 1),
    }
    if later := side.later_waits_ms:
        told["later_p50_ms"] = round(statistics.median(later), 1)
        told["later_max_ms"] = round(max(later), 1)
        told["later_longest_by_median"] = round(max(later) / statistics.median(later), 1)
    return told


def replace_id(request: Submit, request_id: str) -> Submit:
    """The same request by another name."""
    return Submit(request_id, request.prompt_token_ids, request.sampling, request.adapter, request.adapter_rows)


if __name__ == "__main__":
    main()
