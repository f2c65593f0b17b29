"""Fills the maps of a step: pure functions from plain integers into arrays, which know neither scheduler nor model.

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

from kernels.lora.maps import Segment

BASE = -1  # the place of sequences without an adapter
IN_FLIGHT = -1  # a token whose value the request table has


@dataclass(slots=True)  # not frozen: a step makes one for each sequence, which would take thrice as long
class ChunkInput:
    """One sequence's part of a step, in plain integers.

    token_ids    the tokens to run, at positions start, start + 1, ...; IN_FLIGHT for one that is not known yet
    slot         of the sequence, whose row of the block table reaches at least up to its last token here
    num_logits   logits are wanted of so many of its last tokens
    place        of its adapter on the device, BASE for none; first_rows of that place, per group
    length_limit prompt + max tokens of its request
    """

    token_ids: Sequence[int]
    start: int
    slot: int
    num_logits: int
    place: int = BASE
    first_rows: tuple[int, ...] = ()
    length_limit: int = 0

    @property
    def end(self) -> int:
        """Length of the sequence after the step."""
        return self.start + len(self.token_ids)


Arrays = Mapping[str, np.ndarray]


def adapter_order(chunks: Sequence[ChunkInput]) -> list[int]:
    """Indices of the chunks in the order of a step: by the adapter's rows, the base model last, else as they came."""
    return sorted(range(len(chunks)), key=lambda i: (chunks[i].place == BASE, chunks[i].first_rows, chunks[i].place))


def is_all_decode(chunks: Sequence[ChunkInput]) -> bool:
    """Whether each sequence has one token, which is its next, and wants its logits."""
    return all(len(chunk.token_ids) == 1 and chunk.start > 0 and chunk.num_logits == 1 for chunk in chunks)


def fill_tokens(arrays: Arrays, chunks: Sequence[ChunkInput], block_table: np.ndarray, block_size: int) -> list[int]:
    """Tokens, where they stand and where their keys go; returns the running sum of the chunks' lengths.

    arrays       token_ids, token_slots, positions, slot_mapping int64 [tokens]; query_start_loc int32 [sequences + 1];
                 kv_lens int32 [sequences]; block_table int32 [sequences, columns]
    block_table  int32 [slots, blocks], by slot
    """
    slots = np.array([chunk.slot for chunk in chunks], np.int64)
    positions = np.array([chunk.start for chunk in chunks], np.int64)
    lengths = [len(chunk.token_ids) for chunk in chunks]
    starts = [0, *accumulate(lengths)]
    token_slots, kv_lens = slots, positions + lengths
    if starts[-1] != len(chunks):
        token_slots = np.repeat(slots, lengths)
        positions = np.arange(starts[-1]) + np.repeat(positions - starts[:-1], lengths)
    _put(arrays["token_ids"], [token for chunk in chunks for token in chunk.token_ids], 0)
    _put(arrays["token_slots"], token_slots, 0)
    _put(arrays["positions"], positions, 0)
    blocks, offsets = np.divmod(positions, block_size)
    _put(arrays["slot_mapping"], block_table[token_slots, blocks].astype(np.int64) * block_size + offsets, -1)
    _put(arrays["query_start_loc"], starts, starts[-1])
    _put(arrays["kv_lens"], kv_lens, 0)
    _put(arrays["block_table"], block_table[slots, : arrays["block_table"].shape[1]], 0)
    return starts


def fill_conv(arrays: Arrays, chunks: Sequence[ChunkInput]) -> None:
    """state_indices int32 and has_initial_state bool, [sequences]: a sequence's line is its slot's."""
    _put(arrays["state_indices"], [chunk.slot for chunk in chunks], 0)
    _put(arrays["has_initial_state"], [chunk.start > 0 for chunk in chunks], False)


def fill_length_limits(arrays: Arrays, chunks: Sequence[ChunkInput]) -> None:
    """length_limits float32 [tokens]."""
    lengths = [len(chunk.token_ids) for chunk in chunks]
    limits = np.fromiter((chunk.length_limit for chunk in chunks), np.float32, len(chunks))
    _put(arrays["length_limits"], np.repeat(limits, lengths), 0)


def fill_logits_rows(arrays: Arrays, chunks: Sequence[ChunkInput], starts: Sequence[int]) -> None:
    """logits_rows int64 [rows]: the tokens whose logits are wanted."""
    rows = [row for chunk, end in zip(chunks, starts[1:], strict=True) for row in range(end - chunk.num_logits, end)]
    _put(arrays["logits_rows"], rows, 0)


def segments_of(chunks: Sequence[ChunkInput], lengths: Sequence[int]) -> tuple[Segment, ...]:
    """One segment per place that has any of the `lengths`; the chunks stand in adapter order."""
    segments: list[Segment] = []
    start = 0
    for chunk, length in zip(chunks, lengths, strict=True):
        end = start + length
        if chunk.place == BASE:
            continue
        if segments and segments[-1].place == chunk.place:
            segments[-1] = Segment(segments[-1].start, end, chunk.place, chunk.first_rows)
        elif length:
            assert all(segment.place != chunk.place for segment in segments), "not in adapter order"
            segments.append(Segment(start, end, chunk.place, chunk.first_rows))
        start = end
    return tuple(segments)


def fill_lora(arrays: Arrays, prefix: str, segments: Sequence[Segment]) -> None:
    """The device half of `LoraMaps`, in the arrays of that prefix; all of them say the same without segments."""
    num, last = len(segments), segments[-1].end if segments else 0
    starts, places = arrays[f"{prefix}/segment_starts"], arrays[f"{prefix}/places"]
    assert num <= len(places), "more adapters in a step than sequences"
    _put(starts, [segment.start for segment in segments], last)
    _put(places, [segment.place for segment in segments], -1)
    first_rows = arrays[f"{prefix}/first_rows"]
    first_rows[:, num:] = -1
    if num:
        first_rows[:, :num] = np.array([segment.first_rows for segment in segments], np.int32).T
    lengths = [segment.end - segment.start for segment in segments]
    _put(arrays[f"{prefix}/token_segment"], np.repeat(np.arange(num, dtype=np.int32), lengths), -1)
    arrays[f"{prefix}/num_segments"][0] = num


def fill_side(arrays: Arrays, prefix: str, segments: Sequence[Segment], groups: Mapping[str, int]) -> None:
    """Lines of the tokens, int64 [tokens], 0 where they have none; `groups` says where each stands in `first_rows`."""
    lengths = [segment.end - segment.start for segment in segments]
    for group, index in groups.items():
        lines = np.array([segment.first_rows[index] + 1 for segment in segments], np.int64)
        _put(arrays[f"{prefix}/{group}"], np.repeat(lines, lengths), 0)


def side_lines(chunks: Sequence[ChunkInput], groups: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The side groups that adapters of the chunks are in, each with what a captured step must know of it: of heads how
    many tables it multiplies with."""
    found = []
    for group, index in groups.items():
        highest = max((chunk.first_rows[index] + 1 for chunk in chunks if chunk.place != BASE), default=0)
        if highest:
            found.append((group, highest if group == "saved_head" else 1))
    return tuple(found)


def _put(array: np.ndarray, values: np.ndarray | list[int], padding: int | bool) -> None:
    """array = values, and `padding` behind them."""
    num = len(values)
    array[:num] = values
    if num < len(array):
        array[num:] = padding
