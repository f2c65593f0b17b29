"""Constraints on the next token of one sequence: its grammar, and its request's own lists of tokens.

A sequence's matcher belongs to one thread at a time: to the mask thread between `begin` and `wait` of
`grammar_sequences.StepMasks`, to the engine's own otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernels.sampling.maps import MASK_WORD_BITS
from kernels.sampling.sampling_request import mask_of
from service.engine.ipc.messages import Sampling
from service.grammars.matching import error_of


class TokenRules:
    """The tokens that are allowed at all, and bad words: sequences that an output must not hold, as with vLLM. The last
    token of each is barred where the output ends with those before it; the prompt does not count.

    Cost for each token of the output: one pass over the mask, and the words that have it last but one.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, always_allowed: Sequence[int] = ()) -> None:
        """always_allowed  tokens that are allowed whatever `sampling.allowed_tokens` says"""
        bits = np.zeros(-(-vocab_size // MASK_WORD_BITS) * MASK_WORD_BITS, np.bool_)
        given = np.unpackbits(np.frombuffer(sampling.allowed_tokens, np.uint8), bitorder="little")
        bits[:vocab_size] = True
        if sampling.allowed_tokens:
            bits[len(given) :] = False
            bits[: len(given)] = given
            bits[list(always_allowed)] = True
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for word in sampling.bad_words:
            *before, last = word
            if before:
                self._after.setdefault(before[-1], []).append((before, last))
            else:
                bits[last] = False
        self._mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def narrow(self, mask: np.ndarray, output: Sequence[int]) -> None:
        """Bar what must not follow the output, in place: int32 [ceil(vocab / 32)]."""
        mask &= self._mask
        for before, last in self._after.get(output[-1], ()) if output else ():
            if list(output[-len(before) :]) == before:
                mask.view(np.uint32)[last // MASK_WORD_BITS] &= ~np.uint32(1 << last % MASK_WORD_BITS)


# Processor time of a usual grammar's token and mask; a tenant owes what a mask takes beyond it.
USUAL_SECONDS = 0.1e-3
# Part of the passing time by which debts are forgiven.
SHARE = 0.1
# Processor time that one sequence's grammar may use. Usual grammars take a fifth of the first or less, and some ms for
# a mask whose lexer's states are new; all sequences wait for the one thread that makes masks.
SECONDS_A_TOKEN = 0.5e-3
MAX_SECONDS_BEHIND = 50e-3
TOO_COSTLY = "it takes too much processor time to follow; simplify it, so that a text can be read in fewer ways"
NOTHING_LEFT = "allowed_token_ids and bad_words leave no token of those that it allows"


def has_constraint(sampling: Sampling) -> bool:
    """Whether lists say what a token may be; grammars are looked at apart."""
    return bool(sampling.allowed_tokens or sampling.bad_words)


class Account:
    """The cost of one tenant's grammars, in seconds of processor time."""

    def __init__(self, now: float) -> None:
        self._spent = 0.0
        self._seen = 0.0  # of it, at the last call of `owed`
        self._forgiven = 0.0
        self._at = now

    def spend(self, seconds: float) -> None:
        """For one token's mask. In the thread that makes masks."""
        self._spent += max(0.0, seconds - USUAL_SECONDS)

    def owed(self, now: float) -> float:
        """Seconds that are not forgiven yet. Time forgives the debt of the last call, not the cost since then."""
        self._forgiven = min(self._seen, self._forgiven + SHARE * (now - self._at))
        self._seen, self._at = self._spent, now
        return self._seen - self._forgiven


class TokenConstraint:
    """The constraint on a sequence's tokens: its state in its grammar, and its lists of tokens.

    error      why its grammar cannot be followed any further; empty while it can be: not allowed by the grammar, over
               the library's bounds, or more than MAX_SECONDS_BEHIND of processor time beyond SECONDS_A_TOKEN for each
               token
    account    the account that its grammar's processor time is charged to; None: to nobody's
    num_masks  masks that its grammar has made
    is_costly  whether the last of them, with the token before it, took more than SECONDS_A_TOKEN
    """

    def __init__(
        self,
        sampling: Sampling,
        stop_ids: frozenset[int],
        vocab_size: int,
        *,
        grammar: str | None = None,
        matcher: Any = None,
        eos_token_ids: Sequence[int] = (),
        account: Account | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """stop_ids       tokens that end the sequence
        matcher        of the grammar, at its beginning, which nobody else has; None without a grammar
        eos_token_ids  what ends an answer that the grammar allows to end; lists of tokens do not forbid it
        clock          seconds of processor time of the thread that calls: a loaded machine ends nobody's answer
        """
        self.grammar = grammar
        self._matcher = matcher
        self.account = account
        self.num_masks = 0
        self.is_costly = False
        self._clock = clock
        self._seconds = 0.0  # that the token before took, which the next mask tells of
        self._seconds_behind = 0.0
        self._num_min = sampling.min_tokens
        ends = frozenset(eos_token_ids)
        # The adapter's: the grammar does not know them, and they may end the answer where the model's own may.
        self._own_ends = frozenset(sampling.eos_token_ids) if matcher is not None else frozenset()
        self._base_ends, self._own_bits = mask_of(ends, vocab_size), mask_of(self._own_ends, vocab_size)
        self._early_bar = _bar(stop_ids | ends, vocab_size) if sampling.min_tokens else None
        self._late_bar = _bar(ends, vocab_size) if sampling.ignore_eos and ends else None
        self._rules: TokenRules | None = None
        if sampling.allowed_tokens or sampling.bad_words:
            self._rules = TokenRules(sampling, vocab_size, (*eos_token_ids, *self._own_ends))
        self._output: list[int] = []
        self.error = ""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing may follow."""
        return self._matcher is not None and bool(self._matcher.is_stopped())

    def consume(self, token: int) -> None:
        """The sequence's next token."""
        self._output.append(token)
        if self._matcher is None or token in self._own_ends:
            return
        started = self._clock()
        is_allowed = self._matcher.consume_token(token)
        self._seconds += self._clock() - started
        if not is_allowed:
            self.error = error_of(self._matcher)

    def fill(self, mask: np.ndarray) -> None:
        """Write the mask of the next token: int32 [ceil(vocab / 32)], contiguous. Where it goes wrong, `error` is set.

        An end that min_tokens or ignore_eos forbid is barred, unless the grammar allows nothing else.
        """
        mask[:] = -1
        if self._matcher is not None:
            self._fill_from_grammar(mask)
            if self.error:
                mask[:] = -1
                return
            if self._own_ends and (mask & self._base_ends).any():
                mask |= self._own_bits
        bar = self._early_bar if len(self._output) < self._num_min else self._late_bar
        if bar is not None:
            narrowed = mask & bar
            if narrowed.any():
                mask[:] = narrowed
        if self._rules is not None:
            self._rules.narrow(mask, self._output)
            if not mask.any():
                self.error = NOTHING_LEFT
                mask[:] = -1

    def _fill_from_grammar(self, mask: np.ndarray) -> None:
        started = self._clock()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        seconds = self._seconds + self._clock() - started
        self._seconds = 0.0
        self.num_masks += 1
        self.is_costly = seconds > SECONDS_A_TOKEN
        if self.account is not None:
            self.account.spend(seconds)
        self._seconds_behind = max(0.0, self._seconds_behind + seconds - SECONDS_A_TOKEN)
        if self._matcher.is_error():
            self.error = error_of(self._matcher)
        elif self._seconds_behind > MAX_SECONDS_BEHIND:
            self.error = TOO_COSTLY


def _bar(tokens: frozenset[int], vocab_size: int) -> np.ndarray:
    """The mask that allows all but these."""
    bar: np.ndarray = ~mask_of(tokens, vocab_size)
    return bar
