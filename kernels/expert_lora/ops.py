"""LoRA on the experts of a sparse feed-forward layer: the public, checked op.

A pair is a token and one of its experts. With p a pair, e its expert, t its token, q the adapter of t's segment, n its
rank in slice s (its rows there by the number of experts), and r = its first row + e * n:

    out[p, slice s] += scalings[s, q] * (x[p] @ a[s][r : r + n].T) @ b[s][r : r + n]

Pairs of tokens of the base model are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora.maps import LoraMaps, LoraStack
from kernels.platform import contract, implementation


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Pairs of a token and one of its experts, by expert and then by token.

    experts, tokens  int64 [pairs], on the device; a token is its place in the step
    """

    experts: torch.Tensor
    tokens: torch.Tensor
    num_experts: int


def expert_lora(x: torch.Tensor, out: torch.Tensor, stack: LoraStack, maps: LoraMaps, pairs: Pairs) -> None:
    """Add the deltas of the step's adapters; see the module's docstring.

    x      [pairs, in], contiguous; cast to the rows' dtype
    out    [pairs, total width], contiguous; changed in place, pairs of base tokens excepted
    stack  of a projection of experts: row j of expert e of an adapter of rank n is row e * n + j of its range, and
           `ranks` holds rows, n * num_experts
    """
    num_pairs = len(pairs.experts)
    assert x.is_contiguous() and out.is_contiguous(), "x and out are contiguous"
    assert len(x) == len(out) == num_pairs == len(pairs.tokens), "x and out have a row for each pair"
    assert all(a.shape[1] == x.shape[1] for a in stack.a), "x and A disagree about the input width"
    assert stack.output_width == out.shape[1], "the slices are the output"
    if num_pairs and maps.places.shape[0]:
        implementation("expert_lora", x.device).expert_lora(x, out, stack, maps, pairs)


def warm_up(stacks: Sequence[LoraStack], dtype: torch.dtype, num_experts: int) -> int:
    """Compile all that `expert_lora` of these stacks can need, with x and out of this dtype; the number of variants
    that were compiled."""
    return contract("expert_lora", stacks[0].a[0].device).warm_up_and_count(stacks, dtype, num_experts)
