"""The base projection: a weight is packed once into what the device multiplies fastest, then used in every step.

linear   out = x @ weight.T + bias

Behind a weight there may be room for the rows of A of all adapters, in the same buffer: the product over a longer
prefix of it yields the adapters' h too (`kernels.lora_window.ops`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from kernels.linear.quantised import Quantised, dequantise
from kernels.platform import in_use


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] as its implementation holds it; opaque to everybody else.

    data    in the implementation's own layout and dtype
    bias    [out_features] or None
    dtype   dtype of the weight that was packed: inputs and outputs of `linear` have it
    nbytes  memory held, without rows behind the weight
    behind  the weight with such rows, if it has any
    tiled   of a quantised weight that is held so: what its implementation has beside data; None for others
    rounds_inputs
            products round their inputs to 8 bits for each token
    rounds_prompts
            products of many tokens do: see `round_prompts`
    """

    data: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    out_features: int
    in_features: int
    implementation: str
    nbytes: int
    behind: RowsBehind | None = None
    tiled: Any = None
    rounds_inputs: bool = False
    rounds_prompts: bool = False

    @property
    def holds_codes(self) -> bool:
        """Whether it is a quantised weight that is held as such."""
        return self.tiled is not None


@dataclass(frozen=True, slots=True, eq=False)
class RowsBehind:
    """The buffer that a weight shares with rows of A.

    data        [out_features + num_rows * num_slices, in_features]: the weight, then row j of slice s as row
                out_features + j * num_slices + s. A quantised weight has it elsewhere: then the rows alone
    bias        [out_features + num_rows * num_slices], zero behind the weight's own; or None
    num_rows    rows of each slice
    """

    data: torch.Tensor
    bias: torch.Tensor | None
    num_rows: int
    num_slices: int


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """Pack a weight [out_features, in_features] and its bias [out_features] of the same dtype. Copies what it keeps."""
    assert weight.dim() == 2, "a weight is [out_features, in_features]"
    assert weight.dtype in (torch.float32, torch.bfloat16, torch.float16), f"unsupported dtype {weight.dtype}"
    assert bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype), "bias does not fit"
    implementation = in_use(weight.device).implementations["linear"]
    return _module(implementation).pack_weight(weight, bias)


def pack_quantised(
    weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype, *, saves_memory: bool = False
) -> PackedWeight:
    """Pack a quantised weight and its bias [out_features] of `dtype`, the dtype of inputs and outputs; where the device
    has no kernel for its codes, dequantised. Keeps the weight's tensors, or copies.

    saves_memory  a kernel counts too that is slower than the product of the dequantised weight
    """
    assert bias is None or (bias.shape == weight.codes.shape[:1] and bias.dtype == dtype), "bias does not fit"
    module = _module(in_use(weight.codes.device).implementations["linear"])
    pack = getattr(module, "pack_quantised", None)
    if pack is None and saves_memory:
        pack = getattr(module, "pack_small", None)
    packed: PackedWeight | None = None if pack is None else pack(weight, bias, dtype)
    return packed or pack_weight(dequantise(weight, dtype), bias)


def round_prompts(weight: PackedWeight) -> PackedWeight:
    """The weight, whose products of more tokens than a decode step's kernel takes round their inputs to float8, with
    scales for each token, and multiply codes by codes; as it was where its implementation has no such product. Rows of
    A behind it read inputs as they are."""
    module = _module(weight.implementation)
    return replace(weight, rounds_prompts=hasattr(module, "can_round") and module.can_round(weight))


def append_rows(weight: PackedWeight, num_rows: int, num_slices: int) -> tuple[PackedWeight, torch.Tensor]:
    """The weight anew, in one buffer with num_rows rows of A for each slice behind it, and that part of the buffer.

    The caller drops the old weight; until then both are held. Only for weights that are held as they are.

    Returns (weight, [num_rows * num_slices, in_features], row j of slice s at j * num_slices + s, not cleared).
    """
    assert weight.behind is None, "the weight has rows behind it already"
    return _module(weight.implementation).append_rows(weight, num_rows, num_slices)


def linear(
    x: torch.Tensor, weight: PackedWeight, *, window_rows: int = 0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out = x @ weight.T + bias, accumulated in float32 and rounded once.

    x            [tokens, in_features] of the weight's dtype, unit stride along the features
    window_rows  rows of A of each slice to multiply with as well: column out_features + j * num_slices + s of the
                 result is x @ (row j of slice s), without bias
    out          where the result is written, of its shape and dtype, contiguous; made when None

    Returns a contiguous [tokens, out_features + window_rows * num_slices] of that dtype.
    """
    assert x.dim() == 2 and x.shape[1] == weight.in_features, "x does not fit the weight"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    if not window_rows:
        return _module(weight.implementation).linear(x, weight, out)
    behind = weight.behind
    assert behind is not None and window_rows <= behind.num_rows, "the window is longer than the rows behind the weight"
    num_columns = weight.out_features + window_rows * behind.num_slices
    return _module(weight.implementation).linear_window(x, weight, num_columns, out)


def warm_up(weights: Sequence[PackedWeight], max_tokens: int, max_window_rows: int) -> int:
    """Compile all that products with these weights can need in steps of up to max_tokens tokens and windows of up to
    max_window_rows rows, and reserve their memory. Returns the number of variants that were compiled."""
    of_module: dict[str, list[PackedWeight]] = {}
    for weight in weights:
        of_module.setdefault(weight.implementation, []).append(weight)
    modules = ((_module(implementation), its) for implementation, its in of_module.items())
    return sum(module.CONTRACT.warm_up_and_count(its, max_tokens, max_window_rows) for module, its in modules)


@functools.cache
def _module(implementation: str) -> ModuleType:
    return importlib.import_module(f"kernels.linear.{implementation}")
