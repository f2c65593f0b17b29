"""Token ids to text while they arrive: never half a character, never a lost space."""

from __future__ import annotations

from collections.abc import Sequence

from service.text.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"
# Prompt tokens decoded ahead of the output, so that the first token keeps its leading space.
_CONTEXT_TOKENS = 6
# A window that never ends on a whole character is cut, so that its cost stays bounded.
_MAX_WINDOW_TOKENS = 64


class IncrementalDetokenizer:
    """Text of a growing list of tokens, given out piece by piece.

    The window `[start, now)` of the tokens is decoded again for each piece, and what is new against the text already
    given out is the piece. Decoders look at neighbours (spaces, byte runs), so a token is never decoded by itself.
    A U+FFFD at the end of the window may be the start of a character whose other bytes are still to come: it is kept
    back until they come, or until `finish`.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._given = len(self._decode().rstrip(_REPLACEMENT))

    def push(self, token_id: int) -> str:
        """Add a token; the text that became certain with it, possibly empty."""
        self._window.append(token_id)
        text = self._decode()
        stable = text.rstrip(_REPLACEMENT)
        piece = self._take(stable)
        if len(stable) == len(text) and piece:
            # Whole characters up to here: the next window starts with this token as its context.
            self._restart(1)
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            self._restart(_MAX_WINDOW_TOKENS // 4)
        return piece

    def finish(self) -> str:
        """What was kept back; incomplete characters come out as U+FFFD."""
        return self._take(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _take(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece

    def _restart(self, keep_tokens: int) -> None:
        self._window = self._window[-keep_tokens:]
        self._given = len(self._decode().rstrip(_REPLACEMENT))
