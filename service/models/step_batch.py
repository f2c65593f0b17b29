"""The flattened step: what the model's forward reads. Built on the host by `service/engine/step/inputs.py`, passed as
an argument.

Sequences stand in adapter order, the base model's last; the tokens of a sequence are contiguous, so segments are too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

import numpy as np
import torch

from kernels.arrays import Array, declared
from kernels.attention_maps import AttentionMaps, QueryStarts
from kernels.lora.maps import LoraMaps

__all__ = ["AttentionMaps", "ConvArrays", "ConvMaps", "StepBatch", "TokenArrays", "TokenSizes"]


@dataclass(frozen=True, slots=True)
class ConvArrays(Generic[Array]):
    """State lines of the sequences, by num_sequences; same order as `AttentionArrays`. Line 0 is the null line.

    state_indices         lines that the new states are written to
    source_state_indices  lines that the old states are read from: the same ones, but in the first step of a sequence
                          that continues a kept state
    has_initial_state     False: the sequence starts in this step
    """

    state_indices: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_sequences,)))
    source_state_indices: Array = field(metadata=declared(np.int32, lambda sizes: (sizes.num_sequences,)))
    has_initial_state: Array = field(metadata=declared(np.bool_, lambda sizes: (sizes.num_sequences,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvMaps(ConvArrays[torch.Tensor]):
    """query_start_loc as in `AttentionArrays`; query_starts its host view; all_decode: every sequence has exactly one
    token and an initial state, so the update op serves the step.
    """

    query_starts: QueryStarts
    query_start_loc: torch.Tensor
    all_decode: bool


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """num_rows: see `StepSizes`; has_rope_limits: the model scales RoPE by the length of a request."""

    num_tokens: int
    num_rows: int | None
    has_rope_limits: bool


def _limits_shape(sizes: TokenSizes) -> tuple[int, ...] | None:
    return (sizes.num_tokens,) if sizes.has_rope_limits else None


def _rows_shape(sizes: TokenSizes) -> tuple[int, ...] | None:
    return None if sizes.num_rows is None else (sizes.num_rows,)


@dataclass(frozen=True, slots=True)
class TokenArrays(Generic[Array]):
    """Tokens of a step, by `TokenSizes`.

    token_ids     -1 for one that the request table knows, at token_slots: replaced before the model reads it
    positions     of the tokens in their sequences
    token_slots   of their sequences
    rope_limits   length limit (prompt + max tokens) of each token's request; None for models that do not use it
    logits_rows   the tokens whose logits are wanted, ascending (hence also in adapter order); None: all of them
    """

    token_ids: Array = field(metadata=declared(np.int64, lambda sizes: (sizes.num_tokens,)))
    positions: Array = field(metadata=declared(np.int64, lambda sizes: (sizes.num_tokens,)))
    token_slots: Array | None = field(default=None, metadata=declared(np.int64, lambda sizes: (sizes.num_tokens,)))
    rope_limits: Array | None = field(
        default=None,
        metadata=declared(np.float32, _limits_shape),
    )
    logits_rows: Array | None = field(default=None, metadata=declared(np.int64, _rows_shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch(TokenArrays[torch.Tensor]):
    """One forward pass.

    lora         None when no token of the step uses an adapter: then no LoRA op is called at all
    conv         None for models without layers that keep states
    logits_lora  maps of `logits_rows` for the head; None like `lora`
    window_rows  rows of A behind the base weights that the base products take along (`kernels.lora_window`); all rows
                 of the step's adapters lie among them. 0: shrink and expand are kernels of their own
    """

    lora: LoraMaps | None
    attention: AttentionMaps
    conv: ConvMaps | None
    logits_lora: LoraMaps | None
    window_rows: int = 0
