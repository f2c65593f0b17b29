"""The addresses of the engines, from Ray's router to the ingress of the same process.

A module of its own: Ray copies the classes that it runs, with the variables that they refer to, but not what they
import. Its calls come in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from service.ray_serve.remote import Address

_Listener = Callable[[dict[str, Address]], None]

_lock = Lock()
_listeners: list[_Listener] = []
_last: list[dict[str, Address]] = []


def listen(listener: _Listener) -> None:
    """Call `listener` with the addresses by name, now if they are known and whenever they change, in any thread."""
    with _lock:
        _listeners.append(listener)
        for addresses in _last:
            listener(addresses)


def update(addresses: dict[str, Address]) -> None:
    """Replace the list of engines."""
    with _lock:
        _last[:] = [addresses]
        for listener in _listeners:
            listener(addresses)
