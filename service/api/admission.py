"""From a parsed request to sequences that can be served: name to digest once, text to tokens, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, TypeVar
from uuid import uuid4

import msgspec

from adapters import errors as store_errors
from adapters.invocation import invocation_start
from adapters.store import Lease
from service.api.errors import BadRequest, QueueFull, UnknownModel, quoted
from service.api.grammars import requested_grammar
from service.api.json_body import check_inner_counts
from service.api.namespace import Namespace
from service.api.reading import check_template_takes_tools, reading_of, shown_tools
from service.api.sampling import build_sampling, seed_of_choice, stop_strings
from service.api.schemas import MAX_PROMPT_LOGPROBS, ChatRequest, CompletionRequest, TokenizeRequest
from service.api.state import Services
from service.api.token_rules import TokenRules, num_rule_chars, token_rules
from service.api.tools import tools_chars
from service.engine.messages import Ready, Sampling
from service.tenants.limits import Charge, Tenant
from service.tenants.tenants import Caller
from service.text.answer_reader import PLAIN, Reading
from service.text.chat_template import RESERVED_VARIABLES, ChatTemplate
from service.text.stop_strings import StopAutomaton
from service.text.template_worker import AdapterTemplate

DEFAULT_COMPLETION_TOKENS = 16
# Of a text that need not fit: far beyond most contexts, since counting what does not fit is what many ask for.
# Tokenising takes 200 bytes for each.
MAX_TEXT_CHARS = 1 << 20
# Longer texts are tokenised in a thread, so that they do not hold up the streams of other requests.
_LONG_TEXT_CHARS = 20_000
# Even longer ones one after another, as tokenising takes two hundred times their memory.
_HUGE_TEXT_CHARS = 1 << 20
_huge_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge-text")
# A message costs as much as so many characters of one, however short it is.
_MESSAGE_CHARS = 50
_VALUE_CHARS = 5
# A character of a stop string, in the automaton, as much as so many.
_STOP_CHARS = 10

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """What a request's names stand for: the base (no lease) or one adapter's digest, held until `release`.

    name        the base's, or the store's name of the adapter
    shown_name  what the caller calls it
    turn        what takes turns for an adapter's own template, see `Services.template_turn`
    """

    name: str
    lease: Lease | None
    shown_name: str = ""
    turn: str = ""

    @property
    def digest(self) -> str | None:
        """The adapter's digest, None for the base."""
        return None if self.lease is None else self.lease.record.digest

    @property
    def adapter_rows(self) -> dict[str, int]:
        """Rows that the adapter takes on the device, by projection group."""
        return {} if self.lease is None else self.lease.record.manifest.rows

    def start_in(self, token_ids: Sequence[int]) -> int | None:
        """The token of a prompt at which the adapter begins to work; None where it is not invoked."""
        invocation = () if self.lease is None else self.lease.record.manifest.invocation
        return invocation_start(token_ids, invocation) if invocation else 0

    @property
    def has_template(self) -> bool:
        """Whether the adapter ships a chat template of its own: one that nobody here has chosen."""
        return self.lease is not None and self.lease.record.manifest.has_chat_template

    def release(self) -> None:
        """Give the adapter's files back to the store; exactly once."""
        if self.lease is not None:
            self.lease.release()


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, the text that `echo` gives back, and how its answers are to be read."""

    token_ids: tuple[int, ...]
    text: str
    reading: Reading = PLAIN


@dataclass(frozen=True)
class Plan:
    """One sequence to run: `sampling.seed` is already this choice's own. `include_stop`: what ends the answer, a stop
    string or an end token's text, is part of it. `pooling`: the prompt's hidden states are wanted, and no answer."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    stop: StopAutomaton
    skip_special_tokens: bool
    include_stop: bool
    pooling: Literal["last", "mean"] | None = None

    @property
    def most_tokens(self) -> int:
        """Prompt and answer, if that is as long as it may be."""
        return len(self.prompt.token_ids) + self.sampling.max_tokens


class Held(Protocol):
    """What a `Job` runs and gives back."""

    @property
    def tenant(self) -> Tenant: ...
    @property
    def target(self) -> Target: ...

    @property
    def plans(self) -> list[Plan]: ...

    def end_one(self, plan: Plan, num_generated: int) -> None:
        """The plan's sequence has ended, after so many tokens."""

    def release(self) -> None:
        """Give back what is still held, if anything is."""


