"""When a host is gone that says nothing any more, as one without power, or cut off: by itself TCP waits for it for two
hours where nothing is to be sent, and for a quarter of an hour where something is."""

from __future__ import annotations

import asyncio
import socket

# For so long a host may not have acknowledged what was sent to it. After so much silence it is asked, again and again.
# Five losses of the same packet are not seen in a network that works.
VANISHED_SECONDS = 10
QUIET_SECONDS = 4
PROBE_SECONDS = 2
PROBES = (VANISHED_SECONDS - QUIET_SECONDS) // PROBE_SECONDS
# A process that stands still is no vanished host: its system goes on and acknowledges, while it has room.
_OPTIONS = {
    "TCP_USER_TIMEOUT": VANISHED_SECONDS * 1000,
    "TCP_KEEPIDLE": QUIET_SECONDS,
    "TCP_KEEPINTVL": PROBE_SECONDS,
    "TCP_KEEPCNT": PROBES,
}


def end_when_vanished(writer: asyncio.StreamWriter) -> None:
    """Have this connection end with an error some VANISHED_SECONDS after its other end has vanished. Where the system
    has not all these options, it takes longer."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
