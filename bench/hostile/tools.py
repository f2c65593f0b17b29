"""Tools of chats whose schemas are short and lead to themselves, or repeat what they define."""

from __future__ import annotations

from typing import Any

from bench.hostile.target import Attack, Target, in_turn
from bench.hostile.uploads import Uploads

NAME = "hostile-tools"
CHATS = "/v1/chat/completions"
# By the format of calls that each shows.
TEMPLATES = {
    "Qwen3-Coder's": "{{ messages[-1].content }}{# tools <function=name><parameter=key> #}",
    "LFM2's": "{{ messages[-1].content }}{# tools <|tool_call_start|> #}",
}
_ITSELF = {"anyOf": [{"$ref": "#/$defs/Itself"}] * 10}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"properties": {"x": _ITSELF}, "$defs": {"Itself": _ITSELF}},
    {"properties": {f"x{number}": {} for number in range(9_000)}, "$defs": {"Long": {"description": "long " * 26_000}}},
    {
        "properties": {f"x{number}": {"$ref": "#/$defs/Text"} for number in range(3_000)},
        "$defs": {"Text": {"enum": [str(number) for number in range(10_000)]}},
    },
)


def attacks(target: Target) -> dict[str, Attack]:
    """By what is told of them."""
    uploads = Uploads(target)
    removal: Attack = lambda: target.request("DELETE", f"/v1/adapters/{NAME}")  # noqa: E731

    def chat(schema: dict[str, Any]) -> Attack:
        function = {"name": "f", "parameters": {"type": "object", **schema}}
        tools = [{"type": "function", "function": function}]
        asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "tools": tools}
        return target.post(CHATS, {"model": NAME, **asked, "tool_choice": "required"})

    return {
        f"tools in {form} format whose schemas lead to themselves or repeat themselves": in_turn(
            uploads.put(NAME, template, keep=True), *map(chat, SCHEMAS), removal
        )
        for form, template in TEMPLATES.items()
    }
