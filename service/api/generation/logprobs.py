"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kernels.sampling.parameters import ScoredToken
from service.api.admission.prompts import Prompt
from service.api.generation.sequence import OutputChunk
from service.api.schema.requests import Generation
from service.text.detokenizer import detokenizer_of
from service.text.tokenizer import TextTokenizer

# JSON has no infinity; a token that sampling ruled out gets what OpenAI and vLLM send for it.
LOWEST_LOGPROB = -9999.0
TokenNames = Callable[[int], str]
# To look up a token's text costs about as much as to tokenise so many characters.
_CHARS_PER_LOOKUP = 4


def token_names(tokenizer: TextTokenizer, request: Generation) -> TokenNames:
    """How the request wants tokens written: as text, or as ids for those whose text is none."""
    return (lambda token_id: f"token_id:{token_id}") if request.return_tokens_as_token_ids else tokenizer.token_text


def completion_logprobs(names: TokenNames, piece: OutputChunk, first_offset: int) -> dict[str, Any]:
    """The completions shape for the tokens of a piece; `first_offset` characters stand before the answer."""
    return _columns(names, piece.logprobs, [first_offset + offset for offset in piece.text_offsets])


def echoed_logprobs(
    tokenizer: TextTokenizer,
    names: TokenNames,
    prompt: Prompt,
    entries: Sequence[ScoredToken | None],
    *,
    skip_special_tokens: bool,
) -> dict[str, Any]:
    """The completions shape for the prompt, of which the first token has no probability."""
    offsets = []
    detokenizer = detokenizer_of(tokenizer, skip_special_tokens=skip_special_tokens)
    num_chars = 0
    for token_id in prompt.token_ids:
        offsets.append(min(num_chars, len(prompt.text)))
        num_chars += len(detokenizer.push(token_id))
    filled = [
        entry if entry is not None else _no_probability(token_id)
        for entry, token_id in zip(entries, prompt.token_ids, strict=True)
    ]
    columns = _columns(names, filled, offsets)
    for index, entry in enumerate(entries):
        if entry is None:
            columns["token_logprobs"][index] = columns["top_logprobs"][index] = None
    return columns


def prompt_logprobs(
    tokenizer: TextTokenizer, entries: Sequence[ScoredToken | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's shape for the prompt: of each token its log probability, and behind it those of `num_top` alternatives
    (-1: all), by id."""
    return [None if entry is None else _by_id(tokenizer, entry, num_top) for entry in entries]


def first_alternatives(entries: Sequence[ScoredToken | None], num_top: int) -> list[ScoredToken | None]:
    """The entries with at most so many alternatives, where the engine was asked for more."""
    return [
        entry if entry is None or not 0 <= num_top < len(entry.top) else entry._replace(top=entry.top[:num_top])
        for entry in entries
    ]


def cost_chars(pieces: Iterable[OutputChunk]) -> int:
    """Cost of writing the log probabilities of `pieces`, as a number of characters to tokenise (`run_in_thread`)."""
    num_lookups = 0
    for piece in pieces:
        entries = (*piece.logprobs, *(piece.prompt_logprobs or ()))
        num_lookups += sum(2 + len(entry.top) for entry in entries if entry is not None)
    return num_lookups * _CHARS_PER_LOOKUP


def join_columns(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Prompt and answer one after the other."""
    return {name: first[name] + second[name] for name in first}


def chat_logprobs(
    tokenizer: TextTokenizer, names: TokenNames, piece: OutputChunk, *, with_chosen: bool = False
) -> dict[str, Any]:
    """The chat shape for the tokens of a piece. `with_chosen`: each is among its alternatives, whatever these are."""
    content = []
    for entry in piece.logprobs:
        named = dict(entry.top)
        if with_chosen:  # first, as vLLM has it
            named = {entry.token_id: entry.logprob} | named
        top = [_chat_token(tokenizer, names, token_id, logprob) for token_id, logprob in named.items()]
        content.append({**_chat_token(tokenizer, names, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content}


def _columns(names: TokenNames, entries: Sequence[ScoredToken], offsets: list[int]) -> dict[str, Any]:
    top = []
    for entry in entries:
        # The chosen token comes first, as with vLLM; of tokens that read alike the likeliest counts.
        alternatives: dict[str, float] = {}
        for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top):
            name = names(token_id)
            alternatives[name] = max(logprob, alternatives.get(name, LOWEST_LOGPROB))
        top.append(alternatives)
    return {
        "tokens": [names(entry.token_id) for entry in entries],
        "token_logprobs": [max(entry.logprob, LOWEST_LOGPROB) for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _no_probability(token_id: int) -> ScoredToken:
    return ScoredToken(token_id, 0.0)


def _by_id(tokenizer: TextTokenizer, entry: ScoredToken, num_top: int) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
    own = {entry.token_id: entry.logprob}
    # The prompt's own comes first, as vLLM has it: prime-rl reads no other.
    shown = own | dict(entry.top if num_top < 0 else entry.top[:num_top]) | own
    return {
        str(token_id): {
            "logprob": max(logprob, LOWEST_LOGPROB),
            "rank": ranks.get(token_id, entry.rank),
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, logprob in shown.items()
    }


def _chat_token(tokenizer: TextTokenizer, names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": names(token_id),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
