"""Places in the queue: one client may fill it, and keeps nobody out."""

from __future__ import annotations

import random

import pytest

from service.api.errors import QueueFull
from service.api.queue_limits import QueueLimits


def test_one_alone_has_all_places() -> None:
    queue = QueueLimits(8)
    queue.acquire(5, "flood")
    queue.acquire(3, "flood")
    with pytest.raises(QueueFull, match="8 of 8"):
        queue.acquire(1, "flood")
    queue.release(1, "flood")
    queue.acquire(1, "flood")


def test_who_has_less_than_its_part_gets_in_although_another_has_filled_the_queue() -> None:
    queue = QueueLimits(8)
    queue.acquire(8, "flood")
    queue.acquire(3, "one")
    queue.acquire(1, "one")
    with pytest.raises(QueueFull):
        queue.acquire(1, "one")  # half of them is its part
    queue.acquire(2, "two")
    with pytest.raises(QueueFull):
        queue.acquire(1, "two")  # a third
    queue.release(8, "flood")
    queue.acquire(2, "one")
    assert queue.num_open == 8


def test_all_together_never_have_more_than_twice_the_limit() -> None:
    queue, rng, held = QueueLimits(16), random.Random(1), dict[str, int]()
    for _ in range(3000):
        client, count = f"p{rng.randrange(40)}", rng.randint(1, 4)
        if rng.random() < 0.4 and held.get(client, 0) >= count:
            queue.release(count, client)
            held[client] -= count
        else:
            try:
                queue.acquire(count, client)
            except QueueFull:
                continue
            held[client] = held.get(client, 0) + count
        assert queue.num_open == sum(held.values()) <= 32
    for client, count in held.items():
        queue.release(count, client)
    assert queue.num_open == 0
    queue.acquire(16, "last")
