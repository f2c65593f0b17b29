"""The flattened step: what the model's forward reads. Built on the host by `service/engine/maps.py`, passed as an
argument.

Sequences stand in adapter order, the base model's last; the tokens of a sequence are contiguous, so segments are too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora.maps import LoraMaps
from kernels.paged_attention.maps import AttentionMaps

__all__ = ["AttentionMaps", "ConvMaps", "StepBatch"]


@dataclass(frozen=True, slots=True)
class ConvMaps:
    """State lines of the sequences; same order as `AttentionMaps`. Line 0 is the null line.

    state_indices int32 [num_sequences]; has_initial_state bool [num_sequences] (False: the sequence starts in this
    step); query_start_loc as in AttentionMaps; query_starts its host view; all_decode: every sequence has exactly one
    token and an initial state, so the update op serves the step.
    """

    query_starts: tuple[int, ...]
    query_start_loc: torch.Tensor
    state_indices: torch.Tensor
    has_initial_state: torch.Tensor
    all_decode: bool


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass.

    token_ids        int64 [num_tokens]; -1 for one that the request table knows, at token_slots int64 [num_tokens]:
                     replaced before the model reads it
    positions        int64 [num_tokens], position of the token in its sequence
    rope_limits      per token float32 [num_tokens] length limit (prompt + max tokens) of its request, for dynamic RoPE
                     scaling; None for models that do not use it
    lora             None when no token of the step uses an adapter: then no LoRA op is called at all
    attention, conv  conv is None for models without convolution layers
    logits_rows      int64 [num_rows]: the tokens whose logits are wanted, ascending (hence also in adapter order);
                     None: all of them
    logits_lora      maps of those rows for the head; None like `lora`
    window_rows      rows of A behind the base weights that the base products take along (`kernels.lora_window`); all
                     rows of the step's adapters lie among them. 0: shrink and expand are kernels of their own
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rope_limits: torch.Tensor | None
    lora: LoraMaps | None
    attention: AttentionMaps
    conv: ConvMaps | None
    logits_rows: torch.Tensor | None
    logits_lora: LoraMaps | None
    token_slots: torch.Tensor | None = None
    window_rows: int = 0
