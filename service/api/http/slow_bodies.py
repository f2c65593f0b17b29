"""Bodies that come too slowly, where another HTTP server than ours reads them: `service.api.http.protocol`, which
bounds connections, does not run there."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.errors import RequestTimeout
from service.api.http_rules import MIN_BYTES_PER_SECOND


class BoundedBodies:
    """The application; reading a body raises RequestTimeout there when less than 1 KiB/s of it has come over so long a
    wait for its client."""

    def __init__(self, app: ASGIApp, stall_limit_seconds: float) -> None:
        self._app, self._stall_limit_seconds = app, stall_limit_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = _Body(receive, self._stall_limit_seconds).receive
        await self._app(scope, receive, send)


class _Body:
    def __init__(self, receive: Receive, stall_limit_seconds: float) -> None:
        self._receive, self._stall_limit_seconds = receive, stall_limit_seconds
        self._is_bounded = True
        self._waited_seconds, self._num_bytes = 0.0, 0  # of this window

    async def receive(self) -> Message:
        if not self._is_bounded:  # whether the client has gone may be asked for as long as the answer takes
            return await self._receive()
        clock = asyncio.get_running_loop().time
        started_seconds = clock()
        try:
            async with asyncio.timeout(self._stall_limit_seconds - self._waited_seconds):
                message = await self._receive()
        except TimeoutError:
            self._look()
            return await self.receive()
        self._waited_seconds += clock() - started_seconds
        self._num_bytes += len(message.get("body", b""))
        self._is_bounded = message.get("more_body", False)
        if self._is_bounded and self._waited_seconds >= self._stall_limit_seconds:
            self._look()
        return message

    def _look(self) -> None:
        """A window is over. RequestTimeout if too little came in it."""
        if self._num_bytes < MIN_BYTES_PER_SECOND * self._stall_limit_seconds:
            self._is_bounded = False  # what still comes is thrown away
            raise RequestTimeout("The body of the request comes too slowly; send it again.")
        self._waited_seconds, self._num_bytes = 0.0, 0
