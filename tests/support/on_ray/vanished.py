"""A host that is gone without a word, on this machine: the system drops what comes for its sockets, as a cut cable
does. Nothing is acknowledged, and nothing refused. Linux, without rights."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_TAKE_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # of the packet filter's language: return 0


@contextmanager
def vanished(*sockets: socket.socket) -> Iterator[None]:
    """Nothing that is sent to these, connected or listening, arrives meanwhile."""
    code = ctypes.create_string_buffer(_TAKE_NOTHING)
    program = struct.pack("HP", 1, ctypes.addressof(code))
    for one in sockets:
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    try:
        yield
    finally:
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