@dataclass
class Admitted:
    """A request that can be served: hand it to a `Job`, or `release` it. It has a place in the queue for each plan that
    has not ended, and the adapter as long as there is one.

    payer   who has the places in the queue, see `payer_of`; of a batch that of its first item
    charge  the tokens of all plans, taken from what the tenant may have in a minute
    """

    services: Services
    tenant: Tenant
    target: Target
    plans: list[Plan]
    payer: str
    charge: Charge
    num_open: int = field(init=False)
    _num_unspent: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = len(self.plans)
        self._num_unspent = sum(plan.most_tokens for plan in self.plans)

    def end_one(self, plan: Plan, num_generated: int) -> None:
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
        leave(self.services, self.tenant, num_places, self.payer)
        self.tenant.give_back_tokens(self.charge, num_tokens)
        if not self.num_open:
            self.target.release()


async def admit(
    services: Services,
    caller: Caller,
    request: CompletionRequest | ChatRequest,
    *,
    has_places: bool = False,
    payer: str = "",
) -> Admitted:
    """Everything about a request that can be checked before it runs. ApiError and LimitReached leave nothing behind.

    The places in the queue are taken before any text is looked at, so that no more requests than fit in it cost
    anything. With `has_places` the caller has taken them (`num_sequences`) for `payer`; they are this request's from
    now on.
    """
    tenant = caller.tenant
    places = num_sequences(services, tenant, request) if has_places else 0
    target: Target | None = None
    try:
        ready = services.require_ready()
        target = resolve(services, caller, request.model, request.adapter_id)
        if not has_places:
            wanted, payer = num_sequences(services, tenant, request), payer_of(services, tenant, target.name)
            enter(services, tenant, wanted, payer)
            places = wanted
        prompts = await _prompts(services, ready, target, request)
        kept = [_truncated(services, ready, request, prompt) for prompt in prompts]
        stop = await _stop_automaton(request)
        rules = await off_loop(
            partial(token_rules, request, services.tokenizer, ready.vocab_size), size_chars=num_rule_chars(request)
        )
        grammar = await requested_grammar(services, request, kept[0].reading)
        plans = plan_sequences(services, ready, request, kept, stop, rules, grammar)
        return Admitted(services, tenant, target, plans, payer, charged(tenant, plans))
    except BaseException:
        leave(services, tenant, places, payer)
        if target is not None:
            target.release()
        raise


def charged(tenant: Tenant, plans: Sequence[Plan]) -> Charge:
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


def payer_of(services: Services, tenant: Tenant, model: str) -> str:
    """Among whom places in the queue are shared: tenants, and models where there are none."""
    return tenant.name if services.tenants.has_file else model


def enter(services: Services, tenant: Tenant, num_sequences: int, payer: str) -> None:
    """Take places for a tenant's sequences. LimitReached, QueueFull if it may not have all, or not all are free."""
    tenant.enter(num_sequences)
    try:
        services.gate.enter(num_sequences, payer)
    except QueueFull:
        tenant.leave(num_sequences)
        raise


def leave(services: Services, tenant: Tenant, num_sequences: int, payer: str) -> None:
    """Give places of a tenant's sequences back."""
    services.gate.leave(num_sequences, payer)
    tenant.leave(num_sequences)


def most_sequences(services: Services, tenant: Tenant) -> int:
    """How many the tenant can ever have in flight."""
    limit = tenant.limits.requests_in_flight
    return services.gate.limit if limit is None else min(limit, services.gate.limit)


def num_sequences(services: Services, tenant: Tenant, request: CompletionRequest | ChatRequest) -> int:
    """`n` for each prompt. BadRequest if the tenant could never have so many."""
    num_choices = request.n or 1
    if num_choices > services.settings.max_choices:
        raise BadRequest(f"`n` is {num_choices}; this server allows {services.settings.max_choices}.", param="n")
    num_prompts = 1 if isinstance(request, ChatRequest) else len(_raw_prompts(request))
    most = most_sequences(services, tenant)
    if num_prompts * num_choices > most:
        raise BadRequest(
            f"{num_prompts} prompts with n = {num_choices} are more than the {most} sequences this server runs or "
            f"queues{'' if most == services.gate.limit else ' for you'}; send fewer.",
            param="prompt",
        )
    return num_prompts * num_choices


async def _stop_automaton(request: CompletionRequest | ChatRequest) -> StopAutomaton:
    """The stop strings, ready to be looked for; of all sequences of the request."""
    stop = stop_strings(request)
    return await off_loop(partial(StopAutomaton, stop), size_chars=_STOP_CHARS * sum(map(len, stop)))


