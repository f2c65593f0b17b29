"""Write the tables of docs/clients.md from the code: `python scripts/clients_page.py`, or `--check` to compare only.

Run it with the project's own Python from the root of the tree, whenever a field of a request has changed.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from service.api.schema.messages import MessagesRequest
from service.api.schema.pooled import EmbeddingRequest
from service.api.schema.requests import ChatRequest, CompletionRequest, Decoding, StreamOptions
from service.api.schema.responses import ResponsesRequest
from service.api.schema.unserved_fields import (
    EMBEDDING_FIELDS,
    GENERATION_FIELDS,
    MESSAGE_FIELDS,
    RESPONSE_FIELDS,
    UnservedField,
)

_DECODING = Decoding.model_fields.keys()
_PAGE = Path("docs/clients.md")
_LEAVE_OUT = "leave it out"
_BEGIN, _END = "<!-- written by scripts/clients_page.py -->\n", "<!-- end -->\n"


def _served() -> Iterator[str]:
    everywhere: list[str] = []
    somewhere: list[str] = []
    completion, chat, response = (one.model_fields for one in (CompletionRequest, ChatRequest, ResponsesRequest))
    options = {f"stream_options.{name}": field for name, field in StreamOptions.model_fields.items()}
    for name in completion | chat | response | options:
        both = [options.get(name, fields.get(name)) for fields in (completion, chat)]
        own = response.get(name)
        names = ("completions", "chat", "responses")
        places = [place for place, field in zip(names, (*both, own), strict=True) if field]
        words = dict.fromkeys(field.description for field in both if field) or {own.description if own else None: None}
        said = "; in chats ".join(map(str, words))
        if len(places) == len(names):
            everywhere.append(f"| `{name}` | {said} |\n")
        else:
            somewhere.append(f"| `{name}` | {', '.join(places)} | {said} |\n")
    yield from ("In all:\n\n| field | what it does |\n|---|---|\n", *everywhere)
    yield from ("\n| field | served in | what it does |\n|---|---|---|\n", *somewhere)


def _described(fields: Mapping[str, Any]) -> Iterator[str]:
    yield "| field | what it does |\n|---|---|\n"
    yield from (f"| `{name}` | {field.description} |\n" for name, field in fields.items())


def _of_messages() -> list[UnservedField]:
    """Those that neither chats nor responses have."""
    return [
        row
        for name, row in MESSAGE_FIELDS.items()
        if row not in (GENERATION_FIELDS.get(name), RESPONSE_FIELDS.get(name))
    ]


def _refused(table: Mapping[str, UnservedField]) -> Iterator[str]:
    yield "| fields | ask for nothing, beside null | what to do instead |\n|---|---|---|\n"
    rows = [row for row in table.values() if not row.is_inert]
    for (neutral, advice), alike in groupby(
        (row for row in rows if row.advice != _LEAVE_OUT), key=lambda row: (_spelled(row.neutral), row.advice)
    ):
        yield f"| {_names(alike)} | {neutral} | {advice} |\n"
    left = sorted((row for row in rows if row.advice == _LEAVE_OUT), key=lambda row: _spelled(row.neutral))
    if left:
        groups = [(neutral, _names(rows)) for neutral, rows in groupby(left, key=lambda row: _spelled(row.neutral))]
        said = "; ".join(f"{names} ({neutral})" if neutral else names for neutral, names in groups)
        yield "\n" + _filled(f"To be left out, where they ask for more than what is in brackets: {said}.")


def _spelled(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def _names(rows: Any) -> str:
    return ", ".join(f"`{row.name}`" for row in rows)


def _filled(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False) + "\n"


def _tables() -> str:
    inert: list[UnservedField] = [row for row in GENERATION_FIELDS.values() if row.is_inert]
    return "".join(
        [
            "### Served\n\n",
            *_served(),
            "\n### Accepted without effect\n\n",
            _filled(f"{_names(inert)}."),
            "\n### Refused by name, unless they ask for nothing\n\n",
            *_refused(GENERATION_FIELDS),
            "\n### Refused by name in responses\n\n",
            "Those above that responses do not serve, and:\n\n",
            *_refused({name: row for name, row in RESPONSE_FIELDS.items() if row != GENERATION_FIELDS.get(name)}),
            "\n### Messages\n\n",
            "Those of responses up to `ebnf`, and:\n\n",
            *_described({name: field for name, field in MessagesRequest.model_fields.items() if name not in _DECODING}),
            "\n" + _filled(f"Without effect: those above, {_names(row for row in _of_messages() if row.is_inert)}."),
            "\nRefused by name, beside those above that messages do not serve:\n\n",
            *_refused({row.name: row for row in _of_messages()}),
            "\n### Embeddings\n\n",
            "`model`, `adapter_id`, `cache_salt`, `add_special_tokens`, and:\n\n",
            *_described(
                {name: field for name, field in EmbeddingRequest.model_fields.items() if name not in _DECODING}
            ),
            f"\nWithout effect: {_names(row for row in EMBEDDING_FIELDS.values() if row.is_inert)}. "
            "Refused by name:\n\n",
            *_refused(EMBEDDING_FIELDS),
        ]
    )


def main() -> int:
    """0 if the page was up to date, or is now; 1 with `--check` if it is not."""
    page = _PAGE.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    written = before + _BEGIN + "\n" + _tables() + "\n" + _END + rest.split(_END)[1]
    if written == page:
        return 0
    if "--check" in sys.argv:
        print(f"{_PAGE} is not what the code says; run python scripts/clients_page.py.", file=sys.stderr)
        return 1
    _PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
