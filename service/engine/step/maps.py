"""Fills the arrays of a step from plain integers: pure functions, which know neither scheduler nor model.

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
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from kernels.arrays import HostArray
from kernels.lora.maps import Segment, fill_lora
from service.engine.step.arrays import AdapterArrays, StepArrays

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