async def _prompts(
    services: Services, ready: Ready, target: Target, request: CompletionRequest | ChatRequest
) -> list[Prompt]:
    if isinstance(request, CompletionRequest):
        return await completion_prompts(services, ready, request)
    return [await chat_prompt(services, target, request)]


def _truncated(services: Services, ready: Ready, request: CompletionRequest | ChatRequest, prompt: Prompt) -> Prompt:
    """What `truncate_prompt_tokens` leaves of the prompt. BadRequest if more is to be kept than there is room for."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return prompt
    limit = min(ready.max_model_len_tokens, ready.kv_capacity_tokens)
    if asked > limit:
        raise BadRequest(
            f"`truncate_prompt_tokens` is {asked}, but this server holds {limit} tokens for a request; lower it.",
            param="truncate_prompt_tokens",
        )
    most = asked if asked > 0 else max(1, limit - (_wanted_tokens(request) or 1))
    if len(prompt.token_ids) <= most:
        return prompt
    token_ids = prompt.token_ids[:most] if request.truncation_side == "right" else prompt.token_ids[-most:]
    text = services.tokenizer.decode(token_ids, skip_special_tokens=False) if request.echo else ""
    return replace(prompt, token_ids=token_ids, text=text)


def resolve_name(services: Services, model: str | None, adapter_id: str | None = None) -> str | None:
    """The adapter that `model` (None: the base) and `adapter_id` name, None for the base. Whether it exists is not
    checked."""
    base = services.settings.base_name
    if model is None:
        return adapter_id
    if not model:
        raise BadRequest(f"`model` is empty; send {base!r}, an adapter's name, or '{base}:<adapter>'.", param="model")
    prefix, _, suffix = model.partition(":")
    if prefix == base and suffix:
        named: str | None = suffix
    else:
        named = None if model == base else model
    if adapter_id:
        if named is not None and named != adapter_id:
            raise BadRequest(
                f"`model` names the adapter {quoted(named)!r} and `adapter_id` names {quoted(adapter_id)!r}; "
                "send one of them.",
                param="adapter_id",
            )
        return adapter_id
    return named


def resolve(services: Services, caller: Caller, model: str | None, adapter_id: str | None = None) -> Target:
    """Names to a digest, with a lease on it. UnknownModel if there is no such adapter for the caller, or none at all:
    LoRA is off."""
    name = resolve_name(services, model, adapter_id)
    if name is None:
        return Target(services.settings.base_name, None, services.settings.base_name)
    param = "adapter_id" if adapter_id else "model"
    unknown = f"The model `{quoted(adapter_id or model or name)}` does not exist"
    if services.store is None:
        raise UnknownModel(
            f"{unknown}: LoRA is off, so there is only {services.settings.base_name!r}; to serve adapters, start the "
            "server with --adapter-row-bytes above 0.",
            param=param,
        )
    try:
        namespace = Namespace(services.store, services.tenants, caller)
        lease = namespace.lease(name)
        full_name = lease.record.name
        # Where there are several tenants none of them can have all turns.
        turn = f"{caller.tenant.name}/" if services.tenants.has_file else lease.record.digest
        return Target(full_name, lease, namespace.shown_name(full_name), turn)
    except store_errors.NotFound:
        raise UnknownModel(f"{unknown}; GET /v1/models lists what does.", param=param) from None


async def off_loop(work: Callable[[], T], *, size_chars: int) -> T:
    """Run `work` here, in a thread if the text is long, or in the thread of the longest."""
    if size_chars < _LONG_TEXT_CHARS:
        return work()
    if size_chars < _HUGE_TEXT_CHARS:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_huge_texts, work)


def _cost_chars(variables: Any) -> int:
    """About the characters of plain data as text, or enough of them for `off_loop` to leave the loop."""
    waiting, num_chars = [variables], 0
    while waiting and num_chars < _LONG_TEXT_CHARS:
        one = waiting.pop()
        num_chars += len(one) if isinstance(one, str) else _VALUE_CHARS
        if isinstance(one, dict):
            waiting.extend(one)
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
    return num_chars


def chat_template_of(services: Services, target: Target) -> ChatTemplate | AdapterTemplate:
    """The adapter's own template, or else the base's. BadRequest if neither has one."""
    if target.digest is not None and target.has_template:
        own = services.adapter_template(target.digest)
        if own is not None:
            return own
    if services.template is None:
        raise BadRequest("This model has no chat template; send the prompt to /v1/completions instead of messages.")
    return services.template


async def chat_prompt(services: Services, target: Target, request: ChatRequest | TokenizeRequest) -> Prompt:
    """The request's messages, which it must have, through the chat template to tokens."""
    messages, given = request.messages, request.chat_template_kwargs
    assert messages is not None, "a request without messages has no chat"
    taken = RESERVED_VARIABLES & set(given or ())
    if taken:
        raise BadRequest(f"chat_template_kwargs may not hold {', '.join(sorted(taken))}.", param="chat_template_kwargs")
    final = bool(request.continue_final_message)
    generate = not final if request.add_generation_prompt is None else request.add_generation_prompt

    tools = shown_tools(request)

    def render() -> tuple[str, Reading]:
        check_inner_counts([text for message in messages for text in message.json_texts])
        plain = [message.for_template() for message in messages]
        template = chat_template_of(services, target)
        if tools:
            check_template_takes_tools(template.source)
        variables = _reasoning_variables(template, request.reasoning_effort) | (given or {})
        text = template.render(
            plain,
            add_generation_prompt=generate,
            continue_final_message=final,
            tools=[tool.for_template() for tool in tools] or None,
            variables=variables,
        )
        if isinstance(request, TokenizeRequest):
            return text, PLAIN
        return text, reading_of(services, request, template.source, text)

    def encode(text: str, reading: Reading) -> Prompt:
        _refuse_hopeless(services, request, text, "messages")
        return replace(encoded(services, text, special=bool(request.add_special_tokens)), reading=reading)

    if target.has_template:
        async with services.template_turn(target.turn):
            text, reading = await asyncio.wrap_future(services.template_workers.submit(render))
        return await off_loop(lambda: encode(text, reading), size_chars=len(text))
    size_chars = sum(_MESSAGE_CHARS + message.num_chars for message in messages) + tools_chars(tools)
    return await off_loop(lambda: encode(*render()), size_chars=size_chars + _cost_chars(given))


