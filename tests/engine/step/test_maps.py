"""The maps of a step against examples worked by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels.lora.maps import Segment
from service.engine.model.padding import StepSizes
from service.engine.step.inputs import StepInputs
from service.engine.step.maps import BASE, IN_FLIGHT, ChunkInput, InputLimits, adapter_order, is_all_decode
from service.models.step_batch import StepBatch

LIMITS = InputLimits(
    token_budget=16,
    max_sequences=3,
    max_blocks=4,
    max_logits_rows=16,
    block_size=4,
    num_groups=2,
    has_conv=True,
    has_length_limits=True,
    device=torch.device("cpu"),
)
# Block size 4. Two sequences of the adapter at place 5, one of the adapter at place 2, one of the base.
CHUNK = ChunkInput([10, 11, 12], start=3, slot=1, num_logits=1, line=7, place=5, first_rows=(16, -1), length_limit=9)
DECODE = ChunkInput([20], start=8, slot=4, num_logits=1, line=9, place=5, first_rows=(16, -1), length_limit=30)
MIDDLE = ChunkInput(
    [30, 31], start=0, slot=2, num_logits=0, line=2, begins=True, place=2, first_rows=(32, 0), length_limit=5
)
PLAIN = ChunkInput([40, 41], start=4, slot=3, num_logits=2, line=3, length_limit=7)
CHUNKS = [CHUNK, DECODE, MIDDLE, PLAIN]
# Sequences that read kept states: one goes on, one begins.
KEPT = [dataclasses.replace(CHUNK, source_line=5), dataclasses.replace(MIDDLE, start=1, source_line=6)]
BLOCKS = {1: (7, 3), 2: (4,), 3: (5, 6), 4: (1, 2, 9)}


def build(
    chunks: list[ChunkInput],
    limits: InputLimits = LIMITS,
    sizes: StepSizes | None = None,
) -> StepBatch:
    """The step of these chunks, as large as they are unless `sizes` pads it."""
    table = np.zeros((5, limits.max_blocks), np.int32)
    for slot, blocks in BLOCKS.items():
        table[slot, : len(blocks)] = blocks
    all_decode = is_all_decode(chunks)
    exact = StepSizes(
        num_tokens=sum(len(chunk.token_ids) for chunk in chunks),
        num_sequences=len(chunks),
        num_rows=None if all_decode else sum(chunk.num_logits for chunk in chunks),
        table_blocks=max(len(BLOCKS[chunk.slot]) for chunk in chunks),
        all_decode=all_decode,
        has_lora=any(chunk.place != BASE for chunk in chunks),
    )
    return StepInputs(limits).fill(chunks, table, [BLOCKS[chunk.slot] for chunk in chunks], sizes or exact)[0]


def test_adapters_stand_in_the_order_of_their_rows_and_the_base_last() -> None:
    assert adapter_order([PLAIN, MIDDLE, DECODE, CHUNK]) == [2, 3, 1, 0]
    assert adapter_order([]) == []


def test_tokens_positions_and_slots() -> None:
    batch = build(CHUNKS)
    assert batch.token_ids.tolist() == [10, 11, 12, 20, 30, 31, 40, 41]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1, 4, 5]
    # Position 3 is the last of block 7; 4 and 5 begin block 3. Position 8 begins block 9.
    assert batch.attention.slot_mapping.tolist() == [31, 12, 13, 36, 16, 17, 24, 25]
    assert batch.rope_limits is not None
    assert batch.rope_limits.tolist() == [9, 9, 9, 30, 5, 5, 7, 7]
    assert batch.token_ids.dtype == batch.positions.dtype == batch.attention.slot_mapping.dtype == torch.int64


def test_attention_maps() -> None:
    attention = build(CHUNKS).attention
    assert attention.query_starts == (0, 3, 4, 6, 8)
    assert attention.query_start_loc.tolist() == [0, 3, 4, 6, 8]
    assert attention.kv_lens == (6, 9, 2, 6)
    assert attention.kv_lens_device.tolist() == [6, 9, 2, 6]
    assert attention.block_tables == ((7, 3), (1, 2, 9), (4,), (5, 6))
    assert attention.block_table.tolist() == [[7, 3, 0], [1, 2, 9], [4, 0, 0], [5, 6, 0]]
    assert attention.block_table.dtype == attention.query_start_loc.dtype == torch.int32


def test_conv_maps() -> None:
    conv = build(CHUNKS).conv
    assert conv is not None
    assert conv.state_indices.tolist() == [7, 9, 2, 3]
    assert conv.has_initial_state.tolist() == [True, True, False, True]
    assert not conv.all_decode


def test_kept_states_are_read_and_not_written() -> None:
    conv = build(KEPT).conv
    assert conv is not None
    assert conv.state_indices.tolist() == [7, 2]
    assert conv.source_state_indices.tolist() == [5, 6]
    assert conv.has_initial_state.tolist() == [True, True]


@pytest.mark.parametrize(
    ("start", "begins", "expected"),
    [(7, False, True), (0, True, False), (7, True, False)],
    ids=["decode", "one-token-prompt", "one token behind what another sequence computed"],
)
def test_a_step_of_single_tokens_is_all_decode_unless_one_begins(start: int, begins: bool, expected: bool) -> None:
    chunk = dataclasses.replace(PLAIN, token_ids=[1], start=start, begins=begins, num_logits=1)
    conv = build([DECODE, chunk]).conv
    assert conv is not None
    assert conv.all_decode == expected
    assert conv.has_initial_state.tolist() == [True, not begins]


def test_lora_maps_of_the_tokens() -> None:
    lora = build(CHUNKS).lora
    assert lora is not None
    assert lora.segments == (Segment(0, 4, 5, (16, -1)), Segment(4, 6, 2, (32, 0)))
    assert lora.num_tokens == 8
    assert lora.segment_starts.tolist() == [0, 4, 6, 6]
    assert lora.places.tolist() == [5, 2, -1]
    assert lora.first_rows.tolist() == [[16, 32, -1], [-1, 0, -1]]
    assert lora.token_segment.tolist() == [0, 0, 0, 0, 1, 1, -1, -1]
    assert lora.num_segments.tolist() == [2]


def test_logits_rows_and_their_lora_maps() -> None:
    batch = build(CHUNKS)
    assert batch.logits_rows is not None
    assert batch.logits_rows.tolist() == [2, 3, 6, 7]
    # The adapter at place 2 wants no logits in this step, so it has no segment among the rows.
    assert batch.logits_lora is not None
    assert batch.logits_lora.segments == (Segment(0, 2, 5, (16, -1)),)
    assert batch.logits_lora.num_tokens == 4
    assert batch.logits_lora.token_segment.tolist() == [0, 0, -1, -1]


def test_an_adapter_between_two_others_without_logits_does_not_join_them() -> None:
    last = dataclasses.replace(DECODE, place=7, first_rows=(48, 16))
    rows = build([CHUNK, MIDDLE, last]).logits_lora
    assert rows is not None
    assert rows.segments == (Segment(0, 1, 5, (16, -1)), Segment(1, 2, 7, (48, 16)))


def test_without_adapters_there_are_no_lora_maps() -> None:
    batch = build([PLAIN])
    assert batch.lora is None
    assert batch.logits_lora is None


def test_a_step_may_want_no_logits_at_all() -> None:
    batch = build([MIDDLE])
    assert batch.logits_rows is not None
    assert batch.logits_rows.tolist() == []
    assert batch.logits_rows.dtype == torch.int64
    assert batch.lora is not None
    assert batch.logits_lora is not None
    assert batch.logits_lora.segments == ()


def test_models_without_convolutions_or_dynamic_rope_get_no_such_maps() -> None:
    limits = dataclasses.replace(LIMITS, has_conv=False, has_length_limits=False)
    batch = build(CHUNKS, limits)
    assert batch.conv is None
    assert batch.rope_limits is None


def test_parts_out_of_adapter_order_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="adapter order"):
        build([CHUNK, MIDDLE, DECODE])


def test_base_is_the_place_of_no_adapter() -> None:
    assert PLAIN.place == BASE == -1


def test_a_step_of_decode_tokens_yields_the_logits_of_all_of_them() -> None:
    batch = build([DECODE, dataclasses.replace(PLAIN, token_ids=[IN_FLIGHT], num_logits=1)])
    assert batch.logits_rows is None
    assert batch.logits_lora is batch.lora
    assert batch.token_ids.tolist() == [20, -1]
    assert batch.token_slots is not None
    assert batch.token_slots.tolist() == [4, 3]


def test_padding_is_empty_sequences_and_tokens_of_the_null_block() -> None:
    sizes = StepSizes(12, 6, 6, table_blocks=4, all_decode=False, has_lora=True)
    batch = build(CHUNKS, sizes=sizes)
    assert batch.token_ids.tolist()[8:] == [0] * 4
    assert batch.positions.tolist()[8:] == [0] * 4
    assert batch.attention.slot_mapping.tolist()[8:] == [-1] * 4
    assert batch.attention.query_start_loc.tolist() == [0, 3, 4, 6, 8, 8, 8]
    assert batch.attention.kv_lens_device.tolist() == [6, 9, 2, 6, 0, 0]
    assert batch.attention.block_table.tolist()[1:] == [[1, 2, 9, 0], [4, 0, 0, 0], [5, 6, 0, 0], [0] * 4, [0] * 4]
    assert batch.logits_rows is not None
    assert batch.logits_rows.tolist() == [2, 3, 6, 7, 0, 0]
    assert batch.conv is not None
    for lines in (batch.conv.state_indices, batch.conv.source_state_indices):
        assert lines.tolist() == [7, 9, 2, 3, 0, 0]
    assert batch.conv.has_initial_state.tolist() == [True, True, False, True, False, False]
    assert batch.lora is not None
    assert batch.lora.num_tokens == 12
    assert batch.lora.token_segment.tolist() == [0, 0, 0, 0, 1, 1, *[-1] * 6]
    assert batch.logits_lora is not None
    assert batch.logits_lora.token_segment.tolist() == [0, 0, *[-1] * 4]


def test_nothing_of_an_earlier_step_is_left() -> None:
    """The buffers are the same; a smaller step after a larger one sees its own padding only."""
    inputs = StepInputs(LIMITS)
    sizes = StepSizes(12, 6, 6, table_blocks=4, all_decode=False, has_lora=True)
    table = np.arange(20, dtype=np.int32).reshape(5, 4)
    blocks = [tuple(table[chunk.slot].tolist()) for chunk in CHUNKS]
    inputs.fill(CHUNKS, table, blocks, sizes)
    small, _ = inputs.fill([PLAIN], table, blocks[3:], sizes)
    expected, _ = StepInputs(LIMITS).fill([PLAIN], table, blocks[3:], sizes)
    for part in ("attention", "conv", "lora", "logits_lora"):
        for field in dataclasses.fields(getattr(small, part)):
            found, fresh = getattr(getattr(small, part), field.name), getattr(getattr(expected, part), field.name)
            assert found.tolist() == fresh.tolist() if isinstance(found, torch.Tensor) else found == fresh, field.name
    for name in ("token_ids", "token_slots", "positions", "rope_limits", "logits_rows"):
        assert getattr(small, name).tolist() == getattr(expected, name).tolist(), name
