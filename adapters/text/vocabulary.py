"""The tokens that an adapter's tokenizer files name and add, and whether the base model's tokenizer has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from adapters.errors import MAX_SHOWN, Malformed, Unsupported
from adapters.files.safetensors_header import printable, refuse_surrogates
from adapters.text.side_files import Role

# The named special tokens, in transformers' order; templates see them as variables.
_TOKENS_BY_NAME = ("model_specific_special_tokens", "extra_special_tokens")
NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Tokens that no chat prompt contains, unless a template writes them.
_UNUSED_ROLES = frozenset({"unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
# A token that fills batches in training, by its name.
_PADDING_NAME = re.compile(r"(?<![a-z])pad(ding)?(?![a-z])", re.IGNORECASE)
# How an added token is found in a text, and whether answers leave it out.
FLAGS = ("lstrip", "rstrip", "single_word", "special")
FILE_OF: Mapping[Role, str] = {
    "tokenizer_config": "tokenizer_config.json",
    "special_tokens_map": "special_tokens_map.json",
    "added_tokens": "added_tokens.json",
    "tokenizer": "tokenizer.json",
    "processor_template": "chat_template.json",
    "generation_config": "generation_config.json",
}
# Limits of a tokenizer.json: far more than models have, thousands, of a hundred characters or two each.
_MAX_ADDED_TOKENS, _MAX_ENTRY_CHARS = 1 << 14, 1 << 13
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*\[')
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class BaseText:
    """The base model's tokenizer and chat templates, as far as an adapter's are compared with them.

    token_id          id of a token as the vocabulary spells it, None if there is none
    token_text        the reverse; empty for an id that stands for nothing
    token_flags       FLAGS of an added token by name, None if the text is none
    special_tokens    named special tokens as text, by the names of the templates' variables
    eos_token_ids     ids that end an answer
    template_sources  of all its chat templates
    """

    token_id: Callable[[str], int | None]
    token_text: Callable[[int], str] = lambda _token_id: ""
    token_flags: Callable[[str], Mapping[str, bool] | None] = lambda _text: None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    template_sources: tuple[str, ...] = ()


# ---- special tokens


def token_content(value: Any) -> str | None:
    """The text of a token that a config writes as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def special_tokens(config: Mapping[str, Any], tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates know them by, as transformers reads them of tokenizer_config.json and
    special_tokens_map.json."""
    merged = merged_config(config, tokens_map)
    named = {name: token_content(merged.get(name)) for name in NAMED_SPECIAL_TOKENS}
    if isinstance(ends := merged.get("eos_token"), list):
        named["eos_token"] = next(filter(None, map(token_content, ends)), None)
    named |= {name: token_content(value) for name, value in merged.items() if _names_one_more(name)}
    for key in _TOKENS_BY_NAME:
        if isinstance(more := merged.get(key), dict):
            named |= {name: token_content(value) for name, value in more.items()}
    return {name: text for name, text in named.items() if text is not None}


def merged_config(config: Mapping[str, Any], tokens_map: Mapping[str, Any]) -> dict[str, Any]:
    # Files that list added tokens come from versions that read no special_tokens_map.json.
    return {**config} if "added_tokens_decoder" in config else {**config, **tokens_map}


def file_that_names(key: str, config: Mapping[str, Any], tokens_map: Mapping[str, Any]) -> str:
    """The file whose value of a key counts."""
    is_of_map = "added_tokens_decoder" not in config and key in tokens_map
    return FILE_OF["special_tokens_map" if is_of_map else "tokenizer_config"]


def odd_tokens(config: Mapping[str, Any], tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """The file of each special token, by its name, that is given as something else than a text, an object with
    `content`, or null; only an `eos_token` may be a list of such."""
    odd: dict[str, str] = {}
    for key, value in merged_config(config, tokens_map).items():
        if isinstance(value, bool) and key not in NAMED_SPECIAL_TOKENS:
            continue  # a switch, such as add_bos_token
        is_one = key in NAMED_SPECIAL_TOKENS or _names_one_more(key)
        more = value if key in _TOKENS_BY_NAME and isinstance(value, dict) else {key: value} if is_one else {}
        file = file_that_names(key, config, tokens_map)
        for name, token in more.items():
            each = token if name == "eos_token" and isinstance(token, list) else [token]
            if any(one is not None and token_content(one) is None for one in each):
                odd[name] = file
    return odd


def _names_one_more(key: str) -> bool:
    return key.endswith("_token") and key not in NAMED_SPECIAL_TOKENS


def names_tokens(config: Mapping[str, Any], tokens_map: Mapping[str, Any]) -> bool:
    """Whether the files specify the special tokens, and so which do not exist."""
    return any(name in NAMED_SPECIAL_TOKENS for name in merged_config(config, tokens_map)) or bool(
        special_tokens(config, tokens_map)
    )


# ---- the vocabulary


@dataclass(slots=True)
class ListedToken:
    """A token of the adapter's tokenizer: its id and FLAGS where a file says them, and those files."""

    token_id: Any = None
    flags: dict[str, bool] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def listed_tokens(files: Mapping[Role, bytes], parsed: Mapping[Role, dict[str, Any]]) -> dict[str, ListedToken]:
    """Tokens that the files add or name, by their texts."""
    listed: dict[str, ListedToken] = {}

    def add(text: str | None, token_id: Any, role: Role, entry: Mapping[str, Any] = {}) -> None:
        if not text:  # a token named "" is none, though templates see it as such
            return
        one = listed.setdefault(text, ListedToken())
        one.token_id = one.token_id if token_id is None else token_id
        one.flags = {name: bool(entry[name]) for name in FLAGS if name in entry} | one.flags
        if FILE_OF[role] not in one.files:
            one.files.append(FILE_OF[role])

    for text, token_id in parsed.get("added_tokens", {}).items():
        add(text, _NO_ID if token_id is None else token_id, "added_tokens")
    config = parsed.get("tokenizer_config", {})
    decoder = config.get("added_tokens_decoder")
    for number, entry in decoder.items() if isinstance(decoder, dict) else ():
        if number.isdecimal() and len(number) < 12:
            known = entry if isinstance(entry, dict) else {}
            add(token_content(known), int(number), "tokenizer_config", known)
    for entry in _added_in(files["tokenizer"]) if "tokenizer" in files else ():
        if isinstance(entry, dict):
            add(token_content(entry), _NO_ID if entry.get("id") is None else entry["id"], "tokenizer", entry)
    roles: tuple[Role, ...] = ("tokenizer_config", "special_tokens_map")
    for role in roles:
        for text in _named_in(parsed.get(role, {})):
            if role == "tokenizer_config" or "added_tokens_decoder" not in config:
                add(text, None, role)
    return listed


# The id of an entry without one, which no base has.
_NO_ID = "none"


def _named_in(config: Mapping[str, Any]) -> Iterator[str]:
    """Texts of the special tokens that one file names, those of lists included."""
    yield from special_tokens(config, {}).values()
    for key in ("eos_token", "extra_special_tokens", "additional_special_tokens"):
        if isinstance(more := config.get(key), list):
            yield from filter(None, map(token_content, more))


def left_out_tokens(
    listed: Mapping[str, ListedToken],
    variables: Mapping[str, str],
    sources: Iterable[str],
    base: BaseText | None,
    vocab_size: int | None,
    files: Mapping[Role, bytes],
) -> list[str]:
    """Tokens that the base has not and that no prompt of the adapter holds. Raises Unsupported for one that matters:
    prompts would be read differently than in training."""
    left_out = []
    for text, one in listed.items():
        if not _is_new(text, one.token_id, base, vocab_size):
            continue
        roles = {name for name, named in variables.items() if named == text}
        is_unused = roles <= _UNUSED_ROLES if roles else _PADDING_NAME.search(text) is not None
        if not is_unused or any(text in source or any(role in source for role in roles) for source in sources):
            raise Unsupported(_changes_vocabulary(text, one.files, files))
        left_out.append(text)
    return left_out


def changed_flags(listed: Mapping[str, ListedToken], named: Iterable[str], base: BaseText | None) -> list[str]:
    """A note about tokens of the base that the adapter's tokenizer finds otherwise.

    named  its special tokens, which are special whatever their entries say
    """
    found, files, special = [], set[str](), set(named)
    for text, one in listed.items():
        flags = base.token_flags(text) if base is not None else None
        own = one.flags | ({"special": True} if one.flags and text in special else {})
        others = [name for name, value in own.items() if flags is not None and flags[name] != value]
        if others:
            found.append(f"{shown(text)} ({', '.join(f'{name}: {str(own[name]).lower()}' for name in others)})")
            files |= {*one.files}
    if not found:
        return []
    more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    return [
        f"Other flags than in the base model's tokenizer stand in {' and '.join(sorted(files))} for "
        f"{', '.join(found[:MAX_SHOWN])}{more}; they are not used, since texts are cut into tokens as the base's are."
    ]


def _is_new(text: str, token_id: Any, base: BaseText | None, vocab_size: int | None) -> bool:
    """Whether the base's tokenizer lacks the token, or has it under another id."""
    if token_id is None:  # named, not listed
        return base is not None and base.token_id(text) is None and text not in base.special_tokens.values()
    if not isinstance(token_id, int) or (vocab_size is not None and token_id >= vocab_size):
        return True
    return base is not None and base.token_id(text) != token_id


def _changes_vocabulary(text: str, named_in: list[str], files: Mapping[Role, bytes]) -> str:
    roles: tuple[Role, ...] = ("tokenizer", "tokenizer_config", "added_tokens", "special_tokens_map")
    there = [FILE_OF[role] for role in roles if role in files]
    return (
        f"The adapter's tokenizer adds the token {shown(text)} ({', '.join(named_in)}), which the base model's does "
        "not have; an adapter that changes the vocabulary is not supported. If it was trained without that token, "
        f"leave out {' and '.join([', '.join(there[:-1]), there[-1]] if there[1:] else there)}: upload with "
        "?without_tokenizer=true, or by `multilora upload --without-tokenizer`."
    )


def shown(text: str) -> str:
    return repr(printable(text[:100]))


# ---- tokenizer.json


def _added_in(tokenizer: bytes) -> list[Any]:
    """The list "added_tokens" of a tokenizer.json, which stands at its beginning."""
    text = tokenizer.decode("utf-8", errors="replace")
    begin = _ADDED_TOKENS.search(text)
    if begin is None:
        return []
    try:
        found = list(_entries(text, begin.end()))
        refuse_surrogates(found)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, Malformed) else "its list of added tokens is broken."
        raise Malformed(f"tokenizer.json cannot be read: {reason}") from None
    return found


def _entries(text: str, at: int) -> Iterator[Any]:
    """The entries of a JSON list whose bracket stands before `at`, each parsed by itself so that other threads can run
    in between. Raises ValueError for anything else, and for too many or too long entries."""
    decoder = json.JSONDecoder()
    at = _behind_space(text, at)
    if text[at : at + 1] == "]":
        return
    for _ in range(_MAX_ADDED_TOKENS):
        entry, length = decoder.raw_decode(text[at : at + _MAX_ENTRY_CHARS])
        yield entry
        at = _behind_space(text, at + length)
        mark = text[at : at + 1]
        if mark == "]":
            return
        if mark != ",":
            break
        at = _behind_space(text, at + 1)
    else:
        raise Malformed(f"it has more than {_MAX_ADDED_TOKENS} added tokens.")
    raise ValueError("no comma and no end")


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it may be empty"
    return found.end()
