"""Streams of a request's messages from the engine to their reader. Imports no torch.

Who owns: the submitter owns the stream. Closing it early aborts its request. A stream that is read slowly holds its own
messages (at most one per token) and delays no other; a listener is called at once. When the engine
dies, every stream raises EngineDied once its messages are read; requests are never sent again silently.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from service.engine.ipc.messages import Finished, Tokens


class EngineDied(RuntimeError):
    """The engine ended, or was not there, before the request did; one sentence. The request may be sent again."""


class NeverSent(EngineDied):
    """The engine was not there when the request was to be sent to it."""


class TokenStream(AsyncIterator[Tokens | Finished]):
    """Messages of one request: Tokens, then one Finished. Raises EngineDied if the engine ends before, NeverSent if it
    has not had the request."""

    def __init__(self, request_id: str, on_close: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._on_close = on_close
        self._messages: deque[Tokens | Finished] = deque()
        self._news = asyncio.Event()
        self._death: EngineDied | None = None
        self._is_over = False
        self._listener: Callable[[], None] | None = None

    def push(self, message: Tokens | Finished) -> None:
        self._messages.append(message)
        if self._listener is not None:
            self._listener()
        else:
            self._news.set()

    def die(self, error: EngineDied) -> None:
        self._death = error
        self._notify()

    def listen(self, listener: Callable[[], None], _begin_anew: Callable[[], bool] | None = None) -> None:
        """Call `listener` whenever `poll` would return a message or raise, now if it would already. It never raises.
        The stream may not be iterated any more. With one engine, no request ever begins anew."""
        self._listener = listener
        if self._messages or self._death is not None:
            listener()

    def poll(self) -> Tokens | Finished | None:
        """The next message, None while there is none or when the stream is over. Raises as the iteration does."""
        if self._is_over:
            return None
        if self._messages:
            message = self._messages.popleft()
            self._is_over = isinstance(message, Finished)
            return message
        if self._death is not None:
            self._is_over = True
            raise self._death
        return None

    async def __anext__(self) -> Tokens | Finished:
        while not self._is_over:
            message = self.poll()
            if message is not None:
                return message
            self._news.clear()
            await self._news.wait()
        raise StopAsyncIteration

    def _notify(self) -> None:
        if self._listener is not None:
            self._listener()
        else:
            self._news.set()

    async def aclose(self) -> None:
        """Abort the request unless it is over. Safe to call at any time."""
        if not self._is_over:
            self._is_over = True
            self._news.set()
            self._on_close(self._request_id)
