"""Tokens with the prefix cache are those without it: base, LoRA, DoRA and activated adapters in mixed steps, chunked,
preempted, aborted and evicted, in memory that begins as NaN."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.engine.engine import Engine
from service.engine.ipc.messages import Tokens
from service.engine.model.runner import ModelRunner
from service.models.families import model_spec
from service.models.layers.caches import HostRowCopies, KvCache, _HostRows, allocate_caches, state_bytes_per_line
from service.models.spec.config_json import read_config
from tests.support.engine.engine_parity import (
    BASE,
    Oracle,
    Request,
    World,
    assert_greedy,
    build_engine,
    config_of,
    make_world,
    run_engine,
)
from tests.support.engine.fake_stream import FakeStream, Noted
from tests.support.models.tiny_models import ATTENTION_INPUTS, FAMILIES, LINEAR_MODULES, VOCAB_SIZE, WITH_EXPERTS

INVOCATION = (9, 8, 7)
HOST_FAMILIES = ["llama", "lfm2", "qwen3_5_text"]


@pytest.fixture(scope="module", params=(*FAMILIES, *WITH_EXPERTS))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    return world_of(request.param, tmp_path_factory.mktemp(request.param), device)


def world_of(family: str, directory: Path, device: str) -> World:
    linear, inputs = LINEAR_MODULES[family], ATTENTION_INPUTS[family]
    specs = {
        "plain": {"rank": 4, "target_modules": linear},
        "dora": {"rank": 4, "target_modules": inputs, "use_dora": True},
        "activated": {"rank": 4, "target_modules": linear, "alora_invocation_tokens": list(INVOCATION)},
    }
    return make_world(family, directory, device, specs=specs)


def requests_of(world: World, num: int) -> list[Request]:
    """Conversations that go on, over common beginnings: each prompt is the stem of another one, cut anywhere."""
    rng = random.Random(num)
    stem = tuple(rng.randrange(10, VOCAB_SIZE) for _ in range(40))
    stem = stem[:30] + INVOCATION + stem[30:]
    requests = []
    for i in range(num):
        rest = tuple(rng.randrange(10, VOCAB_SIZE) for _ in range(rng.randint(1, 6)))
        prompt = stem[: rng.choice((rng.randint(1, 43), 40, 43))] + (rest if rng.random() < 0.7 else ())
        adapter = (BASE, *world.adapters)[i % (1 + len(world.adapters))]
        requests.append(Request(f"r{i}", adapter, prompt, rng.randint(4, 12)))
    for first in range(0, num, 8):  # equal prompts, which begin at once
        requests[first + 1] = replace(requests[first], name=f"r{first + 1}")
    return requests


def poison_free_lines(engine: Engine) -> None:
    """Before each step, lines of state that neither a sequence nor the cache has are NaN."""
    assert isinstance(engine.runner, ModelRunner)
    layers = engine.runner.caches.layers
    tensors = [getattr(cache, name) for cache in layers for name in ("lines", "matrices") if hasattr(cache, name)]
    whole_run = engine.runner.run

    def run(*args: Any) -> torch.Tensor:
        for tensor in tensors:
            tensor[engine.lines.free] = float("nan")
        return whole_run(*args)

    engine.runner.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_with_the_cache_are_those_without_it(world: World, overlap: bool) -> None:
    requests = requests_of(world, 32)
    tokens = {}
    for has_cache in (False, True):
        # Thirty blocks of four tokens hold about two of these requests at their end, or idle blocks instead.
        sizes = {"num_blocks": 30, "token_budget": 24, "max_sequences": 6, "side_bytes": 2**20}
        spec = model_spec(read_config(world.model_dir))
        sizes["state_cache_bytes"] = 8 * state_bytes_per_line(spec, world.dtype)
        engine = build_engine(config_of(world, prefix_cache=has_cache, overlap=overlap, **sizes))
        poison_free_lines(engine)
        answers = run_engine(engine, [request.submit(world) for request in requests], joins_per_step=2)
        tokens[has_cache] = {name: answer.tokens for name, answer in answers.items()}
        assert all(len(tokens[has_cache][request.name]) == request.max_tokens for request in requests)
        assert engine.stats().num_preemptions
        counts = engine.cache.counts
        if has_cache:
            assert counts.hit_tokens > counts.queried_tokens / (12 if engine.capacity.has_conv else 3)
            assert engine.cache.trie.num_evicted
            assert engine.lines.num_evicted or not engine.capacity.has_conv
        else:
            assert not counts.hit_tokens
        engine.close()
    assert tokens[True] == tokens[False]
    oracle = Oracle(world)
    for request in requests:
        if request.adapter != "activated":
            assert_greedy(oracle, request, tokens[True][request.name])


def bits_of(engine: Engine, line: int, block: int) -> list[torch.Tensor]:
    """Copies of a line of state, and of keys and values of a block's first three tokens."""
    assert isinstance(engine.runner, ModelRunner)
    caches = engine.runner.caches.each
    states = [getattr(one, name)[line] for one in caches for name in ("lines", "matrices") if hasattr(one, name)]
    keys = [tensor[block][:3] for one in caches if isinstance(one, KvCache) for tensor in (one.k, one.v)]
    return [tensor.clone() for tensor in (*states, *keys)]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_the_state_before_the_last_token_of_equal_prompts_has_the_bits_of_a_cut_there(
    family: str, tmp_path: Path, device: str
) -> None:
    """And so have the first tokens' keys and values that are copied; all go on as one that shares nothing."""
    world = world_of(family, tmp_path, device)
    prompt = tuple(random.Random(1).randrange(10, VOCAB_SIZE) for _ in range(40))
    kept: dict[bool | str, list[torch.Tensor]] = {}
    tokens = {}
    for has_cache in (False, True):
        sizes = {
            "num_blocks": 60,
            "token_budget": 64 if has_cache else 39,
            "max_sequences": 6,
            "side_bytes": 2**20,
            "overlap": False,
        }
        sizes["state_cache_bytes"] = 8 * state_bytes_per_line(model_spec(read_config(world.model_dir)), world.dtype)
        engine = build_engine(config_of(world, prefix_cache=has_cache, **sizes))
        for i in range(4 if has_cache else 1):
            engine.submit(Request(f"r{i}", "plain", prompt, 9).submit(world))
        assert not engine.step()  # all but the last token of the first
        (sequence,) = engine.scheduler.running
        place = sequence.source_line or sequence.line, engine.blocks.blocks(sequence.key)[-1]
        kept[has_cache] = bits_of(engine, *place)
        events = engine.run_until_idle()
        tokens[has_cache] = {
            name: [t for e in events if isinstance(e, Tokens) and e.request_id == name for t in e.token_ids]
            for name in ("r0", "r1", "r2", "r3")
        }
        if has_cache:
            assert engine.cache.counts.hit_tokens == 3 * 39
            kept["afterwards"] = bits_of(engine, *place)
        engine.close()
    for name in (True, "afterwards"):
        assert all(torch.equal(one, other) for one, other in zip(kept[name], kept[False], strict=True))
    assert all(some == tokens[False]["r0"] for some in tokens[True].values()), "the tokens differ"


