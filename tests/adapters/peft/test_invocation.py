"""Where an activated LoRA begins in a prompt."""

from __future__ import annotations

from adapters.peft.config import invocation_start


def test_the_last_whole_occurrence_counts() -> None:
    assert invocation_start((5, 1, 2, 5, 1, 2, 1), (1, 2)) == 4
    assert invocation_start((1, 2, 1, 2, 1), (1, 2, 1)) == 2
    assert invocation_start((3, 1), (1,)) == 1
    assert invocation_start((1, 2), (1, 2)) == 0


def test_there_may_be_none() -> None:
    assert invocation_start((), (1,)) is None
    assert invocation_start((1,), (1, 2)) is None
    assert invocation_start((1, 3, 2), (1, 2)) is None


def test_the_bytes_of_two_tokens_are_none() -> None:
    """Token 1 << 32 is eight bytes that hold those of 1 four bytes further on."""
    assert invocation_start((1 << 32, 0, 5), (1,)) is None
    assert invocation_start((1, 1 << 32, 0), (1,)) == 0
