"""One request inside the engine: its tokens, what has been computed of them, and what it holds.

The scheduler changes `num_computed`, `state_line` and the lists the sequence stands in; the engine appends tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.engine.messages import Submit, TokenLogprob

if TYPE_CHECKING:
    from service.engine.penalties import TokenCounts


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, waiting or running.

    key            arrival number: the key of its block account, and its age
    token_ids      prompt and output
    num_computed   tokens whose keys, values and conv state are in the caches; 0 after a preemption
    seed           of its random stream, drawn by the engine where the request names none
    stop_ids       tokens that end it (stop_token_ids, and end-of-sequence unless ignored)
    is_running     stands in the running list, and so holds blocks, a line and a pin
    state_line     0 where it holds none
    counts         token counts for penalties; None where it uses none
    steps_waiting_for_rows  steps in which it was passed over because its adapter was not read, or found no rows
    prompt_logprobs  of the prompt so far, entry 0 None; empty where not asked for
    prompt_logprobs_sent  the one message that carries them has gone out
    """

    request: Submit
    key: int
    seed: int
    stop_ids: frozenset[int]
    token_ids: list[int]
    num_prompt: int
    counts: TokenCounts | None = None
    num_computed: int = 0
    is_running: bool = False
    state_line: int = 0
    steps_waiting_for_rows: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs_sent: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def adapter(self) -> str | None:
        return self.request.adapter

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def max_total(self) -> int:
        """The most tokens the sequence can have: prompt + max_tokens."""
        return self.num_prompt + self.request.sampling.max_tokens

    @property
    def num_prompt_logprobs_missing(self) -> int:
        """Prompt tokens whose log probabilities are asked for and not known yet."""
        if self.request.sampling.prompt_logprobs is None:
            return 0
        return self.num_prompt - len(self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence's part of one step: tokens [sequence.num_computed, + num_tokens), logits of the last `num_logits`."""

    sequence: Sequence
    num_tokens: int
    num_logits: int

    @property
    def is_decode(self) -> bool:
        """One token, sampled by an earlier step."""
        return self.num_tokens == 1 and self.sequence.num_computed >= self.sequence.num_prompt
