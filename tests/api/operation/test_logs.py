"""A flood of refused requests does not flood the log."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from service.logs import RefusalLines
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server, wait_for
from tests.support.limits import LIMIT_SECONDS


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the lines about lines say."""
    return [vars(record)["fields"] for record in caplog.records if "left out" in record.getMessage()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> RefusalLines:
    caplog.set_level(logging.WARNING, logger="multilora")
    return RefusalLines(3, clock)


def test_a_payer_has_its_lines_and_what_is_left_out_is_told_once(
    lines: RefusalLines, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert [lines.may_write("one") for _ in range(10)] == [True] * 3 + [False] * 7
    assert lines.may_write("two"), "one client's flood costs no other its lines"
    clock.now += 59.9
    assert not lines.may_write("one")
    lines.report()
    assert not told(caplog), "the minute is not over"
    clock.now += 0.2
    lines.report()
    lines.report()
    assert told(caplog) == [{"payer": "one", "left_out": 8, "written": 3}]
    assert [lines.may_write("one") for _ in range(4)] == [True] * 3 + [False]


def test_a_line_after_the_minute_tells_too(lines: RefusalLines, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        lines.may_write("one")
    clock.now += 3600.0
    assert lines.may_write("one")
    assert told(caplog) == [{"payer": "one", "left_out": 2, "written": 3}]


def test_a_client_of_many_addresses_has_no_lines_without_end(
    lines: RefusalLines, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    written = sum(lines.may_write(f"2001:db8:0:{number:x}::/64") for number in range(10_000))
    assert written == 256 + 3
    clock.now += 61
    lines.report()
    assert told(caplog) == [{"payer": "others", "left_out": 10_000 - 256 - 3, "written": 3}]


@pytest.fixture(scope="module")
def terse(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"refusal_lines_per_minute": 2, "log_format": "json", "model_name": BASE, "kv_bytes": "32MiB"}
    with running_server(checkpoints.base, tmp_path_factory.mktemp("terse"), **settings) as running:
        yield running


def malformed(server: Server, source: str) -> bytes:
    """The head of the answer to what is no HTTP, from this address."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), LIMIT_SECONDS, (source, 0)) as connection:
        connection.sendall(b"GET\r\n\r\n")
        return connection.makefile("rb").readline()


def test_malformed_and_refused_requests_are_counted_and_few_are_logged(terse: Server) -> None:
    """Of the test's own address two lines, of another one its two; what is served has its line all the same."""
    before = {status: terse.metric("http_requests_total", status=status) for status in ("400", "404")}
    for _ in range(20):
        assert terse.get("/nothing").status_code == 404
    for source in ("127.0.0.77", "127.0.0.78"):
        for _ in range(10):
            assert b" 400 " in malformed(terse, source)
    assert terse.metric("http_requests_total", status="404") == before["404"] + 20
    assert terse.metric("http_requests_total", status="400") == before["400"] + 20
    served = terse.get("/version", headers={"X-Request-Id": "served-after-all"})
    assert served.status_code == 200
    wait_for(lambda: terse.log_lines("served-after-all"), "the line of what was served")
    logged = [json.loads(line) for line in terse.log.splitlines() if line.startswith("{")]
    # On a slow machine a minute may end in between, which begins another.
    assert 2 <= sum(line.get("status") == 404 for line in logged) < 20
    for source in ("127.0.0.77", "127.0.0.78"):
        assert 2 <= sum(line.get("client") == source for line in logged) < 10
