"""The causal convolution kernels in the forms that their launcher can choose, for the gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.causal_conv1d import reference, triton_ascend
from kernels.causal_conv1d.call import ConvLaunch, PrefillCall, UpdateCall
from service.models.spec.model_spec import ShortConvSpec
from tests.ascend.cases.far import far_apart
from tests.ascend.gate.cases import MAX_TRAFFIC, Case, Launch
from tests.ascend.gate.checks import MAX_SCALAR_LOADS
from tests.support.models.published import spec_of
from tests.support.ops.conv_cases import randn
from tests.support.ops.conv_checks import serving
from tests.tolerances import OP

NUM_VECTOR_CORES = 40
MAPS = frozenset(
    {
        "starts_ptr",
        "lines_ptr",
        "sources_ptr",
        "accepted_ptr",
        "initial_ptr",
        "source_block_ptr",
        "first_block_ptr",
        "last_block_ptr",
        "computed_ptr",
    }
)


def _int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _tensors(
    dim: int, width: int, num_tokens: int, num_lines: int, state_len: int, dtype: torch.dtype, state_dtype: torch.dtype
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(dim + width + num_tokens)

    def values(*shape: int) -> torch.Tensor:
        return randn(*shape, generator=generator)

    return {
        "x": values(num_tokens, dim).to(dtype),
        "weight": values(width, dim).to(dtype),
        "bias": values(dim).to(dtype),
        "conv_states": values(num_lines, state_len, dim).to(state_dtype),
        "activation": "silu",
    }


def _far(call: dict[str, Any]) -> dict[str, Any]:
    """x, gates and states where 32 bits do not count the elements before the later half of their rows."""
    names = [name for name in ("x", "conv_states", "gate_in", "gate_out") if call.get(name) is not None]
    return {name: far_apart(call[name], 2**32 // call[name].shape[0] + 16) for name in names}


def _expected(op: Any, call: dict[str, Any], *, in_place: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    x, states = call["x"].clone(), None if call["conv_states"] is None else call["conv_states"].clone()
    return op(**{**call, "x": x, "out": x if in_place else None, "conv_states": states}), states


def _weights_bytes(call: dict[str, Any]) -> int:
    return call["weight"].nbytes + (0 if call["bias"] is None else call["bias"].nbytes)


def _plan(
    kind: type[PrefillCall] | type[UpdateCall], call: dict[str, Any], *, in_place: bool, num_cores: int
) -> ConvLaunch:
    """What the launcher makes of a call, with fresh outputs."""
    fields = dict.fromkeys(field.name for field in dataclasses.fields(kind))
    x = call["x"]
    out = x if in_place else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(torch.nan)  # far too
    made = kind(**{**fields, "pad_slot_id": -1, "out": out, **call})
    with serving(triton_ascend, num_cores=num_cores):
        return triton_ascend.plan_prefill(made) if isinstance(made, PrefillCall) else triton_ascend.plan_update(made)


def update(
    dim: int = 2048,
    width: int = 4,
    lines: tuple[int, ...] = tuple(range(1, 33)),
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.bfloat16,
    lengths: tuple[int, ...] | None = None,
    tokens_each: int = 1,
    draft: int | None = None,
    is_paged: bool = False,
    sources: tuple[int, ...] | None = None,
    null_targets: bool = False,
    pad_slot_id: int = -1,
    is_gated: bool = False,
    is_bare: bool = False,
    has_bias: bool = True,
    in_place: bool = False,
    judge_traffic: bool = False,
    max_traffic: float = MAX_TRAFFIC,
    max_load_traffic: float = MAX_TRAFFIC,
    max_transfers: int | None = None,
    far: bool = False,
) -> Launch:
    """An update of sequences in these lines; `lengths` makes it varlen, `draft` speculative, `is_bare` leaves bias and
    activation out. In a prefix cache every second sequence has its new state in another line than the old one, with
    `null_targets` in the null line."""
    num_sequences = len(lines)
    num_tokens = num_sequences * tokens_each if lengths is None else sum(lengths) + 2
    state_len = width - 1 + (draft or 0)
    num_lines = (3 if is_paged else 1) * (max(lines) + 1)
    call = _tensors(dim, width, num_tokens, num_lines, state_len, dtype, state_dtype)
    call |= {"state_indices": _int32(lines), "pad_slot_id": pad_slot_id}
    call["source_state_indices"] = None if sources is None else _int32(sources)
    if lengths is not None:
        call |= {
            "query_start_loc": _int32([sum(lengths[:n]) for n in range(num_sequences + 1)]),
            "max_query_len": max(lengths),
        }
    if draft is not None:
        call["num_accepted_tokens"] = _int32([1 + n % (draft + 1) for n in range(num_sequences)])
    if is_paged:
        others = _int32([0] * num_sequences) if null_targets else _int32(lines) + num_lines // 3
        call["state_indices"] = torch.stack([_int32(lines), others, _int32(lines)], dim=1)
        call |= {
            "initial_state_idx": _int32([0] * num_sequences),
            "block_idx_last_scheduled_token": _int32([n % 2 for n in range(num_sequences)]),
        }
    if is_gated:
        call |= {"gate_in": call["x"].flip(0).contiguous(), "gate_out": call["x"].roll(1, 0)}
    if is_bare:
        call |= {"bias": None, "activation": None}
    if not has_bias:
        call["bias"] = None
    if far:
        call |= _far(call)
    if tokens_each > 1:
        call["x"] = call["x"].view(num_sequences, tokens_each, dim)
    expected, states = _expected(reference.causal_conv1d_update, call, in_place=in_place)
    assert states is not None
    plan = _plan(UpdateCall, call, in_place=in_place, num_cores=NUM_VECTOR_CORES)
    written = call["x"].nbytes + num_sequences * (width - 1) * dim * state_dtype.itemsize
    gates = sum(call[name].nbytes for name in ("gate_in", "gate_out") if call.get(name) is not None)
    read = written + gates + _weights_bytes(call)
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected, "states_ptr": states},
        MAPS,
        minimum_bytes=read + written if judge_traffic else None,
        minimum_load_bytes=read if judge_traffic else None,
        max_traffic=max_traffic,
        max_load_traffic=max_load_traffic,
        max_transfers=max_transfers,
        tolerance=OP[dtype],
        exact=frozenset({"states_ptr"}),
    )


def prefill(
    dim: int = 300,
    width: int = 4,
    lines: tuple[int, ...] | None = (2, 0, 1, 3, -1),
    lengths: tuple[int, ...] = (20, 5, 2, 33, 3),
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.bfloat16,
    block_size_tokens: int | None = None,
    source_blocks: tuple[int, ...] | None = None,
    skipped_blocks: int = 0,
    null_targets: bool = False,
    pad_slot_id: int = -1,
    sources: tuple[int, ...] | None = None,
    has_states: bool = True,
    is_gated: bool = False,
    is_bare: bool = False,
    has_bias: bool = True,
    in_place: bool = False,
    num_cores: int = NUM_VECTOR_CORES,
    judge_traffic: bool = False,
    max_traffic: float = MAX_TRAFFIC,
    max_transfers: int | None = None,
    max_scalar_loads: int | None = None,
    far: bool = False,
) -> Launch:
    """A prefill of sequences of these lengths, every second one with an initial state, two tokens of padding behind.

    In a prefix cache, old states lie in the last block written before or in `source_blocks`, and the boundaries of the
    chunk's first `skipped_blocks` are not asked for. With `null_targets` the first sequence's final state and the last
    boundary's of the last sequence have the null line.
    """
    num_sequences, num_tokens = len(lengths), sum(lengths) + (0 if judge_traffic else 2)
    num_blocks = 1
    num_lines = num_sequences + 2
    if block_size_tokens is not None:
        num_blocks = max(lengths) // block_size_tokens + 3
        num_lines = num_sequences * num_blocks + 1
    call = _tensors(dim, width, num_tokens, num_lines, width - 1, dtype, state_dtype)
    call |= {
        "query_start_loc": _int32([sum(lengths[:n]) for n in range(num_sequences + 1)]),
        "has_initial_state": torch.tensor([n % 2 == 0 for n in range(num_sequences)]),
        "pad_slot_id": pad_slot_id,
    }
    if lines is not None:
        call["state_indices"] = _int32(lines)
    call["source_state_indices"] = None if sources is None else _int32(sources)
    if block_size_tokens is not None:
        computed = [n % 2 * 3 for n in range(num_sequences)]
        last = [(before + length - 1) // block_size_tokens for before, length in zip(computed, lengths, strict=True)]
        call |= {
            "state_indices": _int32(range(1, num_lines)).view(num_sequences, num_blocks).flip(1).contiguous(),
            "initial_state_idx": _int32(
                source_blocks or [max(before - 1, 0) // block_size_tokens for before in computed]
            ),
            "block_idx_first_scheduled_token": _int32(
                [before // block_size_tokens + skipped_blocks for before in computed]
            ),
            "block_idx_last_scheduled_token": _int32(last),
            "num_computed_tokens": _int32(computed),
            "block_size_tokens": block_size_tokens,
        }
        if null_targets:
            call["state_indices"][0, last[0]] = call["state_indices"][-1, last[-1] - 1] = 0
    if is_gated:
        call |= {"gate_in": call["x"].flip(0).contiguous(), "gate_out": call["x"].roll(1, 0)}
    if is_bare:
        call |= {"bias": None, "activation": None}
    if not has_bias:
        call["bias"] = None
    if far:
        call |= _far(call)
    if not has_states:
        call |= {"conv_states": None, "state_indices": None, "has_initial_state": None}
    expected, states = _expected(reference.causal_conv1d_prefill, call, in_place=in_place)
    plan = _plan(PrefillCall, call, in_place=in_place, num_cores=num_cores)
    minimum = 2 * call["x"].nbytes + _weights_bytes(call)
    minimum += sum(2 * (width - 1) * dim * state_dtype.itemsize for length in lengths if length)
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected} | ({} if states is None else {"states_ptr": states}),
        MAPS,
        minimum_bytes=minimum if judge_traffic else None,
        max_traffic=max_traffic,
        max_transfers=max_transfers,
        max_scalar_loads=max_scalar_loads,
        tolerance=OP[dtype],
        exact=frozenset({"states_ptr"}),
    )


def published(make: Callable[..., Launch], model: str, *arguments: Any, **options: Any) -> Callable[[], Launch]:
    """With the convolution of a published model: gated and without an activation, or with silu in a delta net."""
    mixer = spec_of(model).convs[0]
    if isinstance(mixer, ShortConvSpec):
        options |= {"is_gated": True, "is_bare": not mixer.bias}
    else:
        options |= {"has_bias": False}
    return partial(make, mixer.size, mixer.width, *arguments, **options)


def _judged(
    make: Callable[..., Launch], max_traffic: float, max_load_traffic: float, max_transfers: int
) -> Callable[[], Launch]:
    """An update whose bytes, reads alone and transfers are limited to what it does.

    A row of 256 bytes takes as long as one of 4 KB by the public tables, so that items are as wide as the chip's memory
    allows. Where cores get few items, each core's taps are more than the rows that it computes; every core reads the
    same ones, which the chip's L2 holds. Items of 128 channels, eight a core, shared them (at most 1.07 times the
    minimum), in ten times the transfers.
    """
    return partial(
        make,
        judge_traffic=True,
        max_traffic=max_traffic,
        max_load_traffic=max_load_traffic,
        max_transfers=max_transfers,
    )


_UPDATES = {
    "one sequence": _judged(partial(update, 2048, 4, (1,)), 1.0, 1.0, 13),
    "8 sequences": _judged(partial(update, 2048, 4, tuple(range(1, 9))), 1.51, 1.96, 104),
    "32 sequences": _judged(update, 1.6, 2.17, 416),
    # Decode steps of a delta net and of a short convolution.
    "qwen3.5 0.8B, 8 sequences": _judged(published(update, "Qwen3.5-0.8B", tuple(range(1, 9))), 1.42, 1.79, 288),
    "qwen3.5 0.8B, 32 sequences": _judged(published(update, "Qwen3.5-0.8B", tuple(range(1, 33))), 1.17, 1.32, 904),
    "lfm2 1.2B, 8 sequences": _judged(published(update, "LFM2-1.2B", tuple(range(1, 9))), 1.32, 1.49, 88),
    "far": partial(update, 40, 3, (3, 0, 1, 7), is_gated=True, far=True),
    "far, drafts": partial(update, 40, 4, (3, 0, 7, 1), lengths=(2, 1, 3, 1), draft=3, far=True),
    "another pad slot": partial(update, 70, 3, (3, 5, 1), pad_slot_id=5),
    "padding and odd channels": partial(update, 2100, 3, (3, 0, 1, -1, 2), is_gated=True),
    "width 2, fp32": partial(update, 77, 2, (2, 1), dtype=torch.float32, state_dtype=torch.float32),
    "width 8": partial(update, 520, 8, (2, 1, -1), state_dtype=torch.float32),
    "other sources": partial(update, 70, 3, (3, 5, 0, -1, 1), sources=(2, 2, 0, -1, 1)),
    "varlen": partial(update, 300, 4, (3, 1, 0, 2), lengths=(2, 0, 1, 5)),
    "drafts": partial(update, 300, 4, (3, 1, 0, 2), lengths=(2, 3, 1, 0), draft=3),
    "prefix cache": partial(update, 300, 3, (3, 1, 0, 2), is_paged=True),
    "prefix cache, not kept": partial(update, 70, 3, (3, 1, 0, 2), is_paged=True, null_targets=True),
    "drafts in a prefix cache, not kept": partial(
        update, 70, 4, (3, 1, 0, 2), lengths=(2, 3, 1, 1), draft=3, is_paged=True, null_targets=True
    ),
    "drafts in a prefix cache": partial(update, 70, 4, (3, 1, 0, 2), lengths=(2, 3, 1, 0), draft=3, is_paged=True),
    # Queries, keys and values of a delta net: of Qwen3.5 0.8B, and of the other sizes' 32 value heads.
    "qwen3.5 0.8B": published(update, "Qwen3.5-0.8B", (2, 1)),
    "qwen3.5": published(update, "Qwen3.5-9B", (2, 0, 1), lengths=(1, 0, 2)),
    "lfm2": published(update, "LFM2-350M", tuple(range(1, 9))),
    "lfm2, fp16, in place": partial(
        update,
        600,
        3,
        (2, 0, 1),
        dtype=torch.float16,
        state_dtype=torch.float16,
        is_gated=True,
        is_bare=True,
        in_place=True,
    ),
    "several tokens each": partial(update, 300, 4, (3, 0, 2), tokens_each=3),
    "several draft tokens each, in place": partial(update, 40, 5, (3, 0, 2), tokens_each=3, draft=2, in_place=True),
    "width 6, no activation, one channel": partial(update, 1, 6, (2, 1), is_bare=True, state_dtype=torch.float32),
    "width 7, fp16": partial(update, 300, 7, (2, 1, -1), dtype=torch.float16, state_dtype=torch.float16),
}

_PREFILLS = {
    "mixed": prefill,
    # Of 16 tokens; every second sequence has an old state, which the program of its first tile alone may touch.
    "sequences that begin with a tile": partial(prefill, 64, 4, (1, 2, 3), (16, 16, 40)),
    "qwen3.5": published(prefill, "Qwen3.5-0.8B", (1, 2), (9, 18)),
    # As a step that is padded to more sequences; each of them would be a work item of the last tile.
    "empty sequences behind the last token": partial(
        prefill, 64, 4, (1, 2, *[0] * 30), (9, 18, *[0] * 30), max_scalar_loads=2 * MAX_SCALAR_LOADS
    ),
    "other sources": partial(prefill, 70, 4, (2, 0, 1, 3, -1), sources=(6, 0, 6, 3, -1)),
    # Each program zeroes the rows of its own tile.
    "padding of several tiles": partial(prefill, 64, 4, (0, 2), (40, 8)),
    # A tile of 16 tokens reads three rows of the one before, and each core the taps.
    "long": partial(prefill, 512, 4, (1, 2), (400, 240), judge_traffic=True, max_traffic=1.25, max_transfers=1649),
    # Tiles of 13 tokens, one for each core and 2,048 channels: with 32 on fewer cores 1.07, in 2.3 times the time.
    "qwen3.5 0.8B, 160 tokens": published(
        prefill, "Qwen3.5-0.8B", (1, 2), (100, 60), judge_traffic=True, max_traffic=1.27, max_transfers=1308
    ),
    "far": partial(prefill, 40, 3, (4, 0, 3), (9, 3, 12), is_gated=True, far=True),
    "gated, width 3, own lines": partial(prefill, 600, 3, None, (3, 0, 18), is_gated=True, state_dtype=torch.float32),
    "width 8, fp32": partial(prefill, 130, 8, dtype=torch.float32, state_dtype=torch.float32),
    "width 2, no states": partial(prefill, 77, 2, None, has_states=False),
    "lfm2": published(prefill, "LFM2-350M", (1, 2), (9, 18)),
    "gated, no bias, odd channels": partial(prefill, 2100, 3, (1, 2), (9, 18), is_gated=True, is_bare=True),
    "lfm2, fp16, in place": partial(
        prefill,
        130,
        3,
        (2, 0, 1),
        (9, 3, 12),
        dtype=torch.float16,
        state_dtype=torch.float16,
        is_gated=True,
        is_bare=True,
        in_place=True,
    ),
    "long tiles": partial(prefill, 300, 4, (1, 2), (100, 35), num_cores=2),
    "width 5": partial(prefill, 300, 5, (2, 0, 1), (9, 3, 12)),
    "width 6, no activation, one channel": partial(prefill, 1, 6, (2, 0, 1), (9, 3, 12), is_bare=True),
    "width 7, fp16": partial(prefill, 300, 7, (2, 0, 1), (9, 3, 12), dtype=torch.float16, state_dtype=torch.float16),
}
_PREFIX_CACHE = {
    "blocks of 8": partial(prefill, 300, 4, None, (20, 5, 2, 33), block_size_tokens=8),
    "blocks of 1": partial(prefill, 300, 4, None, (5, 2), block_size_tokens=1),
    # Old states are in the line of a boundary's state, of one not asked for, and of the final one.
    "blocks of 1, any source": partial(
        prefill, 70, 8, None, (20, 5, 6), block_size_tokens=1, source_blocks=(3, 1, 5), skipped_blocks=1
    ),
    "blocks of 1, another pad slot": partial(prefill, 70, 4, None, (5, 2), block_size_tokens=1, pad_slot_id=6),
    "not kept": partial(prefill, 70, 4, None, (20, 33), block_size_tokens=8, null_targets=True),
    "far": partial(prefill, 40, 3, None, (9, 3, 12), block_size_tokens=4, far=True),
    "lfm2, in place": partial(
        prefill, 70, 3, None, (20, 5), block_size_tokens=8, is_gated=True, is_bare=True, in_place=True
    ),
    "width 7, fp16": partial(
        prefill, 70, 7, None, (5, 9), block_size_tokens=4, dtype=torch.float16, state_dtype=torch.float16
    ),
}

# The compiler's planner fills what there is with second buffers to load into: of 2,048 channels it plans 98 %, where
# one buffer of each would do with 56 % (it asks for 216 KB of 192 for 4,096 channels).
#
# The compiler for the Ascend 950, which triton-ascend does not serve, dies since rows of 4 KB move at a time.
_950: dict[str, Any] = {
    "crashes": "an assertion of bishengir-compile-a5: cast<BaseMemRefType> of another type",
    "compiles": frozenset(
        ("width 2, fp32", "width 2, no states", "width 6, no activation, one channel"),
    ),
}
# 2 % above what they take by estimate.
_UPDATE_US = {
    "one sequence": 2.04, "8 sequences": 2.04, "32 sequences": 2.04, "qwen3.5 0.8B, 8 sequences": 1.94,
    "qwen3.5 0.8B, 32 sequences": 5.69, "lfm2 1.2B, 8 sequences": 1.31,
}  # fmt: skip
_PREFILL_US = {"long": 9.71, "qwen3.5 0.8B, 160 tokens": 15.3}
CASES = [
    Case("conv_update", triton_ascend.conv_update, _UPDATES, work_loop_depth=2, max_us=_UPDATE_US, **_950),
    # An item is what one sequence has in a tile; a block boundary of the prefix cache is one of its own.
    Case("conv_prefill", triton_ascend.conv_prefill, _PREFILLS, work_loop_depth=3, max_us=_PREFILL_US, **_950),
    Case("conv_prefix", triton_ascend.conv_prefill, _PREFIX_CACHE, work_loop_depth=4, **_950),
]
