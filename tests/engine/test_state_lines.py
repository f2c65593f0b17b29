"""The allocator of convolution state lines."""

from __future__ import annotations

import pytest

from service.engine.state_lines import StateLines


def test_every_line_but_the_null_line_is_handed_out_once() -> None:
    lines = StateLines(5)
    assert sorted(lines.take() for _ in range(4)) == [1, 2, 3, 4]
    assert lines.num_free == 0
    lines.check_integrity()


def test_a_released_line_is_handed_out_again() -> None:
    lines = StateLines(3)
    first, _ = lines.take(), lines.take()
    lines.release(first)
    lines.check_integrity()
    assert lines.take() == first


def test_releasing_a_free_line_is_a_bug() -> None:
    lines = StateLines(3)
    with pytest.raises(KeyError):
        lines.release(1)


def test_integrity_notices_a_lost_line() -> None:
    lines = StateLines(3)
    lines._free.pop()
    with pytest.raises(AssertionError, match="lost or held twice"):
        lines.check_integrity()
