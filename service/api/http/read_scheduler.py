"""Schedules reads of heads and bodies between networks, since each read takes time of the one event loop.

A read is bounded by itself (`protocol.py`), and so is what it begins: a request for many choices takes the loop a few
milliseconds on its way to the engine. A client with hundreds of connections would still have all of them served between
two turns of everybody else: so one network has one read in each pass of the loop, and where its reads are costly, as
those of tiny chunks and of long heads are, it pauses for a multiple of what they took. Its connections wait for each
other, in the order they came, and nobody else's do. What is not read stays in the kernel, but for one piece of each
connection.

A trusted proxy's address is nobody's. Whose a head is that it passes on is known when it has been read: it is served
when it is the turn of the client that the proxy names. Bodies have the turns of who pays for the request, a tenant or
that client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

# A read that takes the loop's thread longer is costly; usual ones take less than half of that.
USUAL_SECONDS = 0.0005
# For each second beyond that, so many seconds until the network's next read.
PAUSE_PER_SECOND = 16.0
# Bytes per read of what is not announced, a head or the beginning of a chunk: first, least and most. Their cost is
# unknown at first.
FIRST_READ_BYTES, LEAST_READ_BYTES, MOST_READ_BYTES = 1 << 10, 1 << 9, 1 << 12
_LONG_READ_SECONDS = 2 * USUAL_SECONDS


def next_read_bytes(num_bytes: int, seconds: float) -> int:
    """How many to read after so many took so long: costly ones in short reads. On busy processors a thread that
    computes for milliseconds is made to wait for its next turn, and the loop with it."""
    if seconds <= _LONG_READ_SECONDS * num_bytes / MOST_READ_BYTES:
        return MOST_READ_BYTES
    return max(int(num_bytes * _LONG_READ_SECONDS / seconds), LEAST_READ_BYTES)


@dataclass
class _Network:
    """Whether one has read in this pass, when it may go on, and what waits for that."""

    has_read: bool = False
    free_at_seconds: float = 0.0
    waiting: deque[Callable[[], None]] = field(default_factory=deque)


class ReadScheduler:
    """One thread, the loop's."""

    def __init__(self) -> None:
        self._networks: dict[str, _Network] = {}  # those that have read in this pass, pause or wait

    def may_read(self, network: str, read: Callable[[], None]) -> bool:
        """Whether a connection of the network may read now; if not, `read` is called when it may."""
        one = self._networks.get(network)
        if one is None:
            one = self._networks[network] = _Network()
            asyncio.get_running_loop().call_soon(self._next_pass, network, one)
        elif one.waiting or one.has_read or one.free_at_seconds > asyncio.get_running_loop().time():
            one.waiting.append(read)
            return False
        one.has_read = True
        return True

    def charge(self, network: str, seconds: float) -> None:
        """A read has taken so long of the loop's thread."""
        one = self._networks.get(network)
        if one is not None and seconds > USUAL_SECONDS:
            now = asyncio.get_running_loop().time()
            pause_seconds = PAUSE_PER_SECOND * (seconds - USUAL_SECONDS)
            one.free_at_seconds = max(one.free_at_seconds, now) + pause_seconds

    def _next_pass(self, network: str, one: _Network) -> None:
        """The first that waits goes on, if it may."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        one.has_read = bool(one.waiting) and one.free_at_seconds <= now
        if one.has_read:
            loop.call_soon(self._next_pass, network, one)  # whatever becomes of this read
            one.waiting.popleft()()
        elif one.free_at_seconds > now:
            loop.call_at(one.free_at_seconds, self._next_pass, network, one)
        else:
            del self._networks[network]
