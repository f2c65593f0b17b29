"""Who pays for what is being done: the one place where requests are told apart for the sake of fairness.

A key, where keys are set; else where the request comes from. Behind a proxy without keys all clients are one payer.
"""

from __future__ import annotations

import hashlib
import ipaddress
from contextvars import ContextVar

from starlette.datastructures import Headers

NOBODY = ""  # the server itself
PAYER: ContextVar[str] = ContextVar("payer", default=NOBODY)


def payer_of(headers: Headers, address: str | None, *, keys_are_set: bool) -> str:
    """A short text that is the same for all requests of one payer, and tells no key. With keys, call it when the key
    has been checked."""
    if keys_are_set and "authorization" in headers:
        return hashlib.sha256(headers["authorization"].split(" ")[-1].encode("utf-8", "surrogateescape")).hexdigest()[
            :16
        ]
    return network_of(address or "")


def network_of(address: str) -> str:
    """What one client has: an address, of IPv6 a /64."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a socket of the file system
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
