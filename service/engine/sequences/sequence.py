"""One request inside the engine: its tokens, what has been computed of them, and what it holds.

The scheduler changes `num_computed`, `slot` and the lists the sequence stands in; the engine appends tokens.

A token is *in flight* from the launch of the step that samples it to its collection: it is counted everywhere, and its
value is on the device only, in the request table at the sequence's slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kernels.sampling.parameters import ScoredToken
from service.engine.ipc.messages import Loads, Submit, Tier

NEVER = 2**62  # a number of tokens that no sequence reaches

if TYPE_CHECKING:
    from service.engine.sequences.constraint import TokenConstraint


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, waiting or running.

    key            arrival number: the key of its block account, and its age
    token_ids      prompt and output, as far as the host knows them
    num_in_flight  tokens behind these that a launched step samples
    num_computed   tokens whose keys, values and conv state are in the caches, or will be when the launched steps have
                   run; 0 after a preemption
    seed           of its random stream, drawn by the engine where the request names none
    parameters     of its sampling, `kernels.sampling.maps.row_of`
    stop_ids       tokens that end it (stop_token_ids, and end-of-sequence unless ignored)
    has_begun      a chunk of it was scheduled since it joined
    slot           of a running sequence, which so holds blocks and a pin too; 0 for a waiting one
    line           its line of state, where the model has states; 0 for a waiting sequence
    source_line    the kept line that its next step reads instead; 0: its own, or none if it begins
    cuts           numbers of tokens at which a chunk ends, since the state there is to be kept
    num_prompt_logprobs  entries of `prompt_logprobs` that there are, or will be when the launched steps have run
    prompt_logprobs  of the prompt so far, entry 0 None; empty where not asked for
    prompt_logprobs_sent  the one message that carries them has gone out
    constraint     on its tokens, by a grammar, a list of those allowed or bad words; None without one. It has seen all
                   tokens that the host knows, whatever the scheduler does with the sequence
    num_cached     tokens of it that were found in the prefix cache when it first joined; None before
    copied_block   which its next chunk copies into its own block of that number, and goes on in; 0: none
    publish_at     the number of computed tokens with which it has a block for the prefix cache
    came_from      the tier that had its adapter when it came; None without one, and once its first token was told
    came_at        the engine's clock then, in seconds, and its number of steps
    loads          of its adapter, once it has begun
    waited_seconds  from then to its first step, None before it
    pooled         of its hidden states, once its last prompt token is computed; see `Finished`
    unsent_versions  (number of its first output token, digest) of adapters that it has moved to, see `Tokens`
    """

    request: Submit
    key: int
    seed: int
    parameters: np.ndarray
    stop_ids: frozenset[int]
    token_ids: list[int]
    num_prompt: int
    num_in_flight: int = 0
    num_computed: int = 0
    has_begun: bool = False
    slot: int = 0
    line: int = 0
    source_line: int = 0
    cuts: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    prompt_logprobs: list[ScoredToken | None] = field(default_factory=list)
    prompt_logprobs_sent: bool = False
    constraint: TokenConstraint | None = None
    num_cached: int | None = None
    copied_block: int = 0
    publish_at: int = NEVER
    came_from: Tier | None = None
    came_at: tuple[float, int] = (0.0, 0)
    loads: Loads = ()
    waited_seconds: float | None = None
    pooled: bytes | None = None
    unsent_versions: tuple[tuple[int, str], ...] = ()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def adapter(self) -> str | None:
        return self.request.adapter

    @property
    def is_running(self) -> bool:
        return self.slot != 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output, tokens in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def max_total(self) -> int:
        """The most tokens the sequence can have: prompt + max_tokens."""
        return self.num_prompt + self.request.sampling.max_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens that the next steps must compute. The last token of a request is sampled and never computed."""
        return 0 if self.num_in_flight and self.num_tokens >= self.max_total else self.num_tokens - self.num_computed

    @property
    def num_prompt_logprobs_missing(self) -> int:
        """Prompt tokens whose log probabilities are asked for, and which no launched step yields."""
        if self.request.sampling.prompt_logprobs is None:
            return 0
        return self.num_prompt - self.num_prompt_logprobs


@dataclass(slots=True)  # not frozen: a step makes one for each sequence, which would take thrice as long
class ScheduledChunk:
    """A sequence's part of one step: its tokens [start, start + num_tokens), logits of the last `num_logits`.

    begins             it is the first since the sequence joined: of what its slot and line hold, nothing is its own
    line               of its state, which the step writes
    source_line        of the state that the step reads instead; 0: none
    copied_block       which is copied first into the block that its first token is of; 0: none
    num_prompt_logits  of these logits tell of prompt tokens, from number `first_prompt_logprob` on
    samples            the last of these logits yields the sequence's next token
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int
    samples: bool
    begins: bool
    line: int
    source_line: int
    copied_block: int
    first_prompt_logprob: int = 0
    num_prompt_logits: int = 0

    @property
    def adapter(self) -> str | None:
        """The adapter of these tokens; None for those before the sequence's adapter begins."""
        return self.sequence.adapter if self.start >= self.sequence.request.adapter_start else None

    @property
    def is_decode(self) -> bool:
        """One token, sampled by an earlier step."""
        return self.num_tokens == 1 and self.start >= self.sequence.num_prompt


