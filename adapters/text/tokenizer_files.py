"""An adapter's tokenizer files and templates: their changes to prompts and answers, relative to the base model's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapters.errors import Malformed
from adapters.files.paths import DEFAULT_TEMPLATE, TEMPLATE_FILE
from adapters.files.safetensors_header import parse_json_object, printable
from adapters.text.side_files import TEMPLATES_FOLDER, Role
from adapters.text.vocabulary import (
    FILE_OF,
    BaseText,
    changed_flags,
    file_that_names,
    left_out_tokens,
    listed_tokens,
    merged_config,
    names_tokens,
    odd_tokens,
    shown,
    special_tokens,
    token_content,
)

MAX_TEMPLATES = 16
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Far more than adapters name; each is looked at by every request.
_MAX_EOS_TOKENS, _MAX_VARIABLE_CHARS = 64, 1 << 14
# Keys of generation_config.json that change no answer here.
_NO_SETTINGS = {"eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "_from_model_config"}


@dataclass(frozen=True, slots=True)
class AdapterText:
    """An adapter's own chat templates, special tokens and end tokens.

    templates       chat templates by name, the usual one as "default"
    special_tokens  template variables that differ from the base's; a value of None: the adapter has none
    eos_token_ids   ids that end its answers beside the base's
    notes           sentences for the load report

    num_padding_tokens  tokens behind the base's vocabulary that its tokenizer adds and no prompt holds
    """

    templates: dict[str, str]
    special_tokens: dict[str, str | None]
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]
    num_padding_tokens: int = 0


def read_text(
    files: Mapping[Role, bytes], named_templates: Mapping[str, bytes], base: BaseText | None, vocab_size: int | None
) -> AdapterText:
    """Read an upload's text files and compare them with the base's.

    named_templates  of TEMPLATES_FOLDER, by name
    base             None: only ids outside of the vocabulary are known to be new

    Raises Unsupported for a tokenizer that changes the vocabulary, Malformed for files that cannot be read.
    """
    parsed: dict[Role, dict[str, Any]] = {}
    for role, file in FILE_OF.items():
        if role in files and role != "tokenizer":
            parsed[role] = parse_json_object(files[role], file)
    notes: list[str] = []
    templates = _chat_templates(files, named_templates, parsed, notes)
    config, tokens_map = parsed.get("tokenizer_config", {}), parsed.get("special_tokens_map", {})
    sources = tuple(templates.values()) or (base.template_sources if base is not None else ())
    listed = listed_tokens(files, parsed)
    left_out = left_out_tokens(listed, special_tokens(config, tokens_map), sources, base, vocab_size, files)
    notes += [
        f"No prompt holds the token {shown(text)} ({', '.join(listed[text].files)}), which the base model's tokenizer "
        "does not have; it was left out."
        for text in left_out
    ]
    notes += changed_flags(listed, special_tokens(config, tokens_map).values(), base)
    notes += [
        f"The special token {shown(name)} of {file} is no token's text; what is none was left out."
        for name, file in odd_tokens(config, tokens_map).items()
    ]
    known = base or BaseText(lambda _text: None)
    changed = _changed_tokens(config, tokens_map, frozenset(left_out), sources, known.special_tokens)
    ends = _end_tokens(parsed, known, vocab_size, notes)
    behind = {
        one.token_id
        for one in map(listed.__getitem__, left_out)
        if type(one.token_id) is int and vocab_size is not None and one.token_id >= vocab_size
    }
    return AdapterText(templates, changed, ends, tuple(notes), len(behind))


def _changed_tokens(
    config: Mapping[str, Any],
    tokens_map: Mapping[str, Any],
    left_out: frozenset[str],
    sources: tuple[str, ...],
    base: Mapping[str, str],
) -> dict[str, str | None]:
    """Special tokens that are others than the base's, and that a template may write. Files that name none at all leave
    the base's."""
    if not names_tokens(config, tokens_map):
        return {}
    own = {
        name: base.get(name) if text in left_out else text for name, text in special_tokens(config, tokens_map).items()
    }
    own |= {name: base[name] for name in odd_tokens(config, tokens_map) if name not in own and name in base}
    changed = {name: own.get(name) for name in sorted({*own, *base}) if own.get(name) != base.get(name)}
    used = {
        name: text for name, text in changed.items() if name == "eos_token" or any(name in source for source in sources)
    }
    if sum(len(name) + len(text or "") for name, text in used.items()) > _MAX_VARIABLE_CHARS:
        raise Malformed(f"The special tokens have more than {_MAX_VARIABLE_CHARS} characters; shorten them.")
    return used


