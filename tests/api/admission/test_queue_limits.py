"""Places in the queue: one client may fill it, and keeps nobody out."""

from __future__ import annotations

import random

import pytest

from service.api.errors import QueueFull
from service.api.queue_limits import QueueLimits


def test_one_alone_has_all_places() -> None:
    gate = QueueLimits(8)
    gate.enter(5, "flood")
    gate.enter(3, "flood")
    with pytest.raises(QueueFull, match="8 of 8"):
        gate.enter(1, "flood")
    gate.leave(1, "flood")
    gate.enter(1, "flood")


def test_who_has_less_than_its_part_gets_in_although_another_has_filled_the_queue() -> None:
    gate = QueueLimits(8)
    gate.enter(8, "flood")
    gate.enter(3, "one")
    gate.enter(1, "one")
    with pytest.raises(QueueFull):
        gate.enter(1, "one")  # half of them is its part
    gate.enter(2, "two")
    with pytest.raises(QueueFull):
        gate.enter(1, "two")  # a third
    gate.leave(8, "flood")
    gate.enter(2, "one")
    assert gate.num_open == 8


def test_all_together_never_have_more_than_twice_the_limit() -> None:
    gate, rng, held = QueueLimits(16), random.Random(1), dict[str, int]()
    for _ in range(3000):
        client, count = f"p{rng.randrange(40)}", rng.randint(1, 4)
        if rng.random() < 0.4 and held.get(client, 0) >= count:
            gate.leave(count, client)
            held[client] -= count
        else:
            try:
                gate.enter(count, client)
            except QueueFull:
                continue
            held[client] = held.get(client, 0) + count
        assert gate.num_open == sum(held.values()) <= 32
    for client, count in held.items():
        gate.leave(count, client)
    assert gate.num_open == 0
    gate.enter(16, "last")
