"""What the engine refuses: requests that the API should have refused, checked again, so that none can stop the
engine."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from adapters.errors import RowsExceeded
from kernels.sampling.parameters import row_of
from service.engine.adapter_desk import LORA_IS_OFF, Rows
from service.engine.grammars import NO_GRAMMARS
from service.engine.messages import MAX_WEIGHT, MIN_WEIGHT, Sampling, Submit
from service.engine.sequence import Sequence

if TYPE_CHECKING:
    from service.engine.runner import Capacity

MAX_TOKENS_LIMIT = 2**31


def error_in(
    request: Submit, capacity: Capacity, kv_capacity_tokens: int, rows: Rows | None, *, has_grammars: bool
) -> str | None:
    """One sentence that says what is wrong and what to do, or None if the request can be served.

    has_grammars  whether the engine can follow grammars
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        return "The prompt is empty; send at least one token."
    if not all(0 <= token < capacity.vocab_size for token in prompt):
        return f"The prompt has token ids outside the vocabulary of {capacity.vocab_size}."
    if not MIN_WEIGHT <= request.weight <= MAX_WEIGHT:
        return f"The tenant's weight is {request.weight}; it must be between {MIN_WEIGHT} and {MAX_WEIGHT:g}."
    error = _error_in_adapter(request, rows) or _error_in_sampling(sampling, capacity.vocab_size)
    if error is None and sampling.grammar is not None and not has_grammars:
        error = NO_GRAMMARS
    if error is not None:
        return error
    total, limit = len(prompt) + sampling.max_tokens, capacity.max_model_len_tokens
    if total > limit:
        return f"Prompt and max_tokens are {total} tokens; the context holds {limit}. Shorten one of them."
    if total > kv_capacity_tokens:
        return (
            f"Prompt and max_tokens are {total} tokens; the KV cache holds {kv_capacity_tokens}. Shorten one of them."
        )
    return None


def sequence_of(request: Submit, key: int, capacity: Capacity) -> Sequence:
    """The sequence of a request that has no error. Draws a seed where the request names none."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    endings = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        endings.update(capacity.eos_token_ids)
    return Sequence(
        request=request,
        key=key,
        seed=random.getrandbits(63) if sampling.seed is None else sampling.seed,
        parameters=row_of(sampling),
        stop_ids=frozenset(endings),
        token_ids=list(prompt),
        num_prompt=len(prompt),
        num_prompt_logprobs=0 if sampling.prompt_logprobs is None else 1,
        prompt_logprobs=[] if sampling.prompt_logprobs is None else [None],
    )


def _error_in_adapter(request: Submit, rows: Rows | None) -> str | None:
    if request.adapter is None:
        return None
    if rows is None:
        return LORA_IS_OFF
    try:
        rows.check_size(request.adapter_rows)
    except RowsExceeded as error:  # in the store since a start with more rows, or on another device
        return str(error)
    return None


def _error_in_sampling(sampling: Sampling, vocab_size: int) -> str | None:
    """The first field that is out of its range."""
    fields: list[tuple[str, bool]] = [
        ("max_tokens", 0 <= sampling.max_tokens < MAX_TOKENS_LIMIT),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens),
        ("temperature", sampling.temperature >= 0.0 and math.isfinite(sampling.temperature)),
        ("top_p", 0.0 <= sampling.top_p <= 1.0),
        ("top_k", 0 <= sampling.top_k < MAX_TOKENS_LIMIT),
        ("min_p", 0.0 <= sampling.min_p <= 1.0),
        ("repetition_penalty", sampling.repetition_penalty > 0.0 and math.isfinite(sampling.repetition_penalty)),
        ("presence_penalty", math.isfinite(sampling.presence_penalty)),
        ("frequency_penalty", math.isfinite(sampling.frequency_penalty)),
        ("logprobs", sampling.logprobs is None or sampling.logprobs >= 0),
        ("prompt_logprobs", sampling.prompt_logprobs is None or sampling.prompt_logprobs >= 0),
        ("logit_bias", all(0 <= token < vocab_size for token in sampling.logit_bias)),
        ("logit_bias", all(math.isfinite(bias) for bias in sampling.logit_bias.values())),
        ("stop_token_ids", all(0 <= token < vocab_size for token in sampling.stop_token_ids)),
    ]
    for name, is_fine in fields:
        if not is_fine:
            return f"{name} is out of range."
    return None
