"""The kernels of the gated delta rule's prefill in the forms that their launcher can choose, for the gate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.gated_delta import reference, triton_ascend
from kernels.platform import detect, installed
from tests.ascend.cases.far import far_apart, far_down
from tests.ascend.cases.gated_delta_cases import NUM_VECTOR_CORES, QWEN_2B, QWEN_9B, QWEN_27B
from tests.ascend.gate.cases import MAX_TRAFFIC, Case, Launch
from tests.tolerances import OP

# What comes out of each step, as make_data makes the same tensors each time and the reference takes long.
_EXPECTED: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
MAPS = frozenset({"starts_ptr", "lines_ptr", "sources_ptr", "continued_ptr"})


@dataclass(frozen=True)
class Step:
    """An example step: for each sequence its tokens, its line, and whether it continues what the line holds.

    sizes  num_key_heads, num_value_heads, key_dim, value_dim
    far    32 bits do not count the elements before a row of the gates, nor those before a line
    zeros  the last token has queries, keys and values that no norm can scale
    sources  lines that states are read from; none: those that are written
    """

    lengths: Sequence[int]
    lines: Sequence[int]
    continued: Sequence[bool]
    sizes: tuple[int, int, int, int] = (1, 2, 128, 128)
    dtype: torch.dtype = torch.bfloat16
    far: bool = False
    zeros: bool = False
    sources: Sequence[int] = ()


@dataclass(frozen=True)
class Data:
    """A step with its tensors, and what is to come out. Rows of padding, lines of nobody and lines that nothing
    continues are NaN, and so is `out`, in full; the null line is not, so that padding that writes there shows."""

    qkv: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    states: torch.Tensor
    starts: torch.Tensor
    lines: torch.Tensor
    sources: torch.Tensor
    continued: torch.Tensor
    out: torch.Tensor
    expected_out: torch.Tensor
    expected_states: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """As a prefill takes them."""
        inputs = (self.qkv, self.b, self.a, self.a_log, self.dt_bias, self.states)
        return (*inputs, self.starts, self.lines, self.sources, self.continued)

    @property
    def used_states(self) -> torch.Tensor:
        """Of states of gigabytes, the part that is used: nobody is to write, or compare, the rest."""
        return self.states[-len(self.expected_states) :]


def make_data(step: Step) -> Data:
    """Random tensors; a is columns of a wider product, and nothing lies behind b's last row."""
    num_key_heads, num_heads, key_dim, value_dim = step.sizes
    starts = [0, *itertools.accumulate(step.lengths)]
    num_tokens = starts[-1]
    generator = torch.Generator().manual_seed(num_tokens + num_heads + key_dim)

    def values(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(of)

    qkv = values(num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim, of=step.dtype)
    wide, b = values(num_tokens, num_heads + 7, of=step.dtype), values(num_tokens, num_heads, of=step.dtype)
    of_sources = step.sources or step.lines
    states = torch.full((max(*step.lines, *of_sources) + 2, num_heads, key_dim, value_dim), torch.nan)
    states[0] = 1.0
    for n, (line, goes_on) in enumerate(zip(of_sources, step.continued, strict=True)):
        if line > 0 and (goes_on or not step.lengths[n]):
            states[line] = values(num_heads, key_dim, value_dim)
        elif line < 1:
            for rows in (qkv, wide, b):
                rows[starts[n] : starts[n + 1]] = torch.nan
    if step.zeros:
        qkv[-1] = 0.0
    if step.far:
        wide, b = (far_apart(rows, 2**32 // num_tokens + 16) for rows in (wide, b))
    a, _ = wide.split((num_heads, 7), dim=1)
    a_log, dt_bias = 0.5 * values(num_heads), values(num_heads)
    lines, sources = (torch.tensor(each, dtype=torch.int32) for each in (step.lines, of_sources))
    continued = torch.tensor(step.continued)
    of_starts = torch.tensor(starts, dtype=torch.int32)
    if repr(step) not in _EXPECTED:
        after = states.clone()
        out = reference.prefill(qkv, b, a, a_log, dt_bias, after, of_starts, lines, continued, None, sources)
        _EXPECTED[repr(step)] = out, after
    expected_out, expected_states = (tensor.clone() for tensor in _EXPECTED[repr(step)])
    for n, line in enumerate(step.lines):
        if line < 1:
            expected_out[starts[n] : starts[n + 1]] = torch.nan
    if step.far:
        num_lines = 2**31 // states[0].numel() + 1
        states = far_down(states, num_lines)
        lines, sources = (torch.where(each > 0, each + num_lines, each) for each in (lines, sources))
    out = torch.full((num_tokens, num_heads, value_dim), torch.nan, dtype=step.dtype)
    inputs = (qkv, b, a, a_log, dt_bias, states, of_starts, lines, sources, continued)
    return Data(*inputs, out, expected_out, expected_states)


def walk(
    step: Step,
    *,
    max_tokens: int = 200,
    num_cores: int = NUM_VECTOR_CORES,
    judge_traffic: bool = False,
    max_traffic: float = MAX_TRAFFIC,
) -> Launch:
    """Sequences of up to max_tokens token by token; nothing is written of longer ones."""
    data = make_data(step)
    for n, (length, line) in enumerate(zip(step.lengths, step.lines, strict=True)):
        if length > max_tokens:
            data.expected_out[data.starts[n] : data.starts[n + 1]] = torch.nan
            data.expected_states[line] = data.used_states[line]
    with installed(replace(detect("cpu"), num_cores=num_cores)):
        plan = triton_ascend.plan_walk(*data.arguments, data.out, max_tokens)
    num_read = sum(goes_on and line > 0 for goes_on, line in zip(step.continued, step.lines, strict=True))
    num_written = sum(length > 0 and line > 0 for length, line in zip(step.lengths, step.lines, strict=True))
    moved_states = (num_read + num_written) * data.states[0].nbytes
    return Launch(
        plan.arguments,
        plan.grid,
        {"out_ptr": data.expected_out, "states": data.expected_states},
        MAPS,
        reachable={"states": data.used_states},
        minimum_bytes=moved_states + data.qkv.nbytes + data.out.nbytes if judge_traffic else None,
        max_traffic=max_traffic,
        tolerance=OP[step.dtype],
    )


# Lengths, lines and continuations of a step with everything in it. The empty sequence continues nothing, and keeps what
# its line holds all the same.
MIXED = ((3, 0, 5, 1, 4, 1), (2, 1, 3, -1, 5, 0), (True, False, False, True, False, False))
_WALKS = {
    # Each tile of 32 values reads the queries and keys of its head again: 1.2 times the minimum of bytes, and 2.28 for
    # the prompt below. Its values, its outputs and a token's two gates are rows of 64 bytes and of a few, for each of
    # which a piece of 128 is moved (two where a gate's row lies across): 1.35 and 3.39. With tiles of 64 values it is
    # less, but these take 86 % of the unified buffer with 32 heads, without a second copy to load into; and a prompt of
    # two heads would be the work of four cores in place of eight.
    "qwen3.5 2B": partial(walk, Step((16,), (1,), (True,), QWEN_2B), judge_traffic=True, max_traffic=1.35),
    "qwen3.5 9B": partial(walk, Step((1, 2), (2, 1), (True, False), QWEN_9B), judge_traffic=True),
    "qwen3.5 27B": partial(walk, Step((1, 1), (0, 1), (False, True), QWEN_27B), judge_traffic=True),
    "a prompt": partial(walk, Step((100,), (1,), (False,)), judge_traffic=True, max_traffic=3.39),
    "everything": partial(walk, Step(*MIXED)),
    "longer sequences are left": partial(walk, Step((3, 4), (2, 1), (True, True)), max_tokens=3),
    "other sources": partial(
        walk, Step(*MIXED[:2], (True, True, False, True, True, True), (1, 2, 16, 16), sources=(6, 7, 3, -1, 6, 0))
    ),
    "nothing but padding": partial(walk, Step((2, 1), (0, -1), (False, True), (1, 2, 16, 16))),
    "keys unlike values, fp16": partial(walk, Step(*MIXED, (2, 4, 48, 80), torch.float16)),
    "values unlike keys, fp32": partial(walk, Step(*MIXED, (1, 3, 16, 96), torch.float32)),
    "small heads, few cores": partial(walk, Step(*MIXED, (2, 6, 16, 32)), num_cores=2),
    "large heads": partial(walk, Step((2, 3), (2, 1), (False, True), (1, 1, 256, 256))),
    "zeros": partial(walk, Step((2,), (1,), (True,), (1, 2, 16, 16), zeros=True)),
    "far": partial(walk, Step((2, 1, 2), (1, 0, 3), (True, False, False), (1, 2, 16, 32), far=True, sources=(4, 0, 3))),
}

# 2 % above what they take by estimate.
_US = {"qwen3.5 2B": 65.4, "qwen3.5 9B": 23.6, "qwen3.5 27B": 11.1, "a prompt": 207}
CASES = [Case("gated_delta_walk", triton_ascend.gated_delta_walk, _WALKS, on_chip_fraction=0.85, max_us=_US)]
