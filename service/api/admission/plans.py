"""Sequences that the engine can run, with their sampling: a request's fields, each checked against the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from pydantic import ValidationError

from adapters.files.name_versions import OnNewVersion
from kernels.sampling.parameters import NEUTRAL, PARAMETERS
from service.api.admission.answer_constraints import AnswerConstraints, TokenLists
from service.api.admission.model_resolution import ResolvedModel
from service.api.admission.prompts import Prompt, num_answer_tokens
from service.api.errors import BadRequest, quoted
from service.api.schema.error_messages import bad_request, out_of_vocabulary
from service.api.schema.requests import (
    MAX_HELD_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    Decoding,
    Generation,
)
from service.api.state import Services
from service.engine.ipc.messages import Pooling, Ready, Sampling
from service.text.stop_strings import StopAutomaton
from service.text.tokenizer import TextError, read_json

_SEED_RANGE = 2**63
_MAX_ID_DIGITS = 10
_MAX_SHOWN_KEYS = 8


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


def plans_of(
    services: Services,
    ready: Ready,
    target: ResolvedModel,
    request: CompletionRequest | ChatRequest,
    prompts: Sequence[Prompt],
    constraints: AnswerConstraints,
) -> list[PlannedSequence]:
    """`n` sequences for each prompt, in order of the choices' index. BadRequest if one could never be served."""
    plans = []
    on_new_version = request.on_new_version or target.on_new_version or services.settings.on_new_version
    if on_new_version == "restart" and request.stream:  # the name's: tokens that were sent cannot be taken back
        on_new_version = "keep"
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


def model_defaults(model_dir: Path) -> Mapping[str, float]:
    """`NEUTRAL` but for what the model's generation_config.json names. TextError for values that no request may
    have."""
    config = read_json(model_dir / "generation_config.json")
    names = [parameter.name for parameter in PARAMETERS if parameter.is_models]
    named = {name: config[name] for name in names if config.get(name) is not None}
    try:
        Generation.model_validate(named)
    except ValidationError as error:
        raise TextError(
            f"generation_config.json of the model: {bad_request(error.errors()).message} Correct it, or start with "
            "--sampling-defaults openai."
        ) from error
    return {**NEUTRAL, **named}


def sampling_parameters(request: Decoding, defaults: Mapping[str, float]) -> dict[str, Any]:
    """The number of each of `PARAMETERS`, by name."""
    asked = {name: getattr(request, name) for name in NEUTRAL}
    said = {name: defaults[name] if value is None else value for name, value in asked.items()}
    return {parameter.name: min(said[parameter.name], parameter.most) for parameter in PARAMETERS}


