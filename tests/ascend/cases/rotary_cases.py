"""The kernel of rotation and cache write in the forms that its launcher can choose, for the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.paged_attention.cache_layout import made
from kernels.platform import detect, installed
from kernels.rotary_kv import reference, triton_ascend
from tests.ascend.cases.far import far_apart
from tests.ascend.gate.cases import MAX_TRAFFIC, Case, Launch
from tests.support.models.published import PUBLISHED, heads_of
from tests.tolerances import OP

NUM_VECTOR_CORES = 40
BLOCK_SIZE = 4
EPS = 1e-6


def rotary_kv(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int = 128,
    *,
    rotary_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    is_normed: bool = True,
    padding: tuple[int, ...] = (),
    num_behind: int = 0,
    judge_traffic: bool = False,
    max_load_traffic: float = MAX_TRAFFIC,
    far: bool = False,
    heads_first: bool = True,
) -> Launch:
    """Tokens in no order of slots; those in `padding` have none, and rows of NaN.

    heads_first  the caches lie head by head, as FIA wants them where it works
    """
    (num_heads, kv_heads), rotary_dim = heads, rotary_dim or head_dim
    generator = torch.Generator().manual_seed(num_tokens + head_dim)

    def values(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(of)

    num_all_heads = num_heads + 2 * kv_heads
    packed = values(num_tokens, num_all_heads * head_dim + num_behind)
    packed[list(padding)] = torch.nan
    packed[:, num_all_heads * head_dim :] = torch.nan
    if far:
        packed = far_apart(packed, 2**32 // num_tokens + 16)
    qkv = packed[:, : num_all_heads * head_dim].unflatten(1, (num_all_heads, head_dim))
    angles = torch.cat([4.0 * values(num_tokens, 1, rotary_dim // 2, of=torch.float32)] * 2, -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = None
    if is_normed:
        query, key = values(2, head_dim, of=weight_dtype or dtype)
        weight = torch.cat((query.expand(num_heads, -1), key.expand(kv_heads, -1)))
    cache_shape = (num_tokens // BLOCK_SIZE + 3, BLOCK_SIZE, kv_heads, head_dim)
    caches = [made(lambda shape: values(*shape), cache_shape, heads_first=heads_first) for _ in range(2)]
    slots = torch.randperm(num_tokens + BLOCK_SIZE - 1, generator=generator)[:num_tokens] + BLOCK_SIZE
    slots[list(padding)] = -1
    truth = [cache.double() for cache in caches]  # as the caches lie
    exact_weight = None if weight is None else weight.double()
    expected_q = reference.rotary_kv(qkv.double(), cos.double(), sin.double(), *truth, slots, exact_weight, EPS)
    q = torch.full((num_tokens, num_heads, head_dim), torch.nan, dtype=dtype)
    with installed(replace(detect("cpu"), num_cores=NUM_VECTOR_CORES)):
        launch = triton_ascend.plan(qkv, cos, sin, weight, slots, q, *caches, EPS)
    num_kept = num_tokens - len(padding)
    written = q.nbytes + num_kept * 2 * kv_heads * head_dim * dtype.itemsize
    read = written + num_tokens * rotary_dim * dtype.itemsize + (0 if weight is None else weight[[0, -1]].nbytes)
    return Launch(
        launch.arguments,
        launch.grid,
        {"q_ptr": expected_q.to(dtype), "k_cache_ptr": truth[0].to(dtype), "v_cache_ptr": truth[1].to(dtype)},
        frozenset({"slots_ptr"}),
        minimum_bytes=read + written if judge_traffic else None,
        minimum_load_bytes=read if judge_traffic else None,
        max_load_traffic=max_load_traffic,
        tolerance=OP[dtype],
        exact=frozenset({"v_cache_ptr"}),
    )


def published(model: str, num_tokens: int, **options: Any) -> Callable[[], Launch]:
    """With the heads of a published model."""
    heads = heads_of(model)
    return partial(
        rotary_kv,
        num_tokens,
        (heads.num_heads, heads.num_kv_heads),
        heads.head_dim,
        rotary_dim=heads.rotary_dim,
        is_normed=heads.is_normed,
        weight_dtype=torch.float32 if heads.has_exact_weight else None,
        **options,
    )


def _other_forms() -> dict[str, Callable[[], Launch]]:
    """A decode step with a padded token for each form of heads that a family's model has and no case above."""
    models = {heads_of(model).form: model for model in reversed(PUBLISHED)}
    judged = {heads_of(model).form for model in ("Llama-3-8B", "Qwen3-8B", "Qwen3.5-0.8B")}
    return {model: published(model, 3, padding=(1,)) for form, model in models.items() if form not in judged}