def num_common(one: Sequence, other: Sequence, start: int, end: int) -> int:
    """Tokens from `start` on, up to `end`, that are equal and have equal keys and values in two sequences: from where
    an adapter begins, they have others."""
    if one.adapter != other.adapter or one.request.adapter_start != other.request.adapter_start:
        starts = (each.request.adapter_start for each in (one, other) if each.adapter is not None)
        end = min(end, min(starts, default=NEVER))
    return num_equal(one.token_ids[start:end], other.token_ids[start:end])


def num_equal(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    if one == other:
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class StepTokens:
    """A step's budget of tokens, and of logits of prompt tokens. Tokens of a preempted sequence are not used again.

    multiple  chunks that the budget cuts end at a multiple of so many tokens, if they reach one
    """

    def __init__(self, num_tokens: int, max_prompt_logits: int, multiple: int = 1) -> None:
        self.num_left = num_tokens
        self._multiple = multiple
        self._prompt_logits_left = max_prompt_logits

    def next_chunk(self, sequence: Sequence) -> ScheduledChunk | None:
        """As many of the sequence's tokens as are left, with the logits that they must yield; None if none are."""
        start, num_tokens = sequence.num_computed, min(self.num_left, sequence.num_to_compute)
        adapter_start = sequence.request.adapter_start
        if start < adapter_start:  # a chunk is the base's or the adapter's, since all its tokens are of one segment
            num_tokens = min(num_tokens, adapter_start - start)
        if sequence.cuts:
            num_tokens = min(num_tokens, next((cut for cut in sequence.cuts if cut > start), NEVER) - start)
        if num_tokens == self.num_left < sequence.num_to_compute:
            more = (start + num_tokens) % self._multiple
            num_tokens -= more if more < num_tokens else 0
        if num_tokens <= 0:
            return None
        end = start + num_tokens
        begins, held = not sequence.has_begun, (sequence.line, sequence.source_line, sequence.copied_block)
        if not sequence.num_prompt_logprobs_missing:
            samples = end == sequence.num_tokens
            self.num_left -= num_tokens
            return ScheduledChunk(sequence, start, num_tokens, int(samples), samples, begins, *held)
        # The logits of token i tell of prompt token i + 1; entry 0 has no logprob and is there from the start.
        first = sequence.num_prompt_logprobs
        first_row = max(start, first - 1)
        end = min(end, first_row + self._prompt_logits_left)
        if end <= start:
            return None
        self.num_left -= end - start
        num_logits = max(end - first_row, 0)
        self._prompt_logits_left -= num_logits
        num_prompt_logits = min(num_logits, sequence.num_prompt - first)
        samples = end == sequence.num_tokens
        logits = (end - start, num_logits, samples)
        return ScheduledChunk(sequence, start, *logits, begins, *held, first, num_prompt_logits)
