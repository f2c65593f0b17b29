"""Shares of the server's connections: one address, and one tenant, may have half of them.

An address is known when a connection is opened, a tenant with the key of a request: the connection is its until it is
closed, or has a request of another one. A proxy opens connections for many clients, so that no share of its own
holds for one that is trusted to say who they are; it is to bound what each of them opens. Nor for this machine's own
addresses: who works here does not keep others out by mistake.

Where a share is full, an idle connection is closed for the new one: clients leave many open that they do not use again.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import Protocol

from service.api.errors import QueueFull
from service.fairness.client_identity import network_of

_MOST_TRIED = 8  # idle connections, of which each may have input by now


class KeptConnection(Protocol):
    """A connection between two requests. network: as `open` returned it; tenant: as in `belong`."""

    network: str
    tenant: str

    def close_if_idle(self) -> bool:
        """Close it, and count it down, unless its client has sent something."""


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
        # By network; that which is idle longest is first.
        self._idle: defaultdict[str, dict[KeptConnection, None]] = defaultdict(dict)

    def open(self, address: str) -> str | None:
        """Count a connection from an address. Returns the network that it counts for, as `close` takes it; None for one
        too many."""
        network = "" if self._is_proxy(address) else network_of(address)
        has_share = network and not _is_loopback(address)
        if has_share and self._num_from[network] >= self._most_of_one:
            if not self._close_one(self._idle.get(network, ())):
                return None
        elif self._num >= self.most and not self._close_one(self._idle_of_largest(network)):
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
        is_full = self._num_of_tenant[tenant] >= self._most_of_one
        if is_full and not self._close_one(one for idle in self._idle.values() for one in idle if one.tenant == tenant):
            raise QueueFull(
                f"You have {self._most_of_one} connections, the half of all that one tenant may have; close some, or "
                "send more requests over each.",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        _count_down(self._num_of_tenant, before)
        self._num_of_tenant[tenant] += 1

    def rest(self, connection: KeptConnection) -> None:
        """Its request is answered, and nothing of another one has come."""
        self._idle[connection.network][connection] = None

    def wake(self, connection: KeptConnection) -> None:
        """It is not idle any more, or closed."""
        if idle := self._idle.get(connection.network):
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.network]

    def _idle_of_largest(self, network: str) -> Iterable[KeptConnection]:
        """Idle connections of the network that has most, of this one and those that have more: who opens many cannot
        close those of others who have few."""
        num = self._num_from
        larger = [one for one in self._idle if one == network or num[one] > num[network]]
        return self._idle[max(larger, key=num.__getitem__)] if larger else ()

    def _close_one(self, idle: Iterable[KeptConnection]) -> bool:
        return any(one.close_if_idle() for one in list(islice(idle, _MOST_TRIED)))

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
