"""Counts of the prefix cache: tokens that sequences have found when they joined."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.scheduling.prefix_trie import Found, Way
from service.engine.sequences.sequence import Sequence


@dataclass(slots=True)
class CacheCounts:
    """Tokens of prompts since the start."""

    queried_tokens: int = 0  # of requests that joined for the first time
    hit_tokens: int = 0  # those of them that were found
    host_hit_tokens: int = 0  # those of these that came from host memory
    stateless_tokens: int = 0  # not found, though their blocks were, since no state behind them was kept
    resumed_tokens: int = 0  # found when preempted requests joined again

    def add(self, sequence: Sequence, found: Found, way: Way | None) -> None:
        """The sequence joins behind what is found; way: None if it was not looked up."""
        if sequence.num_cached is not None:
            self.resumed_tokens += found.num_tokens
            return
        sequence.num_cached = found.num_tokens
        self.queried_tokens += sequence.num_prompt
        self.hit_tokens += found.num_tokens
        if way is not None and way.num_here is not None:
            self.host_hit_tokens += max(0, found.num_tokens - way.num_here)
        if found.known is not None:
            self.stateless_tokens += found.known[1] - found.num_tokens