def _reasoning_variables(template: ChatTemplate | AdapterTemplate, effort: str | None) -> dict[str, Any]:
    """What a template sees of `reasoning_effort`, as with vLLM. BadRequest if it would look at none of it."""
    if effort is None:
        return {}
    if "reasoning_effort" in template.source or (effort == "none" and "enable_thinking" in template.source):
        return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    raise BadRequest(
        f"`reasoning_effort` is {quoted(effort)!r}, which this model's chat template does not take; leave it out.",
        param="reasoning_effort",
    )


async def completion_prompts(services: Services, ready: Ready, request: CompletionRequest) -> list[Prompt]:
    """The four forms of `prompt` to tokens."""
    texts = _raw_prompts(request)
    special = request.add_special_tokens is None or request.add_special_tokens

    for text in texts:
        if isinstance(text, str):
            _refuse_hopeless(services, request, text, "prompt")

    def work() -> list[Prompt]:
        return [_completion_prompt(services, ready, text, special=special, echo=bool(request.echo)) for text in texts]

    return await off_loop(work, size_chars=sum(len(text) for text in texts))


def _raw_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The four forms of `prompt` as one."""
    raw = request.prompt
    if isinstance(raw, str):
        return [raw]
    if not raw:
        raise BadRequest("`prompt` is an empty list; send at least one token or text.", param="prompt")
    return [raw] if isinstance(raw[0], int) else list(raw)


def encoded(services: Services, text: str, *, special: bool) -> Prompt:
    """Text to tokens, with the special tokens of the tokenizer's post-processor if `special`."""
    return Prompt(tuple(services.tokenizer.encode(text, add_special_tokens=special)), text)


def _refuse_hopeless(
    services: Services, request: CompletionRequest | ChatRequest | TokenizeRequest, text: str, field: str
) -> None:
    """BadRequest for a text that is too long however its tokens fall, before they are looked for."""
    ready, most_chars = services.engine.ready, services.tokenizer.max_chars_per_token
    if not isinstance(request, TokenizeRequest) and request.truncate_prompt_tokens is not None:
        if len(text) > MAX_TEXT_CHARS:
            raise BadRequest(
                f"The prompt has {len(text)} characters; to be truncated it may have {MAX_TEXT_CHARS}: shorten it.",
                param=field,
            )
        return
    if ready is not None and most_chars is not None:
        limit = min(ready.max_model_len_tokens, ready.kv_capacity_tokens)
        if len(text) > limit * most_chars:
            raise BadRequest(
                f"The prompt has {len(text)} characters, which cannot be within the {limit} tokens that this server "
                "holds for a request; shorten it.",
                param=field,
            )


