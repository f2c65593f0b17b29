"""From a parsed request to sequences that can be served, which hold their places, tokens and adapter until they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from service.api.admission.grammar import requested_grammar
from service.api.admission.model_resolution import ResolvedModel, resolve
from service.api.admission.prompts import request_prompts, truncated
from service.api.admission.queue_slots import client_of_places, enter, leave, num_sequences
from service.api.admission.sampling import stop_strings
from service.api.admission.sequences import PlannedSequence, plan_sequences
from service.api.admission.token_lists import num_list_chars, token_lists
from service.api.errors import BadRequest
from service.api.run_in_thread import run_in_thread
from service.api.schema.requests import ChatRequest, CompletionRequest
from service.api.state import Services
from service.tenants.limits import Charge, Tenant
from service.tenants.tenants import Caller
from service.text.stop_strings import StopAutomaton

# A character of a stop string, in the automaton, as much as so many of a text that is tokenised.
_STOP_CHARS = 10


class Held(Protocol):
    """The resources of a `GenerationJob`: it releases them as its sequences end."""

    @property
    def tenant(self) -> Tenant: ...
    @property
    def target(self) -> ResolvedModel: ...

    @property
    def plans(self) -> list[PlannedSequence]: ...

    def end_one(self, plan: PlannedSequence, num_generated: int) -> None:
        """The plan's sequence has ended, after so many tokens."""

    def release(self) -> None:
        """Give back what is still held, if anything is."""


@dataclass
class Admitted:
    """A request that can be served: hand it to a `GenerationJob`, or `release` it. It holds a place in the queue for
    each planned sequence that has not ended, and the adapter until the last has.

    client   who has the places in the queue, see `client_of_places`; of a batch that of its first item
    charge  the tokens of all plans, taken from what the tenant may have in a minute
    """

    services: Services
    tenant: Tenant
    target: ResolvedModel
    plans: list[PlannedSequence]
    client: str
    charge: Charge
    num_open: int = field(init=False)
    _num_unspent: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = len(self.plans)
        self._num_unspent = sum(plan.most_tokens for plan in self.plans)

    def end_one(self, plan: PlannedSequence, num_generated: int) -> None:
        """A sequence has ended: give its place back and the tokens that it has not generated, and the adapter with the
        last of them."""
        self._num_unspent -= plan.most_tokens
        self._give_back(1, plan.sampling.max_tokens - num_generated)

    def release(self) -> None:
        """Give back what is still held, if anything is."""
        if self.num_open:
            self._give_back(self.num_open, self._num_unspent)

    def _give_back(self, num_places: int, num_tokens: int) -> None:
        self.num_open -= num_places
        assert self.num_open >= 0, "a sequence has ended twice"
        leave(self.services, self.tenant, num_places, self.client)
        self.tenant.give_back_tokens(self.charge, num_tokens)
        if not self.num_open:
            self.target.release()


async def admit(
    services: Services,
    caller: Caller,
    request: CompletionRequest | ChatRequest,
    *,
    has_places: bool = False,
    client: str = "",
) -> Admitted:
    """Everything about a request that can be checked before it runs. ApiError and LimitReached leave nothing behind.

    The places in the queue are taken before any text is looked at, so that no more requests than fit in it cost
    anything. With `has_places` the caller has taken them (`num_sequences`) for `client`; they are this request's from
    now on.
    """
    tenant = caller.tenant
    places = num_sequences(services, tenant, request) if has_places else 0
    target: ResolvedModel | None = None
    try:
        ready = services.require_ready()
        target = resolve(services, caller, request.model, request.adapter_id)
        if not has_places:
            wanted, client = num_sequences(services, tenant, request), client_of_places(services, tenant, target.name)
            enter(services, tenant, wanted, client)
            places = wanted
        prompts = await request_prompts(services, ready, target, request)
        kept = [truncated(services, ready, request, prompt) for prompt in prompts]
        stop = await _stop_automaton(request)
        lists = await run_in_thread(
            partial(token_lists, request, services.tokenizer, ready.vocab_size), size_chars=num_list_chars(request)
        )
        grammar = await requested_grammar(services, request, kept[0].reading)
        plans = plan_sequences(services, ready, target, request, kept, stop, lists, grammar)
        return Admitted(services, tenant, target, plans, client, charged(tenant, plans))
    except BaseException:
        leave(services, tenant, places, client)
        if target is not None:
            target.release()
        raise


def charged(tenant: Tenant, plans: Sequence[PlannedSequence]) -> Charge:
    """The tokens that the sequences may take, taken. BadRequest if the tenant may never have so many at once."""
    num_tokens = sum(plan.most_tokens for plan in plans)
    limit = tenant.limits.tokens_per_minute
    if limit is not None and num_tokens > limit:
        raise BadRequest(
            f"This request may take {num_tokens} tokens (prompt and `max_tokens` of each sequence), more than your "
            f"{limit} tokens per minute; lower `max_tokens`, or send less at a time.",
            param="max_tokens",
        )
    return tenant.take_tokens(num_tokens)


async def _stop_automaton(request: CompletionRequest | ChatRequest) -> StopAutomaton:
    """The stop strings, ready to be looked for; of all sequences of the request."""
    stop = stop_strings(request)
    return await run_in_thread(partial(StopAutomaton, stop), size_chars=_STOP_CHARS * sum(map(len, stop)))
