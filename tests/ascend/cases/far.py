"""Tensors whose elements 32 bits do not count, as their rows lie far apart; only the rows' own memory is touched."""

from __future__ import annotations

import math

import numpy as np
import torch


def far_apart(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """The values, with neighbours along the first dimension `stride` elements apart."""
    strides = (stride, *torch.empty(tensor.shape[1:], device="meta").stride())
    far = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    return far.copy_(tensor)


def far_down(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The values behind `num_rows` further rows of zeros, which nobody touches.

    numpy asks the system for them, as the tests have torch fill what it allocates: gigabytes, with which several tests
    at a time do not fit.
    """
    shape = (num_rows + tensor.shape[0], *tensor.shape[1:])
    memory = np.zeros(math.prod(shape) * tensor.itemsize, dtype=np.uint8)
    far = torch.from_numpy(memory).view(tensor.dtype).view(shape)
    far[num_rows:] = tensor
    return far
