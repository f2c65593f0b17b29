"""Text to token ids and back, with the `tokenizers` library alone, giving the ids that transformers would give."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from adapters.text.vocabulary import FLAGS, merged_config, special_tokens, token_content

_FEW_TOKENS = 1000


class TextError(ValueError):
    """A model directory or an adapter has text files that cannot be used; the message says which and why."""


class NotUnicode(TextError):
    """A client's text cannot be read as Unicode."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty if there is no such file. TextError if it is not a JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TextError(f"{path.name} of the model is not readable JSON: {error}.") from error
    if not isinstance(content, dict):
        raise TextError(f"{path.name} of the model must hold a JSON object.")
    return content


class TextTokenizer:
    """The tokenizer of a model directory: tokenizer.json, with the special tokens that tokenizer_config.json names.

    What is added around a text (a BOS, say) is what tokenizer.json's post-processor says, as in transformers 5; the
    flags `add_bos_token` and `add_eos_token` of tokenizer_config.json say nothing beside it.

    config          tokenizer_config.json as it is
    special_tokens  named special tokens (`bos_token`, ...) as text, for chat templates
    special_ids     ids that `skip_special_tokens` leaves out of text
    special_id_of   the same by their texts
    eos_token_ids   ids that end a sequence, from tokenizer_config.json, generation_config.json and config.json
    vocab_size      the highest id + 1; ids between may stand for nothing
    max_chars_per_token  a text of more characters has more than one token; None where there is no such bound
    """

    def __init__(self, tokenizer: Tokenizer, config: dict[str, Any], eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.config = config
        self.special_tokens = special_tokens(config, {})
        _add_configured_tokens(tokenizer, config, self.special_tokens)
        self._added = tokenizer.get_added_tokens_decoder()
        self.special_id_of = {token.content: id_ for id_, token in sorted(self._added.items()) if token.special}
        self.special_ids = frozenset(self.special_id_of.values())
        eos = tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *(() if eos is None else (eos,)))))
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        parts = json.loads(tokenizer.to_str())
        self.is_byte_level = "ByteLevel" in json.dumps(parts.get("decoder"))
        # Nothing is done to the text but to take the tokens' bytes together.
        self.joins_bytes = (parts.get("decoder") or {}).get("type") == "ByteLevel"
        self.joined = _Joined(self)
        self.max_chars_per_token = max_chars_of(parts)
        # Decoders of the sentencepiece kind take the space off what comes first, so a token is shown behind another.
        first = None if self.is_byte_level else tokenizer.token_to_id("a")
        self._first_ids = [first] if first is not None and self.decode([first]) == "a" else []

    @classmethod
    def load(cls, model_dir: Path) -> TextTokenizer:
        """Read the tokenizer of `model_dir`. TextError if tokenizer.json is missing or unreadable."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TextError(f"{model_dir} has no tokenizer.json; save the model with a fast tokenizer.")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TextError(f"{path} is not a tokenizer.json that the tokenizers library reads: {error}.") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = read_json(model_dir / "tokenizer_config.json")
        config = merged_config(config, read_json(model_dir / "special_tokens_map.json"))
        model = read_json(model_dir / "config.json")
        if model.get("eos_token_id") is None and isinstance(model.get("text_config"), dict):
            model = model["text_config"]
        eos_token_ids = [
            *_ids(read_json(model_dir / "generation_config.json").get("eos_token_id")),
            *_ids(model.get("eos_token_id")),
        ]
        return cls(tokenizer, config, tuple(dict.fromkeys(eos_token_ids)))

    def to_json(self) -> str:
        """The text of a tokenizer.json, with what tokenizer_config.json declares special."""
        return self._tokenizer.to_str()

    def token_flags(self, text: str) -> dict[str, bool] | None:
        """FLAGS of an added token, None for a text that is none."""
        token_id = self._tokenizer.token_to_id(text)
        token = None if token_id is None else self._added.get(token_id)
        return None if token is None else {name: getattr(token, name) for name in FLAGS}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the model's post-processor adds (a BOS, say) if `add_special_tokens`.

        NotUnicode for half of a surrogate pair, which JSON can spell.
        """
        _check_unicode(text)
        # As a batch of one: that lets other threads run meanwhile, which `encode` does not. "Fast" leaves out where
        # in the text each token is, which nobody asks for and which takes three quarters of the time.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def pair_encoder(self, *, add_special_tokens: bool) -> Callable[[str, str], tuple[list[int], list[int], list[int]]]:
        """A function of two texts: the tokens before the second text, its own, and those behind it, as the model's
        post-processor joins a pair. The first text, which is often the same, is encoded once.

        NotUnicode as `encode`.
        """
        known: dict[str, Encoding] = {}

        def encoding(text: str) -> Encoding:
            _check_unicode(text)
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]

        def join(one: str, other: str) -> tuple[list[int], list[int], list[int]]:
            if one not in known:
                known[one] = encoding(one)
            whole = self._tokenizer.post_process(known[one], encoding(other), add_special_tokens)
            ids, sides = whole.ids, whole.sequence_ids
            if 1 not in sides:
                return ids, [], []
            start, end = sides.index(1), len(sides) - sides[::-1].index(1)
            return ids[:start], ids[start:end], ids[end:]

        return join

    def num_tokens_before(self, text: str, at: int, num_tokens: int) -> int:
        """About how many of a text's `num_tokens` tokens stand before character `at`: the shorter side is encoded."""
        if at < len(text) // 2:
            return len(self.encode(text[:at], add_special_tokens=False))
        return num_tokens - len(self.encode(text[at:], add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 come out as U+FFFD."""
        if len(token_ids) > _FEW_TOKENS:  # as a batch of one: that lets other threads run meanwhile
            return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text, special tokens included; for listing alternatives in log probabilities."""
        if self._first_ids:
            text = self._tokenizer.decode([*self._first_ids, token_id], skip_special_tokens=False)
            if text.startswith("a"):
                return text[1:]
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be whole characters."""
        name = self.token_name(token_id)
        if token_id not in self._added:
            if self.is_byte_level and all(char in _BYTE_OF_CHAR for char in name):
                return bytes(_BYTE_OF_CHAR[char] for char in name)
            if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
                return bytes([int(name[3:5], 16)])
        return self.token_text(token_id).encode()

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id outside the vocabulary."""
        return self._tokenizer.id_to_token(token_id) or ""


def _check_unicode(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise NotUnicode("The text holds half of a surrogate pair; send valid Unicode.") from error


class _Joined(dict[int, str | bytes]):
    """Token id to the part of the text that it adds, special or not, where `joins_bytes`: characters, or bytes of which
    some are only part of one. A token that was met before is found without a call."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | bytes:
        name = self._tokenizer.token_name(token_id)
        is_mapped = all(char in _BYTE_OF_CHAR for char in name)
        added = bytes(_BYTE_OF_CHAR[char] for char in name) if is_mapped else name.encode()
        found: str | bytes = added
        with contextlib.suppress(UnicodeDecodeError):
            found = added.decode()
        self[token_id] = found
        return found


def max_chars_of(parts: dict[str, Any]) -> int | None:
    """The characters of the longest token, from a parsed tokenizer.json, if every text is cut into tokens and nothing
    of it is lost: bytes stand for what no token spells, no token takes in the blanks around it, and the normalizer, if
    any, only puts composed characters for up to four others."""
    model = parts.get("model", {})
    spells_all = bool(model.get("byte_fallback")) or "ByteLevel" in json.dumps(parts.get("pre_tokenizer"))
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in parts.get("added_tokens") or [])
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not vocabulary or swallows or not spells_all:
        return None
    steps = _steps(parts.get("normalizer"))
    if not all(_keeps_length(step) or _composes(step) for step in steps):
        return None
    added = (token["content"] for token in parts.get("added_tokens") or [])
    return max(len(token) for token in (*vocabulary, *added)) * (4 if any(map(_composes, steps)) else 1)


def _steps(normalizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if normalizer is None:
        return []
    return list(normalizer["normalizers"]) if normalizer.get("type") == "Sequence" else [normalizer]


def _keeps_length(step: dict[str, Any]) -> bool:
    if step.get("type") == "Replace":
        pattern = step.get("pattern", {}).get("String")
        return pattern is not None and len(step.get("content", "")) >= len(pattern)
    return step.get("type") in ("Prepend", "Lowercase", "NFD", "NFKD")


def _composes(step: dict[str, Any]) -> bool:
    return step.get("type") in ("NFC", "NFKC")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, backwards: printable Latin-1 stands for itself, the other
    bytes in order for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _ids(value: Any) -> list[int]:
    """An `eos_token_id` as configs write it (absent, a number, a list) as a list."""
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int)]


def _add_configured_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens that tokenizer_config.json declares special are special, also where tokenizer.json does not say so."""
    declared = [content for content in named.values() if tokenizer.token_to_id(content) is not None]
    for entry in (config.get("added_tokens_decoder") or {}).values():
        if isinstance(entry, dict) and entry.get("special") and token_content(entry) is not None:
            content = str(entry["content"])
            if tokenizer.token_to_id(content) is not None:
                declared.append(content)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [content for content in dict.fromkeys(declared) if content not in known]
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in missing])
