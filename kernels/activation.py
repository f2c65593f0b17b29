"""Activations of a gated feed-forward layer. Torch-free, for descriptions of models."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped"]
# Of the clamped gate.
CLAMP, CLAMPED_SLOPE = 7.0, 1.702
