"""Several engines behind one API process, each with a device of its own; to the routers they are one.

Each is behind an `EngineLink` of its own: a process of this one's, or somewhere else (`service.cluster.remote`). A
request goes where `service.cluster.routing` says; one whose engine dies, or stops answering, before its first token is
sent again once, to another. That repeats nothing: who asked has had nothing yet. A stream that had begun ends with
EngineDied, as with one engine.

Everything is in one event loop. Loads are what was sent from here, which is all where nobody else sends to these
engines; tiers and free rows are as the engines reported last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from service.cluster.routing import DEFAULT_RULE, Demand, Replica, Rule, choose
from service.engine.link import EngineLink
from service.engine.messages import EngineSaid, Finished, Ready, Stats, Submit, Tier, Tokens
from service.engine.streams import EngineDied, NeverSent, TokenStream

log = logging.getLogger(__name__)

_TIERS: tuple[Tier, ...] = ("device", "host", "disk")
# Most output of a request that counts as load before it is there: what clients allow says little of what comes.
MOST_EXPECTED_TOKENS = 256
# An engine that has said nothing for so long is asked, again and again; it answers between two steps.
ASK_SECONDS = 1.0
# After so many questions it gets no new requests, and those that wait for their first token go elsewhere. Questions and
# not seconds, since this process may have stood still itself.
QUESTIONS_UNTIL_SILENT = 6
# After so many it is killed, and started again: far more than the longest step of a machine that works.
QUESTIONS_UNTIL_HUNG = 120


@dataclass(eq=False)
class Member:
    """An engine.

    open              requests that were sent to it and are not over
    num_questions     asked since it last said something
    asked_seconds     when the last one was, by time.monotonic()
    """

    name: str
    client: EngineLink
    open: dict[str, Routed] = field(default_factory=dict)
    queued_tokens: int = 0
    num_sent: Counter[Tier] = field(default_factory=Counter)
    num_sent_again: int = 0
    num_questions: int = 0
    asked_seconds: float = 0.0

    @property
    def takes_requests(self) -> bool:
        return self.client.state == "ready" and self.num_questions < QUESTIONS_UNTIL_SILENT

    def ask_if_silent(self) -> None:
        """Count the questions that it has not answered; one more if it has said nothing for a while."""
        now_seconds, heard_seconds = time.monotonic(), self.client.heard_seconds
        if self.client.state != "ready" or heard_seconds >= self.asked_seconds:
            self.num_questions = 0
        if self.client.state == "ready" and now_seconds - heard_seconds >= ASK_SECONDS:
            self.client.ask()
            self.num_questions, self.asked_seconds = self.num_questions + 1, now_seconds


class Routed:
    """The messages of one request, whichever engine they come from; see `service.api.state.Messages`."""

    def __init__(self, engines: Engines, request: Submit) -> None:
        self.request = request
        self.has_begun = self.was_resent = False
        self.left_tokens = 0
        self.member: Member | None = None
        self._engines = engines
        self._inner: TokenStream | None = None
        self._listener: Callable[[], None] | None = None

    def take(self, member: Member, inner: TokenStream) -> None:
        """It is this engine's from now on."""
        self.member, self._inner = member, inner
        if self._listener is not None:
            inner.listen(self._listener)

    def lose(self, error: EngineDied) -> None:
        """It is no engine's."""
        self._inner = TokenStream(self.request.request_id, lambda _request_id: None)
        self._inner.die(error)

    def listen(self, listener: Callable[[], None]) -> None:
        """See `TokenStream.listen`."""
        self._listener = listener
        assert self._inner is not None, "listened to before it was sent"
        self._inner.listen(listener)

    def poll(self) -> Tokens | Finished | None:
        """See `TokenStream.poll`."""
        assert self._inner is not None, "polled before it was sent"
        try:
            message = self._inner.poll()
        except EngineDied as death:
            if self._engines.send_again(self, death):
                return self.poll()
            raise
        if isinstance(message, Tokens):
            self.has_begun = True
            self._engines.progressed(self, len(message.token_ids))
        elif message is not None:
            self._engines.over(self)
        return message


