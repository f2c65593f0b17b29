"""Admission: from a parsed request to sequences that the engine can run, in six stages.

    resolve    the model's name to the base or an adapter's digest, with a lease on it (`model_resolution`)
    reserve    a place in the queue for each sequence
    render     the chat template with the messages (`prompts`, `parsers`)
    tokenise   each prompt, which must fit (`prompts`)
    constrain  the answers: stop strings, token lists, grammar (`grammar`)
    plan       the sequences with their sampling (`sampling`), and charge their tokens

A stage that takes something registers its release: a request that is refused or given up leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

import msgspec

from service.api.admission.grammar import requested_grammar
from service.api.admission.model_resolution import ResolvedModel, resolve_request
from service.api.admission.prompts import Prompt, num_answer_tokens, raw_prompts, rendered, tokenized
from service.api.admission.sampling import (
    TokenLists,
    build_sampling,
    num_list_chars,
    seed_of_choice,
    stop_strings,
    token_lists,
)
from service.api.admission.scoring import check_task, pair_prompts, pooling_of, sampling_of
from service.api.errors import BadRequest
from service.api.queue_limits import QueuePlaces
from service.api.schema.pooled import PairRequest
from service.api.schema.requests import (
    MAX_HELD_LOGPROBS,
    ChatRequest,
    OnNewVersion,
    PooledRequest,
    PromptRequest,
)
from service.api.state import Services
from service.engine.ipc.messages import Pooling, Ready, Sampling
from service.fairness.thread_pool import run_in_thread
from service.tenants.limits import Charge, Tenant
from service.tenants.tenants import Caller
from service.text.answer_reader import ParserConfig
from service.text.stop_strings import StopAutomaton

# Inputs of an embedding request that run at a time; the others follow in the same places.
MAX_POOLED_AT_A_TIME = 64
# A character of a stop string, in the automaton, as much as so many of a text that is tokenised.
_STOP_CHARS = 10


@dataclass(frozen=True)
class PlannedSequence:
    """One sequence to run: `sampling.seed` is already this choice's own. `include_stop`: what ends the answer, a stop
    string or an end token's text, is part of it. `pooling`: the prompt's hidden states are wanted, and no answer.
    `on_new_version`: what happens when the adapter's name moves; `tells_versions`: the answer says which made it."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    stop: StopAutomaton
    skip_special_tokens: bool
    include_stop: bool
    pooling: Pooling | None = None
    cache_salt: str = ""
    on_new_version: OnNewVersion = "keep"
    tells_versions: bool = False

    @property
    def most_tokens(self) -> int:
        """Prompt and answer, if that is as long as it may be."""
        return len(self.prompt.token_ids) + self.sampling.max_tokens


@dataclass
class Admitted:
    """A request that can be served: hand it to a `GenerationJob`, or `release` it. It holds places in the queue while
    so many sequences have not ended, and the adapter until the last has.

    charge  the tokens of all plans, taken from what the tenant may have in a minute
    """

    tenant: Tenant
    target: ResolvedModel
    plans: list[PlannedSequence]
    places: QueuePlaces
    charge: Charge
    num_open: int = field(init=False)
    _num_unspent: int = field(init=False)
    _has_target: bool = True

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

    def _give_back(self, num_sequences: int, num_tokens: int) -> None:
        self.num_open -= num_sequences
        assert self.num_open >= 0, "a sequence has ended twice"
        self.places.shrink(self.num_open)
        self.tenant.give_back_tokens(self.charge, num_tokens)
        if not self.num_open:
            self.leave_target()

    def leave_target(self) -> None:
        """Give the adapter back, if that has not been done: sequences that have not ended have other versions."""
        if self._has_target:
            self._has_target = False
            self.target.release()


async def admit(
    services: Services, caller: Caller, request: PromptRequest, places: QueuePlaces | None = None
) -> Admitted:
    """The request with its sequences and all that they hold. ApiError or LimitReached, with nothing left behind.

    places  `num_places` that the caller has reserved; they are this request's from now on
    """
    tenant = caller.tenant
    with ExitStack() as undo:
        if places is not None:
            undo.callback(places.release)
        ready = services.require_ready()
        target = resolve_request(services, caller, request)
        undo.callback(target.release)
        # Before any text is looked at, so that no more requests than fit in the queue cost anything.
        if places is None:
            places = reserve(services, tenant, num_places(services, tenant, request), target.name)
            undo.callback(places.release)
        check_task(services, target, request)
        if isinstance(request, PairRequest):
            prompts = await pair_prompts(services, target, request, ready)
        else:
            texts = await rendered(services, target, request)
            prompts = await tokenized(services, request, texts, ready)
        constraints = await _constraints(services, ready, request, prompts[0].reading)
        plans = _plans(services, ready, target, request, prompts, constraints)
        charge = _charged(tenant, plans)
        undo.pop_all()
        return Admitted(tenant, target, plans, places, charge)


def reserve(services: Services, tenant: Tenant, num_places: int, model: str) -> QueuePlaces:
    """Places in the queue, shared among tenants, or among models where there are none. LimitReached, QueueFull."""
    return QueuePlaces(services.gate, tenant, tenant.name if services.tenants.has_file else model, num_places)


