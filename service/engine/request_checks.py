"""Checks of requests that the API has made already; the engine repeats them, so that no request can stop it."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import numpy as np

from adapters.errors import RowsExceeded
from kernels.sampling.parameter_rows import row_of
from kernels.sampling.parameters import PARAMETERS
from service.engine.grammar.compiled_grammars import NO_GRAMMARS
from service.engine.ipc.messages import (
    MAX_ENDINGS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    Sampling,
    Submit,
)
from service.engine.loras.interfaces import Rows
from service.engine.loras.prefetch import LORA_IS_OFF
from service.engine.sequences.sequence import Sequence

if TYPE_CHECKING:
    from service.engine.model.runner import Capacity

MAX_TOKENS_LIMIT = 2**31
POOLED_AND_TOKENS = "A pooled vector and tokens cannot be had of one request; send max_tokens 0 with pooling."
NO_HEAD = "The base has no score head; name an adapter that has one."
NO_TOKEN_LEFT = "allowed_token_ids, bad_words and min_tokens leave no token to choose; ask for less of them."


def error_in(
    request: Submit, capacity: Capacity, kv_capacity_tokens: int, rows: Rows | None, *, has_grammars: bool
) -> str | None:
    """One sentence with the fault and its cure, or None if the request can be served.

    has_grammars  whether the engine can follow grammars
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not prompt:
        return "The prompt is empty; send at least one token."
    if min(prompt) < 0 or max(prompt) >= capacity.vocab_size:
        return f"The prompt has token ids outside the vocabulary of {capacity.vocab_size}."
    if not MIN_WEIGHT <= request.weight <= MAX_WEIGHT:
        return f"The tenant's weight is {request.weight}; it must be between {MIN_WEIGHT} and {MAX_WEIGHT:g}."
    error = _error_in_adapter(request, rows) or _error_in_sampling(sampling, capacity)
    if error is None and sampling.grammar is not None and not has_grammars:
        error = NO_GRAMMARS
    if error is None and request.pooling is not None and sampling.max_tokens:
        error = POOLED_AND_TOKENS
    if error is None and request.pooling == "classify" and request.adapter is None:
        error = NO_HEAD
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
    return Sequence(
        request=request,
        key=key,
        seed=random.getrandbits(63) if sampling.seed is None else sampling.seed,
        parameters=row_of(sampling),
        stop_ids=_endings(sampling, capacity),
        token_ids=list(prompt),
        num_prompt=len(prompt),
        num_prompt_logprobs=0 if sampling.prompt_logprobs is None else 1,
        prompt_logprobs=[] if sampling.prompt_logprobs is None else [None],
    )


def _endings(sampling: Sampling, capacity: Capacity) -> frozenset[int]:
    """Tokens that end the answer, and are barred before `min_tokens`."""
    return frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else capacity.eos_token_ids)))


def _leaves_a_token(sampling: Sampling, capacity: Capacity) -> bool:
    """Whether a token can be chosen wherever bad words bar what they can, and before `min_tokens`."""
    barred = {word[-1] for word in sampling.bad_words}
    barred.update(_endings(sampling, capacity) if sampling.min_tokens else ())
    is_left = np.ones(capacity.vocab_size, np.bool_)
    if sampling.allowed_tokens:
        is_left[:] = False
        bits = np.unpackbits(np.frombuffer(sampling.allowed_tokens, np.uint8), bitorder="little")
        is_left[: len(bits)] = bits[: capacity.vocab_size]
    is_left[[token for token in barred if 0 <= token < capacity.vocab_size]] = False
    return bool(is_left.any())


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


def _error_in_sampling(sampling: Sampling, capacity: Capacity) -> str | None:
    """The first field that is out of its range, or that no token is left to choose."""
    vocab_size = capacity.vocab_size
    fields: list[tuple[str, bool]] = [
        ("max_tokens", 0 <= sampling.max_tokens < MAX_TOKENS_LIMIT),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens),
        *((parameter.name, parameter.takes(getattr(sampling, parameter.name))) for parameter in PARAMETERS),
        ("logprobs", sampling.logprobs is None or sampling.logprobs >= 0),
        ("prompt_logprobs", sampling.prompt_logprobs is None or sampling.prompt_logprobs >= 0),
        ("logprob_token_ids", len(sampling.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS),
        ("logprob_token_ids", all(0 <= token < vocab_size for token in sampling.logprob_token_ids)),
        ("logit_bias", len(sampling.logit_bias) <= MAX_LOGIT_BIASES),
        ("logit_bias", all(0 <= token < vocab_size for token in sampling.logit_bias)),
        ("logit_bias", all(math.isfinite(bias) for bias in sampling.logit_bias.values())),
        ("allowed_tokens", len(sampling.allowed_tokens) <= -(-vocab_size // 8)),
        ("bad_words", all(word and all(0 <= token < vocab_size for token in word) for word in sampling.bad_words)),
        ("stop_token_ids", len(_endings(sampling, capacity)) <= MAX_ENDINGS),
        ("stop_token_ids", all(0 <= token < vocab_size for token in sampling.stop_token_ids)),
        ("eos_token_ids", set(sampling.eos_token_ids) <= set(sampling.stop_token_ids)),
    ]
    for name, is_fine in fields:
        if not is_fine:
            return f"{name} is out of range."
    if (sampling.allowed_tokens or sampling.bad_words or sampling.min_tokens) and not _leaves_a_token(
        sampling, capacity
    ):
        return NO_TOKEN_LEFT
    return None
