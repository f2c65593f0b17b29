"""The arrays that a step hands to the device, each declared once, here or beside the ops that read it; and pure
functions that fill them from plain integers and know neither scheduler nor model.

Bounds are fixed at the start, by `InputLimits`: no step is larger than `largest_sizes`, and none asks for more of its
logits than `largest_facts`, since requests that want more are refused.

The layout: sequences in adapter order, those of the base model last, so that the tokens of one adapter, and the rows
of its logits, form one contiguous segment. Adapters stand in the order of their rows, which lets a CPU read
neighbouring ranges as one.

Padding, behind the last token and the last sequence: tokens are token 0 at position 0, written nowhere (slot -1);
sequences are empty, of length 0, with the null block's row and the null line of state; rows of logits are row 0; no
segment holds any of them. Hence padding reads and changes nothing that anybody else reads.

Cost per step: a few numpy calls, and Python per sequence, not per token, but for the tokens of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic

import numpy as np
import torch

from kernels.arrays import Array, HostArray, Layout, declared
from kernels.attention_maps import AttentionArrays
from kernels.lora.maps import LoraArrays, LoraSizes, Segment, fill_lora
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


BASE = -1  # the place of sequences without an adapter
IN_FLIGHT = -1  # a token whose value the request table has


@dataclass(slots=True)  # not frozen: a step makes one for each sequence, which would take thrice as long
class ChunkInput:
    """One sequence's part of a step, in plain integers.

    token_ids    the tokens to run, at positions start, start + 1, ...; IN_FLIGHT for one that is not known yet
    slot         of the sequence, whose row of the block table reaches at least up to its last token here
    line         of its state, which the step writes; read first, unless the sequence begins
    begins       the first chunk since the sequence joined
    num_logits   logits are wanted of so many of its last tokens
    place        of its adapter on the device, BASE for none; first_rows of that place, per group
    length_limit prompt + max tokens of its request
    source_line  of the state that the step reads instead, also where the sequence begins; 0: none
    """

    token_ids: Sequence[int]
    start: int
    slot: int
    num_logits: int
    line: int = 0
    begins: bool = False
    place: int = BASE
    first_rows: tuple[int, ...] = ()
    length_limit: int = 0
    source_line: int = 0

    @property
    def end(self) -> int:
        """Length of the sequence after the step."""
        return self.start + len(self.token_ids)


def adapter_order(chunks: Sequence[ChunkInput]) -> list[int]:
    """Indices of the chunks in the order of a step: by the adapter's rows, the base model last, else as they came."""
    return sorted(range(len(chunks)), key=lambda i: (chunks[i].place == BASE, chunks[i].first_rows, chunks[i].place))


def is_all_decode(chunks: Sequence[ChunkInput]) -> bool:
    """Whether each sequence has one token, which is its next, and wants its logits."""
    return all(len(chunk.token_ids) == 1 and not chunk.begins and chunk.num_logits == 1 for chunk in chunks)


def fill_tokens(
    arrays: StepArrays[HostArray], chunks: Sequence[ChunkInput], block_table: np.ndarray, block_size: int
) -> list[int]:
    """Tokens, where they stand and where their keys go; returns the running sum of the chunks' lengths.

    block_table  int32 [slots, blocks], by slot
    """
    tokens, attention = arrays.tokens, arrays.attention
    slots = np.array([chunk.slot for chunk in chunks], np.int64)
    positions = np.array([chunk.start for chunk in chunks], np.int64)
    lengths = [len(chunk.token_ids) for chunk in chunks]
    starts = [0, *accumulate(lengths)]
    token_slots, kv_lens = slots, positions + lengths
    if starts[-1] != len(chunks):
        token_slots = np.repeat(slots, lengths)
        positions = np.arange(starts[-1]) + np.repeat(positions - starts[:-1], lengths)
    tokens.token_ids.put([token for chunk in chunks for token in chunk.token_ids])
    tokens.positions.put(positions)
    if tokens.token_slots is not None:
        tokens.token_slots.put(token_slots)
    if tokens.rope_limits is not None:
        limits = np.fromiter((chunk.length_limit for chunk in chunks), np.float32, len(chunks))
        tokens.rope_limits.put(np.repeat(limits, lengths))
    if tokens.logits_rows is not None:
        ends = zip(chunks, starts[1:], strict=True)
        tokens.logits_rows.put([row for chunk, end in ends for row in range(end - chunk.num_logits, end)])
    blocks, offsets = np.divmod(positions, block_size)
    attention.slot_mapping.put(block_table[token_slots, blocks].astype(np.int64) * block_size + offsets)
    attention.query_start_loc.put(starts)
    attention.kv_lens_device.put(kv_lens)
    attention.block_table.put(block_table[slots, : attention.block_table.shape[1]])
    if arrays.conv is not None:
        arrays.conv.state_indices.put([chunk.line for chunk in chunks])
        arrays.conv.source_state_indices.put([chunk.source_line or chunk.line for chunk in chunks])
        arrays.conv.has_initial_state.put([bool(chunk.source_line) or not chunk.begins for chunk in chunks])
    return starts


def segments_of(chunks: Sequence[ChunkInput], lengths: Sequence[int]) -> tuple[Segment, ...]:
    """One segment per place that has any of the `lengths`; the chunks stand in adapter order."""
    found: dict[int, ChunkInput] = {}  # by place, the first chunk that has any
    starts: list[int] = []
    ends: list[int] = []
    last, start = BASE, 0
    for chunk, length in zip(chunks, lengths, strict=True):
        end = start + length
        if chunk.place == BASE:
            continue
        if chunk.place == last:
            ends[-1] = end
        elif length:
            assert chunk.place not in found, "not in adapter order"
            last = chunk.place
            found[last] = chunk
            starts.append(start)
            ends.append(end)
        start = end
    first_rows = [chunk.first_rows for chunk in found.values()]
    return tuple(map(Segment, starts, ends, found, first_rows))


def fill_adapters(arrays: AdapterArrays[HostArray], segments: Sequence[Segment], groups: Mapping[str, int]) -> None:
    """Rows and lines of the tokens' adapters; `groups` says where each of the lines' stands in `first_rows`."""
    assert len(segments) <= arrays.lora.places.shape[0], "more adapters in a step than sequences"
    fill_lora(arrays.lora, segments)
    if arrays.side is None:
        return
    lengths = [segment.end - segment.start for segment in segments]
    for group, index in groups.items():
        array = getattr(arrays.side, group)
        if array is not None:
            lines = np.array([segment.first_rows[index] + 1 for segment in segments], np.int64)
            array.put(np.repeat(lines, lengths))


def has_rows(chunks: Sequence[ChunkInput], group: int | None) -> bool:
    """Whether an adapter of the chunks has rows in the group; None: the model has no such group."""
    return group is not None and any(chunk.place != BASE and chunk.first_rows[group] >= 0 for chunk in chunks)


def non_lora_lines(chunks: Sequence[ChunkInput], groups: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The non-LoRA groups used by the chunks' adapters, each with the number that a captured step depends on: for
    heads, how many tables it multiplies with."""
    found = []
    for group, index in groups.items():
        highest = max((chunk.first_rows[index] + 1 for chunk in chunks if chunk.place != BASE), default=0)
        if highest:
            found.append((group, highest if group == "saved_head" else 1))
    return tuple(found)