_PLAIN = {
    "llama 8B, one token": published("Llama-3-8B", 1, judge_traffic=True),
    "llama 8B, 64 tokens": published("Llama-3-8B", 64, judge_traffic=True),
    "token by token": partial(rotary_kv, 5, (6, 2), 64, is_normed=False, padding=(1,), heads_first=False),
    "padding": partial(rotary_kv, 5, (6, 2), 64, is_normed=False, padding=(0, 4), num_behind=16),
    "fp32": partial(rotary_kv, 3, (7, 1), 32, is_normed=False, dtype=torch.float32),
    "far": partial(rotary_kv, 4, (4, 2), 64, is_normed=False, far=True),
}
_NORMED = {
    # Five cores read the angles and a weight, 512 bytes beside 2 KB of heads; with blocks of 16 heads 1.06, but three
    # cores would do it, and the busiest one of 64 tokens would move 60 KB in place of 44.
    "qwen3 8B, one token": published("Qwen3-8B", 1, judge_traffic=True, max_load_traffic=1.15),
    "qwen3 8B, 64 tokens": published("Qwen3-8B", 64, judge_traffic=True),
    "heads of odd numbers, padding": partial(rotary_kv, 5, (14, 3), 96, padding=(2,), num_behind=16),
    "several blocks of keys": partial(rotary_kv, 3, (20, 20), 64, padding=(1,)),
    "qwen3 8B, 64 tokens, token by token": published("Qwen3-8B", 64, judge_traffic=True, heads_first=False),
    # Behind its weight lies nothing.
    "one key head": partial(rotary_kv, 3, (4, 1), 96),
    "weights of fp32, fp16": partial(rotary_kv, 3, (4, 4), 64, dtype=torch.float16, weight_dtype=torch.float32),
}
_PARTIAL = {
    "qwen3.5, a quarter is turned": published("Qwen3.5-0.8B", 5, padding=(1,)),
    "one key head": partial(rotary_kv, 3, (4, 1), 80, rotary_dim=32),
    "not normed": partial(rotary_kv, 3, (6, 2), 96, rotary_dim=64, is_normed=False, num_behind=16),
    "token by token": partial(rotary_kv, 3, (6, 2), 96, rotary_dim=64, heads_first=False),
}

# 2 % above what they take by estimate.
_PLAIN_US = {"llama 8B, one token": 0.397, "llama 8B, 64 tokens": 7.86}
_NORMED_US = {"qwen3 8B, one token": 0.753, "qwen3 8B, 64 tokens": 8.09, "qwen3 8B, 64 tokens, token by token": 8.09}

# Around an item stand the loops over blocks of heads and over tokens.
CASES = [
    Case(name, triton_ascend.rotary_kv_kernel, launches, work_loop_depth=2, on_chip_fraction=0.85, max_us=max_us)
    for name, launches, max_us in (
        ("rotary_kv", _PLAIN, _PLAIN_US),
        ("rotary_kv_normed", _NORMED, _NORMED_US),
        ("rotary_kv_partial", _PARTIAL, {}),
        ("rotary_kv_published", _other_forms(), {}),
    )
]
