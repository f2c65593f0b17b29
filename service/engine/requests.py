"""The requests that wait or run, from their arrival to their last message.

Who owns: this owns the table of requests and their unsent events; the scheduler owns what a sequence holds, and
`constrained` its grammar. Who frees: `finish` and `abort`, through those two, at once.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np

from adapters.errors import RowsExceeded
from kernels.sampling.maps import row_of
from kernels.sampling.parameters import PARAMETERS
from service.engine.grammar.compiled_grammars import NO_GRAMMARS
from service.engine.grammar.grammar_sequences import GrammarSequences, without_grammar
from service.engine.ipc.messages import (
    MAX_ENDINGS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_WEIGHT,
    MIN_WEIGHT,
    Finished,
    Move,
    Sampling,
    Submit,
    Tokens,
)
from service.engine.loras.interfaces import Rows
from service.engine.loras.prefetch import LORA_IS_OFF, Failure
from service.engine.model.runner import Capacity
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.version_moves import set_adapter
from service.engine.sequences.sequence import Sequence

if TYPE_CHECKING:
    from service.engine.model.runner import Capacity


Event = Tokens | Finished
NOT_FINITE = "The model gave no finite logits for this request."
ADAPTER_NOT_FINITE = "The adapter gives no finite logits for this request: its weights or its scaling are too large."
BAD_GRAMMAR = "The answer's format cannot be followed"


class Requests:
    """See the module's docstring.

    events  to be sent, oldest first; the sender fetches them by `take_events`
    rows    of adapters, None where LoRA is off
    """

    def __init__(
        self,
        capacity: Capacity,
        kv_capacity_tokens: int,
        rows: Rows | None,
        scheduler: Scheduler,
        constrained: GrammarSequences,
    ) -> None:
        self.events: list[Event] = []
        self._capacity = capacity
        self._kv_capacity_tokens = kv_capacity_tokens
        self._rows = rows
        self._scheduler = scheduler
        self._constrained = constrained
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._fits: str | None = None  # the adapter of the last move

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether this very sequence has not ended; another one may have its id by now."""
        return self._sequences.get(sequence.request_id) is sequence

    # ---- coming and going

    def submit(self, request: Submit, num_steps: int) -> None:
        """Queue a request. One that can never run is answered with Finished(error).

        num_steps  launched before it came
        """
        error = error_in(
            request,
            self._capacity,
            self._kv_capacity_tokens,
            self._rows,
            has_grammars=self._constrained.has_grammars,
        )
        if error is None and request.request_id in self._sequences:
            error = f"The request id {request.request_id!r} is in use."
        if error is not None:
            self.events.append(Finished(request.request_id, "error", error=error, client_fault=True))
            return
        sequence = sequence_of(without_grammar(request), self._num_arrived, self._capacity)
        sequence.came_at = (time.perf_counter(), num_steps)
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        if self._constrained.add(sequence, request):
            self._scheduler.add(sequence)

    def schedule_compiled(self) -> None:
        """Pass sequences with compiled grammars to the scheduler; fail those whose grammar cannot be followed."""
        for sequence, error in self._constrained.take_compiled():
            if error:
                self.finish(sequence, _bad_grammar(sequence, error))
            else:
                self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Forget the request; everything it holds is free when this returns. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._forget(sequence)

    def move(self, message: Move) -> None:
        """Let a request go on with another adapter. Unknown ids are ignored, and adapters that can never have rows."""
        sequence = self._sequences.get(message.request_id)
        if sequence is None or sequence.adapter is None or self._rows is None:
            return
        if message.adapter != self._fits:  # mostly all requests of a name move together
            try:
                self._rows.check_size(message.adapter_rows)
            except RowsExceeded:
                return
            self._fits = message.adapter
        if sequence in self._constrained.waiting:
            set_adapter(sequence, message.adapter, message.adapter_rows)
        else:
            self._scheduler.move(sequence, message.adapter, message.adapter_rows)

    def end_all(self, reason: Literal["abort", "error"], error: str | None = None) -> None:
        """End every request for this reason."""
        for sequence in list(self._sequences.values()):
            self.finish(sequence, Finished(sequence.request_id, reason, error=error))

    def fail_waiting(self, failures: Mapping[str, Failure]) -> None:
        """End those that wait for an adapter which could not be loaded, by its digest; those that were to go on with it
        keep the one that they have."""
        if failures:
            self._scheduler.moves.fail(failures)
        for sequence in list(self._sequences.values()) if failures else ():
            failure = None if sequence.adapter is None else failures.get(sequence.adapter)
            if failure is not None and not sequence.is_running:
                error, is_clients = failure.error, failure.client_fault
                self.finish(sequence, Finished(sequence.request_id, "error", error=error, client_fault=is_clients))

    def finish(self, sequence: Sequence, message: Finished) -> None:
        """Free all that the sequence holds, and add the event of its end."""
        self._forget(sequence)
        self.events.append(message)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if not self._constrained.discard(sequence):
            self._scheduler.remove(sequence)

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    # ---- going on

    def advance(self, sequence: Sequence, token: int | None) -> None:
        """The sequence has its next token (None: there was none to choose); end it if that was the last."""
        request_id, sampling = sequence.request_id, sequence.request.sampling
        if token is None or (sequence.request.pooling is not None and sequence.pooled is None):
            self._scheduler.cache.withdraw(sequence)
            is_adapters = sequence.adapter is not None
            error = ADAPTER_NOT_FINITE if is_adapters else NOT_FINITE
            self.finish(sequence, Finished(request_id, "error", error=error, client_fault=is_adapters))
            return
        if sampling.max_tokens > 0:
            sequence.token_ids.append(token)
            if token in sequence.stop_ids:
                self.finish(sequence, Finished(request_id, "stop", stop_token_id=token))
                return
        if sequence.constraint is not None:
            sequence.constraint.consume(token)
            if self.end_if_stuck(sequence):
                return
            if sequence.constraint.is_complete:
                self.finish(sequence, Finished(request_id, "stop"))
                return
        if len(sequence.token_ids) >= sequence.max_total:
            self.finish(sequence, _complete(sequence))

    def end_if_stuck(self, sequence: Sequence) -> bool:
        """End a sequence whose grammar cannot be followed any further; False if it can be."""
        error = self._constrained.error_in(sequence)
        if error and sequence in self:
            self.finish(sequence, _bad_grammar(sequence, error))
        return bool(error)

    def check_integrity(self) -> None:
        """Every request is in exactly one queue, and nothing else is."""
        known = sorted(sequence.key for sequence in self._sequences.values())
        queued = [*self._scheduler.waiting, *self._scheduler.running, *self._constrained.waiting]
        assert known == sorted(sequence.key for sequence in queued), "a request is lost"


def _complete(sequence: Sequence) -> Finished:
    """The end of a sequence that has all that it may have."""
    if sequence.pooled is None:
        return Finished(sequence.request_id, "length")
    waited_seconds, loads = sequence.waited_seconds, sequence.loads
    return Finished(sequence.request_id, "length", pooled=sequence.pooled, waited_seconds=waited_seconds, loads=loads)


def _bad_grammar(sequence: Sequence, reason: str) -> Finished:
    return Finished(sequence.request_id, "error", error=f"{BAD_GRAMMAR}: {reason}.", client_fault=True)


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
