"""The sequences that a request is run as: `n` for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

import msgspec

from service.api.admission.lengths import checked_max_tokens
from service.api.admission.model_resolution import ResolvedModel
from service.api.admission.prompts import Prompt
from service.api.admission.sampling import build_sampling, seed_of_choice
from service.api.admission.token_lists import TokenLists
from service.api.errors import BadRequest
from service.api.schema.requests import MAX_HELD_LOGPROBS, ChatRequest, CompletionRequest
from service.api.state import Services
from service.engine.ipc.messages import Ready, Sampling
from service.text.stop_strings import StopAutomaton


@dataclass(frozen=True)
class PlannedSequence:
    """One sequence to run: `sampling.seed` is already this choice's own. `include_stop`: what ends the answer, a stop
    string or an end token's text, is part of it. `pooling`: the prompt's hidden states are wanted, and no answer."""

    request_id: str
    prompt: Prompt
    sampling: Sampling
    stop: StopAutomaton
    skip_special_tokens: bool
    include_stop: bool
    pooling: Literal["last", "mean"] | None = None
    cache_salt: str = ""

    @property
    def most_tokens(self) -> int:
        """Prompt and answer, if that is as long as it may be."""
        return len(self.prompt.token_ids) + self.sampling.max_tokens


def plan_sequences(
    services: Services,
    ready: Ready,
    target: ResolvedModel,
    request: CompletionRequest | ChatRequest,
    prompts: Sequence[Prompt],
    stop: StopAutomaton,
    lists: TokenLists,
    grammar: str | None = None,
) -> list[PlannedSequence]:
    """`n` sequences for each prompt, in order of the choices' index. BadRequest if one could never be served."""
    plans = []
    for prompt in prompts:
        max_tokens = checked_max_tokens(ready, request, prompt.token_ids)
        sampling = build_sampling(
            request,
            max_tokens=max_tokens,
            vocab_size=ready.vocab_size,
            eos_token_ids=services.tokenizer.eos_token_ids,
            own_eos_token_ids=target.eos_token_ids,
            defaults=services.sampling_defaults,
            lists=lists,
            grammar=grammar,
            max_logprobs=services.settings.max_logprobs,
        )
        for index in range(request.n or 1):
            plans.append(
                PlannedSequence(
                    request_id=uuid4().hex,
                    prompt=prompt,
                    sampling=_replace_seed(sampling, seed_of_choice(request.seed, index)),
                    stop=stop,
                    skip_special_tokens=request.skip_special_tokens is None or request.skip_special_tokens,
                    include_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
                    cache_salt=request.cache_salt or "",
                )
            )
    # One answer alone is seldom as long as it may be, and those of a stream do not wait for each other.
    if (wanted := num_logprobs(plans, with_answers=len(plans) > 1 and not request.stream)) > MAX_HELD_LOGPROBS:
        raise too_many_logprobs(wanted)
    return plans


def num_logprobs(plans: Sequence[PlannedSequence], *, with_answers: bool) -> int:
    """Log probabilities, alternatives included, that the sequences ask for: of prompts, and of answers that are as long
    as they may be. What there is of them is counted again as it comes (`service.api.logprob_budget`)."""
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


def _replace_seed(sampling: Sampling, seed: int | None) -> Sampling:
    return msgspec.structs.replace(sampling, seed=seed)
