"""Shares of the server's connections: one address, and one tenant, may have half of them.

An address is known when a connection is opened, a tenant with the key of a request: the connection is its until it is
closed, or has a request of another one. A proxy opens connections for many clients, so that no share of its own
holds for one that is trusted to say who they are; it is to bound what each of them opens. Nor for this machine's own
addresses: who works here does not keep others out by mistake.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable

from service.api.errors import QueueFull
from service.fairness.client_identity import network_of


class ConnectionShares:
    """One thread, the event loop's.

    most             connections in all
    trusted_proxies  addresses and networks
    """

    def __init__(self, most: int, trusted_proxies: Iterable[str] = ()) -> None:
        self.most = most
        self._most_of_one = max(1, most // 2)
        self._proxies = [ipaddress.ip_network(one) for one in trusted_proxies]
        self._num = 0
        self._num_from: Counter[str] = Counter()
        self._num_of_tenant: Counter[str] = Counter()

    def open(self, address: str) -> str | None:
        """Count a connection from an address. Returns the network that it counts for, as `close` takes it; None for one
        too many."""
        network = "" if self._is_proxy(address) else network_of(address)
        has_share = network and not _is_loopback(address)
        if self._num >= self.most or (has_share and self._num_from[network] >= self._most_of_one):
            return None
        self._num += 1
        self._num_from[network] += 1
        return network

    def close(self, network: str, tenant: str) -> None:
        """Count a closed connection down; `tenant` as in `belong`."""
        self._num -= 1
        _count_down(self._num_from, network)
        _count_down(self._num_of_tenant, tenant)

    def belong(self, before: str, tenant: str) -> None:
        """A connection of one tenant, "" for none, has a request of another. QueueFull, and it stays the first one's,
        if that has its share already; the connection is to be closed then."""
        if self._num_of_tenant[tenant] >= self._most_of_one:
            raise QueueFull(
                f"You have {self._most_of_one} connections, the half of all that one tenant may have; close some, or "
                "send more requests over each.",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        _count_down(self._num_of_tenant, before)
        self._num_of_tenant[tenant] += 1

    def _is_proxy(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:  # a socket of the file system
            return False
        return any(parsed in one for one in self._proxies)


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a socket of the file system
        return True
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _count_down(counts: Counter[str], name: str) -> None:
    """Without keeping names that nobody has any more."""
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
