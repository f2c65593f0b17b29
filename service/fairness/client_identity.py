"""Identity of a request's client: the one place that tells requests apart for fairness.

A tenant, or a key, where keys are set; else where the request comes from, as a trusted proxy says. Behind any other all
clients are one client.
"""

from __future__ import annotations

import ipaddress
from contextvars import ContextVar

NOBODY = ""  # the server itself
CLIENT: ContextVar[str] = ContextVar("client", default=NOBODY)


def client_of(name: str, address: str) -> str:
    """The identity that all requests of one client share. name: the tenant's or the key's, "" without keys."""
    return name or network_of(address)


def network_of(address: str) -> str:
    """The network of one client: an address, of IPv6 a /64. IPv4 in IPv6's spelling (::ffff:192.0.2.1), which proxies
    write that listen to both, is IPv4."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a socket of the file system
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
