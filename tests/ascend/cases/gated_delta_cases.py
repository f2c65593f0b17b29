"""The kernel of the gated delta rule's decode step in the forms that its launcher can choose, for the gate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from kernels.gated_delta import reference, triton_ascend
from kernels.gated_delta.ops import gated_norm
from kernels.platform import detect, installed
from tests.ascend.cases.far import far_apart, far_down
from tests.ascend.gate.cases import MAX_TRAFFIC, Case, Launch
from tests.support.models.published import delta_heads_of
from tests.tolerances import OP

NUM_VECTOR_CORES = 40
EPS = 1e-6
# num_key_heads, num_value_heads, key_dim, value_dim of Qwen3.5: 0.8B and 2B, 4B and 9B, 27B.
QWEN_2B, QWEN_9B, QWEN_27B = (delta_heads_of(f"Qwen3.5-{size}") for size in ("2B", "9B", "27B"))


def decode(
    sizes: tuple[int, int, int, int] = (1, 2, 128, 128),
    lines: tuple[int, ...] = (2, 0, 3, -1, 1),
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_cores: int = NUM_VECTOR_CORES,
    judge_traffic: bool = False,
    max_traffic: float = MAX_TRAFFIC,
    far: bool = False,
    zeros: bool = False,
    sources: tuple[int, ...] | None = None,
) -> Launch:
    """A token of a sequence in each of these lines; the rows of padding, and lines of nobody, are NaN, but for the null
    line, so that padding that writes there shows. z and a are columns of one wider product; b is alone, so that its
    rows have another stride, and nothing lies behind its last.

    zeros    the last token has queries, keys and values that no norm can scale
    sources  lines that states are read from, behind those that are written; None: these
    """
    num_key_heads, num_heads, key_dim, value_dim = sizes
    num_tokens, value_size = len(lines), num_heads * value_dim
    generator = torch.Generator().manual_seed(num_tokens + num_heads + key_dim)

    def values(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(of)

    is_padding = torch.tensor(lines) < 1
    qkv = values(num_tokens, 2 * num_key_heads * key_dim + value_size, of=dtype)
    wide, b = values(num_tokens, value_size + num_heads + 7, of=dtype), values(num_tokens, num_heads, of=dtype)
    for rows in (qkv, wide, b):
        rows[is_padding] = torch.nan
    if zeros:
        qkv[-1] = 0.0
    sources = lines if sources is None else sources
    states = torch.full((max(*lines, *sources) + 2, num_heads, key_dim, value_dim), torch.nan)
    states[0] = 1.0
    for line in sources:
        if line > 0:
            states[line] = values(num_heads, key_dim, value_dim)
    if far:
        qkv, wide, b = (far_apart(rows, 2**32 // num_tokens + 16) for rows in (qkv, wide, b))
    z, a, _ = wide.split((value_size, num_heads, 7), dim=1)
    a_log, dt_bias, norm_weight = values(num_heads), values(num_heads), 1 + 0.1 * values(value_dim)
    expected_states = states.clone()
    starts, ones = torch.arange(num_tokens + 1, dtype=torch.int32), torch.ones(num_tokens, dtype=torch.bool)
    state_indices, source_indices = (torch.tensor(each, dtype=torch.int32) for each in (lines, sources))
    of_rule = (qkv, b, a, a_log, dt_bias, expected_states, starts, state_indices, ones, None, source_indices)
    expected = gated_norm(reference.prefill(*of_rule), z, norm_weight, EPS, torch.float64)
    expected[is_padding] = torch.nan
    if far:
        # Where 32 bits do not count the elements before any line that is used.
        num_lines = 2**31 // states[0].numel() + 1
        states = far_down(states, num_lines)
        state_indices, source_indices = (
            torch.where(each > 0, each + num_lines, each) for each in (state_indices, source_indices)
        )
    out = torch.full((num_tokens, value_size), torch.nan, dtype=dtype)
    with installed(replace(detect("cpu"), num_cores=num_cores)):
        inputs = (qkv, z, b, a, a_log, dt_bias, norm_weight, states, state_indices, source_indices)
        plan = triton_ascend.plan_decode(*inputs, EPS, out)
    # Of gigabytes, the part that is used: nobody is to write, or compare, the rest.
    used_states = states[-len(expected_states) :]
    moved_states = num_tokens * num_heads * key_dim * value_dim * 4
    minimum = 2 * moved_states + qkv.nbytes + 2 * out.nbytes
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": expected, "states": expected_states},
        frozenset({"lines_ptr", "sources_ptr"}),
        reachable={"states": used_states},
        minimum_bytes=minimum if judge_traffic else None,
        max_traffic=max_traffic,
        minimum_load_bytes=minimum - moved_states - out.nbytes if judge_traffic else None,
        tolerance=OP[dtype],
    )


_DECODES = {
    "qwen3.5 2B, one token": partial(decode, QWEN_2B, (1,), judge_traffic=True),
    "qwen3.5 9B, 4 tokens": partial(decode, QWEN_9B, (4, 1, 3, 2), judge_traffic=True),
    "qwen3.5 27B": partial(decode, QWEN_27B, (0, 1), judge_traffic=True),
    # As many tokens as a decode step has, with heads that are few so that it does not take a minute.
    "64 tokens": partial(decode, (1, 2, 128, 128), tuple(range(1, 65)), judge_traffic=True),
    "padding": decode,
    "other sources": partial(decode, (1, 2, 16, 16), (2, 0, 3, -1, 1), sources=(4, 0, 4, -1, 5)),
    "nothing but padding": partial(decode, (1, 2, 16, 16), (0, -1, 0)),
    "keys unlike values, fp16": partial(decode, (2, 4, 48, 80), dtype=torch.float16),
    "values unlike keys, fp32": partial(decode, (1, 3, 16, 96), (3, 0, 1), dtype=torch.float32),
    "small heads, few cores": partial(decode, (2, 6, 16, 32), (5, 2, -1, 1, 4), num_cores=2),
    "large heads": partial(decode, (1, 1, 256, 256), (2, 1)),
    "zeros": partial(decode, (1, 2, 16, 16), (2, 1), zeros=True),
    "far": partial(decode, (1, 2, 16, 32), (1, 0, 3), far=True, sources=(4, 0, 3)),
}

# 2 % above what they take by estimate.
_US = {"qwen3.5 2B, one token": 7.01, "qwen3.5 9B, 4 tokens": 28.0, "qwen3.5 27B": 14.2, "64 tokens": 28.0}
CASES = [Case("gated_delta_decode", triton_ascend.gated_delta_decode, _DECODES, on_chip_fraction=0.85, max_us=_US)]
