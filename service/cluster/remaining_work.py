"""The expected work of a request: the load by which engines are chosen and their number is scaled."""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.ipc.messages import Submit

# The most output that counts before it is there: max_tokens says little about the output that comes. A request that has
# run for long counts as much as a new one, until it comes close to max_tokens.
MOST_EXPECTED_TOKENS = 256


@dataclass(slots=True)
class RemainingWork:
    """Tokens of one request that remain: its prompt, until there is output, and the output that may still come."""

    prompt_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, request: Submit) -> RemainingWork:
        """The work of a request that has not begun."""
        return cls(len(request.prompt_token_ids), request.sampling.max_tokens)

    @property
    def expected_tokens(self) -> int:
        return self.prompt_tokens + min(self.output_tokens, MOST_EXPECTED_TOKENS)

    def take(self, num_tokens: int) -> None:
        """Subtract output that has come."""
        self.prompt_tokens = 0
        self.output_tokens = max(self.output_tokens - num_tokens, 0)
