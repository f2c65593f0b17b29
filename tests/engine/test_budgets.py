"""What an engine takes of a machine when nobody says so: plain numbers for GPUs, NPUs and CPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.layout import Group
from adapters.row_plan import plan_non_lora
from kernels.sampling.penalty_state import DenseState
from service.engine.ipc.config import EngineOptions
from service.engine.startup.budgets import GIB, MIB, Budgets, ModelSizes, decide_budgets, sentences
from service.engine.startup.build import settled
from service.models.spec.config_json import ModelError

# Llama 3.1 8B in bfloat16: 32 layers, 8 heads of 128 for keys and values, hidden 4096, intermediate 14336.
LLAMA_8B = ModelSizes(
    kv_bytes_per_token=128 * 1024,
    state_bytes_per_line=0,
    row_bytes=5_242_880,
    bytes_per_step_token=4 * (4096 + 2 * 14336) * 2,
    logits_bytes=4 * 128_256,
    context_tokens=131_072,
)
TINY = ModelSizes(
    kv_bytes_per_token=1024,
    state_bytes_per_line=2048,
    row_bytes=10_000,
    bytes_per_step_token=8192,
    logits_bytes=1024,
    context_tokens=2048,
)


def options(**fields: Any) -> EngineOptions:
    return EngineOptions(model_dir="/model", store_root="/store", **fields)


def decided(sizes: ModelSizes, device_type: str, free_bytes: int, graph_bytes: int = 0, **fields: Any) -> Budgets:
    return decide_budgets(options(**fields), sizes, device_type, free_bytes, graph_bytes=graph_bytes)


def test_a_large_gpu_is_used_whole() -> None:
    budgets = decided(LLAMA_8B, "cuda", 122 * GIB)
    assert (budgets.token_budget, budgets.max_sequences, budgets.block_size_tokens) == (8192, 256, 16)
    num_rows_of_logits = 6 * (256 + 64) + 1 + 256
    assert budgets.step_bytes == 8192 * 4 * (4096 + 2 * 14336) * 2 + num_rows_of_logits * 4 * 128_256
    left = int(122 * GIB * 0.96) - budgets.step_bytes
    assert budgets.row_bytes == left // 4
    assert left - LLAMA_8B.kv_bytes_per_token * 16 < budgets.kv_bytes + budgets.row_bytes <= left


def test_an_npu_has_steps_and_blocks_of_its_own() -> None:
    budgets = decided(LLAMA_8B, "npu", 45 * GIB)
    assert (budgets.token_budget, budgets.max_sequences, budgets.block_size_tokens) == (2048, 256, 128)
    assert budgets.kv_bytes % (128 * LLAMA_8B.kv_bytes_per_token) == 0
    assert decided(LLAMA_8B, "npu", 45 * GIB, block_size_tokens=256).block_size_tokens == 256


@pytest.mark.parametrize("device_type", ["cuda", "npu", "cpu"])
def test_counts_for_penalties_are_kept_free_for_on_devices(device_type: str) -> None:
    """They are allocated when a request first has a penalty, and all else is taken by then."""
    counts = DenseState(1 + 2, 128, torch.device("cpu"))
    counts.reset(1, [5], [])
    sizes = replace(TINY, logits_bytes=4 * 128)
    budgets = decided(sizes, device_type, GIB, token_budget=64, max_sequences=2)
    others = 64 * sizes.bytes_per_step_token + 6 * 64 * sizes.logits_bytes + 2 * sizes.state_bytes_per_line
    assert budgets.step_bytes == others + (0 if device_type == "cpu" else counts.table.nbytes)


def test_graphs_are_kept_free_for() -> None:
    without, with_graphs = (decided(LLAMA_8B, "cuda", 60 * GIB, graph_bytes=size) for size in (0, 4 * GIB))
    assert with_graphs.step_bytes == without.step_bytes + 4 * GIB
    freed = without.kv_bytes + without.row_bytes - with_graphs.kv_bytes - with_graphs.row_bytes
    assert abs(freed - 4 * GIB) < 2 * LLAMA_8B.kv_bytes_per_token * 16


def test_a_cpu_s_host_tier_of_the_prefix_cache_is_memory_as_the_caches_are() -> None:
    without, given = (decided(LLAMA_8B, "cpu", 32 * GIB, prefix_host_bytes=num) for num in (0, 20 * GIB))
    taken = given.kv_bytes + given.state_cache_bytes + given.row_bytes + given.side_bytes + given.step_bytes
    assert given.kv_bytes < without.kv_bytes and taken <= 12 * GIB
    beside_a_gpu = decided(LLAMA_8B, "cuda", 60 * GIB, prefix_host_bytes=20 * GIB)
    assert beside_a_gpu.kv_bytes > decided(LLAMA_8B, "cuda", 60 * GIB).kv_bytes - GIB  # but for what copies go through


@pytest.mark.parametrize(
    ("line_mib", "table_mib", "free_gib", "num_tables"),
    [(3, 520, 30, 2), (12, 2004, 62, 1), (12, 2004, 122, 2), (12, 2004, 7, 0)],
    ids=["0.5B on 32 GB", "8B on 80 GB", "8B on 141 GB", "8B on 24 GB"],
)
@pytest.mark.parametrize("device_type", ["cuda", "npu"])
def test_a_device_has_room_for_embeddings_and_heads_of_adapters_where_they_are_a_small_part(
    device_type: str, line_mib: int, table_mib: int, free_gib: int, num_tables: int
) -> None:
    sizes = replace(LLAMA_8B, non_lora_line_bytes=line_mib * MIB, non_lora_table_bytes=table_mib * MIB)
    side_bytes = decided(sizes, device_type, free_gib * GIB).side_bytes
    assert side_bytes <= free_gib * GIB / 16
    units: dict[Group, int] = {"vectors": line_mib * MIB, "norms": 0}
    plan = plan_non_lora(units | {"saved_embedding": table_mib * MIB, "saved_head": 0}, side_bytes)
    assert plan["saved_head"] == num_tables
    assert plan["vectors"] >= 16


def test_a_tiny_model_takes_what_it_can_use_of_a_large_gpu() -> None:
    budgets = decided(TINY, "cuda", 130 * GIB)
    assert budgets.kv_bytes == 256 * TINY.context_tokens * TINY.kv_bytes_per_token
    assert budgets.row_bytes == 16_384 * TINY.row_bytes


def test_a_small_gpu_has_smaller_steps() -> None:
    """Until they need no more than a quarter of what the weights leave, or are 512 tokens; what is given stays."""
    assert [decided(LLAMA_8B, "cuda", size * GIB).token_budget for size in (122, 11, 7, 3)] == [8192, 4096, 2048, 512]
    assert decided(LLAMA_8B, "cuda", 7 * GIB, token_budget=8192).token_budget == 8192


# Qwen3.5 9B in bfloat16: 24 delta nets of 32 x 128 x 128 float32, 8 layers of attention of 4 heads of 256.
QWEN_9B = ModelSizes(
    kv_bytes_per_token=8 * 2 * 4 * 256 * 2,
    state_bytes_per_line=24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2),
    row_bytes=5_000_000,
    bytes_per_step_token=4 * (4096 + 24_576) * 2,
    logits_bytes=4 * 248_320,
    context_tokens=262_144,
)


@pytest.mark.parametrize(
    ("device_type", "free_gib", "num_sequences", "token_budget"),
    [
        ("npu", 11, 64, 2048),
        ("npu", 42, 256, 2048),
        ("cuda", 4, 32, 2048),
        ("cuda", 55, 256, 8192),
        ("cpu", 14, 64, 256),
    ],
    ids=["910B4 of 32 GB", "910B of 64 GB", "24 GB", "80 GB", "CPU"],
)
def test_states_are_of_fewer_sequences_until_the_model_fits(
    device_type: str, free_gib: int, num_sequences: int, token_budget: int
) -> None:
    budgets = decided(QWEN_9B, device_type, free_gib * GIB)
    assert (budgets.max_sequences, budgets.token_budget) == (num_sequences, token_budget)
    assert budgets.kv_bytes > 8192 * QWEN_9B.kv_bytes_per_token
    given = decided(QWEN_9B, device_type, 60 * GIB, max_sequences=300, state_bytes=GIB)
    assert given.max_sequences == 300


@pytest.mark.parametrize("free_gib", [20, 62])
def test_a_cache_is_no_larger_than_attention_takes(free_gib: int) -> None:
    sizes = replace(LLAMA_8B, kv_bytes_per_token=12_288, max_kv_tokens=(2**31 - 1) // 512)
    for fields in ({"row_bytes": 0}, {}):
        budgets = decided(sizes, "npu", free_gib * GIB, **fields)
        num_tokens = budgets.kv_bytes // 12_288 + 128
        assert num_tokens <= sizes.max_kv_tokens
        assert free_gib == 20 or fields == {} or num_tokens > sizes.max_kv_tokens - 128
    assert decided(sizes, "npu", 62 * GIB, kv_bytes=60 * GIB, row_bytes=0).kv_bytes == 60 * GIB, "what is given stays"


def test_a_cpu_s_caches_follow_the_free_memory() -> None:
    """A quarter of it for keys and values, an eighth for rows; no more than is of use, and half of it at most."""
    budgets = decided(TINY, "cpu", 64 * GIB)
    assert (budgets.token_budget, budgets.max_sequences) == (256, 64)
    assert budgets.kv_bytes == 64 * TINY.context_tokens * TINY.kv_bytes_per_token == 128 * MIB
    assert budgets.row_bytes == 16_384 * TINY.row_bytes
    for free in (8 * GIB, 16 * GIB, 64 * GIB):
        large = decided(replace(LLAMA_8B, context_tokens=8192), "cpu", free)
        block_bytes = large.block_size_tokens * LLAMA_8B.kv_bytes_per_token
        assert free // 4 - block_bytes < large.kv_bytes <= free // 4
        assert 256 * MIB < large.row_bytes <= free // 8
    assert large.row_bytes == 1024 * LLAMA_8B.row_bytes
    short = decided(TINY, "cpu", 200 * MIB)
    assert short.kv_bytes + short.row_bytes + short.step_bytes <= 100 * MIB
    assert short.kv_bytes > 2 * short.row_bytes > 0


def test_a_cpu_s_keys_and_values_hold_one_request_of_the_whole_context_where_half_of_the_memory_does() -> None:
    long = replace(LLAMA_8B, context_tokens=32_768)
    context_bytes = long.context_tokens * long.kv_bytes_per_token
    assert decided(long, "cpu", 14 * GIB).kv_bytes == context_bytes > 14 * GIB // 4
    short = decided(long, "cpu", 8 * GIB)
    assert 2 * GIB < short.kv_bytes < context_bytes
    (*_, line) = sentences(options(), short, long, "cpu", 8 * GIB)
    assert "tokens of the 32,768 that one request could have)" in line
    assert short.kv_bytes + short.row_bytes + short.side_bytes + short.step_bytes <= 4 * GIB


@pytest.mark.parametrize("device_type", ["cuda", "npu", "cpu"])
def test_what_is_given_stays_and_the_rest_follows(device_type: str) -> None:
    given = {"token_budget": 100, "max_sequences": 7, "block_size_tokens": 32, "kv_bytes": 8 * MIB, "row_bytes": 0}
    budgets = decided(TINY, device_type, 16 * MIB, **given)
    assert {name: getattr(budgets, name) for name in given} == given


def test_sequences_and_the_token_budget_fit_each_other() -> None:
    assert decided(TINY, "cpu", GIB, token_budget=8).max_sequences == 8
    assert decided(TINY, "cpu", GIB, max_sequences=1000).token_budget == 1000


def test_a_given_cache_makes_the_other_one_smaller() -> None:
    free, given = 60 * GIB, 50 * GIB
    assert 0 < decided(LLAMA_8B, "cuda", free, row_bytes=given).kv_bytes < free - given
    assert 0 < decided(LLAMA_8B, "cuda", free, kv_bytes=given).row_bytes < free - given


@pytest.mark.parametrize("fields", [{}, {"kv_bytes": 100 * MIB}, {"row_bytes": 1 << 40}])
def test_too_little_memory_is_a_sentence(fields: dict[str, int]) -> None:
    with pytest.raises(
        ModelError, match=r"^400 MiB of memory are free .* lower --token-budget or .*--adapter-row-bytes"
    ):
        decided(LLAMA_8B, "cuda", 400 * MIB, **fields)


def test_the_start_says_what_it_chose_and_what_would_change_it() -> None:
    given = options(kv_bytes=2 * GIB)
    budgets = decide_budgets(given, LLAMA_8B, "cuda", 60 * GIB)
    told = sentences(given, budgets, LLAMA_8B, "cuda:1", 60 * GIB)
    assert told[0] == "60.0 GiB free on cuda:1 beside the weights, of which steps need 3.0 GiB"
    assert told[1] == "given: --kv-bytes 2.0 GiB (16,384 tokens of the 131,072 that one request could have)"
    assert told[2] == (
        "decided from the machine: --token-budget 8192, --max-sequences 256, --block-size-tokens 16, "
        "--adapter-row-bytes 13.2 GiB (2,695 rows: 168 adapters of rank 16 everywhere); "
        "name any of them to change it, and the others follow"
    )
    all_given = options(
        token_budget=8, max_sequences=8, block_size_tokens=16, kv_bytes=MIB, row_bytes=0, state_cache_bytes=0
    )
    assert len(sentences(all_given, decide_budgets(all_given, TINY, "cpu", GIB), TINY, "cpu", GIB)) == 2


@pytest.mark.parametrize(
    ("reads", "num_waits", "found"),
    [([5, 5, 5], 2, 5), ([5, 4, 6, 6, 6], 4, 6), ([5, 7, 6, 6], 3, 6), ([*range(50)], 40, 40)],
    ids=["at rest", "given back late", "taken by others", "never at rest"],
)
def test_free_memory_is_read_when_the_probe_s_is_given_back(reads: list[int], num_waits: int, found: int) -> None:
    waits: list[float] = []
    values = iter(reads)
    assert settled(lambda: next(values), waits.append) == found
    assert len(waits) == num_waits and sum(waits) <= 2.01


def test_states_of_the_prefix_cache_have_a_sixth_of_the_blocks_bytes() -> None:
    for kind in ("cpu", "cuda"):
        decided = decide_budgets(options(), TINY, kind, GIB)
        assert decided.state_cache_bytes == pytest.approx(decided.kv_bytes / 6, rel=0.2)
        assert decide_budgets(options(kv_bytes=6 * MIB), TINY, kind, GIB).state_cache_bytes == MIB
    assert decide_budgets(options(prefix_cache=True), TINY, "npu", GIB).state_cache_bytes == 0
    assert decide_budgets(options(prefix_cache=True, state_cache_bytes=MIB), TINY, "npu", GIB).state_cache_bytes == MIB
    for fields in ({"prefix_cache": False}, {"state_cache_bytes": 0}):
        assert decide_budgets(options(**fields), TINY, "cpu", GIB).state_cache_bytes == 0
