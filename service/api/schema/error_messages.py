"""pydantic's errors about a body, as one sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from service.api.errors import BadRequest, quoted
from service.api.schema.tools import PLAIN_CHOICE, TOOL_TAGS

_PROMPT = "`prompt` must be a text, a list of texts, a list of token ids or a list of lists of token ids."
_INPUT = "`input` must be a text, or a list that is neither empty nor too long; /openapi.json says of what."
_CONTENT = '`content` of a message must be a text or a list of parts {"type": "text", "text": ...}'
_OTHER_PARTS = "; images, audio and files are not supported."
_FORMATS = (
    '`response_format` must be {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": '
    '{"schema": ...}} or {"type": "structural_tag", ...}.'
)
_SCHEMAS = ("json", "schema", "guided_json")
# Of scores and rankings: a text, or a list of them.
_TEXTS = ("text_1", "text_2", "queries", "documents")
# Fields of several types: below them pydantic's path goes on with the name of the type that it tried.
_UNIONS = frozenset(
    {
        "model",
        "prompt",
        "stop",
        "system",
        "content",
        "arguments",
        "input",
        "output",
        "response_format",
        "tool_choice",
        PLAIN_CHOICE,
        "version",
        *_TEXTS,
        *_SCHEMAS,
    }
)
# How the tags of bodies of several kinds begin.
BODY_TAG = "\0"
# How pydantic begins; the name of the field stands before it here.
_SHOULD = re.compile(r"^(Input|String|List|Dictionary|Value|Data) should")
# By owner, what the Responses API writes flat and chats one level deeper.
_NESTED = {
    "tools": (("name", "description", "parameters", "strict"), "function"),
    "tool_choice": (("name",), "function"),
    "response_format": (("name", "description", "schema", "strict"), "json_schema"),
}
_TOOL_CHOICE = (
    '`tool_choice` must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, which names '
    'one of the `tools`, or {"type": "allowed_tools", "allowed_tools": ...}, which names some.'
)
_ALLOWED_TOOLS = (
    '`tool_choice.allowed_tools` must be {"mode": "auto" or "required", "tools": [{"type": "function", "function": '
    '{"name": ...}}, ...]}, which names some of the `tools`.'
)


def bad_request(faults: Sequence[Mapping[str, Any]], *, prefix: str = "") -> BadRequest:
    """The first fault as a BadRequest; `prefix` stands before its sentence."""
    # The plainest of a union's faults is reported: an unsupported field before a wrong type.
    fault = min(faults, key=_rank)
    path = _path(fault)
    sentence = _sentence(fault, path, faults)
    return BadRequest(prefix + sentence, param=_dotted(path) or None)


def _rank(fault: Mapping[str, Any]) -> int:
    """Order in which faults are reported: an unsupported role or part of content first, then a field, then a length
    (one member of a union names it where the others report a wrong type)."""
    if fault["type"] == "literal_error" and fault["loc"][-1] in ("role", "type"):
        return 0
    if fault["type"] in ("field", "extra_forbidden", "json_invalid"):
        return 1
    return 2 if fault["type"] in ("string_too_long", "string_too_short", "too_long") else 3


def _path(fault: Mapping[str, Any]) -> list[Any]:
    """Where the fault is in the client's body: without FastAPI's own first part, and without the types of unions."""
    loc = [] if fault["type"] == "json_invalid" else list(fault["loc"])  # there it would be a place in the body
    if fault["type"] == "field":
        loc.append(fault["ctx"]["field"])
    # A batch's item has no first part of FastAPI's; there, `body` by itself is a field that the client made up.
    is_field = fault["type"] == "extra_forbidden" and len(loc) == 1
    if (loc[:1] == ["body"] and not is_field) or loc[:1] == ["query"]:
        del loc[0]
    is_field = fault["type"] == "extra_forbidden" and len(loc) == 1  # as a client's may begin too
    if loc and str(loc[0]).startswith(BODY_TAG) and not is_field:
        del loc[0]
    if loc[:1] == ["tools"]:
        loc = [part for part in loc if part not in TOOL_TAGS]
    if loc[:1] == ["documents"]:
        loc = [part for part in loc if part not in ("str", "Document")]
    return [part for at, part in enumerate(loc) if not (at and loc[at - 1] in _UNIONS and isinstance(part, str))]


def _sentence(fault: Mapping[str, Any], path: list[Any], faults: Sequence[Mapping[str, Any]]) -> str:
    kind, name = fault["type"], _dotted(path)
    if kind == "field":
        return str(fault["ctx"]["sentence"])
    if kind == "extra_forbidden":
        if fault["loc"][0] == "query":
            return f"`{quoted(name)}` is not a parameter of this request; leave it out."
        return _unknown_field(path, fault["loc"])
    if kind == "string_unicode":  # most often the name of a field, which no path can hold
        return f"`{quoted(str(fault['input']))}` holds half of a surrogate pair; send valid Unicode."
    if kind == "json_invalid":
        return f"The body is not valid JSON: {fault.get('ctx', {}).get('error', 'it cannot be parsed')}."
    if path[:1] == ["tool_choice"]:
        return _ALLOWED_TOOLS if path[1:2] == ["allowed_tools"] else _TOOL_CHOICE
    if path == ["response_format"]:
        return _FORMATS
    if path and (path[-1] in _SCHEMAS or path == ["json_schema"]):
        return f"`{name}` must be a JSON schema: an object, true or false, or its text."
    if path[:1] in (["messages"], ["input"]) and "content" in path:
        index = path.index("content")
        parts = [one for one in faults if one["type"] == "literal_error" and one["loc"][-1] == "type"]
        named = f" (it holds a part {_of_type(parts[0]['input'])})" if parts else ""
        return f"{_dotted(path[: index + 1])}: {_CONTENT}{_OTHER_PARTS[:-1]}{named}."
    if path[:1] == ["prompt"]:
        # /tokenize's prompt is no union: its fault's path ends with the field itself.
        return "`prompt` must be a text." if kind == "string_type" and fault["loc"][-1] == "prompt" else _PROMPT
    if path == ["input"] and kind != "missing":
        return _INPUT
    if path[:1] and path[0] in _TEXTS and kind in ("string_type", "list_type"):
        return f"`{name}` must be a text{', or a list of texts' if len(path) == 1 else ''}."
    if not path:
        if kind == "missing":
            return "The request has no body; send a JSON object with Content-Type: application/json."
        if kind == "value_error":
            return f"{_words(fault)}."
        return "The body must be a JSON object; send it with Content-Type: application/json."
    if kind == "missing":
        return f"`{name}` is missing; send it."
    return f"`{name}`: {_words(fault)}."


def _of_type(kind: Any) -> str:
    """Only a text is quoted: a list would be written first, and may be as long as the body."""
    return f"of type {quoted(kind)!r}" if isinstance(kind, str) else "whose type is no text"


def _unknown_field(path: Sequence[Any], loc: Sequence[Any]) -> str:
    """The name stands as the client wrote it, whatever it is: that is what is to be found and left out, or moved."""
    name, owner = quoted(str(path[-1])), _dotted(path[:-1])
    if path[:-1] == ["response_format"] and "json_schema" not in loc:
        return _FORMATS
    names, inner = _NESTED.get(re.sub(r"\[\d+\]", "", owner), ((), ""))
    if name in names:
        return f"`{name}` is not a field of `{owner}`; put it into `{owner}.{inner}`."
    if owner:
        return f"`{name}` is not a field of `{owner}`; leave it out."
    return f"`{name}` is not a field of this request; leave it out. /openapi.json lists those that are."


def _words(fault: Mapping[str, Any]) -> str:
    if fault["type"] in ("model_type", "model_attributes_type"):
        return "it must be an object"
    if fault["type"] in ("too_short", "string_too_short") and not fault["input"]:
        least, unit = fault["ctx"]["min_length"], "character" if fault["type"] == "string_too_short" else "item"
        return f"it is empty; send at least {least} {unit}{'' if least == 1 else 's'}"
    if fault["type"] == "too_long" and fault["ctx"]["actual_length"] is not None:
        return f"it may have at most {fault['ctx']['max_length']} items, and has {fault['ctx']['actual_length']}"
    message = str(fault["msg"]).rstrip(".")
    return _SHOULD.sub("it must", message)


def _dotted(path: Sequence[Any]) -> str:
    """`messages[0].role`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{quoted(part)}" if text else quoted(part)
    return text


def out_of_vocabulary(field: str, token_id: int, vocab_size: int) -> BadRequest:
    """The refusal of a field that holds a token which the model has not."""
    return BadRequest(
        f"`{field}` holds {token_id}, which is out of vocabulary: the last token is {vocab_size - 1}.",
        param=field,
    )
