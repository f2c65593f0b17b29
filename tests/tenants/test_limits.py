"""What a tenant may have, on a clock that the tests set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.tenants.keys_file import Limits
from service.tenants.limits import Charge, LimitReached, Minute, Tenant


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tenant(clock: Clock, **limits: int) -> Tenant:
    return Tenant("acme", Limits(**limits), clock)


_STEPS = st.lists(
    st.tuples(st.floats(0, 40), st.integers(1, 60), st.integers(0, 60)),
    max_size=60,
)


@given(_STEPS, st.integers(60, 100))
def test_no_sixty_seconds_hold_more_than_the_limit(steps: list[tuple[float, int, int]], limit: int) -> None:
    """Whenever they begin, whatever is asked for and given back."""
    clock = Clock()
    one = tenant(clock, tokens_per_minute=limit)
    taken: list[tuple[float, int, Charge]] = []
    for wait_seconds, wanted, unused in steps:
        clock.now += wait_seconds
        try:
            charge = one.take_tokens(wanted)
        except LimitReached as error:
            # As soon as it says, and not for good.
            clock.now += int(error.headers["Retry-After"])
            charge = one.take_tokens(wanted)
        one.give_back_tokens(charge, min(unused, wanted))
        taken.append((clock.now, wanted - min(unused, wanted), charge))
        for start, _, _ in taken:
            assert sum(amount for at, amount, _ in taken if start <= at < start + 60) <= limit
    clock.now += 62
    assert one.headers()["x-ratelimit-remaining-tokens"] == str(limit)


def test_what_is_refused_is_told_when_to_come_again(clock: Clock) -> None:
    one = tenant(clock, tokens_per_minute=100)
    one.take_tokens(60)
    clock.now += 30
    one.take_tokens(40)
    with pytest.raises(LimitReached, match=r"0 of your 100 tokens per minute are left, .* may take 50") as caught:
        one.take_tokens(50)
    assert caught.value.headers == {"Retry-After": "31"}
    clock.now += 30.9
    with pytest.raises(LimitReached):
        one.take_tokens(50)
    clock.now += 0.1
    one.take_tokens(50)
    assert one.headers() == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "10",
        "x-ratelimit-reset-tokens": "61s",
    }


def test_what_is_given_back_late_frees_nothing_twice(clock: Clock) -> None:
    one = tenant(clock, tokens_per_minute=100)
    early = one.take_tokens(80)
    clock.now += 70
    one.take_tokens(100)
    one.give_back_tokens(early, 80)
    assert one.headers()["x-ratelimit-remaining-tokens"] == "0"


def test_places(clock: Clock) -> None:
    one = tenant(clock, requests_in_flight=3)
    one.enter(2)
    with pytest.raises(LimitReached, match="2 of your 3 requests in flight"):
        one.enter(2)
    one.enter(1)
    assert one.headers()["x-ratelimit-remaining-requests"] == "0"
    one.leave(3)
    assert one.headers()["x-ratelimit-remaining-requests"] == "3"


@pytest.mark.parametrize(("limit", "wait_seconds"), [(2, "61"), (0, "60")])
def test_uploads(clock: Clock, limit: int, wait_seconds: str) -> None:
    one = tenant(clock, uploads_per_minute=limit)
    for _ in range(limit):
        one.take_change()
    with pytest.raises(LimitReached, match=f"begun {limit} uploads") as caught:
        one.take_change()
    assert caught.value.headers == {"Retry-After": wait_seconds}


def test_what_has_no_limit_is_neither_refused_nor_told(clock: Clock) -> None:
    one = tenant(clock)
    for _ in range(1000):
        one.enter(10**6)
        one.take_tokens(10**9)
        one.take_change()
    assert one.headers() == {}


def test_counts_outlast_new_limits(clock: Clock) -> None:
    one = tenant(clock)
    one.take_tokens(70)
    one.limits = Limits(tokens_per_minute=100)
    with pytest.raises(LimitReached):
        one.take_tokens(40)
    one.limits = Limits(tokens_per_minute=50)  # less than has been taken
    assert one.headers()["x-ratelimit-remaining-tokens"] == "0"


def test_memory_does_not_grow(clock: Clock) -> None:
    minute = Minute(clock)
    for _ in range(10_000):
        clock.now += 0.1
        minute.take(1)
    assert len(minute.taken()) <= 62
    assert 600 <= minute.used <= 620
