"""The tokens of one step, as they are handed out."""

from __future__ import annotations

from service.engine.sequences.sequence import NEVER, ScheduledChunk, Sequence


class StepTokens:
    """A step's budget of tokens, and of logits of prompt tokens. Tokens of a preempted sequence are not used again.

    multiple  chunks that the budget cuts end at a multiple of so many tokens, if they reach one
    """

    def __init__(self, num_tokens: int, max_prompt_logits: int, multiple: int = 1) -> None:
        self.num_left = num_tokens
        self._multiple = multiple
        self._prompt_logits_left = max_prompt_logits

    def take(self, sequence: Sequence) -> ScheduledChunk | None:
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
