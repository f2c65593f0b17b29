"""The base projection: a weight is packed once into what the device multiplies fastest, then used in every step.

linear   out = x @ weight.T + bias
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from kernels.platform import in_use


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] as its implementation holds it; opaque to everybody else.

    data    in the implementation's own layout and dtype
    bias    [out_features] or None
    dtype   dtype of the weight that was packed: inputs and outputs of `linear` have it
    nbytes  memory held
    """

    data: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    out_features: int
    in_features: int
    implementation: str
    nbytes: int


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """Pack a weight [out_features, in_features] and its bias [out_features] of the same dtype. Copies what it keeps."""
    assert weight.dim() == 2, "a weight is [out_features, in_features]"
    assert weight.dtype in (torch.float32, torch.bfloat16, torch.float16), f"unsupported dtype {weight.dtype}"
    assert bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype), "bias does not fit"
    implementation = in_use(weight.device).implementations["linear"]
    return _module(implementation).pack_weight(weight, bias)


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """out = x @ weight.T + bias, accumulated in float32 and rounded once.

    x  [tokens, in_features] of the weight's dtype, unit stride along the features

    Returns a fresh contiguous [tokens, out_features] of that dtype.
    """
    assert x.dim() == 2 and x.shape[1] == weight.in_features, "x does not fit the weight"
    assert x.dtype == weight.dtype, f"x is {x.dtype}, the weight {weight.dtype}"
    return _module(weight.implementation).linear(x, weight)


@functools.cache
def _module(implementation: str) -> ModuleType:
    return importlib.import_module(f"kernels.linear.{implementation}")
