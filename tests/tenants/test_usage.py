"""What a tenant has taken on one server counts on the others of its store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.tenants.keys_file import Limits
from service.tenants.limits import ABSENT_SECONDS, Exchange, LimitReached, Tenant, TenantUsage
from tests.tenants.test_limits import Clock


class OneServer:
    """A tenant as one server knows it, whose clock has nothing to do with that of others."""

    def __init__(self, directory: Path, began_seconds: float, limits: Limits) -> None:
        self.clock = Clock()
        self.clock.now = began_seconds
        self.tenant = Tenant("acme", limits, self.clock)
        self._exchange = Exchange(directory)

    def exchange(self) -> None:
        heard = self._exchange.say_and_hear({"acme": self.tenant.usage()})
        self.tenant.learn(heard.get("acme", TenantUsage()))


def servers(directory: Path, number: int = 2, **limits: int) -> list[OneServer]:
    return [OneServer(directory, 1000.0 + 7e6 * one, Limits(**limits)) for one in range(number)]


def test_tokens_and_uploads_and_requests_count_over_all(tmp_path: Path) -> None:
    one, other, third = servers(tmp_path, 3, tokens_per_minute=100, uploads_per_minute=2, requests_in_flight=4)
    one.tenant.take_tokens(60)
    one.tenant.take_change()
    other.tenant.enter(3)
    other.tenant.take_change()
    for each in (one, other, third):
        each.exchange()
    one.exchange()
    third.tenant.take_tokens(40)
    for each in (third, one, other):
        each.exchange()
        with pytest.raises(LimitReached, match="0 of your 100 tokens per minute are left"):
            each.tenant.take_tokens(1)
        with pytest.raises(LimitReached, match="3 of your 4 requests"):
            each.tenant.enter(2)
        with pytest.raises(LimitReached, match="begun 2 uploads"):
            each.tenant.take_change()
        assert each.tenant.headers()["x-ratelimit-remaining-requests"] == "1"


def test_what_was_taken_elsewhere_grows_old_also_without_news(tmp_path: Path) -> None:
    one, other = servers(tmp_path, tokens_per_minute=100)
    one.tenant.take_tokens(100)
    one.exchange()
    other.exchange()
    with pytest.raises(LimitReached) as caught:
        other.tenant.take_tokens(50)
    other.clock.now += int(caught.value.headers["Retry-After"])
    other.tenant.take_tokens(100)


def test_what_is_given_back_elsewhere_may_be_taken_here(tmp_path: Path) -> None:
    one, other = servers(tmp_path, tokens_per_minute=100, requests_in_flight=1)
    charge = one.tenant.take_tokens(100)
    one.tenant.enter(1)
    one.exchange()
    other.exchange()
    one.tenant.give_back_tokens(charge, 90)
    one.tenant.leave(1)
    one.exchange()
    other.exchange()
    other.tenant.take_tokens(90)
    other.tenant.enter(1)


def test_of_a_server_that_is_gone_the_minute_counts_and_no_request(tmp_path: Path) -> None:
    gone, other = servers(tmp_path, tokens_per_minute=100, requests_in_flight=1)
    gone.tenant.take_tokens(100)
    gone.tenant.enter(1)
    gone.exchange()
    (file,) = tmp_path.iterdir()
    said_seconds = file.stat().st_mtime - ABSENT_SECONDS - 1
    os.utime(file, (said_seconds, said_seconds))
    other.exchange()
    other.tenant.enter(1)
    with pytest.raises(LimitReached):
        other.tenant.take_tokens(1)
    os.utime(file, (said_seconds - 600, said_seconds - 600))
    other.exchange()
    other.tenant.take_tokens(100)
    assert file not in tmp_path.iterdir()


def test_a_file_that_is_no_server_s_is_passed_over(tmp_path: Path) -> None:
    one, other = servers(tmp_path, tokens_per_minute=100)
    (tmp_path / "torn").write_bytes(b'{"acme": {"tok')
    one.tenant.take_tokens(70)
    one.exchange()
    other.exchange()
    with pytest.raises(LimitReached, match="30 of your 100 tokens per minute are left"):
        other.tenant.take_tokens(31)