def build_sampling(
    request: CompletionRequest | ChatRequest,
    *,
    max_tokens: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    own_eos_token_ids: tuple[int, ...] = (),
    defaults: Mapping[str, float] = NEUTRAL,
    lists: TokenLists = TokenLists(),
    grammar: str | None = None,
    max_logprobs: int = -1,
) -> Sampling:
    """The engine's sampling parameters for a request. `eos_token_ids`, and an adapter's own, end the answer unless
    `ignore_eos`; ids beyond the vocabulary, which some checkpoints name, are left out. `grammar` is the result of
    `requested_grammar`. BadRequest names a wrong field."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens ({min_tokens}) is larger than max_tokens ({max_tokens}); lower it.", param="min_tokens"
        )
    stop_token_ids = _checked_ids(request, "stop_token_ids", vocab_size)
    if not request.ignore_eos:
        endings = (token_id for token_id in (*eos_token_ids, *own_eos_token_ids) if 0 <= token_id < vocab_size)
        stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *endings)))
    if not lists.leave_a_token(stop_token_ids if min_tokens else (), vocab_size):
        raise _no_token_left(request)
    logprobs, prompt_logprobs = _logprobs(request, vocab_size, max_logprobs)
    numbers = sampling_parameters(request, defaults)
    if numbers["top_p"] == 0:
        numbers["temperature"] = 0.0  # of equally likely tokens too the first one
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        **numbers,
        logit_bias=_logit_bias(request, vocab_size),
        allowed_tokens=lists.allowed_tokens,
        bad_words=lists.bad_words,
        seed=request.seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        eos_token_ids=() if request.ignore_eos else own_eos_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=_checked_ids(request, "logprob_token_ids", vocab_size),
        grammar=grammar,
    )


def _no_token_left(request: Generation) -> BadRequest:
    """The sentence for fields that together bar every token."""
    asked = ("allowed_token_ids", "bad_words", "stop_token_ids", "min_tokens")
    names = [name for name in asked if getattr(request, name)]
    return BadRequest(
        f"{', '.join(f'`{name}`' for name in names)} can leave no token to choose; allow more. Before `min_tokens` no "
        "end token can be chosen, and neither can the last token of a bad word, wherever it would complete the word.",
        param=names[0],
    )


def seed_of_choice(seed: int | None, index: int) -> int | None:
    """Each of the `n` answers has a random stream of its own, the first one the request's seed itself."""
    if seed is None:
        return None
    return (seed + index + _SEED_RANGE) % (2 * _SEED_RANGE) - _SEED_RANGE


def _logprobs(
    request: CompletionRequest | ChatRequest, vocab_size: int, max_logprobs: int
) -> tuple[int | None, int | None]:
    """Alternatives for (output tokens, prompt tokens); None means no log probabilities at all. BadRequest for more than
    `max_logprobs`; -1 stands for all tokens, in both."""
    limit = vocab_size if max_logprobs < 0 else max_logprobs

    def wanted(name: str) -> int | None:
        count: int | None = getattr(request, name, None)
        most = vocab_size if count == -1 else count
        if most is None or most <= limit:
            return most
        asked = "all tokens" if count == -1 else str(count)
        raise BadRequest(
            f"`{name}` asks for {asked}; it must be less than or equal to {limit} (--max-logprobs).", param=name
        )

    prompt = wanted("prompt_logprobs")
    if isinstance(request, ChatRequest):
        count = (wanted("top_logprobs") or 0) if request.logprobs else None
        has_logprobs = count is not None
    else:
        count = wanted("logprobs")
        has_logprobs = count is not None
        # An answer of no tokens is the prompt alone, and the engine runs the prompt for its log probabilities.
        counts = [count if request.echo else None, prompt, 0 if request.max_tokens == 0 else None]
        prompt = max((one for one in counts if one is not None), default=None)
    if request.logprob_token_ids:
        if not has_logprobs:
            raise BadRequest("`logprob_token_ids` is only allowed with `logprobs`.", param="logprob_token_ids")
        count = 0
    return count, prompt


def _checked_ids(request: Generation, name: str, vocab_size: int) -> tuple[int, ...]:
    token_ids = getattr(request, name) or ()
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise out_of_vocabulary(name, token_id, vocab_size)
    return tuple(token_ids)


def _logit_bias(request: Generation, vocab_size: int) -> dict[int, float]:
    given = request.logit_bias or {}
    wrong = [key for key in given if not _is_token_id(key) or int(key) >= vocab_size]
    if wrong:
        shown = ", ".join(repr(quoted(key)) for key in wrong[:_MAX_SHOWN_KEYS])
        rest = f" and {len(wrong) - _MAX_SHOWN_KEYS} more" if len(wrong) > _MAX_SHOWN_KEYS else ""
        raise BadRequest(
            f"`logit_bias` has the key{'' if len(wrong) == 1 else 's'} {shown}{rest}; keys are token ids from 0 to "
            f"{vocab_size - 1}, as text: the vocabulary has {vocab_size} tokens.",
            param="logit_bias",
        )
    return {int(key): float(bias) for key, bias in given.items()}


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS
