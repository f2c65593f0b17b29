"""Answers that may be long are written a piece at a time, in threads in which clients take turns, as fast as they are
read: neither the event loop nor Python's lock is held for more than a piece, and no second copy of the whole is made.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from adapters.gil_lock import GIL_LOCK
from service.api.http.sse import JsonResponse
from service.api.threads import in_turn

_PIECE_BYTES = 1 << 16
_PIECE_CHARS = 1 << 14
_PIECE_ITEMS = 1 << 9
# Answers of fewer values, or characters in all, are written at once.
_SHORT = 4096
# A value each, whatever it is: so many items of these are short without a look at each one, which took five sixths of
# the time of a list of tokens.
_PLAIN = frozenset({int, float, bool, type(None)})


def json_answer(content: Any, close: Callable[[], None] = lambda: None) -> Response:
    """Plain data as JSON. `close` is called exactly once: when a long answer has been sent or its client has gone, at
    once for a short one."""
    if _is_short(content):
        close()
        return JsonResponse(content)
    return _LongAnswer(content, close)


class _LongAnswer(StreamingResponse):
    def __init__(self, content: Any, close: Callable[[], None]) -> None:
        super().__init__(_in_threads(pieces(content)), media_type="application/json")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _in_threads(left: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each made when it is wanted. Starlette's own threads know no clients: 40 long answers of one would be written at
    once, and the event loop would ask for Python's lock beside all of them."""
    while piece := await in_turn(_next, left):
        yield piece


def _next(left: Iterator[bytes]) -> bytes:
    with GIL_LOCK:
        return next(left, b"")


def pieces(content: Any) -> Iterator[bytes]:
    """The JSON text, in pieces of about 64 KiB."""
    waiting = bytearray()
    for part in _parts(content):
        waiting += part
        if len(waiting) >= _PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _parts(content: Any) -> Iterator[bytes]:
    if isinstance(content, str) and len(content) > _PIECE_CHARS:
        yield b'"'
        for at in range(0, len(content), _PIECE_CHARS):
            yield msgspec.json.encode(content[at : at + _PIECE_CHARS])[1:-1]
        yield b'"'
    elif isinstance(content, dict) and content and not _is_short(content):
        for at, (name, value) in enumerate(content.items()):
            yield (b"," if at else b"{") + msgspec.json.encode({name: None})[1:-5]
            yield from _parts(value)
        yield b"}"
    elif isinstance(content, list) and content and not _is_short(content):
        left, separator = iter(content), b"["
        while some := list(islice(left, _PIECE_ITEMS)):
            if _PLAIN.issuperset(map(type, some)) or _is_short(some):
                yield separator + msgspec.json.encode(some)[1:-1]
            else:
                for one in some:
                    yield separator
                    yield from _parts(one)
                    separator = b","
            separator = b","
        yield b"]"
    else:
        yield msgspec.json.encode(content)


def _is_short(content: Any) -> bool:
    """Looks at no more values than make an answer long."""
    waiting, size = [content], 0
    while waiting:
        one = waiting.pop()
        size += 1 + (len(one) // 16 if isinstance(one, str) else 0)
        if size > _SHORT:
            return False
        if isinstance(one, list | dict):
            if len(one) > _SHORT:
                return False
            waiting.extend(one.values() if isinstance(one, dict) else one)
    return True
