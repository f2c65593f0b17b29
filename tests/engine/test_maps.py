"""The maps of a step against examples worked by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels.lora.maps import Segment
from service.engine.maps import BASE, MapLimits, Part, adapter_order, build_step

LIMITS = MapLimits(
    block_size=4, num_groups=2, max_segments=3, has_conv=True, has_length_limits=True, device=torch.device("cpu")
)
# Block size 4. Two sequences of the adapter at place 5, one of the adapter at place 2, one of the base.
CHUNK = Part(
    [10, 11, 12], start=3, blocks=(7, 3), num_logits=1, place=5, first_rows=(16, -1), state_line=1, length_limit=9
)
DECODE = Part(
    [20], start=8, blocks=(1, 2, 9), num_logits=1, place=5, first_rows=(16, -1), state_line=4, length_limit=30
)
MIDDLE = Part([30, 31], start=0, blocks=(4,), num_logits=0, place=2, first_rows=(32, 0), state_line=2, length_limit=5)
PLAIN = Part([40, 41], start=4, blocks=(5, 6), num_logits=2, state_line=3, length_limit=7)
PARTS = [CHUNK, DECODE, MIDDLE, PLAIN]


def test_adapters_stand_in_the_order_of_their_rows_and_the_base_last() -> None:
    assert adapter_order([PLAIN, MIDDLE, DECODE, CHUNK]) == [2, 3, 1, 0]
    assert adapter_order([]) == []


def test_tokens_positions_and_slots() -> None:
    batch = build_step(PARTS, LIMITS)
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31, 40, 41]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1, 4, 5]
    # Position 3 is the last of block 7; 4 and 5 begin block 3. Position 8 begins block 9.
    assert batch.attention.slot_mapping.tolist() == [31, 12, 13, 36, 16, 17, 24, 25]
    assert batch.rope_limits is not None
    assert batch.rope_limits.tolist() == [9, 9, 9, 30, 5, 5, 7, 7]
    assert batch.token_ids.dtype == batch.positions.dtype == batch.attention.slot_mapping.dtype == torch.int64


def test_attention_maps() -> None:
    attention = build_step(PARTS, LIMITS).attention
    assert attention.query_starts == (0, 3, 4, 6, 8)
    assert attention.query_start_loc.tolist() == [0, 3, 4, 6, 8]
    assert attention.kv_lens == (6, 9, 2, 6)
    assert attention.kv_lens_device.tolist() == [6, 9, 2, 6]
    assert attention.block_tables == ((7, 3), (1, 2, 9), (4,), (5, 6))
    assert attention.block_table.tolist() == [[7, 3, 0], [1, 2, 9], [4, 0, 0], [5, 6, 0]]
    assert attention.block_table.dtype == attention.query_start_loc.dtype == torch.int32


def test_conv_maps() -> None:
    conv = build_step(PARTS, LIMITS).conv
    assert conv is not None
    assert conv.state_indices.tolist() == [1, 4, 2, 3]
    assert conv.has_initial_state.tolist() == [True, True, False, True]
    assert not conv.all_decode


@pytest.mark.parametrize(("start", "expected"), [(7, True), (0, False)], ids=["decode", "one-token-prompt"])
def test_a_step_of_single_tokens_is_all_decode_unless_one_begins(start: int, expected: bool) -> None:
    conv = build_step([DECODE, dataclasses.replace(PLAIN, token_ids=[1], start=start, num_logits=1)], LIMITS).conv
    assert conv is not None
    assert conv.all_decode == expected


def test_lora_maps_of_the_tokens() -> None:
    lora = build_step(PARTS, LIMITS).lora
    assert lora is not None
    assert lora.segments == (Segment(0, 4, 5, (16, -1)), Segment(4, 6, 2, (32, 0)))
    assert lora.num_tokens == 8
    assert lora.segment_starts.tolist() == [0, 4, 6, 6]
    assert lora.places.tolist() == [5, 2, -1]
    assert lora.first_rows.tolist() == [[16, 32, -1], [-1, 0, -1]]
    assert lora.token_segment.tolist() == [0, 0, 0, 0, 1, 1, -1, -1]
    assert lora.num_segments.tolist() == [2]


def test_logits_rows_and_their_lora_maps() -> None:
    batch = build_step(PARTS, LIMITS)
    assert batch.logits_rows.tolist() == [2, 3, 6, 7]
    # The adapter at place 2 wants no logits in this step, so it has no segment among the rows.
    assert batch.logits_lora is not None
    assert batch.logits_lora.segments == (Segment(0, 2, 5, (16, -1)),)
    assert batch.logits_lora.num_tokens == 4
    assert batch.logits_lora.token_segment.tolist() == [0, 0, -1, -1]


def test_an_adapter_between_two_others_without_logits_does_not_join_them() -> None:
    last = dataclasses.replace(DECODE, place=7, first_rows=(48, 16))
    rows = build_step([CHUNK, MIDDLE, last], LIMITS).logits_lora
    assert rows is not None
    assert rows.segments == (Segment(0, 1, 5, (16, -1)), Segment(1, 2, 7, (48, 16)))


def test_without_adapters_there_are_no_lora_maps() -> None:
    batch = build_step([PLAIN], LIMITS)
    assert batch.lora is None
    assert batch.logits_lora is None


def test_a_step_may_want_no_logits_at_all() -> None:
    batch = build_step([MIDDLE], LIMITS)
    assert batch.logits_rows.tolist() == []
    assert batch.logits_rows.dtype == torch.int64
    assert batch.logits_lora is None
    assert batch.lora is not None


def test_models_without_convolutions_or_dynamic_rope_get_no_such_maps() -> None:
    limits = dataclasses.replace(LIMITS, has_conv=False, has_length_limits=False)
    batch = build_step(PARTS, limits)
    assert batch.conv is None
    assert batch.rope_limits is None


def test_parts_out_of_adapter_order_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="adapter order"):
        build_step([CHUNK, MIDDLE, DECODE], LIMITS)


def test_riders_travel_with_the_maps() -> None:
    batch = build_step(PARTS, LIMITS, riders={"numbers": np.array([0.5, 0.25], np.float32)})
    assert {name: tensor.tolist() for name, tensor in batch.riders.items()} == {"numbers": [0.5, 0.25]}
    assert build_step(PARTS, LIMITS).riders == {}


def test_base_is_the_place_of_no_adapter() -> None:
    assert PLAIN.place == BASE == -1
