"""The sizes that a probe runs an op at: those of the model to be served, since a kernel may fail at one width only.

Torch-free, for descriptions of models.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

# Activations of a gated feed-forward layer, and what its gate is clamped to.
Activation = Literal["silu", "gelu_tanh", "clamped"]
CLAMP, CLAMPED_SLOPE = 7.0, 1.702


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeShapes:
    """Sizes of a model. The defaults are odd multiples of 16, for use without one.

    dtype              of weights, activations and caches: "float32", "bfloat16" or "float16"
    row_dtype          of LoRA rows
    intermediate_size  width of the feed-forward layers
    sliding_window     smallest window of any attention layer, None without windows
    score_cap          of all attention layers; None without
    has_sinks          attention has a sink for each query head
    conv_width         taps of the short convolution; 0: the model has none, so its op is not probed
    conv_size          its channels, where it is followed by silu and not gated; None: hidden_size, and gated
    delta              num_key_heads, num_value_heads, key_dim and value_dim of the gated delta rule; None: not probed
    mamba2             num_groups, num_heads, state_size and head_dim of state-space layers; None: not probed
    experts            number of experts, how many a token has, and their width; None: not probed
    has_expert_biases  experts add a bias behind each of their products
    rotary_dim         elements of a head that are turned; None: all
    has_output_gate    behind each query head of the projection stands a gate
    activation         of the gates of feed-forward layers and experts
    is_quantised       weights of projections are in codes; their product is not probed without
    exact_norms        weights of norms are float32 whatever the dtype
    block_size         tokens per KV block
    num_blocks         KV blocks of a layer's cache; a probe uses a few
    max_sequences      most sequences of one step; a probe has a few
    vocab_size         columns of the logits
    """

    dtype: str = "float32"
    row_dtype: str = "float32"
    hidden_size: int = 272
    intermediate_size: int = 464
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int | None = None
    has_output_gate: bool = False
    activation: Activation = "silu"
    is_quantised: bool = True
    exact_norms: bool = False
    sliding_window: int | None = None
    score_cap: float | None = None
    has_sinks: bool = False
    conv_width: int = 3
    conv_size: int | None = None
    delta: tuple[int, int, int, int] | None = (2, 4, 16, 32)
    mamba2: tuple[int, int, int, int] | None = (2, 4, 16, 32)
    experts: tuple[int, int, int] | None = (6, 2, 48)
    has_expert_biases: bool = False
    block_size: int = 16
    num_blocks: int = 64
    max_sequences: int = 64
    vocab_size: int = 1000
    norm_eps: float = 1e-6

    @property
    def torch_dtype(self) -> torch.dtype:
        return _torch_dtype(self.dtype)

    @property
    def torch_row_dtype(self) -> torch.dtype:
        return _torch_dtype(self.row_dtype)


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(importlib.import_module("torch"), name)
    return dtype
