"""Token ids to text while they arrive: never half a character, never a lost space."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from service.text.tokenizer import TextTokenizer

# Prompt tokens decoded ahead of the output, so that the first token keeps its leading space.
_CONTEXT_TOKENS = 6
# The context begins up to so many tokens earlier, so that it does not begin inside a character: UTF-8 has at most three
# bytes behind the first, and a token has at least one.
_MAX_CHARACTER_TAIL_TOKENS = 3
# A window that never ends on a whole character is cut, so that its cost stays bounded.
_MAX_WINDOW_TOKENS = 64
_KEPT_TOKENS = 16


class Detokenizer(Protocol):
    """Text of a growing list of tokens, given out piece by piece: in all, that of the tokens behind the prompt's."""

    def push(self, token_id: int) -> str:
        """Add a token; the text that became certain with it, possibly empty."""
        ...

    def finish(self) -> str:
        """The withheld text; incomplete characters come out as U+FFFD."""
        ...


def detokenizer_of(
    tokenizer: TextTokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    seen_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """For the tokens behind a prompt's.

    skip_special_tokens  leave special tokens out of the text, all but `seen_ids`
    """
    hidden_ids = tokenizer.special_ids - seen_ids if skip_special_tokens else frozenset[int]()
    kind = BytesDetokenizer if tokenizer.joins_bytes else WindowDetokenizer
    return kind(tokenizer, prompt_token_ids, hidden_ids)


class BytesDetokenizer:
    """Where a text is nothing but its tokens' bytes, read as UTF-8: each token is looked at once.

    A character that the prompt begins is the answer's if the answer makes one of it; if not, what the decoder shows for
    its first bytes is left out.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], hidden_ids: frozenset[int]) -> None:
        self._joined, self._hidden_ids = tokenizer.joined, hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between_characters = True
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS - _MAX_CHARACTER_TAIL_TOKENS :]:
            self.push(token_id)
        # Text shown for the first bytes of a character: one U+FFFD, or one for each that can never begin one.
        self._begun = self._decoder.getstate()[0].decode("utf-8", "replace")

    _begun = ""

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        if token_id in self._hidden_ids:
            return ""
        added = self._joined[token_id]
        if isinstance(added, str):
            if self._is_between_characters:
                return added
            added = added.encode()
        text = self._decoder.decode(added)
        self._is_between_characters = not self._decoder.getstate()[0]
        return self._answers(text)

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._answers(self._decoder.decode(b"", final=True))

    def _answers(self, text: str) -> str:
        """The text without what is shown for bytes of the prompt."""
        if text and self._begun:
            text, self._begun = text.removeprefix(self._begun), ""
        return text


class WindowDetokenizer:
    """For all other decoders, which look at neighbours.

    The window is some tokens whose text is given out already (the context) and the new ones. It is decoded again for
    each token, and what is new against the text given out is the piece: decoders look at neighbours (spaces, runs of
    bytes), so a token is never decoded by itself. A U+FFFD at the end may be the start of a character whose other bytes
    are still to come: it is kept back until they come, or until `finish`.
    """

    def __init__(self, tokenizer: TextTokenizer, prompt_token_ids: Sequence[int], hidden_ids: frozenset[int]) -> None:
        self._tokenizer, self._hidden_ids = tokenizer, hidden_ids
        self._window = list(prompt_token_ids[self._context_start(prompt_token_ids) :])
        # The first bytes of a character whose other bytes are to come count as new: the character is the answer's.
        self._num_context, num_chars_behind = self._whole_characters()
        self._num_given = len(self._decode(self._num_context)) + num_chars_behind
        # Length of the text for these bytes, which is the answer's only if it makes a character of them.
        self._num_unfinished = len(self._decode()) - self._num_given

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        self._window.append(token_id)
        text = self._decode()
        stable = self._stable(text)
        piece = self._give(stable)
        if piece and len(stable) == len(text):
            # Whole characters up to here: the tokens of this piece are the context of the next one.
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_given = len(self._decode())
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            piece += self._cut(text)
        return piece

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._give(self._decode())

    def _decode(self, num_tokens: int | None = None) -> str:
        """The text of the window, or of its first `num_tokens`."""
        shown = [token_id for token_id in self._window[:num_tokens] if token_id not in self._hidden_ids]
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def _context_start(self, prompt_token_ids: Sequence[int]) -> int:
        start = max(len(prompt_token_ids) - _CONTEXT_TOKENS, 0)
        earliest = max(start - _MAX_CHARACTER_TAIL_TOKENS, 0)
        while start > earliest and 0x80 <= (self._tokenizer.token_bytes(prompt_token_ids[start]) or b"a")[0] < 0xC0:
            start -= 1
        return start

    def _whole_characters(self) -> tuple[int, int]:
        """(tokens of the window up to the last that ends on a whole character, whole characters behind these)."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        num_tokens = num_chars_behind = 0
        for index, token_id in enumerate(self._window):
            if token_id not in self._hidden_ids:
                num_chars_behind += len(decoder.decode(self._tokenizer.token_bytes(token_id)))
            if not decoder.getstate()[0]:
                num_tokens, num_chars_behind = index + 1, 0
        return num_tokens, num_chars_behind

    def _stable(self, text: str) -> str:
        """The text without what further tokens may change: a byte-level decoder shows an incomplete character as one
        U+FFFD, a byte-fallback decoder the whole run of bytes around it as one U+FFFD each."""
        return text.removesuffix("\ufffd") if self._tokenizer.is_byte_level else text.rstrip("\ufffd")

    def _give(self, text: str) -> str:
        piece = text[self._num_given :]
        if piece and self._num_unfinished:
            piece = piece.removeprefix("\ufffd" * self._num_unfinished)
            self._num_unfinished = 0
        self._num_given = max(self._num_given, len(text))
        return piece

    def _cut(self, text: str) -> str:
        """Go on with the last tokens only; a run of bytes so long is no character, so it is given out."""
        piece = "" if self._tokenizer.is_byte_level else self._give(text)
        self._window = self._window[-_KEPT_TOKENS:]
        self._num_context = _KEPT_TOKENS
        kept = self._decode()
        self._num_given = len(self._stable(kept) if self._tokenizer.is_byte_level else kept)
        return piece
