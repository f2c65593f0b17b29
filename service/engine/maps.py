"""Builds the maps of a step: pure functions from plain integers to arrays. Nothing here knows the scheduler or the
model.

The layout: sequences in adapter order, those of the base model last, so that the tokens of one adapter, and the rows
of its logits, form one contiguous segment. Adapters stand in the order of their rows, which lets a CPU read
neighbouring ranges as one. All arrays of a step are built in numpy; `staging.py` takes them to the device, and those
of the sampler with them, in one copy.

Cost per step: O(tokens) Python for slots and positions, some ten microseconds for 256 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.lora.maps import LoraMaps, Segment
from service.engine.staging import Staging
from service.models.batch import AttentionMaps, ConvMaps, StepBatch

BASE = -1  # the place of sequences without an adapter


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of a step, in plain integers.

    token_ids    the tokens to run, at positions start, start + 1, ...
    blocks       KV blocks of the sequence in order, at least up to its last token
    num_logits   logits are wanted of so many of its last tokens
    place        of its adapter on the device, BASE for none; first_rows of that place, per group
    state_line   0 for models without convolutions
    length_limit prompt + max tokens of its request
    """

    token_ids: Sequence[int]
    start: int
    blocks: tuple[int, ...]
    num_logits: int
    place: int = BASE
    first_rows: tuple[int, ...] = ()
    state_line: int = 0
    length_limit: int = 0


@dataclass(frozen=True, slots=True)
class MapLimits:
    """What the maps of all steps of an engine have in common.

    max_segments pads the LoRA maps to one size, so that a captured step fits all
    """

    block_size: int
    num_groups: int
    max_segments: int
    has_conv: bool
    has_length_limits: bool
    device: torch.device


def adapter_order(parts: Sequence[Part]) -> list[int]:
    """Indices of the parts in the order of a step: by the adapter's rows, the base model last, else as they came."""
    return sorted(range(len(parts)), key=lambda i: (parts[i].place == BASE, parts[i].first_rows, parts[i].place))


def build_step(
    parts: Sequence[Part],
    limits: MapLimits,
    staging: Staging | None = None,
    riders: Mapping[str, np.ndarray] | None = None,
) -> StepBatch:
    """The batch of `parts`, which stand in adapter order already.

    staging  takes the arrays to the device of `limits`; None: one of their own
    riders   arrays that are no maps and travel with them, becoming `StepBatch.riders`
    """
    lengths = [len(part.token_ids) for part in parts]
    starts = _running_sum(lengths)
    segments = _segments(parts, lengths)
    row_segments = _segments(parts, [part.num_logits for part in parts])
    num_rows = sum(part.num_logits for part in parts)
    arrays: dict[str, np.ndarray] = {
        "token_ids": np.array([token for part in parts for token in part.token_ids], np.int64),
        "positions": _positions(parts),
        "slot_mapping": _slot_mapping(parts, limits.block_size),
        "logits_rows": _logits_rows(parts, starts),
        "query_start_loc": np.array(starts, np.int32),
        "kv_lens": np.array([part.start + len(part.token_ids) for part in parts], np.int32),
        "block_table": _block_table(parts),
    }
    if limits.has_conv:
        arrays["state_indices"] = np.array([part.state_line for part in parts], np.int32)
        arrays["has_initial_state"] = np.array([part.start > 0 for part in parts], np.bool_)
    if limits.has_length_limits:
        arrays["length_limits"] = np.repeat(np.array([part.length_limit for part in parts], np.float32), lengths)
    arrays |= _lora_arrays("tokens", segments, starts[-1], limits)
    arrays |= _lora_arrays("rows", row_segments, num_rows, limits)
    riders = riders or {}
    on_device = (staging or Staging(limits.device)).upload({**arrays, **riders})
    return StepBatch(
        token_ids=on_device["token_ids"],
        positions=on_device["positions"],
        rope_limits=on_device.get("length_limits"),
        lora=_lora_maps("tokens", segments, starts[-1], on_device),
        attention=_attention_maps(parts, starts, on_device),
        conv=_conv_maps(parts, starts, on_device) if limits.has_conv else None,
        logits_rows=on_device["logits_rows"],
        logits_lora=_lora_maps("rows", row_segments, num_rows, on_device),
        riders={name: on_device[name] for name in riders},
    )


