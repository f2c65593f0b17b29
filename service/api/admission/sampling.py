"""A request's sampling fields to the engine's `Sampling`, each checked against the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kernels.sampling.parameters import NEUTRAL, PARAMETERS
from service.api.errors import BadRequest, quoted
from service.api.schema.error_messages import bad_request
from service.api.schema.requests import ChatRequest, CompletionRequest, Decoding, Generation
from service.engine.ipc.messages import Sampling
from service.text.tokenizer import TextError, TextTokenizer, read_json

_SEED_RANGE = 2**63
_MAX_ID_DIGITS = 10
_MAX_SHOWN_KEYS = 8
# Characters of a request's stop strings together; the automaton takes about 150 bytes for each.
MAX_STOP_CHARS = 4096
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


def model_defaults(model_dir: Path) -> Mapping[str, float]:
    """`NEUTRAL` but for what the model's generation_config.json names. TextError for values that no request may
    have."""
    config = read_json(model_dir / "generation_config.json")
    names = [parameter.name for parameter in PARAMETERS if parameter.is_models]
    named = {name: config[name] for name in names if config.get(name) is not None}
    try:
        Generation.model_validate(named)
    except ValidationError as error:
        raise TextError(
            f"generation_config.json of the model: {bad_request(error.errors()).message} Correct it, or start with "
            "--sampling-defaults openai."
        ) from error
    return {**NEUTRAL, **named}


def sampling_parameters(request: Decoding, defaults: Mapping[str, float]) -> dict[str, Any]:
    """The number of each of `PARAMETERS`, by name."""
    asked = {name: getattr(request, name) for name in NEUTRAL}
    said = {name: defaults[name] if value is None else value for name, value in asked.items()}
    return {parameter.name: min(said[parameter.name], parameter.most) for parameter in PARAMETERS}


def build_sampling(
    request: CompletionRequest | ChatRequest,
    *,
    max_tokens: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    own_eos_token_ids: tuple[int, ...] = (),
    defaults: Mapping[str, float] = NEUTRAL,
    lists: TokenLists = TokenLists(),
    grammar: str | None = None,
    max_logprobs: int = -1,
) -> Sampling:
    """The engine's sampling parameters for a request. `eos_token_ids`, and an adapter's own, end the answer unless
    `ignore_eos`; ids beyond the vocabulary, which some checkpoints name, are left out. `grammar` is the result of
    `requested_grammar`. BadRequest names a wrong field."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens ({min_tokens}) is larger than max_tokens ({max_tokens}); lower it.", param="min_tokens"
        )
    stop_token_ids = _checked_ids(request, "stop_token_ids", vocab_size)
    if not request.ignore_eos:
        endings = (token_id for token_id in (*eos_token_ids, *own_eos_token_ids) if 0 <= token_id < vocab_size)
        stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *endings)))
    if not lists.leave_a_token(stop_token_ids if min_tokens else (), vocab_size):
        raise _no_token_left(request)
    logprobs, prompt_logprobs = _logprobs(request, vocab_size, max_logprobs)
    numbers = sampling_parameters(request, defaults)
    if numbers["top_p"] == 0:
        numbers["temperature"] = 0.0  # of equally likely tokens too the first one
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        **numbers,
        logit_bias=_logit_bias(request, vocab_size),
        allowed_tokens=lists.allowed_tokens,
        bad_words=lists.bad_words,
        seed=request.seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        eos_token_ids=() if request.ignore_eos else own_eos_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=_checked_ids(request, "logprob_token_ids", vocab_size),
        grammar=grammar,
    )


def _no_token_left(request: Generation) -> BadRequest:
    """The sentence for fields that together bar every token."""
    asked = ("allowed_token_ids", "bad_words", "stop_token_ids", "min_tokens")
    names = [name for name in asked if getattr(request, name)]
    return BadRequest(
        f"{', '.join(f'`{name}`' for name in names)} can leave no token to choose; allow more. Before `min_tokens` no "
        "end token can be chosen, and neither can the last token of a bad word, wherever it would complete the word.",
        param=names[0],
    )


def seed_of_choice(seed: int | None, index: int) -> int | None:
    """Each of the `n` answers has a random stream of its own, the first one the request's seed itself."""
    if seed is None:
        return None
    return (seed + index + _SEED_RANGE) % (2 * _SEED_RANGE) - _SEED_RANGE


def stop_strings(request: Generation) -> tuple[str, ...]:
    """The `stop` field as a tuple. BadRequest if the texts are too long together."""
    if request.stop is None:
        return ()
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    num_chars = sum(map(len, stop))
    if num_chars > MAX_STOP_CHARS:
        raise BadRequest(
            f"`stop` has {num_chars} characters in all; this server takes {MAX_STOP_CHARS}. Send shorter texts, or "
            "fewer.",
            param="stop",
        )
    return stop


def _logprobs(
    request: CompletionRequest | ChatRequest, vocab_size: int, max_logprobs: int
) -> tuple[int | None, int | None]:
    """Alternatives for (output tokens, prompt tokens); None means no log probabilities at all. BadRequest for more than
    `max_logprobs`; -1 stands for all tokens, in both."""
    limit = vocab_size if max_logprobs < 0 else max_logprobs

    def wanted(name: str) -> int | None:
        count: int | None = getattr(request, name, None)
        most = vocab_size if count == -1 else count
        if most is None or most <= limit:
            return most
        asked = "all tokens" if count == -1 else str(count)
        raise BadRequest(
            f"`{name}` asks for {asked}; it must be less than or equal to {limit} (--max-logprobs).", param=name
        )

    prompt = wanted("prompt_logprobs")
    if isinstance(request, ChatRequest):
        count = (wanted("top_logprobs") or 0) if request.logprobs else None
        has_logprobs = count is not None
    else:
        count = wanted("logprobs")
        has_logprobs = count is not None
        # An answer of no tokens is the prompt alone, and the engine runs the prompt for its log probabilities.
        counts = [count if request.echo else None, prompt, 0 if request.max_tokens == 0 else None]
        prompt = max((one for one in counts if one is not None), default=None)
    if request.logprob_token_ids:
        if not has_logprobs:
            raise BadRequest("`logprob_token_ids` is only allowed with `logprobs`.", param="logprob_token_ids")
        count = 0
    return count, prompt


def _checked_ids(request: Generation, name: str, vocab_size: int) -> tuple[int, ...]:
    token_ids = getattr(request, name) or ()
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise BadRequest(
                f"{name} holds {token_id}, which is out of vocabulary: the last token is {vocab_size - 1}.", param=name
            )
    return tuple(token_ids)


def _logit_bias(request: Generation, vocab_size: int) -> dict[int, float]:
    given = request.logit_bias or {}
    wrong = [key for key in given if not _is_token_id(key) or int(key) >= vocab_size]
    if wrong:
        shown = ", ".join(repr(quoted(key)) for key in wrong[:_MAX_SHOWN_KEYS])
        rest = f" and {len(wrong) - _MAX_SHOWN_KEYS} more" if len(wrong) > _MAX_SHOWN_KEYS else ""
        raise BadRequest(
            f"`logit_bias` has the key{'' if len(wrong) == 1 else 's'} {shown}{rest}; keys are token ids from 0 to "
            f"{vocab_size - 1}, as text: the vocabulary has {vocab_size} tokens.",
            param="logit_bias",
        )
    return {int(key): float(bias) for key, bias in given.items()}


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS


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
