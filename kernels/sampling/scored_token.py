"""A token and its log probability, as it goes from the sampler to the API. Torch-free."""

from __future__ import annotations

from typing import NamedTuple


class ScoredToken(NamedTuple):
    """Log probability of one token, and others with theirs: the most likely ones, most likely first, or those that were
    asked for by id. rank: how many tokens are at least as likely, itself among them; 0: not counted."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
