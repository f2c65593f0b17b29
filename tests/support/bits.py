"""Comparing tensors bit for bit: to `torch.equal` zeros of either sign are the same, and no NaN is."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits."""
    return actual.dtype == expected.dtype and torch.equal(_bits(actual), _bits(expected))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])
