"""Which tokens an answer may hold: `allowed_token_ids` and `bad_words`, as the engine takes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.api.errors import BadRequest, quoted
from service.api.schema.requests import Generation
from service.text.tokenizer import TextTokenizer

# Characters of a request's bad words together: each step looks for their tokens.
MAX_BAD_CHARS = 4096


@dataclass(frozen=True)
class TokenLists:
    """See `Sampling`, whose fields these are. The default allows everything."""

    allowed_tokens: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()

    def leave_a_token(self, barred: Iterable[int], vocab_size: int) -> bool:
        """Whether a token can be chosen wherever the bad words bar what they can, and these tokens are barred too."""
        gone = {*barred, *(word[-1] for word in self.bad_words)}
        if not self.allowed_tokens:
            return len(gone) < vocab_size
        bits = bytearray(self.allowed_tokens)
        for token_id in gone:
            if token_id >> 3 < len(bits):
                bits[token_id >> 3] &= ~(1 << (token_id & 7))
        return any(bits)


def num_list_chars(request: Generation) -> int:
    """About the characters that `token_lists` has to handle, for `run_in_thread`."""
    return len(request.allowed_token_ids or ()) + 2 * sum(map(len, request.bad_words or ()))


def token_lists(request: Generation, tokenizer: TextTokenizer, vocab_size: int) -> TokenLists:
    """BadRequest names a wrong field."""
    return TokenLists(_allowed(request, vocab_size), _bad_words(request, tokenizer, vocab_size))


def _allowed(request: Generation, vocab_size: int) -> bytes:
    token_ids = request.allowed_token_ids
    if token_ids is None:
        return b""
    highest = max(token_ids)
    if highest >= vocab_size:
        raise BadRequest(
            f"allowed_token_ids holds {highest}, which is out of vocabulary: the last token is {vocab_size - 1}.",
            param="allowed_token_ids",
        )
    bits = bytearray(highest // 8 + 1)
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


def _bad_words(request: Generation, tokenizer: TextTokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as a text begins with it, and as it stands behind a space."""
    words = request.bad_words or []
    num_chars = sum(map(len, words))
    if num_chars > MAX_BAD_CHARS:
        raise BadRequest(
            f"`bad_words` has {num_chars} characters in all; this server takes {MAX_BAD_CHARS}. Send shorter texts, or "
            "fewer.",
            param="bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        first, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not first or max(first + spaced) >= vocab_size:
            raise BadRequest(
                f"`bad_words` holds {quoted(word)!r}, which has no tokens of this model.", param="bad_words"
            )
        found[first] = None
        # Where the space is a token by itself, the word behind it is the same as without.
        if spaced[-len(first) :] != first:
            found[spaced] = None
    return tuple(found)
