"""A chat answer as OpenAI's message, or as the deltas of its stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from service.text.answer_reader import AnswerReader, ParserConfig, Thought
from service.text.calls.call import Arguments, Begun, Call


class ChatFormatter:
    """Formats one choice of a chat.

    in_pieces          whether calls are told as they are written: for `deltas`
    includes_thoughts  whether they are sent
    names_tool            whether the request names the tool to be called
    """

    def __init__(
        self,
        reading: ParserConfig,
        *,
        in_pieces: bool = False,
        includes_thoughts: bool = True,
        names_tool: bool = False,
    ) -> None:
        self._format = reading.calls
        self._reader = AnswerReader(reading, in_pieces=in_pieces)
        self._includes_thoughts, self._names_tool = includes_thoughts, names_tool
        self.num_calls = 0
        # When the reading of calls began and ended, by `time.perf_counter`; of a stream, of the first and the last.
        self.calls_span: tuple[float, float] | None = None
        self._num_thought = 0
        self._offsets: list[int] = []  # of tokens of which it is not certain yet whether they are thoughts

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the thoughts so far, without the marks around them."""
        begin, end = self._reader.thought_chars
        return self._num_thought + sum(begin <= offset and (end is None or offset < end) for offset in self._offsets)

    def count(self, text_offsets: Sequence[int]) -> None:
        """Tokens of the text that was read last, each with the characters of the answer before it."""
        _, end = self._reader.thought_chars
        if end is not None and not self._offsets and (not text_offsets or text_offsets[0] >= end):
            return
        self._offsets += text_offsets
        if end is not None:
            self._num_thought, self._offsets = self.num_reasoning_tokens, []

    def message(self, text: str, echoed: str = "", *, is_cut: bool = False) -> dict[str, Any]:
        """The whole answer; `echoed` stands before its words. `is_cut`: it ends though the model had not ended."""
        began, words, thoughts, calls = time.perf_counter(), [echoed], list[str](), list[dict[str, Any]]()
        for one in [*self._reader.push(text), *self._reader.finish(is_cut=is_cut)]:
            if isinstance(one, Call):
                calls.append(self._call(one))
            elif isinstance(one, Thought):
                thoughts.append(one.text)
            else:
                assert isinstance(one, str), "parts of calls where whole ones were asked for"
                words.append(one)
        content = "".join(words)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls or thoughts else "")}
        shown = "".join(thoughts) if self._includes_thoughts else ""
        message["reasoning"] = message["reasoning_content"] = shown or None  # vLLM has the key in every message
        if calls:
            message["tool_calls"] = calls
            self.calls_span = began, time.perf_counter()
        return message

    def deltas(self, text: str, *, is_last: bool, is_cut: bool = False) -> list[dict[str, Any]]:
        """The deltas of new text; possibly none. A call's name comes first and its arguments follow in parts, each sent
        once: clients join the texts of deltas."""
        deltas: list[dict[str, Any]] = []
        for one in [*self._reader.push(text), *(self._reader.finish(is_cut=is_cut) if is_last else ())]:
            if isinstance(one, Call | Begun):
                call = {"index": self.num_calls, **self._call(Call(one.name, ""))}
                self._note_call()
                deltas.append({"tool_calls": [call]})
            if isinstance(one, Call | Arguments):
                arguments = one.arguments if isinstance(one, Call) else one.text
                if arguments:
                    self._note_call()
                    deltas.append({"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": arguments}}]})
            elif isinstance(one, str):
                deltas.append({"content": one})
            elif isinstance(one, Thought) and self._includes_thoughts:
                deltas.append({"reasoning": one.text, "reasoning_content": one.text})
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's finish reason: `tool_calls` where the model chose to call, `stop` where the request named the
        tool."""
        return "tool_calls" if reason == "stop" and self.num_calls and not self._names_tool else reason

    def _note_call(self) -> None:
        now = time.perf_counter()
        self.calls_span = now if self.calls_span is None else self.calls_span[0], now

    def _call(self, call: Call) -> dict[str, Any]:
        assert self._format is not None, "a call in no format"
        self.num_calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._format.new_id(), "type": "function", "function": function}