# ---- the host tier


def poison_free_blocks(engine: Engine) -> None:
    """Before each step, blocks that neither a sequence nor the cache has are NaN."""
    assert isinstance(engine.runner, ModelRunner)
    whole_run, caches = engine.runner.run, [one for one in engine.runner.caches.each if isinstance(one, KvCache)]

    def run(*args: Any) -> torch.Tensor:
        known = {node.block for node in engine.cache.trie.nodes}
        unheld = [block for block in range(1, engine.blocks.num_blocks) if not engine.blocks.num_holders(block)]
        free = [block for block in unheld if block not in known]
        for cache in caches:
            cache.k[free] = cache.v[free] = float("nan")
        return whole_run(*args)

    engine.runner.run = run  # type: ignore[method-assign]


def sizes_of(world: World, **more: Any) -> dict[str, Any]:
    """Options of an engine that holds about two of the requests, and as many states as they write in turn."""
    state_bytes = state_bytes_per_line(model_spec(read_config(world.model_dir)), world.dtype)
    sizes = {"num_blocks": 30, "token_budget": 24, "max_sequences": 6, "side_bytes": 2**20}
    return sizes | {"state_cache_bytes": 4 * state_bytes} | more


@pytest.fixture(scope="module", params=HOST_FAMILIES)
def host_world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    return world_of(request.param, tmp_path_factory.mktemp(request.param), device)


