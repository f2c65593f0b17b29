"""The arrays that a step hands to the device, by the step's sizes; each is declared once, here or beside the ops that
read it.

Bounds are fixed at the start, by `InputLimits`: no step is larger than `largest_sizes`, and none asks for more of its
logits than `largest_facts`, since requests that want more are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
import torch

from kernels.arrays import Array, Layout, declared
from kernels.attention_maps import AttentionArrays
from kernels.lora.maps import LoraArrays, LoraSizes
from kernels.lora.non_lora import NonLoraArrays
from kernels.sampling.maps import SamplingArrays, SamplingFacts
from service.engine.ipc.messages import MAX_ENDINGS, MAX_LOGIT_BIASES, MAX_LOGPROB_TOKEN_IDS
from service.engine.model.padding import StepSizes
from service.models.step_batch import ConvArrays, TokenArrays, TokenSizes


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Limits that hold for the inputs of all steps of an engine.

    token_budget, max_sequences, max_blocks  the largest step, and the longest sequence in blocks
    max_logits_rows    the most rows of logits that a step yields
    num_groups         groups of LoRA rows and of non-LoRA parameters; see `RowPlan.groups`
    non_lora_groups    index of each group of non-LoRA parameters among them
    """

    token_budget: int
    max_sequences: int
    max_blocks: int
    max_logits_rows: int
    block_size: int
    num_groups: int
    has_conv: bool
    has_length_limits: bool
    device: torch.device
    non_lora_groups: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = min(self.token_budget, self.max_logits_rows)
        assert self.max_sequences <= most, "each sequence may have a token and a row of logits in a step"

    @property
    def largest_sizes(self) -> StepSizes:
        """No array of a step is larger than with these."""
        num_sequences = max(self.max_sequences, min(self.token_budget, self.max_logits_rows))
        side = tuple((group, 1) for group in self.non_lora_groups)
        return StepSizes(
            self.token_budget, num_sequences, self.max_logits_rows, self.max_blocks, False, True, side=side
        )

    @property
    def largest_facts(self) -> SamplingFacts:
        """No array of a step's sampling is larger than with these: requests that want more are refused."""
        num_rows = self.max_logits_rows
        return SamplingFacts(
            num_logits=num_rows,
            vocab=1,
            num_rows=num_rows,
            is_in_order=True,
            is_random=True,
            used=frozenset(),
            num_ranked=1,
            num_penalised=num_rows,
            num_biased=self.max_sequences * MAX_LOGIT_BIASES,
            num_barred=self.max_sequences * MAX_ENDINGS,
            num_masked=num_rows,
            num_given=num_rows,
            num_chosen=num_rows,
            num_top=0,
            num_scored=MAX_LOGPROB_TOKEN_IDS,
        )


@dataclass(frozen=True, slots=True)
class AdapterArrays(Generic[Array]):
    """Where the adapters of a step's tokens stand, or of its rows of logits. side: see `LoraMaps`."""

    lora: LoraArrays[Array]
    side: NonLoraArrays[Array] | None


@dataclass(frozen=True, slots=True)
class StepArrays(Generic[Array]):
    """The inputs of a step for the model. conv: None for models without such layers.

    adapters       None without adapters
    rows_adapters  None where each token yields logits, or without adapters
    """

    tokens: TokenArrays[Array]
    attention: AttentionArrays[Array]
    conv: ConvArrays[Array] | None
    adapters: AdapterArrays[Array] | None
    rows_adapters: AdapterArrays[Array] | None


@dataclass(frozen=True, slots=True)
class SamplerArrays(SamplingArrays[Array], Generic[Array]):
    """The inputs of a step for the sampler, by `SamplingFacts`.

    sampled_slots  slots of the sequences that get a token
    """

    sampled_slots: Array = field(metadata=declared(np.int64, lambda facts: (facts.num_rows,)))


def step_arrays(layout: Layout[Array], sizes: StepSizes, limits: InputLimits) -> StepArrays[Array]:
    """Those of a step of these sizes."""
    adapters = rows_adapters = None
    if sizes.has_lora:
        adapters = _adapter_arrays(layout, sizes.num_tokens, sizes, limits)
        if sizes.num_rows is not None:
            rows_adapters = _adapter_arrays(layout, sizes.num_rows, sizes, limits)
    return StepArrays(
        tokens=layout.add(TokenArrays[Array], TokenSizes(sizes.num_tokens, sizes.num_rows, limits.has_length_limits)),
        attention=layout.add(AttentionArrays[Array], sizes),
        conv=layout.add(ConvArrays[Array], sizes) if limits.has_conv else None,
        adapters=adapters,
        rows_adapters=rows_adapters,
    )


def _adapter_arrays(
    layout: Layout[Array], num_tokens: int, sizes: StepSizes, limits: InputLimits
) -> AdapterArrays[Array]:
    side = frozenset(group for group, _ in sizes.side)
    lora_sizes = LoraSizes(num_tokens, limits.max_sequences, limits.num_groups, side)
    return AdapterArrays(
        layout.add(LoraArrays[Array], lora_sizes), layout.add(NonLoraArrays[Array], lora_sizes) if side else None
    )
