"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from service.api.admission import Prompt
from service.api.generation import Piece
from service.engine.messages import TokenLogprob
from service.text.detokenizer import IncrementalDetokenizer
from service.text.tokenizer import TextTokenizer

# JSON has no infinity; a token that sampling ruled out gets what OpenAI and vLLM send for it.
LOWEST_LOGPROB = -9999.0
# To look up a token's text costs about as much as to tokenise so many characters.
_CHARS_PER_LOOKUP = 4


def completion_logprobs(tokenizer: TextTokenizer, piece: Piece, first_offset: int) -> dict[str, Any]:
    """The completions shape for the tokens of a piece; `first_offset` characters stand before the answer."""
    return _columns(tokenizer, piece.logprobs, [first_offset + offset for offset in piece.text_offsets])


def prompt_logprobs(
    tokenizer: TextTokenizer, prompt: Prompt, entries: Sequence[TokenLogprob | None], *, skip_special_tokens: bool
) -> dict[str, Any]:
    """The completions shape for the prompt, of which the first token has no probability."""
    offsets = []
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    num_chars = 0
    for token_id in prompt.token_ids:
        offsets.append(min(num_chars, len(prompt.text)))
        num_chars += len(detokenizer.push(token_id))
    filled = [
        entry if entry is not None else _no_probability(token_id)
        for entry, token_id in zip(entries, prompt.token_ids, strict=True)
    ]
    columns = _columns(tokenizer, filled, offsets)
    for index, entry in enumerate(entries):
        if entry is None:
            columns["token_logprobs"][index] = columns["top_logprobs"][index] = None
    return columns


def cost_chars(pieces: Iterable[Piece]) -> int:
    """What it costs to write the log probabilities of `pieces`, in characters of a text to tokenise (`off_loop`)."""
    num_lookups = 0
    for piece in pieces:
        entries = (*piece.logprobs, *(piece.prompt_logprobs or ()))
        num_lookups += sum(2 + len(entry.top) for entry in entries if entry is not None)
    return num_lookups * _CHARS_PER_LOOKUP


def join_columns(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Prompt and answer one after the other."""
    return {name: first[name] + second[name] for name in first}


def chat_logprobs(tokenizer: TextTokenizer, piece: Piece) -> dict[str, Any]:
    """The chat shape for the tokens of a piece."""
    content = []
    for entry in piece.logprobs:
        top = [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
        content.append({**_chat_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content}


def _columns(tokenizer: TextTokenizer, entries: Sequence[TokenLogprob], offsets: list[int]) -> dict[str, Any]:
    top = []
    for entry in entries:
        # The chosen token is always among the alternatives; of tokens that read alike the likeliest stays.
        alternatives: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            alternatives.setdefault(tokenizer.token_text(token_id), max(logprob, LOWEST_LOGPROB))
        top.append(alternatives)
    return {
        "tokens": [tokenizer.token_text(entry.token_id) for entry in entries],
        "token_logprobs": [max(entry.logprob, LOWEST_LOGPROB) for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _no_probability(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, 0.0)


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
