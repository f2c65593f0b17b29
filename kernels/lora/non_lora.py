"""Non-LoRA parameters of adapters: scales and shifts of projections' outputs, weights of norms, whole tables.

Plain torch operations on the device of their tensors, with no decision on the host, so that a step that has them can be
captured. A *line* of a tensor belongs to one adapter; line 0 is the base's own and changes nothing.

    scale_and_shift   out[t] = scale[line[t]] * out[t] + shift[line[t]]
    own_norm          out[t] = unit[t] * weights[line[t]]
    own_head_norms    out[t, h] = unit(qkv[t, h]) * weights[line[t]]           of query and of key heads
    own_embedding     out[t] = tables[line[t] - 1][token_ids[t]]               where line[t] > 0
    own_head          out[t] = x[t] @ tables[line[t] - 1].T                    where line[t] > 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
import torch
from torch.nn import functional

from kernels.arrays import Array, declared


@dataclass(frozen=True, slots=True, eq=False)
class NonLoraVectors:
    """Scale s and shift t of one (packed) projection: float32 [lines, outputs]; an output is s * (base + LoRA) + t.

    DoRA (Liu et al., 2024) has s = m / |W + c B A| by rows of the weight, and leaves the base's bias b as it is, hence
    t = (1 - s) * b. A bias that replaces b gives t = b' - s * b, and one beside lora_B adds c times itself.
    """

    scale: torch.Tensor
    shift: torch.Tensor


def _lines(name: str) -> Mapping[str, Any]:
    return declared(np.int64, lambda sizes: (sizes.num_tokens,) if name in sizes.side else None)


@dataclass(frozen=True, slots=True)
class NonLoraArrays(Generic[Array]):
    """Lines of the tokens of a step, by `LoraSizes`; None where no token has one, so that nothing is launched."""

    vectors: Array | None = field(default=None, metadata=_lines("vectors"))
    norms: Array | None = field(default=None, metadata=_lines("norms"))
    saved_embedding: Array | None = field(default=None, metadata=_lines("saved_embedding"))
    saved_head: Array | None = field(default=None, metadata=_lines("saved_head"))


@dataclass(frozen=True, slots=True)
class NonLoraLines(NonLoraArrays[torch.Tensor]):
    """The same on the device.

    num_heads  tables of heads to multiply with: the highest line among `saved_head`
    """

    num_heads: int = 0


def scale_and_shift(out: torch.Tensor, vectors: NonLoraVectors, lines: torch.Tensor) -> None:
    """Change out [tokens, outputs] in place; in float32, rounded once."""
    scale, shift = vectors.scale.index_select(0, lines), vectors.shift.index_select(0, lines)
    out.copy_(torch.addcmul(shift, out.float(), scale))


def own_norm(unit: torch.Tensor, weights: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
    """unit [tokens, width], normed without a weight, times weights [lines, width] float32; fresh, in unit's dtype."""
    return (unit.float() * weights.index_select(0, lines)).to(unit.dtype)


def own_head_norms(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    num_heads: tuple[int, int],
    lines: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """qkv [tokens, heads + 2 * kv_heads, head_dim] with its query and key heads x / sqrt(mean(x ** 2) + eps) times
    weights [lines, head_dim] float32 of each; fresh. The values are as they were.

    num_heads  (heads, kv_heads); without kv_heads there are no keys and values, nor weights of keys
    """
    num_query, num_key = num_heads
    parts = qkv.split((num_query, num_key, num_key), dim=1)
    normed = [
        functional.rms_norm(part.float(), part.shape[-1:], None, eps) * own.index_select(0, lines).unsqueeze(1)
        for part, own in zip(parts, weights, strict=False)
    ]
    return torch.cat((*(part.to(qkv.dtype) for part in normed), parts[2]), dim=1)


def own_embedding(
    out: torch.Tensor, token_ids: torch.Tensor, tables: torch.Tensor, lines: torch.Tensor
) -> torch.Tensor:
    """out [tokens, hidden], with the rows of tokens that have a table of their own from `tables` [tables, vocabulary,
    hidden]; fresh."""
    index = (lines - 1).clamp(min=0) * tables.shape[1] + token_ids
    own = functional.embedding(index, tables.view(-1, tables.shape[2])).to(out.dtype)
    return torch.where((lines > 0).unsqueeze(1), own, out)


def own_head(
    out: torch.Tensor, x: torch.Tensor, tables: torch.Tensor, lines: torch.Tensor, num_tables: int
) -> torch.Tensor:
    """out [tokens, vocabulary], with the rows of tokens that have a head of their own from the first num_tables of
    `tables` [tables, vocabulary, hidden]; fresh. One product of all tokens per table."""
    for index in range(num_tables):
        product = functional.linear(x.to(tables.dtype), tables[index]).to(out.dtype)
        out = torch.where((lines == index + 1).unsqueeze(1), product, out)
    return out
