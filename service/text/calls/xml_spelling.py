"""How Qwen3-Coder spells a call in XML, and what the values in it are."""

from __future__ import annotations

import json
import re

from service.text.calls.json_text import kind_of

START, END = "<tool_call>", "</tool_call>"
FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"
OPENING = re.compile(r"\s*<function=\s*([^>\s]+)\s*>\s*")
PARAMETER_HEAD = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>")
CLOSING = re.compile(r"\s*</function>\s*")
_PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}


def json_of_value(text: str, kinds: frozenset[str]) -> str:
    """What a parameter's text means, as JSON: the text itself where the parameter is of that kind alone, or where it is
    no other value of those kinds that it may have."""
    if kinds != {"string"}:
        value = _PYTHON_WORDS.get(text.strip(), text.strip())
        kind = kind_of(value)
        if kind is not None and (not kinds or kind in kinds or "string" not in kinds):
            return value
    return json.dumps(text, ensure_ascii=False)
