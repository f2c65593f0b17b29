"""The random stream of a request: one uniform number per output token, a hash of (seed of the request, index of the
token). Hence a request's tokens depend neither on its neighbours nor on preemption, and a step's numbers are known
before the step before has ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """float64 [n] in [0, 1), element by element: splitmix64 of the seed's hash (modulo 2**64) and the index."""
    hashed = _mix(np.array([seed & _MASK for seed in seeds], np.uint64))
    counters = np.array(indices, np.uint64) + np.uint64(1)
    return (_mix(hashed + counters * _GOLDEN) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
