"""An engine in this process, with a model of a known shape and random adapters."""

from __future__ import annotations

import gc
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adapters.layout import BaseLayout
from adapters.row_plan import EMBEDDINGS_SHARE, EXPERTS_SHARE, row_bytes
from bench.shapes import BUNDLED, SEED, SHAPES, opener, write_outside
from service.doctor.checks.probe_engine import FakeAdapters, greedy
from service.engine.engine import Engine
from service.engine.ipc.config import EngineConfig, default_block_size_tokens
from service.engine.ipc.messages import Submit
from service.engine.process import compile_kernels, warm_up
from service.engine.startup.build import build_engine
from service.models.families import model_spec
from service.models.layers.caches import kv_bytes_per_token, state_bytes_per_line
from service.models.layouts import layout_of
from service.models.spec.config_json import read_config

_ROW_ALIGNMENT = 16
_IDLE_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Sizes of the workload. max_adapters: most distinct ones in use together; expert_rank: of adapters on all experts;
    long_prompt_tokens 0: no long prompt will come."""

    shape: str
    device: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    token_budget: int
    max_adapters: int = 0
    rank: int = 0
    expert_rank: int = 0
    long_prompt_tokens: int = 0
    engine_fields: dict[str, Any] = field(default_factory=dict)  # further ones of EngineConfig

    @property
    def dtype(self) -> torch.dtype:
        """On a CPU float32, which is the faster there."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16


@dataclass(frozen=True, slots=True)
class WarmEngine:
    """A warm engine, the load that its budgets were sized for, and how long it took to start.

    adapter_rows  of each adapter, by projection group; {} without LoRA
    """

    engine: Engine
    load: EngineLoad
    adapter_rows: dict[str, int]
    build_seconds: float
    warm_up_seconds: float

    def requests(
        self, num_requests: int, num_adapters: int, num_output_tokens: int, first_adapter: int = 0
    ) -> list[Submit]:
        """Random prompts; adapters in turn from the first one on, none where num_adapters is 0."""
        numbers = random.Random(SEED)
        work = []
        for index in range(num_requests):
            prompt = self.prompt(self.load.num_prompt_tokens, numbers)
            adapter = f"adapter-{first_adapter + index % num_adapters}" if num_adapters else None
            rows = self.adapter_rows if adapter else {}
            work.append(Submit(f"request-{index}", prompt, greedy(num_output_tokens), adapter, rows))
        return work

    def prompt(self, num_tokens: int, numbers: random.Random) -> tuple[int, ...]:
        """Token ids, each as likely as the other."""
        return tuple(numbers.randrange(1, self.engine.capacity.vocab_size) for _ in range(num_tokens))


def build_warm_engine(
    load: EngineLoad, *, has_lora: bool, host_bytes: int | None = None, num_on_host: int | None = None
) -> WarmEngine:
    """An engine of the load's shape, warm; with LoRA, its adapters are made up too.

    host_bytes   of adapters in host memory; None: room for `num_on_host` and a few, or a gibibyte
    """
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
            layout = layout_of(read_config(model_dir))
            if host_bytes is None:
                num_on_host = num_on_host or (load.max_adapters if load.expert_rank else None)
                adapter_bytes = sum(_adapter_bytes(load, layout))
                host_bytes = 1 << 30 if num_on_host is None else int(1.05 * (num_on_host + 8) * adapter_bytes)
            adapters = FakeAdapters(
                layout,
                load.rank,
                load.dtype,
                expert_rank=load.expert_rank,
                budget_bytes=host_bytes,
                is_pinned=load.device != "cpu",
            )
            sources["adapters"], adapter_rows = adapters, adapters.rows
        engine = build_engine(config_for(load, model_dir, has_lora), **sources)
    built = time.perf_counter()
    compile_kernels(engine)
    engine.capture_steps()
    warm_up(engine)
    warm = time.perf_counter()
    while engine.capture_while_idle():
        pass
    gc.collect()
    gc.freeze()
    return WarmEngine(engine, load, adapter_rows, built - started, warm - built)


def _adapter_bytes(load: EngineLoad, layout: BaseLayout) -> tuple[int, int]:
    """Device bytes of one adapter's rows: those of all projections but experts, and those of experts."""
    sizes = row_bytes(layout, load.dtype.itemsize)
    num_experts = max((experts.num for experts in layout.experts), default=1)
    num_rows = -(-load.rank // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    of_layers = num_rows * sum(size for group, size in sizes.items() if group not in ("embeddings", "experts"))
    return of_layers, load.expert_rank * num_experts * sizes.get("experts", 0)


def config_for(load: EngineLoad, model_dir: Path, has_lora: bool) -> EngineConfig:
    """Budgets that hold the whole load at once."""
    config = read_config(model_dir)
    spec, layout = model_spec(config), layout_of(config)
    block = default_block_size_tokens(load.device)
    num_tokens = load.num_requests * (load.num_prompt_tokens + load.num_output_tokens + 2 * block)
    num_tokens += 2 * load.long_prompt_tokens + load.token_budget + block
    of_layers, of_experts = _adapter_bytes(load, layout)
    all_rows = (load.max_adapters + 1) * max(of_layers / (1 - EMBEDDINGS_SHARE), of_experts)
    if layout.experts:
        all_rows /= EXPERTS_SHARE
    fields: dict[str, Any] = {
        "device": load.device,
        "dtype": "bfloat16" if load.dtype == torch.bfloat16 else "float32",
        "token_budget": max(load.token_budget, load.num_requests),
        "max_sequences": load.num_requests,
        "kv_bytes": num_tokens * kv_bytes_per_token(spec, load.dtype),
        # Tables of ranks and scalings are far below the last 5 %.
        "row_bytes": int(1.05 * all_rows) if has_lora else 0,
        "block_size_tokens": block,
        # With the cache, where the model has states.
        "state_cache_bytes": load.num_requests * state_bytes_per_line(spec, load.dtype),
        "prefix_cache": False,  # rounds send the same prompts
    }
    return EngineConfig(model_dir=str(model_dir), store_root=str(model_dir), **(fields | load.engine_fields))