class Engines:
    """See the module's docstring. What an `EngineLink` says of one engine, this says of all: it is ready while one
    is, `ready` has the smallest sizes of those, `stats` the sums, `tiers` the best place."""

    def __init__(self, clients: Sequence[EngineLink], rule: Rule = DEFAULT_RULE) -> None:
        self._members = [Member(f"engine-{number}", client) for number, client in enumerate(clients)]
        self._rule = rule
        self._demand = Demand()
        self._watch: asyncio.Task[None] | None = None
        self._routed: dict[str, Routed] = {}

    # ---- life

    @property
    def clients(self) -> list[EngineLink]:
        """Those that are there now."""
        return [one.client for one in self._members]

    def on_client(self, listener: Callable[[int, EngineLink], None]) -> None:
        """Call `listener` with each engine's number and client."""
        for number, one in enumerate(self._members):
            listener(number, one.client)

    async def start(self) -> None:
        """Start all and keep them running; returns at once."""
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
        """As of one engine, for all at the same time."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(one.drain(limit_seconds) for one in self.clients))

    async def close(self) -> None:
        """As of one engine."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(one.close() for one in self.clients))

    # ---- what is said of all

    @property
    def state(self) -> str:
        """ "ready" while one is, "down" when all are."""
        states = [one.state for one in self.clients]
        return next((one for one in ("draining", "ready", "starting", "restarting") if one in states), "down")

    @property
    def state_error(self) -> str | None:
        """Of the first that has one."""
        return next((one.state_error for one in self.clients if one.state_error), None)

    @property
    def ready(self) -> Ready | None:
        """Sizes that each ready engine has at least."""
        ready = [one.ready for one in self.clients if one.ready is not None]
        if not ready:
            return None
        return msgspec.structs.replace(
            ready[0],
            max_model_len_tokens=min(one.max_model_len_tokens for one in ready),
            kv_capacity_tokens=min(one.kv_capacity_tokens for one in ready),
            row_bytes=min(one.row_bytes for one in ready),
        )

    @property
    def stats(self) -> Stats | None:
        """Sums over the running engines."""
        stats = [one.stats for one in self.clients if one.stats is not None]
        return _sum(stats) if stats else None

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """The fastest place over all engines."""
        return _Tiers([one.tiers for one in self.clients])

    @property
    def num_restarts(self) -> int:
        """Of all together."""
        return sum(one.num_restarts for one in self.clients)

    def replicas(self) -> dict[str, EngineSaid]:
        """Of each engine, by name."""
        return {
            one.name: EngineSaid(
                one.client.state if one.takes_requests or one.client.state != "ready" else "silent",
                one.client.state_error,
                one.queued_tokens,
                len(one.open),
                dict(one.num_sent),
                one.num_sent_again,
                one.client.stats,
            )
            for one in self._members
        }

    def places_of(self, digest: str) -> dict[str, Tier]:
        """Where an adapter is, by engine; those where it is on disk alone are left out."""
        return {one.name: one.client.tiers[digest] for one in self._members if digest in one.client.tiers}

    # ---- requests; none of these waits

    def submit(self, request: Submit) -> Routed:
        """Send a request to one of the engines, now. The stream says how it went, also if none is there."""
        routed = Routed(self, request)
        self._routed[request.request_id] = routed
        homes = self._demand.ask(
            request.adapter, expected_tokens(request), len(self._members), time.monotonic(), self._rule
        )
        order = self._order(request, homes)
        if order:
            self._send(routed, order[0])
        else:
            routed.lose(NeverSent("No engine is there."))
        return routed

    def abort(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        routed = self._routed.get(request_id)
        if routed is not None and routed.member is not None:
            routed.member.client.abort(request_id)
            self.over(routed)

    def load(self, digest: str) -> None:
        """Hint to the adapter's home that it will be wanted."""
        ready = [one for one in self._members if one.takes_requests]
        if ready:
            home = choose(digest, 0, 0, [Replica(one.name) for one in ready], rule=self._rule)[0]
            next(one for one in ready if one.name == home).client.load(digest)

    def evict(self, digest: str) -> None:
        """Free its rows and host memory, on all."""
        for one in self.clients:
            one.evict(digest)

    def keep(self, digests: Collection[str]) -> None:
        """Have these on the device, on all."""
        for one in self.clients:
            one.keep(digests)

    def send_again(self, routed: Routed, death: EngineDied) -> bool:
        """To another engine, if it has not begun and was not sent again before. False if that cannot be."""
        lost = routed.member
        self._forget(routed)
        was_sent = not isinstance(death, NeverSent)
        others = [one for one in self._order(routed.request, 1) if one is not lost and one.takes_requests]
        if routed.has_begun or routed.was_resent or not others or routed.request.request_id not in self._routed:
            self.over(routed)
            return False
        routed.was_resent |= was_sent
        if lost is not None:
            lost.num_sent_again += was_sent
        self._send(routed, others[0])
        return True

    def progressed(self, routed: Routed, num_tokens: int) -> None:
        """Tokens have come: what is left of it is less, and no more than all that may come."""
        most = min(routed.request.sampling.max_tokens, MOST_EXPECTED_TOKENS)
        assert routed.member is not None, "tokens of no engine"
        left = max(min(routed.left_tokens, most) - num_tokens, 0)
        routed.member.queued_tokens += left - routed.left_tokens
        routed.left_tokens = left

    def over(self, routed: Routed) -> None:
        """Nothing more comes."""
        self._forget(routed)
        self._routed.pop(routed.request.request_id, None)

    # ---- inner parts

    def _order(self, request: Submit, homes: int) -> list[Member]:
        """All engines, the best first, those that take no requests last."""
        by_name = {one.name: one for one in self._members}
        taking = [one for one in self._members if one.takes_requests]
        known = [Replica(one.name, one.queued_tokens, _free_rows(one), one.client.tiers) for one in taking]
        num_rows = max(request.adapter_rows.values(), default=0)
        names = choose(
            *(request.adapter, num_rows, expected_tokens(request), known),
            key=request.request_id,
            num_homes=homes,
            rule=self._rule,
        )
        chosen = [by_name[name] for name in names]
        return [*chosen, *(one for one in self._members if one not in chosen)]

    def _send(self, routed: Routed, member: Member) -> None:
        request = routed.request
        routed.left_tokens = expected_tokens(request)
        member.queued_tokens += routed.left_tokens
        member.open[request.request_id] = routed
        if request.adapter is not None:
            member.num_sent[member.client.tiers.get(request.adapter, "disk")] += 1
        routed.take(member, member.client.submit(request))

    def _forget(self, routed: Routed) -> None:
        """It is no engine's any more."""
        member, routed.member = routed.member, None
        if member is not None and member.open.pop(routed.request.request_id, None) is not None:
            member.queued_tokens -= routed.left_tokens
            routed.left_tokens = 0

    async def _watch_all(self) -> None:
        """Ask engines that say nothing; let go of those that do not answer."""
        while True:
            await asyncio.sleep(ASK_SECONDS)
            for one in self._members:
                one.ask_if_silent()
                if one.num_questions >= QUESTIONS_UNTIL_HUNG:
                    log.error("%s has left %d questions unanswered and is killed", one.name, one.num_questions)
                    one.client.kill()
                elif one.num_questions >= QUESTIONS_UNTIL_SILENT:
                    self._move_waiting(one)

    def _move_waiting(self, member: Member) -> None:
        """Requests of an engine that does not answer, and that have had nothing, go to others."""
        for request_id, routed in list(member.open.items()):
            can_move = any(one.takes_requests for one in self._members if one is not member)
            if can_move and not routed.has_begun and not routed.was_resent:
                member.client.abort(request_id)
                with contextlib.suppress(EngineDied):
                    self.send_again(routed, EngineDied(f"{member.name} does not answer."))


class _Tiers(Mapping[str, Tier]):
    """The best of several; a digest that none holds is on disk."""

    def __init__(self, tiers: Sequence[Mapping[str, Tier]]) -> None:
        self._tiers = tiers

    def __getitem__(self, digest: str) -> Tier:
        held = {one.get(digest, "disk") for one in self._tiers}
        return next(tier for tier in _TIERS if tier in held)

    def __contains__(self, digest: object) -> bool:
        return any(digest in one for one in self._tiers)

    def __iter__(self) -> Iterator[str]:
        return iter(set().union(*map(list, self._tiers)))

    def __len__(self) -> int:
        return len(set().union(*map(list, self._tiers)))


def expected_tokens(request: Submit) -> int:
    """What a request counts as load before anything of it is computed."""
    return len(request.prompt_token_ids) + min(request.sampling.max_tokens, MOST_EXPECTED_TOKENS)


def _free_rows(one: Member) -> int:
    stats = one.client.stats
    return 0 if stats is None else stats.rows_total - stats.rows_used


def _sum(stats: Sequence[Stats]) -> Stats:
    """Numbers, and counts by reason or tier, added up; what is news of one engine is left out."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in stats) for name in _SUMMED}
    for name in _COUNTED:
        counts: Counter[str] = Counter()
        for one in stats:
            counts.update(getattr(one, name))
        sums[name] = dict(counts)
    return msgspec.structs.replace(stats[0], **sums, **_NO_NEWS)


_COUNTED = ("num_steps_eager", "num_adapter_requests", "num_tier_evictions", "loaded_bytes")
_NO_NEWS: dict[str, Any] = {"moved_adapters": {}, "adapter_load_seconds": (), "first_tokens": (), "steps": ()}
_SUMMED = tuple(name for name in Stats.__struct_fields__ if name not in _COUNTED and name not in _NO_NEWS)
