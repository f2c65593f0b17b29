"""Tokens that a request's own lists bar at each place of its output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernels.sampling.maps import MASK_WORD_BITS
from service.engine.ipc.messages import Sampling


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