# ---- chat templates


def named_templates(value: Any) -> dict[str, str] | None:
    """Templates by name, of what a config holds as `chat_template`: text, a list of named ones, or an object of them.
    None for anything else."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):
        if not all(isinstance(entry, dict) for entry in value):
            return None
        pairs = [(entry.get("name"), entry.get("template")) for entry in value]
    elif isinstance(value, dict):
        pairs = list(value.items())
    else:
        return None
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in pairs):
        return None
    return {str(name): str(source) for name, source in pairs}


def _chat_templates(
    files: Mapping[Role, bytes],
    named: Mapping[str, bytes],
    parsed: Mapping[Role, dict[str, Any]],
    notes: list[str],
) -> dict[str, str]:
    """The adapter's templates by name. As in transformers, files of templates come before tokenizer_config.json, and
    that before a processor's chat_template.json; notes tell of what is not used."""
    by_file: dict[str, dict[str, str]] = {}
    if "template" in files or named:
        default = {DEFAULT_TEMPLATE: _utf8(files["template"], TEMPLATE_FILE)} if "template" in files else {}
        others = {name: _utf8(data, f"{TEMPLATES_FOLDER}/{name}.jinja") for name, data in named.items()}
        by_file[TEMPLATE_FILE if default else TEMPLATES_FOLDER] = others | default
    roles: tuple[Role, ...] = ("tokenizer_config", "processor_template")
    for role in roles:
        found = named_templates(parsed.get(role, {}).get("chat_template"))
        if found is None:
            raise Malformed(f"{FILE_OF[role]}: chat_template must be text or a list of named templates.")
        if found:
            by_file[FILE_OF[role]] = found
    if not by_file:
        return {}
    used_file, first = next(iter(by_file.items()))
    used = dict(first)
    for file, templates in by_file.items():
        for name, source in templates.items():
            if name == DEFAULT_TEMPLATE:
                used.setdefault(name, source)
            if used.get(name) != source:
                notes.append(
                    f"The chat template {shown(name)} of {file} is not used, since {used_file} comes before it, as in "
                    "transformers."
                )
    if len(used) > MAX_TEMPLATES:
        raise Malformed(f"The adapter has {len(used)} chat templates; this server takes {MAX_TEMPLATES}.")
    wrong = next((name for name in used if not _TEMPLATE_NAME.fullmatch(name)), None)
    if wrong is not None:
        raise Malformed(
            f"The chat template's name {shown(wrong)} must have 1 to 64 letters, digits, '.', '_' and '-'; rename it."
        )
    return used


def _utf8(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed(f"{file} is not UTF-8 text.") from None


# ---- end tokens


def _end_tokens(
    parsed: Mapping[Role, dict[str, Any]],
    base: BaseText,
    vocab_size: int | None,
    notes: list[str],
) -> tuple[int, ...]:
    """Ids that end the adapter's answers and not the base's; notes name them."""
    found: dict[int, str] = {}
    config, tokens_map = parsed.get("tokenizer_config", {}), parsed.get("special_tokens_map", {})
    written = merged_config(config, tokens_map).get("eos_token")
    for text in filter(None, map(token_content, written if isinstance(written, list) else [written])):
        token_id = base.token_id(text)
        if token_id is not None:
            found.setdefault(token_id, f"eos_token of {file_that_names('eos_token', config, tokens_map)}")
    generation = parsed.get("generation_config", {})
    given = generation.get("eos_token_id")
    for one in given if isinstance(given, list) else [] if given is None else [given]:
        if type(one) is int and one >= 0 and (vocab_size is None or one < vocab_size):
            found.setdefault(one, "eos_token_id of generation_config.json")
            continue
        named, what = printable(str(one)[:20]), "none of the base model's" if type(one) is int else "no token's id"
        notes.append(f"The end token {named} of generation_config.json is {what}; it was left out.")
    own = {token_id: file for token_id, file in found.items() if token_id not in base.eos_token_ids}
    if len(own) > _MAX_EOS_TOKENS:
        raise Malformed(f"The adapter names {len(own)} end tokens; this server takes {_MAX_EOS_TOKENS}.")
    notes += [
        f"Answers also end at the token {shown(base.token_text(token_id))} ({token_id}), as {file} says."
        for token_id, file in own.items()
    ]
    others = sorted(key[:50] for key in generation.keys() - _NO_SETTINGS)
    if others:
        names = printable(", ".join(others[:20]))
        notes.append(f"Only eos_token_id of generation_config.json is used; not used: {names}.")
    return tuple(own)
