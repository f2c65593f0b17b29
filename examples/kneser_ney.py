"""An n-gram model with interpolated modified Kneser-Ney smoothing (Chen and Goodman, 1998), in numpy.

The baseline of the bundled model: counted over exactly the rows that the model was trained on, with the model's own
byte tokens, so that both give a probability to the same symbols.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from examples.bundled_data import BOS_ID, VOCAB_SIZE


def windows(tokens: np.ndarray, order: int) -> np.ndarray:
    """All n-grams that predict a token of `tokens`: int64 [tokens], each coded as a number to the base VOCAB_SIZE.

    A context never reaches back over the start of a document: what would stand before it is filled with the start
    token. The start token itself is not predicted.
    """
    padded = np.concatenate([np.full(order - 1, BOS_ID, dtype=np.int64), tokens])
    positions = np.arange(len(padded))
    starts = np.maximum.accumulate(np.where(padded == BOS_ID, positions, 0))
    codes = np.zeros(len(tokens), dtype=np.int64)
    last = positions[order - 1 :]
    for back in range(order - 1, -1, -1):
        symbols = np.where(last - back >= starts[last], padded[last - back], BOS_ID)
        codes = codes * VOCAB_SIZE + symbols
    return codes[tokens != BOS_ID]


@dataclass(frozen=True)
class _Level:
    """Counts of all n-grams of one length. `grams` and `contexts` are sorted codes.

    discounts        of n-grams seen 0, 1, 2 and 3 or more times
    totals           sum of the counts after each context
    reserved         sum of what the discounts took from them
    """

    grams: np.ndarray
    counts: np.ndarray
    discounts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    reserved: np.ndarray

    @classmethod
    def of(cls, grams: np.ndarray, counts: np.ndarray) -> _Level:
        seen = [int((counts == n).sum()) for n in range(1, 5)]
        ratio = seen[0] / max(1, seen[0] + 2 * seen[1])
        cut = [n - (n + 1) * ratio * seen[n] / max(1, seen[n - 1]) for n in range(1, 4)]
        discounts = np.clip(np.array([0.0, *cut]), 0.0, [0.0, 1.0, 2.0, 3.0])
        contexts, first = np.unique(grams // VOCAB_SIZE, return_index=True)
        taken = discounts[np.minimum(counts, 3)]
        return cls(grams, counts, discounts, contexts, np.add.reduceat(counts, first), np.add.reduceat(taken, first))

    def interpolated(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probabilities of the last symbols of `grams`; `lower` are those after a context one symbol shorter."""
        counts = _lookup(self.grams, self.counts, grams)
        totals = _lookup(self.contexts, self.totals, grams // VOCAB_SIZE)
        reserved = _lookup(self.contexts, self.reserved, grams // VOCAB_SIZE)
        kept = counts - self.discounts[np.minimum(counts, 3)]
        return np.where(totals > 0, (kept + reserved * lower) / np.maximum(totals, 1), lower)


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], values.dtype.type(0))


class KneserNey:
    """Modified Kneser-Ney of one order, counted over rows of tokens [rows, length]."""

    def __init__(self, rows: np.ndarray, order: int = 5) -> None:
        self.order = order
        grams, counts = np.unique(np.concatenate([windows(row, order) for row in rows]), return_counts=True)
        self._levels = [_Level.of(grams, counts)]
        for length in range(order - 1, 0, -1):
            grams, counts = _shortened(grams, counts, length)
            self._levels.insert(0, _Level.of(grams, counts))

    def bits(self, document: np.ndarray) -> float:
        """Bits that all tokens of a document cost, its start token excepted."""
        codes = windows(document, self.order)
        unigrams = self._levels[0]
        symbols = codes % VOCAB_SIZE
        seen = _lookup(unigrams.grams, unigrams.counts, symbols)
        probability = (seen + 1) / (unigrams.counts.sum() + VOCAB_SIZE)
        for length, level in enumerate(self._levels[1:], start=2):
            probability = level.interpolated(codes % VOCAB_SIZE**length, probability)
        return float(-np.log2(probability).sum())


def _shortened(grams: np.ndarray, counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The n-grams of `length` symbols at the end of longer `grams`, with their continuation counts.

    The continuation count says before how many different symbols an n-gram was seen; an n-gram at the start of a
    document has nothing before it and keeps its plain count.
    """
    short = grams % VOCAB_SIZE**length
    at_start = short // VOCAB_SIZE ** (length - 1) == BOS_ID if length > 1 else np.zeros(len(short), dtype=bool)
    weights = np.where(at_start, counts, 1)
    order = np.argsort(short, kind="stable")
    unique, first = np.unique(short[order], return_index=True)
    return unique, np.add.reduceat(weights[order], first)
