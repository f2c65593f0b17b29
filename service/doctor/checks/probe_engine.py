"""Engines for the deep checks: the model that is to be served, made-up adapters, loads and their times."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from adapters.layout import BaseLayout
from adapters.memory.host_tier import HostTier
from adapters.memory.slab import HostAdapter, ModuleShape, make_adapter, slab_bytes
from kernels.platform import prepare
from service.doctor.checks.step_process import StepHost
from service.engine.engine import Engine
from service.engine.ipc.messages import Abort, Finished, Sampling, Submit, Tokens
from service.engine.process import compile_kernels, warm_up
from service.engine.startup.build import build_engine, decide, shapes_to_probe
from service.machine import num_usable_cpus
from service.models.layouts import layout_of
from service.models.spec.config_json import read_config

RANK = 16
_SEED = 7
_MAX_PROMPT_TOKENS = {"cpu": 16}
_PROMPT_TOKENS = 128
_WARM_UP_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Subject:
    """A warm engine. num_adapters: made-up ones of rank 16 that its rows hold at the same time, at most 64."""

    engine: Engine
    adapter_rows: dict[str, int]
    num_adapters: int
    num_prompt_tokens: int

    def requests(self, num_requests: int, adapters: Sequence[str], num_output_tokens: int) -> list[Submit]:
        """Random prompts; the adapters in turn, the base model without any."""
        numbers = random.Random(_SEED)
        vocab = self.engine.capacity.vocab_size
        work = []
        for index in range(num_requests):
            prompt = tuple(numbers.randrange(1, vocab) for _ in range(self.num_prompt_tokens))
            adapter = adapters[index % len(adapters)] if adapters else None
            rows = self.adapter_rows if adapter else {}
            work.append(Submit(f"request-{index}", prompt, greedy(num_output_tokens), adapter, rows))
        return work

    def run(self, num_requests: int, adapters: Sequence[str], num_output_tokens: int) -> Run:
        """All at once to their ends, the adapters on the device before."""
        if adapters:
            run_to_the_end(self.engine, self.requests(max(num_requests, len(adapters)), adapters, _WARM_UP_TOKENS))
        return run_to_the_end(self.engine, self.requests(num_requests, adapters, num_output_tokens))

    def decoding(self, work: Sequence[Submit]) -> Driver:
        """A driver whose requests are all past their prompts."""
        driver = Driver(self.engine)
        driver.submit(work)
        while len(driver.run.arrivals) < len(work):
            driver.step()
        return driver


def names(num: int, *, first: int = 0) -> list[str]:
    """Names of made-up adapters."""
    return [f"adapter-{index}" for index in range(first, first + num)]


def build_subject(host: StepHost, **changed: object) -> Subject:
    """An engine as `multilora serve` would build it here, warm. `changed`: fields of EngineOptions."""
    options = host.engine_options(**changed)
    if options.num_threads is None:
        torch.set_num_threads(min(torch.get_num_threads(), num_usable_cpus()))
    else:
        torch.set_num_threads(options.num_threads)
    prepare(host.device)
    config, _ = decide(options, host.device)
    layout = layout_of(read_config(Path(options.model_dir)))
    host.tell("loading the model")
    adapters = FakeAdapters(layout, RANK, shapes_to_probe(config).torch_row_dtype)
    engine = build_engine(options, adapters=adapters)
    host.tell("compiling and capturing")
    compile_kernels(engine)
    engine.capture_steps()
    warm_up(engine)
    while engine.capture_while_idle():
        pass
    longest = min(engine.capacity.max_model_len_tokens, engine.kv_capacity_tokens)
    most = _MAX_PROMPT_TOKENS.get(host.device_type, _PROMPT_TOKENS)
    num_adapters = engine.stats().rows_total // (RANK * len(adapters.rows))
    return Subject(engine, adapters.rows, min(64, num_adapters), max(1, min(most, longest // 4)))


def budgets_of(host: StepHost) -> list[str]:
    """Sentences on how an engine would divide this device's memory."""
    prepare(host.device)
    return decide(host.engine_options(), host.device)[1]


_IDLE_SECONDS = 0.001


def greedy(num_output_tokens: int) -> Sampling:
    """To the last token, whatever the tokens are."""
    return Sampling(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)


@dataclass
class Run:
    """Times of a load, in seconds, on the clock of the caller of `Engine.step`.

    steps        one entry for each call of `step` that ended a step: (seconds since the one before, decode tokens,
                 prompt tokens)
    arrivals     by request: when each message with tokens came, and how many steps had ended by then
    tokens       by request
    """

    started: float
    ended: float = 0.0
    num_output_tokens: int = 0
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    arrivals: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def decode_step_ms(self, num_sequences: int) -> list[float]:
        """Milliseconds of the steps with one token for each of so many sequences, and nothing else."""
        return [seconds * 1e3 for seconds, decode, prompt in self.steps if (decode, prompt) == (num_sequences, 0)]

    def gaps_ms(self) -> list[float]:
        """Between one message with tokens and the next of the same request."""
        return [(later[0] - earlier[0]) * 1e3 for times in self.arrivals.values() for earlier, later in pairwise(times)]

    def first_token_ms(self) -> list[float]:
        return [(times[0][0] - self.started) * 1e3 for times in self.arrivals.values()]


