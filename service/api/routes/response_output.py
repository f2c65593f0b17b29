"""The items of a response and the events that tell of them, made from what a chat says.

An item is a text, a reasoning or the call of a function. Items follow one another: the next one begins when the chat
says something of another kind. Each has its id from its first event to its last, and is whole with the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

EventFields = dict[str, Any]
# Item type to the type of its only part, for items that are text.
_PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseOutput:
    """The items so far. `add` and `finish` yield the events of what they add.

    items  the last one has its text when it has ended
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._logprobs: list[Any] = []
        # Text of the open item, joined when it ends: appending each part would copy all before it.
        self._texts: list[str] = []
        # The open item's index among the chat's calls.
        self._call: int | None = None

    def add(self, said: Mapping[str, Any], logprobs: Sequence[Any] = ()) -> Iterator[EventFields]:
        """A chat's message, or a delta of one, with the log probabilities of its tokens."""
        if said.get("reasoning_content"):
            yield from self._add_text("reasoning", said["reasoning_content"], ())
        # A token's log probability may come before its text does; of calls and thoughts this API tells none.
        if said.get("content") or not (said.get("tool_calls") or said.get("reasoning_content")):
            self._logprobs.extend(logprobs)
        if said.get("content"):
            logprobs, self._logprobs = self._logprobs, []
            yield from self._add_text("message", said["content"], logprobs)
        for place, call in enumerate(said.get("tool_calls") or ()):
            yield from self._add_call(call.get("index", place), call)

    def finish(self, status: str) -> Iterator[EventFields]:
        """End the last item, which is there even if nothing was said; status "completed" or "incomplete"."""
        if not self.items:
            yield from self._begin({"type": "message", "role": "assistant", "content": []})
            yield from self._begin_part()
        yield from self._end(status)

    def _add_text(self, kind: str, text: str, logprobs: Sequence[Any]) -> Iterator[EventFields]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._end("completed")
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin({"type": kind, **own, "content": []})
            yield from self._begin_part()
        part = self.items[-1]["content"][0]
        self._texts.append(text)
        event = {"type": f"response.{part['type']}.delta", **self._place(content_index=0), "delta": text}
        if kind == "message":
            part["logprobs"].extend(logprobs)
            event["logprobs"] = list(logprobs)
        yield event

    def _add_call(self, index: int, call: Mapping[str, Any]) -> Iterator[EventFields]:
        function = call.get("function") or {}
        if not self._is_open or self._call != index:
            yield from self._end("completed")
            yield from self._begin(
                {"type": "function_call", "call_id": call["id"], "name": function["name"], "arguments": ""}
            )
            self._call = index
        arguments = function.get("arguments") or ""
        self._texts.append(arguments)
        if arguments:
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments}

    def _begin(self, item: dict[str, Any]) -> Iterator[EventFields]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        item |= {"id": f"{prefix}_{uuid4().hex}", "status": "in_progress"}
        self.items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": _copy(item)}

    def _begin_part(self) -> Iterator[EventFields]:
        item = self.items[-1]
        part: dict[str, Any] = {"type": _PART_TYPES[item["type"]], "text": ""}
        if item["type"] == "message":
            part |= {"annotations": [], "logprobs": []}
        item["content"].append(part)
        yield {"type": "response.content_part.added", **self._place(content_index=0), "part": _copy(part)}

    def _end(self, status: str) -> Iterator[EventFields]:
        if not self._is_open:
            return
        self._is_open, self._call = False, None
        item = self.items[-1]
        text, self._texts = "".join(self._texts), []
        if item["type"] == "function_call":
            item["arguments"] = text
        else:
            item["content"][0]["text"] = text
        if item["type"] == "message":
            item["content"][0]["logprobs"].extend(self._logprobs)
        self._logprobs = []
        item["status"] = status
        if item["type"] == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **told}
        else:
            part, place = item["content"][0], self._place(content_index=0)
            told = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            yield {"type": f"response.{part['type']}.done", **place, **told}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _place(self, **more: int) -> dict[str, Any]:
        """Where the open item is."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: what it holds may grow before the event is written."""
    return {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
