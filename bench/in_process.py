"""An engine in this process, with a model of a known shape and random adapters; loads on it, and what they took."""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from adapters.row_plan import EMBEDDINGS_SHARE, row_bytes
from bench.shapes import BUNDLED, SEED, SHAPES, RandomAdapters, opener, write_outside
from service.engine.build import build_engine
from service.engine.config import EngineConfig, default_block_size_tokens
from service.engine.engine import Engine
from service.engine.messages import Abort, Finished, Sampling, Submit, Tokens
from service.engine.process import compile_kernels, warm_up
from service.models.caches import kv_bytes_per_token
from service.models.config_json import read_config
from service.models.families import model_spec
from service.models.layouts import layout_of

_ROW_ALIGNMENT = 16
_IDLE_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Sizes of the workload. max_adapters: most distinct ones in use together; long_prompt_tokens 0: no long prompt
    will come."""

    shape: str
    device: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    token_budget: int
    max_adapters: int = 0
    rank: int = 0
    long_prompt_tokens: int = 0
    engine_fields: dict[str, Any] = field(default_factory=dict)  # further ones of EngineConfig

    @property
    def dtype(self) -> torch.dtype:
        """On a CPU float32, which is the faster there."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16


@dataclass(frozen=True, slots=True)
class Subject:
    """A warm engine, the load that its budgets were sized for, and how long it took to start.

    adapter_rows  of each adapter, by projection group; {} without LoRA
    """

    engine: Engine
    load: Load
    adapter_rows: dict[str, int]
    build_seconds: float
    warm_up_seconds: float

    def requests(self, num_requests: int, num_adapters: int, num_output_tokens: int) -> list[Submit]:
        """Random prompts; adapters in turn, none where num_adapters is 0."""
        numbers = random.Random(SEED)
        work = []
        for index in range(num_requests):
            prompt = self.prompt(self.load.num_prompt_tokens, numbers)
            adapter = f"adapter-{index % num_adapters}" if num_adapters else None
            rows = self.adapter_rows if adapter else {}
            work.append(Submit(f"request-{index}", prompt, greedy(num_output_tokens), adapter, rows))
        return work

    def prompt(self, num_tokens: int, numbers: random.Random) -> tuple[int, ...]:
        """Token ids, each as likely as the other."""
        return tuple(numbers.randrange(1, self.engine.capacity.vocab_size) for _ in range(num_tokens))


def greedy(num_output_tokens: int) -> Sampling:
    """To the last token, whatever the tokens are."""
    return Sampling(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)


def build_subject(load: Load, *, has_lora: bool) -> Subject:
    """An engine of the load's shape, warm; with LoRA, its adapters are made up too."""
    shape = SHAPES[load.shape]
    started = time.perf_counter()
    with ExitStack() as stack:
        model_dir = BUNDLED
        sources: dict[str, Any] = {}
        adapter_rows: dict[str, int] = {}
        if shape is not None:
            model_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_outside(model_dir, shape, load.dtype)
            sources["open_tensors"] = opener(shape, load.device, load.dtype)
        if has_lora:
            adapters = RandomAdapters(layout_of(read_config(model_dir)), load.rank, load.dtype)
            sources["adapters"], adapter_rows = adapters, adapters.rows
        engine = build_engine(config_for(load, model_dir, has_lora), **sources)
    built = time.perf_counter()
    compile_kernels(engine)
    engine.capture_steps()
    warm_up(engine)
    warm = time.perf_counter()
    gc.collect()
    gc.freeze()
    return Subject(engine, load, adapter_rows, built - started, warm - built)


def config_for(load: Load, model_dir: Path, has_lora: bool) -> EngineConfig:
    """Budgets that hold the whole load at once."""
    config = read_config(model_dir)
    spec, layout = model_spec(config), layout_of(config)
    block = default_block_size_tokens(load.device)
    num_tokens = load.num_requests * (load.num_prompt_tokens + load.num_output_tokens + 2 * block)
    num_tokens += 2 * load.long_prompt_tokens + load.token_budget + block
    per_row = sum(size for group, size in row_bytes(layout, load.dtype.itemsize).items() if group != "embeddings")
    num_rows = (load.max_adapters + 1) * -(-load.rank // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    fields: dict[str, Any] = {
        "device": load.device,
        "dtype": "bfloat16" if load.dtype == torch.bfloat16 else "float32",
        "token_budget": max(load.token_budget, load.num_requests),
        "max_sequences": load.num_requests,
        "kv_bytes": num_tokens * kv_bytes_per_token(spec, load.dtype),
        # Tables of ranks and scalings are far below the last 5 %.
        "row_bytes": int(1.05 * num_rows * per_row / (1 - EMBEDDINGS_SHARE)) if has_lora else 0,
        "block_size_tokens": block,
    }
    return EngineConfig(model_dir=str(model_dir), store_root=str(model_dir), **(fields | load.engine_fields))


@dataclass
class Run:
    """What a load took; all times in seconds, on the clock of who calls `Engine.step`.

    steps        one entry for each call of `step` that ended a step: (seconds since the one before, decode tokens,
                 prompt tokens)
    arrivals     by request: when each message with tokens came, and how many steps had ended by then
    """

    started: float
    ended: float = 0.0
    num_output_tokens: int = 0
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    arrivals: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    def decode_step_ms(self, num_sequences: int) -> list[float]:
        """Of steps that were one token for each of so many sequences, and nothing else."""
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
