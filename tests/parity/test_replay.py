"""Captured steps give what eager ones give, bit for bit, whatever they are replayed for.

On a CPU a step's torch operations and Triton launches are recorded and run again on the same tensors, as a graph runs
them; the kernels are those for NVIDIA GPUs, in Triton's interpreter. On a GPU the graphs are CUDA's own.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from adapters.memory import device_upload
from kernels.experts import triton_cuda
from kernels.platform import IMPLEMENTATIONS, detect, installed
from kernels.probe.op_reports import OpReport
from service.engine.engine import Engine
from service.engine.model.padding import StepSizes
from service.engine.startup import build
from service.models.layers.caches import KvCache
from service.models.layers.projection import Projection, TokenEmbedding
from service.text.tokenizer import TextTokenizer
from tests.support.engine.engine_parity import (
    BASE,
    SAMPLINGS,
    Request,
    World,
    build_engine,
    config_of,
    make_world,
    run_engine,
)
from tests.support.engine.replay import TwinGraphs
from tests.support.models.tiny_models import LINEAR_MODULES, VOCAB_SIZE
from tests.support.npu.triton_interpreter import multiply_bfloat16

# Adapters of several ranks, of all projections and of some, and the base.
MIX = ("all", "attention", BASE, "rs", "pattern", BASE, "one")


@contextmanager
def kernels_of_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU: what serves the ops on an NVIDIA GPU, interpreted. On a GPU: adapters are there when the engine looks,
    which goes on without those that are late, so that both runs have the same steps."""
    if device != "cpu":
        done = device_upload.DeviceCopyEvent
        monkeypatch.setattr(done, "is_completed", lambda mark: mark.event.synchronize() is None)
        yield
        return
    names = {op: names[0] for op, names in IMPLEMENTATIONS["cuda"].items()}
    platform = replace(detect("cpu"), implementations=MappingProxyType(names))
    reports = tuple(OpReport(op=op, wished=name, used=name) for op, name in names.items())
    monkeypatch.setattr(build, "choose_implementations", lambda *_: (platform, reports))
    with installed(platform):
        yield


def run(
    world: World, requests: list[Request], *, eager: bool, joins_per_step: int = 1, **config: Any
) -> tuple[list[torch.Tensor], Engine]:
    """The logits of each step, in the engine's order, of requests that join so many at a time."""
    graphs = TwinGraphs() if world.device == "cpu" else None
    settings = config_of(world, token_budget=32, max_sequences=4, eager=eager, overlap=True, **config)
    engine = build_engine(settings, graphs=graphs)
    engine.compile_kernels()
    logits: list[torch.Tensor] = []
    model_run = engine.runner.run

    def noted(batch: Any, sizes: Any) -> torch.Tensor:
        out = model_run(batch, sizes)
        # Padding's logits are anything; without rows of their own, all tokens' rows are sequences'.
        logits.append(out[: sum(kv_len > 0 for kv_len in batch.attention.kv_lens)].cpu().clone())
        return out

    engine.runner.run = noted  # type: ignore[method-assign]
    waiting = list(requests)
    while waiting or engine.num_requests:
        for request in waiting[:joins_per_step]:
            engine.submit(request.submit(world))
        del waiting[:joins_per_step]
        engine.step()
    engine.check_integrity()
    return logits, engine


def mixed_requests(seed: int, num: int = 6) -> list[Request]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(1, 9))) for _ in range(num)]
    return [Request(f"r{i}", MIX[(seed + i) % len(MIX)], prompt, rng.randint(2, 4)) for i, prompt in enumerate(prompts)]


