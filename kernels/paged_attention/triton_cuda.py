"""Paged attention on NVIDIA GPUs: one launch for chunks and decode tokens together, and one more where keys are split.

Grids, tiles and the number of splits follow from padded sizes alone and the kernels read the lengths from the maps on
the device, so that a captured step can be replayed with other sequences of its padded size. Nothing is read back.

The partial results of splits lie in one workspace per device, so the attention of a device must run on one stream at a
time.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton

from kernels.attention_maps import AttentionMaps
from kernels.contract import Contract
from kernels.paged_attention.triton_cuda_configs import (
    MAX_SPLITS,
    WORKSPACE_BYTES,
    Heads,
    LaunchPlan,
    max_head_dim,
    plan_for,
)
from kernels.paged_attention.triton_cuda_kernels import add_parts_kernel, paged_attention_kernel, sum_splits_kernel
from kernels.platform import in_use
from kernels.shapes import ProbeShapes
from kernels.triton_launch import Workspace, count_compiled, launch_options, launches_dependently

_LOG2_E = math.log2(math.e)
# Tokens of one sequence, and whether it is a decode step: one of each kind of tile.
_KINDS = ((1, True), (1, False), (16, False))
# Splits and most programs: a launch that loops is of the tile of mixed steps alone.
_FORMS = ((1, None), (2, None), (2, 1))
# Parts, and results of splits, that are loaded before they are added.
_PARTS_AHEAD, _SUMMED_AHEAD = 4, 8


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    maps: AttentionMaps,
    *,
    scale: float,
    sliding_window: int | None,
    score_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
    plan: LaunchPlan | None = None,
) -> None:
    """See `ops.paged_attention`; writes all of `out`. Of `maps` the device half is read.

    Tokens behind the last sequence, and those of a sequence whose kv_lens is 0, pad a captured step: they become zero.

    plan  for tuning and tests
    """
    num_tokens, num_heads, head_dim = q.shape
    num_sequences, max_blocks = maps.block_table.shape
    _, block_size, kv_heads, _ = k_cache.shape
    if num_tokens == 0:
        return
    if plan is None:
        heads = Heads(num_heads, kv_heads, head_dim, q.element_size(), sliding_window)
        max_kv_tokens = max_blocks * block_size
        plan = plan_for(in_use(q.device), heads, num_tokens, num_sequences, max_kv_tokens, is_decode=maps.is_decode)
    tile, groups, is_split = plan.tile, num_heads // kv_heads, plan.num_splits > 1
    # Parts at fixed positions leave many splits of short sequences empty, which one_token would launch programs for.
    one_token = maps.is_decode and not plan.fixed_blocks
    block_d = max(16, triton.next_power_of_2(head_dim))
    target, lse, dependent = out, None, launches_dependently(q.device)
    if is_split:
        target, lse = _split_buffers(plan, num_tokens * num_heads, head_dim, q.device)
    num_tiles = num_tokens if one_token else min(num_tokens, num_tokens // (tile.block_m // groups) + num_sequences + 1)
    num_programs = num_tiles * plan.num_splits
    most_programs = plan.max_programs if is_split else None
    if most_programs is not None:
        num_programs = min(num_programs, most_programs)
    paged_attention_kernel[(num_programs * kv_heads,)](
        q,
        k_cache,
        v_cache,
        target,
        lse,
        maps.query_start_loc,
        maps.kv_lens_device,
        maps.block_table,
        num_tokens,
        num_sequences,
        plan.num_splits,
        plan.min_split_blocks,
        sliding_window or 0,
        max_blocks,
        q.stride(0),
        # For a capped score the kernel computes exp(2 * score / cap) first; base 2 comes with the cap.
        scale * _LOG2_E if score_cap is None else 2.0 * scale * _LOG2_E / score_cap,
        0.0 if score_cap is None else score_cap * _LOG2_E,
        sinks,
        KV_HEADS=kv_heads,
        GROUPS=groups,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        STAGES=tile.stages,
        HAS_WINDOW=sliding_window is not None,
        HAS_CAP=score_cap is not None,
        HAS_SINKS=sinks is not None,
        SPLIT=is_split,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        FIXED_BLOCKS=plan.fixed_blocks,
        ONE_TOKEN=one_token,
        DEPENDENT_LAUNCH=dependent,
        LOOPS=most_programs is not None,
        num_warps=tile.num_warps,
        # Blocks that all rows of a tile see are computed apart, and must be rounded as the others are.
        enable_fp_fusion=not plan.fixed_blocks,
    )
    if is_split and plan.fixed_blocks:
        add_parts_kernel[num_tokens, num_heads](
            *(target, lse, out, sinks, plan.num_splits),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            HAS_SINKS=sinks is not None,
            AHEAD=_PARTS_AHEAD,
            num_warps=1,
            enable_fp_fusion=False,
        )
    elif is_split:
        sum_splits_kernel[num_tokens, num_heads](
            *(target, lse, out, plan.num_splits),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            MAX_SPLITS=MAX_SPLITS,
            AHEAD=_SUMMED_AHEAD,
            DEPENDENT_LAUNCH=dependent,
            num_warps=1,
            **launch_options(q.device),
        )


def warm_up(
    k_cache: torch.Tensor,
    num_heads: int,
    *,
    sliding_window: int | None,
    score_cap: float | None = None,
    has_sinks: bool = False,
) -> None:
    """See `ops.warm_up`. The workspace is allocated too, so that steps can be captured afterwards."""
    _, block_size, kv_heads, head_dim = k_cache.shape
    platform = in_use(k_cache.device)
    heads = Heads(num_heads, kv_heads, head_dim, k_cache.element_size(), sliding_window)
    queries = k_cache.new_zeros(16, num_heads, head_dim)
    sinks = torch.zeros(num_heads, device=k_cache.device) if has_sinks else None
    zeros = torch.zeros(3, dtype=torch.int32, device=k_cache.device)
    for num_tokens, is_decode in _KINDS:
        serving = plan_for(platform, heads, num_tokens, 1, block_size, is_decode=is_decode)
        q = queries[:num_tokens]
        # No tokens, so that no slot is read: all queries are padding behind the only sequence.
        slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=k_cache.device)
        maps = AttentionMaps(
            query_starts=(0, 0),
            kv_lens=(0,),
            block_tables=((),),
            query_start_loc=zeros[:2],
            kv_lens_device=zeros[:1],
            block_table=zeros[:1, None],
            slot_mapping=slots,
            is_decode=is_decode,
        )
        for num_splits, max_programs in _FORMS[: 2 if is_decode or num_tokens > 1 else 3]:
            plan = replace(serving, num_splits=num_splits, min_split_blocks=1, max_programs=max_programs)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            paged_attention(
                *(q, k_cache, k_cache, maps),
                scale=1.0,
                sliding_window=sliding_window,
                score_cap=score_cap,
                sinks=sinks,
                out=out,
                plan=plan,
            )


def compiled_count() -> int:
    """Number of compiled variants of the attention kernels in this process; it must not rise after warm-up."""
    return count_compiled(paged_attention_kernel, sum_splits_kernel, add_parts_kernel)


def refuses(shapes: ProbeShapes) -> str | None:
    """Why the kernel cannot serve a model, as part of a sentence; None if it can."""
    largest = max_head_dim(shapes.torch_dtype.itemsize)
    if shapes.head_dim > largest:
        return f"it takes heads of up to {largest} elements, not {shapes.head_dim}"
    return None


CONTRACT = Contract(refuses=refuses, warm_up=warm_up, compiled_count=compiled_count, replayable=True)


_workspace = Workspace()


def _split_buffers(
    plan: LaunchPlan, num_rows: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [splits * num_rows, head_dim], and logarithms, or maxima and sums, [splits * num_rows] of all splits,
    heads and tokens."""
    workspace = _workspace.take(device, WORKSPACE_BYTES).view(torch.float32)
    num_partials = -(-plan.num_splits * num_rows * head_dim // 16) * 16  # the logarithms begin aligned
    end = num_partials + plan.num_splits * num_rows * (2 if plan.fixed_blocks else 1)
    assert end <= len(workspace), "the plan splits more than the workspace holds"
    return workspace[:num_partials], workspace[num_partials:end]
