"""Several engines behind one API process, each with a device of its own; to the routers they are one.

Each is behind an `EngineLink` of its own: a process of this one's, or somewhere else (`service.ray_serve.remote`). A
request goes where `service.cluster.routing` says; one whose engine dies, or stops answering, before its client has
received any of the answer is sent again once, to another (`service.cluster.dispatch`): an answer that is not streamed
begins anew. A stream that had begun ends with EngineDied, as with one engine.

Everything is in one event loop. Loads count what was sent from here, which is all where no other server sends to these
engines; tiers and free rows are as the engines reported last.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from service.cluster.dispatch import Dispatch, Routed
from service.cluster.routing import (
    DEFAULT_RULE,
    PING_SECONDS,
    PINGS_UNTIL_HUNG,
    PINGS_UNTIL_SILENT,
    ReplicaHealth,
    Rule,
)
from service.engine.ipc.link import EngineLink
from service.engine.ipc.messages import EngineStatus, PauseMode, Ready, Stats, Submit, Tier

log = logging.getLogger(__name__)


class Engines:
    """See the module's docstring. It has the interface of an `EngineLink`, for all engines: it is ready while one is,
    `ready` has the smallest sizes, `stats` the sums, `tiers` the fastest tier."""

    def __init__(self, clients: Sequence[EngineLink], rule: Rule = DEFAULT_RULE) -> None:
        self._members = [ReplicaHealth(f"engine-{number}", client) for number, client in enumerate(clients)]
        self._dispatch = Dispatch(self._members, rule)
        self._watch: asyncio.Task[None] | None = None

    # ---- life

    @property
    def clients(self) -> list[EngineLink]:
        """The links of the engines of this moment."""
        return [one.client for one in self._members]

    def on_client(self, listener: Callable[[int, EngineLink], None]) -> None:
        """Call `listener` with each engine's number and client."""
        for number, one in enumerate(self._members):
            listener(number, one.client)

    async def start(self) -> None:
        """Start all and restart those that end; returns at once. Does nothing the second time."""
        if self._watch is None:
            for one in self.clients:
                await one.start()
            self._watch = asyncio.create_task(self._watch_all(), name="engines-watch")

    async def wait_ready(self) -> Ready:
        """Wait until each is ready or down. Raises EngineDied when all are down for good."""
        results = await asyncio.gather(*(one.wait_ready() for one in self.clients), return_exceptions=True)
        for one, result in zip(self._members, results, strict=True):
            if isinstance(result, BaseException):
                log.error("%s is missing: %s", one.name, result)
        ready = self.ready
        if ready is None:
            raise next(one for one in results if isinstance(one, BaseException))
        return ready

    async def drain(self, limit_seconds: float) -> None:
        """Drain all engines at the same time."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(one.drain(limit_seconds) for one in self.clients))

    async def close(self) -> None:
        """Close all engines."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(one.close() for one in self.clients))

    # ---- state of all

    @property
    def state(self) -> str:
        """ "ready" while one is, "down" when all are"""
        states = [one.state for one in self.clients]
        order = ("draining", "ready", "starting", "restarting", "asleep")
        return next((one for one in order if one in states), "down")

    @property
    def state_error(self) -> str | None:
        """The error of the first engine that has one."""
        return next((one.state_error for one in self.clients if one.state_error), None)

    @property
    def ready(self) -> Ready | None:
        """The smallest sizes of the ready engines."""
        ready = [one.ready for one in self.clients if one.ready is not None]
        return least_of(ready) if ready else None

    @property
    def stats(self) -> Stats | None:
        """Sums over the running engines."""
        stats = [one.stats for one in self.clients if one.stats is not None]
        return sum_of(stats) if stats else None

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """The fastest tier of each adapter over all engines."""
        return DigestTiers([one.tiers for one in self.clients])

    @property
    def num_restarts(self) -> int:
        """Restarts of all engines together."""
        return sum(one.num_restarts for one in self.clients)

    def replicas(self) -> dict[str, EngineStatus]:
        """Status of each engine, by name."""
        return {one.name: one.status() for one in self._members}

    def places_of(self, digest: str) -> dict[str, Tier]:
        """Tier of an adapter by engine; engines where it is on disk only are left out."""
        return {one.name: one.client.tiers[digest] for one in self._members if digest in one.client.tiers}

    # ---- requests; none of these waits

    def submit(self, request: Submit) -> Routed:
        """Send a request to one of the engines, now. If there is none, the stream raises NeverSent."""
        return self._dispatch.submit(request)

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._dispatch.abort(request_id)

    def move(self, request_id: str, adapter: str, adapter_rows: dict[str, int]) -> None:
        """Let a request go on with this adapter; unknown ids are ignored."""
        self._dispatch.move(request_id, adapter, adapter_rows)

    def load(self, digest: str) -> None:
        """Hint to the adapter's home that it will be wanted."""
        home = self._dispatch.home_of(digest)
        if home is not None:
            home.client.load(digest)

    def evict(self, digest: str) -> None:
        """Free the adapter's rows and host memory on all engines."""
        for one in self.clients:
            one.evict(digest)

    def pin(self, digests: Collection[str]) -> None:
        """Pin these adapters on all engines."""
        for one in self.clients:
            one.pin(digests)

    def reset_prefix_cache(self) -> None:
        """Forget what the prefix caches of all engines have."""
        for one in self._members:
            one.prefixes.clear()
            one.client.reset_prefix_cache()

    async def pause(self, mode: PauseMode, limit_seconds: float) -> None:
        """Pause all ready engines, and wait until they are quiet. EngineDied if one ends before, or is resumed."""
        await asyncio.gather(*(one.pause(mode, limit_seconds) for one in self.clients if one.state == "ready"))

    async def resume(self) -> None:
        """End the pauses of all ready engines. EngineDied if one ends before."""
        await asyncio.gather(*(one.resume() for one in self.clients if one.state == "ready"))

    @property
    def can_sleep(self) -> bool:
        """Whether all engines can."""
        return all(one.can_sleep for one in self.clients)

    async def sleep(self, level: int) -> None:
        """Let all engines sleep but those that are down. EngineDied if one ends for good."""
        for member in self._members:
            member.prefixes.clear()
        await asyncio.gather(*(one.sleep(level) for one in self.clients if one.state != "down"))

    async def wake(self) -> None:
        """Wake all engines, and wait until they are ready. EngineDied if one cannot start."""
        await asyncio.gather(*(one.wake() for one in self.clients if one.state == "asleep"))

    @property
    def is_paused(self) -> bool:
        """Whether all ready engines are paused."""
        ready = [one for one in self.clients if one.state == "ready"]
        return bool(ready) and all(one.is_paused for one in ready)

    # ---- inner parts

    async def _watch_all(self) -> None:
        """Ping silent engines; move requests away from those that do not answer, and kill hung ones."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            for one in self._members:
                one.ping_if_silent()
                if one.num_pings_unanswered >= PINGS_UNTIL_HUNG:
                    log.error("%s has left %d questions unanswered and is killed", one.name, one.num_pings_unanswered)
                    one.client.kill()
                elif one.num_pings_unanswered >= PINGS_UNTIL_SILENT:
                    self._dispatch.move_waiting(one)


_TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def least_of(ready: Sequence[Ready]) -> Ready:
    """The smallest size of each kind among these engines, of which there is at least one."""
    return msgspec.structs.replace(
        ready[0],
        max_model_len_tokens=min(one.max_model_len_tokens for one in ready),
        kv_capacity_tokens=min(one.kv_capacity_tokens for one in ready),
        row_bytes=min(one.row_bytes for one in ready),
    )


class DigestTiers(Mapping[str, Tier]):
    """The fastest tier of each digest over several engines; a digest that none holds is on disk."""

    def __init__(self, tiers: Sequence[Mapping[str, Tier]]) -> None:
        self._tiers = tiers

    def __getitem__(self, digest: str) -> Tier:
        held = {one.get(digest, "disk") for one in self._tiers}
        return next((tier for tier in _TIERS if tier in held), "disk")  # there may be no engine

    def __contains__(self, digest: object) -> bool:
        return any(digest in one for one in self._tiers)

    def __iter__(self) -> Iterator[str]:
        return iter(set().union(*map(list, self._tiers)))

    def __len__(self) -> int:
        return len(set().union(*map(list, self._tiers)))


def sum_of(stats: Sequence[Stats]) -> Stats:
    """Sums of numbers, and of counts by reason or tier; events of a single engine are left out."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in stats) for name in _SUMMED}
    for name in _COUNTED:
        counts: Counter[str] = Counter()
        for one in stats:
            counts.update(getattr(one, name))
        sums[name] = dict(counts)
    return msgspec.structs.replace(stats[0], **sums, **_NO_NEWS, is_paused=all(one.is_paused for one in stats))


_COUNTED = ("num_steps_eager", "num_adapter_requests", "num_tier_evictions", "loaded_bytes")
_NO_NEWS: dict[str, Any] = {"moved_adapters": {}, "adapter_load_seconds": (), "first_tokens": (), "steps": ()}
_SUMMED = tuple(name for name in Stats.__struct_fields__ if name not in (*_COUNTED, *_NO_NEWS, "is_paused"))