# One of each kind, since the interpreter takes long. Of the last: a delta net and attention, each before experts.
FEWER_LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_moe_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@pytest.fixture(scope="module", params=FEWER_LAYERS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    return make_world(request.param, tmp_path_factory.mktemp(request.param), device, **FEWER_LAYERS[request.param])


def states_of(engine: Engine) -> list[torch.Tensor]:
    """What sequences leave in their lines, of all layers that keep states."""
    layers = (cache for cache in engine.runner.caches.layers if not isinstance(cache, KvCache))
    return [getattr(cache, name)[1:].cpu().clone() for cache in layers for name in cache.__slots__]


def assert_replays_as_eager(
    world: World, requests: list[Request], *, num_others: int = 1, **config: Any
) -> set[StepSizes]:
    """Returns the sizes that were captured. num_others: least steps that replay what another step has captured."""
    captured, engine = run(world, requests, eager=False, **config)
    counts, states = engine.runner.captured, states_of(engine)
    engine.close()
    if counts.is_off and world.device != "cpu" and world.dtype == torch.float32:
        pytest.skip(f"NOT RUN: on this device no step of {world.family} in float32 is captured")
    try:
        eager, other = run(world, requests, eager=True, **config)
    except ValueError as refusal:
        raise AssertionError(f"an eager step is refused that was replayed: {refusal}") from refusal
    states_of_eager = states_of(other)
    other.close()
    assert counts.num_replayed - counts.num_graphs >= num_others, "something is replayed"
    assert not counts.eager
    assert len(captured) == len(eager)
    for step, (found, expected) in enumerate(zip(captured, eager, strict=True)):
        assert torch.equal(found, expected), f"step {step}"
    for found, expected in zip(states, states_of_eager, strict=True):
        assert torch.equal(found.isnan(), expected.isnan()), "lines of nobody"
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)), "states"
    return set(counts.sizes)


