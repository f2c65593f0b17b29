"""Where a case puts its tensors: on the device in the model's dtype, or on the host in float32, where the truth is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

# Returns the op's outputs, and the tensors that it changes in place, each whole: what must stay is compared too.
Prepared = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(slots=True)
class Place:
    """Deals out the same values, rounded to `dtype`, on the device and on the host.

    dtype  in which the device computes. Values are rounded to it everywhere, so that what differs is the op's doing
    wide   hold them in float32 afterwards, which is exact
    """

    device: torch.device
    dtype: torch.dtype
    row_dtype: torch.dtype
    wide: bool = False
    _generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0), repr=False)

    def put(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Float values, rounded to the model's dtype (or another) and brought here."""
        rounded = values.to(dtype or self.dtype)
        return (rounded.float() if self.wide else rounded).to(self.device)

    def random(self, *shape: int) -> torch.Tensor:
        """Standard normal values on the host, float32; the same for every place, call by call."""
        return torch.randn(shape, generator=self._generator)

    def fresh(self, *shape: int) -> torch.Tensor:
        """Memory that nobody has written, on the host. NaN: what a request leaves behind may be NaN."""
        return torch.full(shape, torch.nan)

    def ints(self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Integers, brought here."""
        return torch.tensor(values, dtype=dtype).to(self.device)
