"""A token and its log probability, as it goes from the sampler to the API. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class ScoredToken(NamedTuple):
    """Log probability of one token, and the most likely ones with theirs, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