def test_replayed_steps_equal_eager_ones(world: World, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Experts take the interpreter long; a GPU replays each graph with many other mixes.
    num = 100 if device != "cpu" else 3 if "moe" in world.family else 6
    with kernels_of_a_gpu(device, monkeypatch):
        assert_replays_as_eager(world, mixed_requests(1, num=num), num_others=1 if device == "cpu" else 50)


def test_replayed_steps_of_experts_in_bfloat16_equal_eager_ones(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtype in which a GPU of compute capability 9.0 has grouped products, and captures them."""
    if device != "cpu" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("NOT RUN: this GPU has no grouped products, so that steps with experts are not captured")
    one_layer = {"num_hidden_layers": 1, "mlp_only_layers": []}
    directory = tmp_path_factory.mktemp("experts")
    world = make_world("qwen3_moe", directory, device, dtype=torch.bfloat16, **one_layer)
    if device == "cpu":
        multiply_bfloat16(monkeypatch)
    products: list[torch.dtype] = []

    def noted(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        products.append(x.dtype)
        return experts(x, *arguments)

    experts = triton_cuda.experts
    monkeypatch.setattr(triton_cuda, "experts", noted)
    with kernels_of_a_gpu(device, monkeypatch):
        # Rows of adapters are float32 on a CPU, and cannot stand behind weights in bfloat16.
        captured = assert_replays_as_eager(world, mixed_requests(1, num=2), lora_window=device != "cpu")
    assert captured, "steps with experts are captured"
    assert set(products) == {torch.bfloat16}


def test_replayed_steps_of_delta_nets_in_bfloat16_equal_eager_ones(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pytest.skip("NOT RUN: a CPU replays delta nets in float32 before experts, see above, which no GPU captures")
    world = make_world("qwen3_5_text", tmp_path_factory.mktemp("delta"), device, dtype=torch.bfloat16)
    with kernels_of_a_gpu(device, monkeypatch):
        for seed in (1, 2):
            assert assert_replays_as_eager(world, mixed_requests(seed), lora_window=True)


def a_tensor_made_anew(patch: pytest.MonkeyPatch) -> None:
    embed = TokenEmbedding.__call__
    patch.setattr(TokenEmbedding, "__call__", lambda self, ids, lora: embed(self, torch.tensor(ids.tolist()), lora))


def a_scalar_baked_in(patch: pytest.MonkeyPatch) -> None:
    embed = TokenEmbedding.__call__
    patch.setattr(TokenEmbedding, "__call__", lambda self, ids, lora: embed(self, ids - ids[:1] + int(ids[0]), lora))


def a_look_at_the_host_s_view(patch: pytest.MonkeyPatch) -> None:
    project = Projection.__call__

    def for_even_places(self: Any, x: torch.Tensor, lora: Any, window_rows: int = 0, *rest: Any) -> torch.Tensor:
        return project(self, x, None if lora is None or lora.segments[0].place % 2 else lora, window_rows, *rest)

    patch.setattr(Projection, "__call__", for_even_places)


def a_check_that_runs_at_the_capture_only(patch: pytest.MonkeyPatch) -> None:
    project = Projection.__call__

    def checked(self: Any, x: torch.Tensor, lora: Any, window_rows: int = 0, *rest: Any) -> torch.Tensor:
        if lora is not None and lora.segments[0].place % 2:
            raise ValueError("this adapter is not to be used")
        return project(self, x, lora, window_rows, *rest)

    patch.setattr(Projection, "__call__", checked)


def a_number_of_adapters_baked_in(patch: pytest.MonkeyPatch) -> None:
    project = Projection.__call__

    def for_one_adapter(self: Any, x: torch.Tensor, lora: Any, window_rows: int = 0, *rest: Any) -> torch.Tensor:
        return project(self, x, None if lora is None or len(lora.segments) > 1 else lora, window_rows, *rest)

    patch.setattr(Projection, "__call__", for_one_adapter)


# Of steps of the same sizes, two requests each: one adapter or two, beside the base or not.
PAIRS = (("all", "all"), ("one", "rs"), (BASE, "one"), ("all", "one"))


def pairs_of_requests(num_pairs: int = len(PAIRS)) -> list[Request]:
    """One step for each of the first of PAIRS."""
    names = [name for pair in PAIRS[:num_pairs] for name in pair]
    return [Request(f"r{i}", name, (7 + i, 9), 1) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    "fault",
    [
        a_tensor_made_anew,
        a_scalar_baked_in,
        a_look_at_the_host_s_view,
        a_number_of_adapters_baked_in,
        a_check_that_runs_at_the_capture_only,
    ],
)
def test_what_a_replay_would_miss_is_noticed(
    fault: Any, tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is right in an eager step, and wrong when the step is captured and replayed with other contents."""
    if device != "cpu":
        pytest.skip("NOT RUN: a capture on a GPU refuses some of these by itself")
    world = make_world("llama", tmp_path_factory.mktemp("faulty"), device, num_hidden_layers=1)
    fault(monkeypatch)
    with kernels_of_a_gpu(device, monkeypatch), pytest.raises(AssertionError, match="step"):
        assert_replays_as_eager(world, pairs_of_requests(2), joins_per_step=2, lora_window=False)


def test_a_step_is_replayed_for_other_numbers_of_adapters(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without windows, so that shrink and expand are launches of their own, whose work is found on the device."""
    world = make_world("llama", tmp_path_factory.mktemp("pairs"), device, num_hidden_layers=1)
    with kernels_of_a_gpu(device, monkeypatch):
        captured = assert_replays_as_eager(
            world, pairs_of_requests(), num_others=len(PAIRS) - 1, joins_per_step=2, lora_window=False
        )
    assert len(captured) == 1 and not any(sizes.window_rows for sizes in captured)


def test_replayed_steps_with_windows_equal_eager_ones(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shrink is in the base product, the expand in what reads it."""
    world = make_world("qwen3", tmp_path_factory.mktemp("windows"), device, num_hidden_layers=1)
    with kernels_of_a_gpu(device, monkeypatch):
        captured = assert_replays_as_eager(world, mixed_requests(3, num=4), lora_window=True)
    assert all(sizes.window_rows for sizes in captured if sizes.has_lora)


def test_what_was_captured_while_nobody_waited_is_replayed(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("qwen3", tmp_path_factory.mktemp("idle"), device, num_hidden_layers=1)
    graphs = TwinGraphs() if device == "cpu" else None
    with kernels_of_a_gpu(device, monkeypatch):
        engine = build_engine(
            config_of(world, token_budget=2, max_sequences=1, overlap=True, lora_window=True), graphs=graphs
        )
        engine.compile_kernels()
        engine.capture_steps()
        steps = engine.runner.captured
        num_at_first = steps.num_graphs
        engine.submit(Request("r0", "one", (7, 9), 2).submit(world))
        assert not engine.capture_while_idle(), "somebody waits"
        engine.abort("r0")
        while engine.capture_while_idle():
            pass
        num_in_all = steps.num_graphs
        assert num_in_all > num_at_first and steps.num_replayed == 0
        engine.forget_history()
        engine.submit(Request("r1", "one", (7, 9), 2).submit(world))
        engine.run_until_idle()
    assert steps.num_graphs == num_in_all
    assert (steps.num_replayed, dict(steps.eager)) == (engine.num_steps, {})
    engine.close()


def test_replayed_steps_behind_blocks_from_host_memory_equal_eager_ones(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five blocks hold one request at a time; the last prompt is the first one's."""
    world = make_world("qwen3", tmp_path_factory.mktemp("host"), device, num_hidden_layers=1)
    prompts = [tuple(range(first, first + 13)) for first in (5, 25, 45, 5)]
    requests = [Request(f"r{i}", BASE, prompt, 4) for i, prompt in enumerate(prompts)]
    sizes = {"num_blocks": 5, "prefix_host_bytes": 2**20}
    with kernels_of_a_gpu(device, monkeypatch):
        captured, engine = run(world, requests, eager=False, **sizes)
        assert engine.stats().prefix_cache_host_hit_tokens >= 8
        assert engine.runner.captured.num_replayed > engine.runner.captured.num_graphs
        engine.close()
        eager, engine = run(world, requests, eager=True, **sizes)
        engine.close()
    assert all(torch.equal(found, expected) for found, expected in zip(captured, eager, strict=True))


def test_grammars_are_followed_in_replayed_steps_with_overlap(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask of a token needs the one before, which is on its way when the step is launched."""
    world = make_world("llama", tmp_path_factory.mktemp("grammars"), device, num_hidden_layers=1)
    text = TextTokenizer.load(world.model_dir)
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: /[a-z]{3}[0-9]/"}]})
    bound = [Request(f"bound-{name}", name, (7, 9, 8), 6) for name in (BASE, "all", "one")]
    submits = [request.submit(world, grammar=grammar) for request in bound]
    submits.append(Request("free", "all", (5,), 5).submit(world))
    tokens = []
    with kernels_of_a_gpu(device, monkeypatch):
        for is_usual in (False, True):
            graphs = TwinGraphs() if device == "cpu" else None
            settings = config_of(world, token_budget=32, max_sequences=4, eager=not is_usual, overlap=is_usual)
            engine = build_engine(settings, graphs=graphs)
            engine.compile_kernels()
            answers = run_engine(engine, submits)
            assert bool(engine.runner.captured.num_replayed) == is_usual
            engine.close()
            tokens.append({name: answer.tokens for name, answer in answers.items()})
    assert tokens[0] == tokens[1]
    for request in bound:
        assert re.fullmatch("[a-z]{3}[0-9]", text.decode(tokens[0][request.name]))
    assert len(tokens[0]["free"]) == 5


def test_every_sampling_is_the_same_in_replayed_steps_with_overlap(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log probabilities, of all ways to choose in one batch."""
    world = make_world("llama", tmp_path_factory.mktemp("samplings"), device, num_hidden_layers=1)
    requests = [Request(f"r{i}", MIX[i], (7 + i, 9, 8, 6), 4) for i in range(len(SAMPLINGS))]
    submits = [one.submit(world, **sampling) for one, sampling in zip(requests, SAMPLINGS, strict=True)]
    found = []
    with kernels_of_a_gpu(device, monkeypatch):
        for is_usual in (False, True):
            graphs = TwinGraphs() if device == "cpu" else None
            # On a GPU products of steps of other sizes may differ in their last bits.
            overlap = is_usual or device != "cpu"
            settings = config_of(world, token_budget=32, max_sequences=8, eager=not is_usual, overlap=overlap)
            engine = build_engine(settings, graphs=graphs)
            engine.compile_kernels()
            found.append(run_engine(engine, submits))
            assert bool(engine.runner.captured.num_replayed) == is_usual
            engine.close()
    assert found[0] == found[1]
    assert all(answer.tokens for answer in found[0].values())


def test_replayed_steps_of_adapters_with_more_than_rows_equal_eager_ones(
    tmp_path_factory: pytest.TempPathFactory, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Magnitudes, norms, embeddings and heads of their own: all that a step reads of them lies in tensors."""
    specs: dict[str, dict[str, Any]] = {
        "dora": {"rank": 2, "target_modules": LINEAR_MODULES["qwen3"], "use_dora": True},
        "whole": {
            "rank": 2,
            "target_modules": ["q_proj"],
            "modules_to_save": ["norm", "q_norm", "embed_tokens", "lm_head"],
        },
    }
    world = make_world(
        "qwen3", tmp_path_factory.mktemp("more"), device, specs=specs, num_hidden_layers=1, tie_word_embeddings=False
    )
    # Their lines change places: the second of either replays what the first captured.
    requests = [Request(f"r{i}", name, (7 + i,), 2) for i, name in enumerate(("dora", "whole", "dora", "whole"))]
    with kernels_of_a_gpu(device, monkeypatch):
        captured = assert_replays_as_eager(world, requests, lora_window=True, side_bytes=4 << 20)
    groups = {group for sizes in captured for group, _ in sizes.side}
    assert groups == {"vectors", "norms", "saved_embedding", "saved_head"}