class Driver:
    """Steps an engine as its process does, and keeps the time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.run = Run(time.perf_counter())
        self.num_open = 0
        self._last = self.run.started

    def submit(self, work: Sequence[Submit]) -> None:
        for request in work:
            self.engine.submit(request)
        self.num_open += len(work)

    def step(self) -> None:
        """One call of `Engine.step`. Raises RuntimeError for a request that failed."""
        engine, run = self.engine, self.run
        newest = engine.step_records[-1] if engine.step_records else None
        engine.wake.clear()
        events = engine.step()
        now = time.perf_counter()
        record = engine.step_records[-1] if engine.step_records else None
        if record is not None and record is not newest:
            run.steps.append((now - self._last, record.num_decode_tokens, record.num_prefill_tokens))
            self._last = now
        elif not events:
            engine.wake.wait(_IDLE_SECONDS)  # an adapter is on its way
        for event in events:
            if isinstance(event, Tokens):
                run.num_output_tokens += len(event.token_ids)
                run.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                run.arrivals.setdefault(event.request_id, []).append((now, len(run.steps)))
            elif isinstance(event, Finished):
                self.num_open -= 1
                if event.reason == "error":
                    raise RuntimeError(event.error)
        run.ended = now

    def abort(self, work: Sequence[Submit]) -> None:
        for request in work:
            self.engine.handle(Abort(request.request_id))
        self.num_open = 0
        self.engine.run_until_idle()


def run_to_the_end(engine: Engine, work: Sequence[Submit]) -> Run:
    """All at once, until the last has its last token. Raises RuntimeError if one has more or fewer than asked for."""
    driver = Driver(engine)
    driver.submit(work)
    while driver.num_open:
        driver.step()
    wanted = sum(request.sampling.max_tokens for request in work)
    if driver.run.num_output_tokens != wanted:
        raise RuntimeError(f"{driver.run.num_output_tokens} output tokens instead of {wanted}")
    return driver.run


_ADAPTER_SEED = 20_27
_STANDARD_DEVIATION = 0.02
_POOL_NUMBERS = 1 << 26


class FakeAdapters(HostTier):
    """A host tier that makes its adapters up: rank `rank` on every projection of every layer, another one by digest;
    rank `expert_rank` on every expert, and none at 0.

    All are cut out of one pool of random numbers at places that follow from the digest: the loader copies them into a
    slab when they are asked for, as it would from a file in the page cache.
    """

    def __init__(
        self,
        layout: BaseLayout,
        rank: int,
        dtype: torch.dtype,
        *,
        expert_rank: int = 0,
        budget_bytes: int = 1 << 30,
        is_pinned: bool = False,
    ) -> None:
        super().__init__(Path(), layout, budget_bytes, dtype=dtype, is_pinned=is_pinned)
        self._of_layout, self._of_dtype = layout, dtype
        num_experts = max((experts.num for experts in layout.experts), default=1)
        left_out = ("embeddings",) if expert_rank else ("embeddings", "experts")
        projections = [projection for projection in layout.projections if projection.group not in left_out]
        ranks: dict[str, int] = {
            one.group: expert_rank * num_experts if one.group == "experts" else rank for one in projections
        }
        self._shapes = [
            ModuleShape(piece.module, ranks[projection.group], projection.in_features, piece.out_features, 1.0)
            for projection in projections
            for piece in projection.slices
        ]
        self.rows: dict[str, int] = ranks
        largest = max(one.rank * max(one.in_features, one.out_features) for one in self._shapes)
        size = max(min(_POOL_NUMBERS, 64 * largest), largest)
        generator = torch.Generator().manual_seed(_ADAPTER_SEED)
        self._pool = torch.empty(size, dtype=dtype).normal_(std=_STANDARD_DEVIATION, generator=generator)

    def read(self, digest: str) -> HostAdapter:
        """An adapter made from a name that ends in a number, which is the seed."""
        places = torch.Generator().manual_seed(int(digest.rpartition("-")[2]))
        slab, memory = self.allocate(slab_bytes(self._of_layout, self._shapes, self._of_dtype))
        adapter = make_adapter(self._of_layout, digest, self._shapes, self._of_dtype, slab, memory)
        for held in adapter.slices.values():
            for side in (held.a, held.b):
                start = int(torch.randint(self._pool.numel() - side.numel() + 1, (), generator=places))
                side.copy_(self._pool[start : start + side.numel()].view_as(side))
        return adapter