def _completion_prompt(services: Services, ready: Ready, raw: str | list[int], *, special: bool, echo: bool) -> Prompt:
    tokenizer = services.tokenizer
    if isinstance(raw, str):
        return encoded(services, raw, special=special)
    # The text is needed for `echo` only; a prompt that cannot be served is refused once the limits are checked.
    if not echo or len(raw) > ready.max_model_len_tokens or max(raw, default=0) >= ready.vocab_size:
        return Prompt(tuple(raw), "")
    return Prompt(tuple(raw), tokenizer.decode(raw, skip_special_tokens=False))


def plan_sequences(
    services: Services,
    ready: Ready,
    request: CompletionRequest | ChatRequest,
    prompts: Sequence[Prompt],
    stop: StopAutomaton,
    rules: TokenRules,
    grammar: str | None = None,
) -> list[Plan]:
    """`n` sequences for each prompt, in order of the choices' index. BadRequest if one could never be served."""
    plans = []
    for prompt in prompts:
        max_tokens = checked_max_tokens(ready, request, prompt.token_ids)
        sampling = build_sampling(
            request,
            max_tokens=max_tokens,
            vocab_size=ready.vocab_size,
            eos_token_ids=services.tokenizer.eos_token_ids,
            defaults=services.sampling_defaults,
            rules=rules,
            grammar=grammar,
        )
        for index in range(request.n or 1):
            plans.append(
                Plan(
                    request_id=uuid4().hex,
                    prompt=prompt,
                    sampling=_replace_seed(sampling, seed_of_choice(request.seed, index)),
                    stop=stop,
                    skip_special_tokens=request.skip_special_tokens is None or request.skip_special_tokens,
                    include_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
                )
            )
    # One sequence alone is bounded by the context length.
    if len(plans) > 1 and (wanted := num_prompt_logprobs(plans)) > MAX_PROMPT_LOGPROBS:
        raise too_many_prompt_logprobs(wanted)
    return plans


def num_prompt_logprobs(plans: Sequence[Plan]) -> int:
    """Log probabilities of prompt tokens, alternatives included, that the sequences ask for."""
    asked = [plan for plan in plans if plan.sampling.prompt_logprobs is not None]
    return sum(len(plan.prompt.token_ids) * ((plan.sampling.prompt_logprobs or 0) + 1) for plan in asked)


def too_many_prompt_logprobs(wanted: int) -> BadRequest:
    """What to say of so many."""
    return BadRequest(
        f"This asks for {wanted} log probabilities of prompt tokens; a request may have {MAX_PROMPT_LOGPROBS}: send "
        "fewer prompts, or lower `logprobs`, `prompt_logprobs` or `n`.",
        param="logprobs",
    )


def _replace_seed(sampling: Sampling, seed: int | None) -> Sampling:
    return msgspec.structs.replace(sampling, seed=seed)


def checked_max_tokens(ready: Ready, request: CompletionRequest | ChatRequest, token_ids: Sequence[int]) -> int:
    """The request's token limit or its default, once prompt and answer are known to fit."""
    num_prompt = len(token_ids)
    field = "messages" if isinstance(request, ChatRequest) else "prompt"
    if num_prompt == 0:
        raise BadRequest("The prompt has no tokens; send at least one.", param=field)
    limit = min(ready.max_model_len_tokens, ready.kv_capacity_tokens)
    wanted = _wanted_tokens(request)
    if wanted is None:
        wanted = max(1, limit - num_prompt)
    if num_prompt + wanted > limit:
        what = "context length" if limit == ready.max_model_len_tokens else "KV cache (--kv-bytes)"
        raise BadRequest(
            f"The {what} holds {limit} tokens, but the prompt has {num_prompt} and up to {wanted} are to be generated; "
            "shorten the prompt or lower the number of tokens.",
            param=field if num_prompt >= limit else _limit_field(request),
        )
    # After the length: this walks through all of them.
    too_high = next((token_id for token_id in token_ids if token_id >= ready.vocab_size), None)
    if too_high is not None:
        raise BadRequest(
            f"`prompt` holds the token {too_high}, but the vocabulary ends at {ready.vocab_size - 1}.", param=field
        )
    return wanted


def _wanted_tokens(request: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    wanted = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if wanted == 0 and not request.echo:
        raise BadRequest("`max_tokens` is 0; that is allowed with `echo` only.", param="max_tokens")
    return wanted


def _limit_field(request: CompletionRequest | ChatRequest) -> str:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "max_tokens"