def most_places(services: Services, tenant: Tenant) -> int:
    """The most places that the tenant can ever have."""
    limit = tenant.limits.requests_in_flight
    return services.gate.limit if limit is None else min(limit, services.gate.limit)


def num_places(services: Services, tenant: Tenant, request: PromptRequest) -> int:
    """`n` for each prompt. BadRequest if the tenant could never have so many."""
    most = most_places(services, tenant)
    if isinstance(request, PooledRequest):
        return min(request.num_prompts, MAX_POOLED_AT_A_TIME, most)
    num_prompts = 1 if isinstance(request, ChatRequest) else len(raw_prompts(request))
    num_choices = request.n or 1
    if num_choices > services.settings.max_choices:
        raise BadRequest(f"`n` is {num_choices}; this server allows {services.settings.max_choices}.", param="n")
    if num_prompts * num_choices > most:
        raise BadRequest(
            f"{num_prompts} prompts with n = {num_choices} are more than the {most} sequences this server runs or "
            f"queues{'' if most == services.gate.limit else ' for you'}; send fewer.",
            param="prompt",
        )
    return num_prompts * num_choices


@dataclass(frozen=True)
class _Constraints:
    """Limits on the answers, for all sequences of a request."""

    stop: StopAutomaton
    lists: TokenLists
    grammar: str | None


async def _constraints(services: Services, ready: Ready, request: PromptRequest, reading: ParserConfig) -> _Constraints:
    if isinstance(request, PooledRequest):
        return _Constraints(StopAutomaton(()), TokenLists(), None)
    stop = stop_strings(request)
    automaton = await run_in_thread(partial(StopAutomaton, stop), size_chars=_STOP_CHARS * sum(map(len, stop)))
    lists = await run_in_thread(
        partial(token_lists, request, services.tokenizer, ready.vocab_size), size_chars=num_list_chars(request)
    )
    return _Constraints(automaton, lists, await requested_grammar(services, request, reading))


def _plans(
    services: Services,
    ready: Ready,
    target: ResolvedModel,
    request: PromptRequest,
    prompts: Sequence[Prompt],
    constraints: _Constraints,
) -> list[PlannedSequence]:
    """`n` sequences for each prompt, in order of the choices' index. BadRequest if one could never be served."""
    if isinstance(request, PooledRequest):
        plan = partial(PlannedSequence, stop=constraints.stop, skip_special_tokens=True, include_stop=False)
        pooling, salt = pooling_of(target, request), request.cache_salt or ""
        pooled = sampling_of(services, target, pooling)
        return [plan(uuid4().hex, prompt, pooled, pooling=pooling, cache_salt=salt) for prompt in prompts]
    plans = []
    on_new_version = request.on_new_version or target.on_new_version or services.settings.on_new_version
    for prompt in prompts:
        sampling = build_sampling(
            request,
            max_tokens=num_answer_tokens(ready, request, len(prompt.token_ids)),
            vocab_size=ready.vocab_size,
            eos_token_ids=services.tokenizer.eos_token_ids,
            own_eos_token_ids=target.eos_token_ids,
            defaults=services.sampling_defaults,
            lists=constraints.lists,
            grammar=constraints.grammar,
            max_logprobs=services.settings.max_logprobs,
        )
        for index in range(request.n or 1):
            plans.append(
                PlannedSequence(
                    request_id=uuid4().hex,
                    prompt=prompt,
                    sampling=msgspec.structs.replace(sampling, seed=seed_of_choice(request.seed, index)),
                    stop=constraints.stop,
                    skip_special_tokens=request.skip_special_tokens is not False,
                    include_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
                    cache_salt=request.cache_salt or "",
                    on_new_version=on_new_version,
                    tells_versions=request.on_new_version is not None,
                )
            )
    # One answer alone is seldom as long as it may be, and those of a stream do not wait for each other.
    if (wanted := num_logprobs(plans, with_answers=len(plans) > 1 and not request.stream)) > MAX_HELD_LOGPROBS:
        raise too_many_logprobs(wanted)
    return plans


def num_logprobs(plans: Sequence[PlannedSequence], *, with_answers: bool) -> int:
    """Log probabilities, alternatives included, that the sequences ask for: of prompts, and of answers that are as long
    as they may be. What there is of them is counted again as it comes (`service.api.queue_limits`)."""
    num = 0
    for plan in plans:
        sampling = plan.sampling
        if sampling.prompt_logprobs is not None:
            num += len(plan.prompt.token_ids) * (sampling.prompt_logprobs + 1)
        if sampling.logprobs is not None and with_answers:
            num += sampling.max_tokens * (sampling.logprobs + len(sampling.logprob_token_ids) + 1)
    return num


def too_many_logprobs(wanted: int) -> BadRequest:
    """The error for a request of so many log probabilities."""
    return BadRequest(
        f"This asks for up to {wanted} log probabilities of prompts and answers; a request may have "
        f"{MAX_HELD_LOGPROBS}: lower `max_tokens`, `logprobs`, `top_logprobs`, `prompt_logprobs` or `n`, or send fewer "
        "prompts.",
        param="logprobs",
    )


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
