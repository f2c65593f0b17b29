"""The KV cache is sized behind the graphs: on a made-up device, whose graphs take as much of it as a test says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from service.engine.engine import Engine
from service.engine.ipc.config import EngineOptions
from service.engine.model import runner
from service.engine.model.padding import Padding, StepSizes
from service.engine.model.runner import SPARE_GRAPHS
from service.engine.startup.budgets import estimate_bytes
from service.engine.startup.build import build_engine
from service.models.families import model_spec
from service.models.layers.caches import kv_bytes_per_token
from service.models.spec.config_json import read_config
from tests.support.models.tiny_models import make_tiny_model

FREE_BYTES = 96 << 20
PADDING = Padding(max_sequences=100, max_blocks=2000, block_size=16)


class Memory:
    """Of a device, whose graphs share a pool of `bytes_per_token` of the largest step, and take `graph_bytes` each, for
    as long as they live. Captures run nothing, as those of a device do.
    """

    def __init__(self, graph_bytes: int = 0, bytes_per_token: int = 0) -> None:
        self.graph_bytes, self.bytes_per_token = graph_bytes, bytes_per_token
        self.graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self.num_captures = 0

    def free_bytes(self, _device: str = "") -> int:
        pool = max((graph.num_tokens for graph in self.graphs), default=0) * self.bytes_per_token
        return FREE_BYTES - pool - len(self.graphs) * self.graph_bytes

    def capture(self, _work: Callable[[], None] | None, num_tokens: int = 0) -> _Graph:
        self.num_captures += 1
        graph = _Graph(num_tokens)
        self.graphs.add(graph)
        return graph


class _Graph:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def update(self, batch: Any) -> None:
        pass

    def replay(self) -> None:
        pass


def test_the_pool_counts_once_and_each_graph_for_itself() -> None:
    first, later = PADDING.to_capture(token_budget=8192, has_lora=True, num_window_rows=1000)
    memory = Memory(graph_bytes=3000, bytes_per_token=70)

    graphs = []

    def capture(sizes: StepSizes) -> None:
        graphs.append(memory.capture(None, sizes.num_tokens))

    estimated = estimate_bytes([*first, *later], 500, capture, memory.free_bytes)
    assert estimated == 500 * 3000 + 1024 * 70
    assert memory.num_captures < 20, "a few stand for all"


def test_a_device_that_another_process_leaves_meanwhile_is_no_negative_graph() -> None:
    frees = iter([0, 10, 30])
    assert estimate_bytes(PADDING.to_capture(token_budget=8, has_lora=False)[0], 9, lambda _: None, frees.__next__) == 0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=100_000)


def build(model_dir: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    # What serves ops on a CPU cannot be replayed, and here nothing is.
    monkeypatch.setattr(runner, "unreplayable_ops", lambda *_: [])
    fixed = {"device": "cpu", "row_bytes": 0, "token_budget": 8, "max_sequences": 8}
    settings = EngineOptions(model_dir=str(model_dir), store_root=str(model_dir / "store"), **fixed, **options)
    return build_engine(settings, graphs=memory, free_bytes=memory.free_bytes)


@pytest.mark.parametrize("graph_bytes", [20_000, 300_000])
def test_the_kv_cache_is_smaller_by_what_graphs_take(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, graph_bytes: int
) -> None:
    without = build(model_dir, Memory(), monkeypatch)
    memory = Memory(graph_bytes)
    engine = build(model_dir, memory, monkeypatch)
    assert memory.num_captures and not memory.graphs, "those of the trial are gone"
    engine.capture_steps()
    while engine.capture_while_idle():
        pass
    token_bytes = kv_bytes_per_token(model_spec(read_config(model_dir)), torch.float32)
    smaller = (without.kv_capacity_tokens - engine.kv_capacity_tokens) * token_bytes
    kept = (len(memory.graphs) + SPARE_GRAPHS) * graph_bytes
    assert abs(smaller - kept) <= engine.config.block_size_tokens * token_bytes
    for one in (without, engine):
        one.close()


@pytest.mark.parametrize("options", [{"kv_bytes": 1 << 20}, {"eager": True}])
def test_nothing_is_measured_where_it_would_change_nothing(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    memory = Memory(1 << 20)
    build(model_dir, memory, monkeypatch, **options).close()
    assert not memory.num_captures
