"""A model's tokens as llguidance knows them, and grammars compiled for them.

The process that tries a stranger's grammar and the engine both use this, so that what passed the one compiles in the
other: same tokens, same limits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from service.models.families import model_spec
from service.models.spec.config_json import read_config
from service.text.tokenizer import TextError, TextTokenizer

# Private use: no text of a grammar has these, so no text is taken for a special token.
_HIDDEN = "\U000f0000{}\U000f0001"
# The library's own, but for what an error shows; for the lexer's states, which take half a kilobyte each and are kept
# with a compiled grammar; and for the items of a mask, where what an ambiguous grammar costs grows with their cube: the
# library's 50,000 are seconds of it, while a schema of some hundred optional properties needs two thousand.
MAX_ITEMS_OF_A_MASK = 10_000
_LIMITS = llguidance.LLParserLimits(max_lexer_states=30_000, step_max_items=MAX_ITEMS_OF_A_MASK, verbose_errors=False)
# How the library's errors name the items of a mask, and those of one place in the text.
_ITEMS_ERROR = re.compile(r"Too many items|Current row has \d+ items")
TOO_AMBIGUOUS = (
    "it is too ambiguous: there are too many ways to read the same text, or to go on from it; let rules repeat by `*` "
    "or `+` in place of naming themselves, write texts as one terminal or regular expression, and offer fewer "
    "alternatives at one place"
)
_MAX_ERROR_CHARS = 500


class GrammarError(ValueError):
    """A grammar that cannot be followed, or a model that can follow none; the message says why, of a grammar in the
    library's words."""


class TokenTable:
    """The tokens of a model's vocabulary. Immutable, for any thread.

    Special tokens have no text here: a JSON string that holds `<|im_end|>` is spelled out, and a grammar names a
    special token by its id, as `<[3]>`.

    vocab_size     columns of the model's logits
    eos_token_ids  what ends an answer; none of them is part of a grammar's text
    special_ids    ids of special tokens by their texts
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        """GrammarError for a tokenizer whose tokens are not spelled in bytes."""
        eos = [token_id for token_id in tokenizer.eos_token_ids if 0 <= token_id < vocab_size]
        if not eos:
            raise GrammarError("the model names no end token")
        try:
            self.tokens = llguidance.LLTokenizer(_without_special_text(tokenizer), n_vocab=vocab_size, eos_token=eos)
        except (ValueError, RuntimeError) as error:
            raise GrammarError(f"the model's tokenizer does not fit grammars: {error}") from error
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos)
        self.special_ids = tokenizer.special_id_of

    @classmethod
    def load(cls, model_dir: Path) -> TokenTable:
        """Load the table of a model directory. GrammarError if its tokenizer is missing or cannot be used."""
        try:
            tokenizer = TextTokenizer.load(model_dir)
        except TextError as error:
            raise GrammarError(str(error).rstrip(".")) from error
        return cls(tokenizer, model_spec(read_config(model_dir)).vocab_size)


def compile_grammar(table: TokenTable, grammar: str) -> llguidance.LLMatcher:
    """A matcher at its beginning, whose first mask has been made: some grammars compile and fail then. It may be copied
    by `deep_copy`. GrammarError for a grammar that is none, or allows no answer at all."""
    matcher = llguidance.LLMatcher(table.tokens, grammar, log_level=0, limits=_LIMITS)
    _raise_error(matcher)
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    _raise_error(matcher)
    if not mask.any():
        raise GrammarError("it allows no answer")
    return matcher


def error_of(matcher: llguidance.LLMatcher) -> str:
    """The error of a matcher that cannot go on, in one line; empty for one that can."""
    if _ITEMS_ERROR.search(matcher.get_error()):
        return TOO_AMBIGUOUS
    # Without the line of the grammar, which its sender has, and without the names that special tokens have here.
    said = re.split(r"\n *\d+ \| |<non-verbose/>|; following special tokens", matcher.get_error())[0]
    message = " ".join(said.split())[:_MAX_ERROR_CHARS].rstrip(" .")
    message = message.partition(" Enable 'coerce_one_of'")[0]  # which would let two of them match
    if message.startswith("NoExtension"):
        return "it allows no answer, or refers to itself without end"
    return message


def _raise_error(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(error_of(matcher) or "it cannot be compiled")


def _without_special_text(tokenizer: TextTokenizer) -> str:
    """tokenizer.json with made-up texts for special tokens, in the vocabulary too."""
    parts: dict[str, Any] = json.loads(tokenizer.to_json())
    hidden = {}
    for token in parts.get("added_tokens") or []:
        if token["id"] in tokenizer.special_ids:
            hidden[token["content"]] = _HIDDEN.format(token["id"])
            token["content"] = hidden[token["content"]]
    vocabulary = parts["model"].get("vocab")
    if isinstance(vocabulary, dict):
        parts["model"]["vocab"] = {hidden.get(text, text): token_id for text, token_id in vocabulary.items()}
    # The post-processor names tokens by their texts, and is not needed here.
    parts["post_processor"] = None
    return json.dumps(parts)
