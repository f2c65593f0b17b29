"""The one table of tolerances: absolute and relative, by dtype. Never loosened for one machine or one test."""

from __future__ import annotations

import torch

# Comparison of an op with its float64 reference, relative to the size of the reference's values.
OP: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}

# Logits of a whole model against transformers (+ PEFT) computing in the same dtype.
LOGITS: dict[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.bfloat16: 8e-2,
}
