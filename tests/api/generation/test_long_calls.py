"""What is looked at while a call is written: each character a few times, however long blanks, heads and answers are."""

from __future__ import annotations

import pytest

from service.text.calls.call import Arguments, Begun, Call
from service.text.calls.call_parser import BlankScanner
from service.text.calls.hermes import START, HermesParser, json_feed
from service.text.calls.lfm2 import PythonicFeed

CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def test_blanks_are_looked_at_once() -> None:
    scanner = BlankScanner(1)
    assert scanner.end("[ \n") is None
    # What was seen before is not looked at, so that it does not matter what it is.
    assert scanner.end("[xx  ") is None
    assert scanner.end("[xxxx y") == 6
    assert scanner.end("[xxxx yz") == 6


def test_blanks_behind_a_quote_are_looked_at_once() -> None:
    """The first character behind them tells whether the quote ends a text."""
    feed = PythonicFeed("", "", ())
    assert feed.push('[f(a="x"') == [Begun("f")]
    assert feed.push('[f(a="x"   ') == []
    assert feed.push('[f(a="x"yyy') == []  # were this looked at again, the quote would be part of the text
    assert feed.push('[f(a="x"   , ') == [Arguments('{"a": "x"')]


def test_a_head_that_is_too_long_is_not_looked_at_again() -> None:
    feed, head = json_feed(()), '{"name": "now", "arguments": '
    assert feed.push(START + " " * 1024) == []
    assert feed.push(START + head + "{}" + " " * 1024) == []
    assert json_feed(()).push(START + head + "{}" + " " * 1024) == [Begun("now"), Arguments("{}")]


class Noting(HermesParser):
    """Notes how much it is asked to look through for the beginning of a call."""

    most_chars = 0

    def _find_start(self, held: str) -> tuple[int, bool]:
        self.most_chars = max(self.most_chars, len(held))
        return super()._find_start(held)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_text_that_comes_at_once_is_read_in_pieces(in_pieces: bool) -> None:
    """Behind each of its calls stands all the rest: looked through each time, that would be the square of it."""
    parser = Noting({}, in_pieces)
    calls = [one for one in parser.push(CALL * 1000) if isinstance(one, Call | Begun)]
    assert len(calls) == 1000 and parser.finish() == []
    assert parser.most_chars <= 4096 + len(CALL)
