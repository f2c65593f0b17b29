"""A prepared case of the probe: one call of an op, to be made several times, that returns the outputs to compare."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Returns the op's outputs, and the tensors that it changes in place, each whole: what must stay is compared too.
Prepared = Callable[[], tuple[torch.Tensor, ...]]
