"""Engines for the steps: the model that is to be served, with the budgets that it would have, and made-up adapters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.platform import prepare
from service.engine.engine import Engine
from service.engine.ipc.messages import Submit
from service.engine.process import compile_kernels, warm_up
from service.engine.startup.build import build_engine, decide, shapes_to_probe
from service.first_host.steps.driving import Driver, Run, greedy, run_to_the_end
from service.first_host.steps.fake_adapters import FakeAdapters
from service.first_host.steps.step_process import StepHost
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
