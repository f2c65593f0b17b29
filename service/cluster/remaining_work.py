"""What a request is expected to take: the load by which engines are chosen, and by which there are more or fewer."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.ipc.messages import Submit

# Most output that counts before it is there: what clients allow says little of what comes. One that has gone on for
# long counts as much as a new one, until it comes to what it was allowed.
MOST_EXPECTED_TOKENS = 256


@dataclass(slots=True)
class RemainingWork:
    """Of one request: its prompt, until there is output, and the output that may still come."""

    prompt_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, request: Submit) -> RemainingWork:
        """All of it."""
        return cls(len(request.prompt_token_ids), request.sampling.max_tokens)

    @property
    def expected_tokens(self) -> int:
        return self.prompt_tokens + min(self.output_tokens, MOST_EXPECTED_TOKENS)

    def take(self, num_tokens: int) -> None:
        """So much more output is there."""
        self.prompt_tokens = 0
        self.output_tokens = max(self.output_tokens - num_tokens, 0)