def _segments(parts: Sequence[Part], lengths: Sequence[int]) -> tuple[Segment, ...]:
    """One segment per place that has any of the `lengths`; the parts stand in adapter order."""
    segments: list[Segment] = []
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        end = start + length
        if part.place == BASE:
            continue
        if segments and segments[-1].place == part.place:
            segments[-1] = Segment(segments[-1].start, end, part.place, part.first_rows)
        elif length:
            assert all(segment.place != part.place for segment in segments), "not in adapter order"
            segments.append(Segment(start, end, part.place, part.first_rows))
        start = end
    return tuple(segments)


def _lora_arrays(
    prefix: str, segments: tuple[Segment, ...], num_tokens: int, limits: MapLimits
) -> dict[str, np.ndarray]:
    """The device half of LoraMaps; none without segments."""
    if not segments:
        return {}
    num, last = len(segments), segments[-1].end
    assert num <= limits.max_segments, "more adapters in a step than sequences"
    starts = np.full(limits.max_segments + 1, last, np.int32)
    starts[:num] = [segment.start for segment in segments]
    places = np.full(limits.max_segments, -1, np.int32)
    places[:num] = [segment.place for segment in segments]
    first_rows = np.full((limits.num_groups, limits.max_segments), -1, np.int32)
    first_rows[:, :num] = np.array([segment.first_rows for segment in segments], np.int32).T
    token_segment = np.full(num_tokens, -1, np.int32)
    for index, segment in enumerate(segments):
        token_segment[segment.start : segment.end] = index
    return {
        f"{prefix}/segment_starts": starts,
        f"{prefix}/places": places,
        f"{prefix}/first_rows": first_rows,
        f"{prefix}/token_segment": token_segment,
        f"{prefix}/num_segments": np.array([num], np.int32),
    }


def _lora_maps(
    prefix: str, segments: tuple[Segment, ...], num_tokens: int, tensors: dict[str, torch.Tensor]
) -> LoraMaps | None:
    if not segments:
        return None
    return LoraMaps(
        segments=segments,
        num_tokens=num_tokens,
        segment_starts=tensors[f"{prefix}/segment_starts"],
        places=tensors[f"{prefix}/places"],
        first_rows=tensors[f"{prefix}/first_rows"],
        token_segment=tensors[f"{prefix}/token_segment"],
        num_segments=tensors[f"{prefix}/num_segments"],
    )


def _attention_maps(parts: Sequence[Part], starts: list[int], tensors: dict[str, torch.Tensor]) -> AttentionMaps:
    return AttentionMaps(
        query_starts=tuple(starts),
        kv_lens=tuple(part.start + len(part.token_ids) for part in parts),
        block_tables=tuple(part.blocks for part in parts),
        query_start_loc=tensors["query_start_loc"],
        kv_lens_device=tensors["kv_lens"],
        block_table=tensors["block_table"],
        slot_mapping=tensors["slot_mapping"],
    )


def _conv_maps(parts: Sequence[Part], starts: list[int], tensors: dict[str, torch.Tensor]) -> ConvMaps:
    return ConvMaps(
        query_starts=tuple(starts),
        query_start_loc=tensors["query_start_loc"],
        state_indices=tensors["state_indices"],
        has_initial_state=tensors["has_initial_state"],
        all_decode=all(len(part.token_ids) == 1 and part.start > 0 for part in parts),
    )


def _positions(parts: Sequence[Part]) -> np.ndarray:
    return np.array([p for part in parts for p in range(part.start, part.start + len(part.token_ids))], np.int64)


def _slot_mapping(parts: Sequence[Part], block_size: int) -> np.ndarray:
    slots = [
        part.blocks[position // block_size] * block_size + position % block_size
        for part in parts
        for position in range(part.start, part.start + len(part.token_ids))
    ]
    return np.array(slots, np.int64)


def _block_table(parts: Sequence[Part]) -> np.ndarray:
    """One row per sequence, padded with the null block."""
    table = np.zeros((len(parts), max(len(part.blocks) for part in parts)), np.int32)
    for row, part in zip(table, parts, strict=True):
        row[: len(part.blocks)] = part.blocks
    return table


def _logits_rows(parts: Sequence[Part], starts: list[int]) -> np.ndarray:
    rows = [row for part, end in zip(parts, starts[1:], strict=True) for row in range(end - part.num_logits, end)]
    return np.array(rows, np.int64)


def _running_sum(lengths: Sequence[int]) -> list[int]:
    """[3, 1] -> [0, 3, 4]."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums
