"""Limits of the LoRA kernels that others must know without importing torch."""

from __future__ import annotations

# What the kernels for GPUs and NPUs take; a CPU takes any rank.
MAX_KERNEL_RANK = 256
