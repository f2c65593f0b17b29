"""Dispatch of each request to one of several engines, and once more to another if that one is lost before the client
has received any of the answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from service.cluster.routing import Demand, Replica, ReplicaHealth, Rule, beginnings, choose
from service.engine.ipc.link import EngineDied, NeverSent, TokenStream
from service.engine.ipc.messages import Finished, Submit, Tokens

# The most output that counts before it is there: max_tokens says little about the output that comes. A request that has
# run for long counts as much as a new one, until it comes close to max_tokens.
MOST_EXPECTED_TOKENS = 256


@dataclass(slots=True)
class RemainingWork:
    """Tokens of one request that remain: its prompt, until there is output, and the output that may still come."""

    prompt_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, request: Submit) -> RemainingWork:
        """The work of a request that has not begun."""
        return cls(len(request.prompt_token_ids), request.sampling.max_tokens)

    @property
    def expected_tokens(self) -> int:
        return self.prompt_tokens + min(self.output_tokens, MOST_EXPECTED_TOKENS)

    def take(self, num_tokens: int) -> None:
        """Subtract output that has come."""
        self.prompt_tokens = 0
        self.output_tokens = max(self.output_tokens - num_tokens, 0)


class Routed:
    """The messages of one request, whichever engine they come from; see `service.api.engine_protocol.Messages`."""

    def __init__(self, dispatch: Dispatch, request: Submit) -> None:
        self.request = request
        self.has_begun = self.was_resent = False
        self.beginnings: list[bytes] = []
        self.left = RemainingWork.of(request)
        self.member: ReplicaHealth | None = None
        self._dispatch = dispatch
        self._inner: TokenStream | None = None
        self._listener: Callable[[], None] | None = None
        self._begin_anew: Callable[[], bool] | None = None

    def take(self, member: ReplicaHealth, inner: TokenStream) -> None:
        """Bind the request to this engine from now on."""
        self.member, self._inner = member, inner
        if self._listener is not None:
            inner.listen(self._listener)

    def lose(self, error: EngineDied) -> None:
        """Fail the request, which no engine has."""
        self._inner = TokenStream(self.request.request_id, lambda _request_id: None)
        self._inner.die(error)

    def begins_anew(self) -> bool:
        """Whether the client has received nothing yet. Messages that were polled are dropped then."""
        if self.has_begun and self._begin_anew is not None and self._begin_anew():
            self.has_begun = False
        return not self.has_begun

    def listen(self, listener: Callable[[], None], begin_anew: Callable[[], bool] | None = None) -> None:
        """See `service.api.engine_protocol.Messages`."""
        self._listener, self._begin_anew = listener, begin_anew
        assert self._inner is not None, "listened to before it was sent"
        self._inner.listen(listener)

    def poll(self) -> Tokens | Finished | None:
        """See `TokenStream.poll`."""
        assert self._inner is not None, "polled before it was sent"
        try:
            message = self._inner.poll()
        except EngineDied as death:
            if self._dispatch.send_again(self, death):
                return self.poll()
            raise
        if isinstance(message, Tokens):
            self.has_begun = True
            self._dispatch.progressed(self, len(message.token_ids))
        elif message is not None:
            self._dispatch.over(self)
        return message


class Dispatch:
    """Open requests, and the engine of each.

    members  the engines of this moment; the list is changed by its owner
    """

    def __init__(self, members: list[ReplicaHealth], rule: Rule) -> None:
        self._members, self._rule = members, rule
        self._demand = Demand()
        self._routed: dict[str, Routed] = {}
        self._last: tuple[Submit, list[bytes]] | None = None

    def submit(self, request: Submit) -> Routed:
        """Send a request to one of the engines, now. If there is none, the stream raises NeverSent."""
        routed = Routed(self, request)
        routed.beginnings = self._beginnings_of(request)
        self._routed[request.request_id] = routed
        homes = self._demand.ask(
            request.adapter, routed.left.expected_tokens, len(self._members), time.monotonic(), self._rule
        )
        order = self._order(routed, homes)
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

    def move(self, request_id: str, adapter: str, adapter_rows: dict[str, int]) -> None:
        """Let a request go on with this adapter, also where it is sent to again. Unknown ids are ignored."""
        routed = self._routed.get(request_id)
        if routed is not None and routed.member is not None:
            routed.request = msgspec.structs.replace(routed.request, adapter=adapter, adapter_rows=adapter_rows)
            routed.member.client.move(request_id, adapter, adapter_rows)

    def home_of(self, digest: str) -> ReplicaHealth | None:
        """The engine that an adapter without requests would be sent to; None where none is ready."""
        ready = self._taking()
        if not ready:
            return None
        home = choose(digest, 0, 0, [Replica(one.name) for one in ready], rule=self._rule)[0]
        return next(one for one in ready if one.name == home)

    def send_again(self, routed: Routed, death: EngineDied) -> bool:
        """Send a request to another engine, if the client has received nothing and it was not sent again before;
        whether it was sent."""
        lost = routed.member
        self._forget(routed)
        was_sent = not isinstance(death, NeverSent)
        others = [one for one in self._order(routed, 1) if one is not lost and one.answers]
        is_open = routed.request.request_id in self._routed
        if routed.was_resent or not others or not is_open or not routed.begins_anew():
            self.over(routed)
            return False
        routed.was_resent |= was_sent
        if lost is not None:
            lost.num_sent_again += was_sent
        self._send(routed, others[0])
        return True

    def progressed(self, routed: Routed, num_tokens: int) -> None:
        """Subtract tokens that have come from the request's remaining work."""
        assert routed.member is not None, "tokens of no engine"
        routed.member.queued_tokens -= routed.left.expected_tokens
        routed.left.take(num_tokens)
        routed.member.queued_tokens += routed.left.expected_tokens

    def over(self, routed: Routed) -> None:
        """Forget a request that has ended."""
        self._forget(routed)
        self._routed.pop(routed.request.request_id, None)

    def move_waiting(self, member: ReplicaHealth) -> None:
        """Send requests of an engine that does not answer, whose clients have received nothing, to others."""
        waiting = {one: routed for one, routed in self._routed.items() if one in member.open}
        for request_id, routed in waiting.items():
            can_move = any(one.answers for one in self._members if one is not member)
            if can_move and not routed.was_resent and routed.begins_anew():
                member.client.abort(request_id)
                with contextlib.suppress(EngineDied):
                    self.send_again(routed, EngineDied(f"{member.name} does not answer."))

    # ---- inner parts

    def _order(self, routed: Routed, homes: int) -> list[ReplicaHealth]:
        """All engines, the best first, those without new requests last."""
        request = routed.request
        by_name = {one.name: one for one in self._members}
        known = [one.as_replica(routed.beginnings) for one in self._taking()]
        num_rows = max(request.adapter_rows.values(), default=0)
        names = choose(
            *(request.adapter, num_rows, RemainingWork.of(request).expected_tokens, known),
            key=request.request_id,
            num_homes=homes,
            rule=self._rule,
        )
        chosen = [by_name[name] for name in names]
        others = (one for one in self._members if one not in chosen)
        return [*chosen, *sorted(others, key=lambda one: not one.answers)]

    def _beginnings_of(self, request: Submit) -> list[bytes]:
        """Once for all choices of a request, which have one prompt."""
        if self._last is not None:
            last, known = self._last
            is_same = last.prompt_token_ids is request.prompt_token_ids and last.cache_salt == request.cache_salt
            if is_same and (last.tenant, last.adapter) == (request.tenant, request.adapter):
                return known
        scope = request.tenant, request.cache_salt
        found = beginnings(request.prompt_token_ids, scope, request.adapter, request.adapter_start)
        self._last = request, found
        return found

    def _taking(self) -> list[ReplicaHealth]:
        """Engines that may get new requests: the uncordoned ones, or all that answer where all are cordoned."""
        answering = [one for one in self._members if one.answers]
        return [one for one in answering if one.takes_requests] or answering

    def _send(self, routed: Routed, member: ReplicaHealth) -> None:
        request = routed.request
        routed.left = RemainingWork.of(request)
        routed.left.prompt_tokens -= member.num_found(routed.beginnings)
        member.note_prompt(routed.beginnings)
        member.queued_tokens += routed.left.expected_tokens
        member.open.add(request.request_id)
        if request.adapter is not None:
            member.num_sent[member.client.tiers.get(request.adapter, "disk")] += 1
        routed.take(member, member.client.submit(request))

    def _forget(self, routed: Routed) -> None:
        """Unbind the request from its engine."""
        member, routed.member = routed.member, None
        if member is not None and routed.request.request_id in member.open:
            member.open.remove(routed.request.request_id)
            member.queued_tokens -= routed.left.expected_tokens
