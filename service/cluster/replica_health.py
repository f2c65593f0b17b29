"""An engine as seen from the server: the requests it was sent, and whether it answers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from service.cluster.routing import Replica
from service.engine.ipc.link import EngineLink
from service.engine.ipc.messages import EngineStatus, Tier

# An engine that has sent nothing for so long is pinged, again and again; it answers between two steps.
PING_SECONDS = 1.0
# After so many pings it gets no new requests, and those that wait for their first token go elsewhere. Pings and not
# seconds, since this process may have stood still itself.
PINGS_UNTIL_SILENT = 6
# After so many it is killed, and started again: far more than the longest step of a machine that works.
PINGS_UNTIL_HUNG = 120


@dataclass(eq=False)
class ReplicaHealth:
    """An engine.

    open                  ids of requests that were sent to it and are not over
    num_pings_unanswered  pings since its last message
    pinged_seconds        time of the last ping, by time.monotonic()
    """

    name: str
    client: EngineLink
    open: set[str] = field(default_factory=set)
    queued_tokens: int = 0
    num_sent: Counter[Tier] = field(default_factory=Counter)
    num_sent_again: int = 0
    num_pings_unanswered: int = 0
    pinged_seconds: float = 0.0

    @property
    def answers(self) -> bool:
        """Whether it is ready, and not silent."""
        return self.client.state == "ready" and self.num_pings_unanswered < PINGS_UNTIL_SILENT

    @property
    def takes_requests(self) -> bool:
        return self.answers and self.client.cordoned is None

    def ping_if_silent(self) -> None:
        """Count unanswered pings; send one more if the engine has sent nothing for PING_SECONDS."""
        now_seconds, heard_seconds = time.monotonic(), self.client.heard_seconds
        if self.client.state != "ready" or heard_seconds >= self.pinged_seconds:
            self.num_pings_unanswered = 0
        if self.client.state == "ready" and now_seconds - heard_seconds >= PING_SECONDS:
            self.client.ping()
            self.num_pings_unanswered, self.pinged_seconds = self.num_pings_unanswered + 1, now_seconds

    def as_replica(self) -> Replica:
        """The load and tiers that `service.cluster.routing` chooses by."""
        stats = self.client.stats
        free_rows = 0 if stats is None else stats.rows_total - stats.rows_used
        return Replica(self.name, self.queued_tokens, free_rows, self.client.tiers)

    def status(self) -> EngineStatus:
        """The status for /health, /metrics and the page."""
        state: str = self.client.state
        if state == "ready":
            state = (self.client.cordoned or state) if self.answers else "silent"
        return EngineStatus(
            state,
            self.client.state_error,
            self.queued_tokens,
            len(self.open),
            dict(self.num_sent),
            self.num_sent_again,
            self.client.stats,
        )