def test_tokens_found_through_host_memory_are_those_computed_from_nothing(host_world: World) -> None:
    requests = requests_of(host_world, 32)
    tokens = {}
    for host_bytes in (0, 64 * 2**20):
        has_cache = host_bytes > 0
        sizes = sizes_of(host_world, prefix_cache=has_cache, prefix_host_bytes=host_bytes, overlap=True)
        engine = build_engine(config_of(host_world, **sizes))
        poison_free_lines(engine)
        poison_free_blocks(engine)
        answers = run_engine(engine, [request.submit(host_world) for request in requests], joins_per_step=2)
        tokens[has_cache] = {name: answer.tokens for name, answer in answers.items()}
        stats = engine.stats()
        assert stats.num_preemptions
        assert (stats.prefix_cache_host_hit_tokens > 0) == has_cache
        assert stats.prefix_cache_host_bytes_used <= stats.prefix_cache_host_bytes_total <= host_bytes
        engine.close()
    assert tokens[True] == tokens[False]
    oracle = Oracle(host_world)
    for request in requests:
        if request.adapter != "activated":
            assert_greedy(oracle, request, tokens[True][request.name])


@pytest.mark.parametrize("family", HOST_FAMILIES)
def test_blocks_and_lines_come_back_with_their_bits(family: str, tmp_path: Path, device: str) -> None:
    """To other places, through buffers smaller than what is copied, and in the order of the steps."""
    spec = model_spec(read_config(world_of(family, tmp_path, device).model_dir))
    caches = allocate_caches(spec, 120, 4, 12, torch.float32, torch.device("cpu"))
    tensors = [(type(one) is KvCache, getattr(one, name)) for one in caches.each for name in one.__slots__]
    for _, tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    stream = FakeStream()
    copies = HostRowCopies(caches, 2 * caches.num_bytes, stream)
    assert copies.num_rows[0] >= 80 and (copies.num_rows[1] >= 4 or not spec.has_states)
    before = [tensor.clone() for _, tensor in tensors]
    blocks = [(block, 79 - i) for i, block in enumerate(range(1, 80, 2))]
    lines = [(1, 3), (2, 0)] if spec.has_states else []
    with Noted(stream):
        copies.save(blocks, lines)
    assert stream.events[0] == "copies wait for steps" and stream.events[-1] == "mark"
    assert not any(event.startswith("steps:") for event in stream.events)
    for _, tensor in tensors:
        tensor.fill_(float("nan"))
    moved = [(block + 40, row) for block, row in blocks]
    with Noted(stream):
        mark = copies.load(moved, [(line + 5, row) for line, row in lines])
    copies.publish(mark)
    assert stream.events[-2:] == ["mark", "steps wait for mark 1"]
    for (is_paged, tensor), old in zip(tensors, before, strict=True):
        shift, places = (40, [block for block, _ in blocks]) if is_paged else (5, [line for line, _ in lines])
        assert torch.equal(tensor[[place + shift for place in places]], old[places])
        others = [place for place in range(len(tensor)) if place - shift not in places]
        assert tensor[others].isnan().all()


def test_pinned_memory_is_taken_in_powers_of_two_and_is_no_more_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds what it pins up to the next one: of 33 GB it would take 64."""
    taken: list[int] = []
    empty = torch.empty

    def unpinned(size: Any, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        taken.extend([size] if pin_memory else [])
        return empty(size, **options)

    caches = [torch.randn(50, 3, 7), torch.randn(50, 40)]
    rows = _HostRows(caches, 4)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", unpinned)
        rows._is_pinned = True
        num_rows = rows.allocate(20_001)
    rows._is_pinned = False
    assert taken == [16_384, 2048, 1024, 512]
    assert num_rows == sum(size // rows.row_bytes for size in taken) == 61
    before = [cache.clone() for cache in caches]
    pairs = [(place, 60 - place) for place in range(50)]
    rows.save(pairs)
    for cache in caches:
        cache.fill_(float("nan"))
    rows.load(pairs)
    assert all(map(torch.equal, caches, before))
