"""With `batch_invariant` a request's numbers are equal to the bit, whatever else is in its steps and however its prompt
was cut: alone, among crowds with other adapters, in chunks, preempted and computed again, begun from the prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.batch_invariant.mode import install_batch_invariance
from kernels.platform import BackendError
from service.engine.engine import Engine
from service.models.families import model_spec
from service.models.layers.caches import state_bytes_per_line
from service.models.spec.config_json import read_config
from tests.support.engine.engine_parity import (
    BASE,
    Answer,
    Request,
    World,
    adapter_specs,
    build_engine,
    config_of,
    make_requests,
    make_world,
    run_engine,
)
from tests.support.models.tiny_models import ATTENTION_INPUTS, FAMILIES, VOCAB_SIZE

# Both random and told: probabilities of the prompt, of the chosen tokens and of others.
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 3, "logprobs": 4, "prompt_logprobs": 2}
# Less and more keys than one block of attention.
LONG, SHORT = 280, 21


# Whose layers a GPU computes so.
DENSE = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "granite",
    "olmo3",
    "glm",
    "lfm2",
    "qwen3_moe",
    "qwen3_5_text",
    "glm4",
    "ministral3",
)


@pytest.fixture(autouse=True)
def _as_it_was(device: str) -> Iterator[None]:
    yield
    install_batch_invariance(device, wanted=False)


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> World:
    if device != "cpu" and request.param not in DENSE:
        pytest.skip("NOT RUN: this device refuses some layers of the family")
    return world_of(request.param, tmp_path_factory.mktemp(request.param), device)


def world_of(
    family: str, directory: Path, device: str, dtype: torch.dtype = torch.float32, **specs: dict[str, Any]
) -> World:
    dora = {"rank": 4, "target_modules": ATTENTION_INPUTS[family], "use_dora": True}
    return make_world(family, directory, device, dtype=dtype, specs={**adapter_specs(family), "dora": dora, **specs})


def test_numbers_are_those_of_a_request_alone(world: World) -> None:
    check_crowds(world)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_in_short_types_are_those_of_a_request_alone(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    """Beside adapters with norms of their own, which are rounded once more, too."""
    norms = {"rank": 2, "target_modules": ["q_proj"], "modules_to_save": ["q_norm", "k_norm", "input_layernorm"]}
    check_crowds(world_of("qwen3", tmp_path, device, dtype, norms=norms))


def check_crowds(world: World, **options: Any) -> None:
    chosen = chosen_of()
    alone: dict[str, Answer] = {}
    engine = engine_of(world, **options)
    for request in chosen:
        alone |= run_engine(engine, [request.submit(world, **SAMPLING)])
    engine.close()
    for requests, joins_per_step, sizes in crowds_of(world):
        engine = engine_of(world, **sizes, **options)
        # Prompts whose probabilities are asked for are computed whole.
        asked = {**SAMPLING, "prompt_logprobs": None if sizes.get("prefix_cache") else SAMPLING["prompt_logprobs"]}
        submits = [request.submit(world, **asked) for request in requests]
        answers = run_engine(engine, submits, joins_per_step=joins_per_step)
        stats = engine.stats()
        assert stats.num_preemptions or "num_blocks" not in sizes or "prefix_host_bytes" in sizes
        assert stats.prefix_cache_host_hit_tokens or "prefix_host_bytes" not in sizes
        assert engine.cache.counts.hit_tokens or "prefix_cache" not in sizes
        engine.close()
        for request in chosen:
            if request.name in answers:
                one, other = answers[request.name], alone[request.name]
                assert one.prompt_logprobs in (other.prompt_logprobs, ()), request
                assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs), request


def test_without_it_numbers_depend_on_the_crowd(tmp_path: Path, device: str) -> None:
    """Else the test above would show nothing."""
    with pytest.raises(AssertionError, match="chosen-"):
        check_crowds(world_of("llama", tmp_path, device), batch_invariant=False)


def test_a_device_without_it_is_refused_by_name() -> None:
    with pytest.raises(BackendError, match="--batch-invariant is not served on meta"):
        install_batch_invariance("meta", wanted=True)


def chosen_of() -> list[Request]:
    rng = random.Random(7)
    names = (BASE, "all", "head", "dora", BASE)
    lengths = (SHORT, LONG, SHORT, SHORT + 8, LONG)
    prompts = [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(length)) for length in lengths]
    return [Request(f"chosen-{i}", *one, 5) for i, one in enumerate(zip(names, prompts, strict=True))]


def crowds_of(world: World) -> list[tuple[list[Request], int, dict[str, Any]]]:
    """(requests, how many join a step, sizes): begun from the prefix cache's host tier, without states; all chunks
    small; all prompts whole; begun from the prefix cache; too few blocks for all."""
    chosen, spec = chosen_of(), model_spec(read_config(world.model_dir))
    cache = {"prefix_cache": True, "state_cache_bytes": 8 * state_bytes_per_line(spec, world.dtype)}
    twins = [Request(f"twin-{r.name}", r.adapter, (*r.prompt[: len(r.prompt) - 3], 6, 7), 2) for r in chosen]
    short = [request for request in chosen if len(request.prompt) < LONG]
    crowd = make_requests(world, 1 + len(world.adapters), seed=1, max_prompt=30)
    host = {"num_blocks": 100, "prefix_host_bytes": 2**24}
    return [
        *([] if spec.has_states else [([*twins, *chosen], 1, {"token_budget": 64, **cache, **host})]),
        ([*crowd, *chosen], 4, {"token_budget": 23, "max_sequences": 16}),
        ([*chosen[::-1], *crowd], 16, {"token_budget": 2000, "max_sequences": 64}),
        ([*twins, *chosen], 3, {"token_budget": 64, **cache}),
        ([*crowd, *short], 16, {"token_budget": 24, "num_blocks": 30}),
    ]


def engine_of(world: World, **sizes: Any) -> Engine:
    fields: dict[str, Any] = {"token_budget": 256, "max_sequences": 8, "prefix_cache": False, "batch_invariant": True}
    fields |= {"side_bytes": 2**20, "num_rows": 160, "max_prompt_logits": 50}
    return build_engine(config_of(world, **(fields | sizes)))
