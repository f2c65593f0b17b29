"""The allocator of convolution state slots."""

from __future__ import annotations

import pytest

from service.engine.sequences.slots import Slots
from tests.support.engine.engine_mock import make_mock_engine


def test_every_line_but_the_null_line_is_handed_out_once() -> None:
    slots = Slots(5)
    assert sorted(slots.acquire() for _ in range(4)) == [1, 2, 3, 4]
    assert slots.num_free == 0
    slots.check_integrity()


def test_a_released_line_is_handed_out_again() -> None:
    slots = Slots(3)
    first, _ = slots.acquire(), slots.acquire()
    slots.release(first)
    slots.check_integrity()
    assert slots.acquire() == first


def test_releasing_a_free_line_is_a_bug() -> None:
    slots = Slots(3)
    with pytest.raises(KeyError):
        slots.release(1)


def test_integrity_notices_a_slot_that_nobody_holds() -> None:
    mock = make_mock_engine()
    mock.submit("r", max_tokens=9)
    mock.step()
    slot = mock.engine.slots.acquire()
    with pytest.raises(AssertionError, match="slots held by a sequence that does not run"):
        mock.engine.check_integrity()
    mock.engine.slots.release(slot)
    mock.settle()
