"""New output of a sequence since the last read, on its way from the engine to the API's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kernels.sampling.scored_token import ScoredToken


class OutputChunk(msgspec.Struct):
    """New text and tokens of a sequence. They need not match: text may wait for the rest of a character.

    text_offsets  for each token, the number of characters of the answer before it
    pooled        of the prompt's hidden states, where they are asked for: see `Finished`
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[ScoredToken] = []
    text_offsets: list[int] = []
    prompt_logprobs: Sequence[ScoredToken | None] | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    pooled: bytes | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended before the model had ended it."""
        return self.finish_reason in ("length", "abort")
