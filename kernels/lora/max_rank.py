"""Limits of the LoRA kernels that others must know without importing torch."""

from __future__ import annotations

# Largest rank of the kernels for GPUs and NPUs; a CPU supports any rank.
MAX_KERNEL_RANK = 256
