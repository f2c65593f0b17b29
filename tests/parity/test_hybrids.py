"""Layers that keep a state for each sequence, where it could go wrong: prompts in odd chunks, preempted and aborted in
their middle, beside adapters of every kind on these layers; weights that are none; modules that trainers merge."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.store.store import AdapterStore
from service.engine.engine import Engine
from service.engine.ipc.messages import Finished, Tokens
from service.models.families import model_spec
from service.models.layers.caches import state_bytes_per_line
from service.models.layouts import layout_in
from service.models.spec.config_json import ModelError, read_config
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
from tests.support.models.tiny_models import OTHER_MIXERS, VOCAB_SIZE

FAMILIES = ("lfm2", "qwen3_5_text", "granitemoehybrid", "granitemoehybrid-experts")
# Around the borders of the delta rule's chunks, and of the convolution's taps.
LENGTHS = (1, 2, 3, 5, 33, 63, 64, 65, 66, 90, 129)


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    mixers = [*OTHER_MIXERS[request.param]]
    specs: dict[str, dict[str, Any]] = {
        "dora": {"rank": 3, "target_modules": mixers, "use_dora": True},
        "bias": {"rank": 4, "target_modules": mixers, "lora_bias": True},
        "activated": {"rank": 4, "target_modules": mixers, "alora_invocation_tokens": [9, 8]},
    }
    return make_world(request.param, tmp_path_factory.mktemp(request.param), device, specs=specs)


def requests_of(world: World) -> list[Request]:
    rng, names = random.Random(3), [BASE, *world.adapters]
    requests = []
    for i, length in enumerate((*LENGTHS, *LENGTHS[::-1])):
        prompt = [rng.randrange(10, VOCAB_SIZE) for _ in range(length)]
        adapter = names[(i + i // len(names)) % len(names)]
        if adapter == "activated" and length > 2:
            at = (length - 2) // (1 + i % 3)  # at the end, in the middle, before it
            prompt[at : at + 2] = 9, 8
        requests.append(Request(f"r{i}", adapter, tuple(prompt), (12, 2, 6)[i % 3]))
    return requests


def run_with_aborts(engine: Engine, world: World, requests: list[Request]) -> tuple[dict[str, list[int]], int]:
    """Tokens of those that were let end, and how many were aborted in the middle of their prompt. Of those found there
    each fourth is aborted, and each other fourth yields, as if blocks had run out."""
    tokens: dict[str, list[int]] = {request.name: [] for request in requests}
    left, aborted = requests.copy(), 0
    seen: set[str] = set()
    while left or engine.num_requests:
        for request in left[:2]:
            engine.submit(request.submit(world))
        left = left[2:]
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens[event.request_id].extend(event.token_ids)
            elif isinstance(event, Finished):
                assert event.error is None
        engine.check_integrity()
        for sequence in engine.scheduler.running.copy():
            if 0 < sequence.num_computed < sequence.num_prompt and sequence.request_id not in seen:
                seen.add(sequence.request_id)
                if len(seen) % 4 == 1:
                    engine.scheduler.preempt(sequence)
                if len(seen) % 4 == 3:
                    engine.abort(sequence.request_id)
                    del tokens[sequence.request_id]
                    aborted += 1
    return tokens, aborted


@pytest.mark.parametrize("token_budget", [3, 65])
def test_odd_chunks_preempted_and_aborted_prompts_equal_peft(world: World, token_budget: int) -> None:
    requests = requests_of(world)
    limits = {"token_budget": token_budget, "max_sequences": 3, "side_bytes": 4 << 20}
    engine = build_engine(config_of(world, **limits))
    tokens, num_aborted = run_with_aborts(engine, world, requests)
    engine.close()
    assert num_aborted > 0
    assert engine.stats().num_preemptions > 0
    oracle = Oracle(world)
    for request in requests:
        if request.name in tokens:
            assert_greedy(oracle, request, tokens[request.name])


def test_a_budget_below_a_line_of_state_is_refused_with_what_a_line_takes(world: World) -> None:
    line_bytes = state_bytes_per_line(model_spec(read_config(world.model_dir)), world.dtype)
    with pytest.raises(ModelError, match=rf"takes {line_bytes} .* --state-bytes"):
        build_engine(config_of(world, state_bytes=line_bytes - 1))


def test_slots_of_adapters_that_are_none_are_used_again(world: World, tmp_path: Path) -> None:
    """Their weights are too large to multiply with, so that states hold NaN; who runs beside them and in their slots
    after them says what PEFT says."""
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    for path in world.adapters["bias"].iterdir():
        (spoilt / path.name).write_bytes(path.read_bytes())
    tensors = load_file(spoilt / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = torch.full_like(tensor, 3e38 if "lora_A" in name else 1e3)
    save_file(tensors, spoilt / "adapter_model.safetensors")
    store = AdapterStore(world.store_root, layout_in(world.model_dir), base_name=BASE, base_dir=world.model_dir)
    with store.begin() as upload:
        upload.add_directory(spoilt)
        manifest = upload.finish("spoilt")[0].manifest
    store.close()
    with_spoilt = replace(
        world,
        digests={**world.digests, "spoilt": manifest.digest},
        rows={**world.rows, "spoilt": manifest.rows},
    )
    others = [Request(f"r{i}", name, tuple(range(20, 37 + i)), 9) for i, name in enumerate([BASE, *world.adapters] * 2)]
    spoilt_ones = [Request(f"x{i}", "spoilt", tuple(range(30, 47 + i)), 9) for i in range(3)]
    mixed = [request for pair in zip(spoilt_ones, others, strict=False) for request in pair]
    mixed += others[len(spoilt_ones) :]
    engine = build_engine(config_of(with_spoilt, token_budget=24, max_sequences=4, side_bytes=4 << 20))
    answers = run_engine(engine, [request.submit(with_spoilt) for request in mixed], joins_per_step=2)
    engine.close()
    for request in spoilt_ones:
        ended = answers[request.name].ended
        assert ended is not None and ended.error is not None
    oracle = Oracle(world)
    for request in others:
        assert_greedy(oracle, request, answers[request.name].tokens)


def test_adapters_of_one_projection_of_a_delta_net_equal_peft(tmp_path: Path, device: str) -> None:
    """Each of those that are multiplied together, and adapted alone; of a rank above the columns of b and a."""
    parts = OTHER_MIXERS["qwen3_5_text"]
    specs: dict[str, dict[str, Any]] = {part: {"rank": 24, "target_modules": [part]} for part in parts}
    world = make_world("qwen3_5_text", tmp_path, device, specs=specs)
    names = (BASE, *parts)
    prompts = [tuple(range(20, 45))] * len(names) + [tuple(range(30, 50 + i)) for i in range(len(names))]
    requests = [
        Request(f"r{i}", name, prompt, 9) for i, (name, prompt) in enumerate(zip(names * 2, prompts, strict=True))
    ]
    engine = build_engine(config_of(world, token_budget=24, max_sequences=6))
    answers = run_engine(engine, [request.submit(world) for request in requests], joins_per_step=2)
    engine.close()
    oracle = Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)
    assert len({tuple(answers[request.name].tokens) for request in requests[: len(names)]}) == len(names)


def test_merged_projections_of_a_trainer_equal_those_taken_apart_in_peft(tmp_path: Path, device: str) -> None:
    """One A of in_proj_qkvz and of in_proj_ba, with DoRA's magnitudes: the same as an adapter of the parts, by PEFT."""
    parts = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"], "in_proj_ba": ["in_proj_b", "in_proj_a"]}
    specs = {"parts": {"rank": 4, "target_modules": [*OTHER_MIXERS["qwen3_5_text"][:4]], "use_dora": True}}
    world = make_world("qwen3_5_text", tmp_path, device, specs=specs)
    file = world.adapters["parts"] / "adapter_model.safetensors"
    tensors, merged = load_file(file), {}
    for fused, (first, second) in parts.items():
        for name in [name for name in tensors if f".{first}." in name]:
            other = name.replace(first, second)
            if "lora_A" in name:
                tensors[other] = tensors[name].clone()
            whole = tensors[name] if "lora_A" in name else torch.cat((tensors[name], tensors[other]))
            merged[name.replace(first, fused)] = whole.contiguous()
    save_file(tensors, file)
    directory = tmp_path / "merged"
    directory.mkdir()
    save_file(merged, directory / "adapter_model.safetensors")
    config = json.loads((world.adapters["parts"] / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, "target_modules": list(parts)}))
    store = AdapterStore(world.store_root, layout_in(world.model_dir), base_name=BASE, base_dir=world.model_dir)
    with store.begin() as upload:
        upload.add_directory(directory)
        manifest = upload.finish("merged")[0].manifest
    store.close()
    world = replace(
        world,
        adapters={"merged": world.adapters["parts"]},
        digests={"merged": manifest.digest},
        rows={"merged": manifest.rows},
    )
    requests = [Request(f"r{i}", ("merged", BASE)[i % 2], tuple(range(20, 50 + i)), 9) for i in range(4)]
    engine = build_engine(config_of(world, token_budget=24, max_sequences=4, side_bytes=4 << 20))
    answers = run_engine(engine, [request.submit(world) for request in requests], joins_per_step=2)
    engine.close()
    oracle = Oracle(world)
    for request in requests:
        assert_greedy(oracle, request, answers[request.name].tokens)
