"""Admission: from a parsed request to sequences that the engine can run, in six stages.

    resolve    the model's name to the base or an adapter's digest, with a lease on it (`model_resolution`)
    reserve    a queue slot for each sequence
    render     the chat template with the messages (`rendering`)
    tokenise   each prompt, which must fit (`prompts`)
    constrain  the answers: stop strings, token lists, grammar (`answer_constraints`)
    plan       the sequences with their sampling (`plans`), and charge their tokens

Of a request whose answers are pooled `pooled` does what is between reserving and charging.
A stage that takes something registers its release: a request that is refused or given up leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field

from service.api.admission.answer_constraints import constraints_of
from service.api.admission.model_resolution import ResolvedModel, resolve_request
from service.api.admission.plans import PlannedSequence, plans_of
from service.api.admission.pooled import pooled_plans
from service.api.admission.prompts import tokenized
from service.api.admission.rendering import raw_prompts, rendered
from service.api.errors import BadRequest, QueueFull, quoted
from service.api.queue_limits import QueueLimits
from service.api.schema.requests import ChatRequest, CompletionRequest, PooledRequest, PromptRequest
from service.api.state import Services
from service.engine.ipc.messages import Ready
from service.tenants.limits import Charge, Tenant
from service.tenants.tenants import Caller

# Inputs of an embedding request that run at a time; the others follow in the same slots.
MAX_POOLED_AT_A_TIME = 64


class QueueSlots:
    """Queue slots of one request's sequences, the tenant's and the queue's, held until they are given back.

    LimitReached or QueueFull, with nothing taken, where the tenant or the client may not have all of them.
    """

    def __init__(self, queue: QueueLimits, tenant: Tenant, client: str, num_slots: int) -> None:
        tenant.enter(num_slots)
        try:
            queue.acquire(num_slots, client)
        except QueueFull:
            tenant.leave(num_slots)
            raise
        self._queue, self._tenant, self._client = queue, tenant, client
        self.num_held = num_slots

    def split(self, num_slots: int) -> QueueSlots:
        """Hand so many of them to another request."""
        self.num_held -= num_slots
        assert self.num_held >= 0, "more slots were handed over than held"
        part = copy(self)
        part.num_held = num_slots
        return part

    def shrink(self, most: int) -> None:
        """Release all beyond `most`."""
        num_given = max(0, self.num_held - most)
        self.num_held -= num_given
        self._queue.release(num_given, self._client)
        self._tenant.leave(num_given)

    def release(self) -> None:
        """Release all."""
        self.shrink(0)


@dataclass
class Admitted:
    """A request that can be served: hand it to a `GenerationJob`, or `release` it. It holds a queue slot for each
    of its sequences that has not ended, and the adapter until the last one has.

    charge  the tokens of all plans, taken from what the tenant may have in a minute
    """

    tenant: Tenant
    target: ResolvedModel
    plans: list[PlannedSequence]
    slots: QueueSlots
    charge: Charge
    num_open: int = field(init=False)
    _num_unspent: int = field(init=False)
    _has_target: bool = True

    def __post_init__(self) -> None:
        self.num_open = len(self.plans)
        self._num_unspent = sum(plan.most_tokens for plan in self.plans)

    def end_one(self, plan: PlannedSequence, num_generated: int, num_cached: int = 0) -> None:
        """A sequence has ended: release its slot and the tokens that were not computed for it, of which so many of
        its prompt's were in the prefix cache, and the adapter with the last of them."""
        self._num_unspent -= plan.most_tokens
        self._give_back(1, plan.sampling.max_tokens - num_generated + num_cached)

    def release(self) -> None:
        """Give back what is still held, if anything is."""
        if self.num_open:
            self._give_back(self.num_open, self._num_unspent)

    def _give_back(self, num_sequences: int, num_tokens: int) -> None:
        self.num_open -= num_sequences
        assert self.num_open >= 0, "a sequence has ended twice"
        self.slots.shrink(self.num_open)
        self.tenant.give_back_tokens(self.charge, num_tokens)
        if not self.num_open:
            self.leave_target()

    def leave_target(self) -> None:
        """Give the adapter back, if that has not been done: sequences that have not ended have other versions."""
        if self._has_target:
            self._has_target = False
            self.target.release()


async def admit(
    services: Services, caller: Caller, request: PromptRequest, slots: QueueSlots | None = None
) -> Admitted:
    """The request with its sequences and all that they hold. ApiError or LimitReached, with nothing left behind.

    slots  `num_queue_slots` that the caller has reserved; they are this request's from now on
    """
    tenant = caller.tenant
    with ExitStack() as undo:
        if slots is not None:
            undo.callback(slots.release)
        ready = services.require_ready()
        target = resolve_request(services, caller, request)
        undo.callback(target.release)
        # Before any text is looked at, so that no more requests than fit in the queue cost anything.
        if slots is None:
            slots = reserve(services, tenant, num_queue_slots(services, tenant, request), target.name)
            undo.callback(slots.release)
        if isinstance(request, PooledRequest):
            plans = await pooled_plans(services, ready, target, request)
        else:
            plans = await _generation_plans(services, ready, target, request)
        charge = _charged(tenant, plans)
        undo.pop_all()
        return Admitted(tenant, target, plans, slots, charge)


async def _generation_plans(
    services: Services, ready: Ready, target: ResolvedModel, request: CompletionRequest | ChatRequest
) -> list[PlannedSequence]:
    """The sequences of a request for answers in words."""
    if target.labels:
        raise BadRequest(
            f"The adapter {quoted(target.shown_name)!r} has a score head, trained to classify texts, and writes none; "
            "send them to /classify, /v1/score or /v1/rerank.",
            param="model",
        )
    texts = await rendered(services, target, request)
    prompts = await tokenized(services, request, texts, ready)
    constraints = await constraints_of(services, ready, request, prompts[0].reading)
    return plans_of(services, ready, target, request, prompts, constraints)


def reserve(services: Services, tenant: Tenant, num_slots: int, model: str) -> QueueSlots:
    """Queue slots, shared among tenants, or among models where there are none. LimitReached, QueueFull."""
    return QueueSlots(services.queue, tenant, tenant.name if services.tenants.has_file else model, num_slots)


def most_queue_slots(services: Services, tenant: Tenant) -> int:
    """The most queue slots that the tenant can ever have."""
    limit = tenant.limits.requests_in_flight
    return services.queue.limit if limit is None else min(limit, services.queue.limit)


def num_queue_slots(services: Services, tenant: Tenant, request: PromptRequest) -> int:
    """`n` for each prompt. BadRequest if the tenant could never have so many."""
    most = most_queue_slots(services, tenant)
    if isinstance(request, PooledRequest):
        return min(request.num_prompts, MAX_POOLED_AT_A_TIME, most)
    num_prompts = 1 if isinstance(request, ChatRequest) else len(raw_prompts(request))
    num_choices = request.n or 1
    if num_choices > services.settings.max_choices:
        raise BadRequest(f"`n` is {num_choices}; this server allows {services.settings.max_choices}.", param="n")
    if num_prompts * num_choices > most:
        raise BadRequest(
            f"{num_prompts} prompts with n = {num_choices} are more than the {most} sequences this server runs or "
            f"queues{'' if most == services.queue.limit else ' for you'}; send fewer.",
            param="prompt",
        )
    return num_prompts * num_choices


def _charged(tenant: Tenant, plans: Sequence[PlannedSequence]) -> Charge:
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
