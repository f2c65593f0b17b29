"""Splits an answer's text into thoughts, words and tool calls, whole or while it streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from service.text.calls.call import Arguments, Begun, Call, Found
from service.text.calls.call_parser import CallParser, Tools, find_mark
from service.text.calls.formats import CallFormat

THINK, END_OF_THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class Thought:
    """Part of what the model thought before it spoke."""

    text: str


# Part of an answer: words, thoughts, or a call, whole or in pieces.
Said = str | Thought | Call | Begun | Arguments


@dataclass(frozen=True)
class ParserConfig:
    """How the text of an answer is to be read. The default: as it is.

    calls             the format of tool calls to look for; None: none
    tools             JSON schemas of the arguments of the tools that there are, by name
    max_calls         calls beyond so many are left out; None: no bound
    must_call         whether the answer is nothing but calls, thoughts apart
    thinks            whether thoughts stand between `<think>` and `</think>`
    is_thinking       whether the prompt ends within them
    seen_ids          special tokens whose text is needed to tell what is what
    """

    calls: CallFormat | None = None
    tools: Tools = field(default_factory=dict)
    max_calls: int | None = None
    must_call: bool = False
    thinks: bool = False
    is_thinking: bool = False
    seen_ids: frozenset[int] = frozenset()


PLAIN = ParserConfig()


class AnswerReader:
    """Reads one answer, whose text arrives in pieces: what is said does not depend on where they are cut.

    in_pieces  whether calls are given out as they are written, and not when they are whole
    """

    def __init__(self, reading: ParserConfig, *, in_pieces: bool = False) -> None:
        self._reading = reading
        inner = _CallsInThought(reading.calls, reading.tools) if reading.calls else None
        self._thoughts = _Thoughts(inner, is_thinking=reading.is_thinking) if reading.thinks else None
        self._calls = _Calls(reading.calls, reading, in_pieces) if reading.calls else None
        self._num_calls, self._is_left_out = 0, False

    @property
    def thought_chars(self) -> tuple[int, int | None]:
        """Where in the text what the model thought begins and ends, without the marks; end None: it has not ended, or
        what the text begins with is not certain yet."""
        return (0, 0) if self._thoughts is None else self._thoughts.span

    def push(self, text: str) -> list[Said]:
        """Add a piece; what became certain with it."""
        if self._thoughts is None:
            return self._words(text)
        thought, words = self._thoughts.push(text)
        return [*([Thought(thought)] if thought else []), *self._words(words)]

    def finish(self, *, is_cut: bool = False) -> list[Said]:
        """The withheld rest, once the text has ended. `is_cut`: it ended before the model had."""
        thought, words = self._thoughts.finish(is_cut=is_cut) if self._thoughts is not None else ("", "")
        said = [*([Thought(thought)] if thought else []), *self._words(words)]
        if self._calls is None:
            return said
        found = self._calls.finish(is_cut=is_cut)
        if found == [] and is_cut and self._calls.is_begun and not self._num_calls and self._reading.must_call:
            found = [Call(name, "") for name in self._reading.tools if len(self._reading.tools) == 1]
        return said + self._counted(found)

    def _words(self, text: str) -> list[Said]:
        if not text:
            return []
        return [text] if self._calls is None else self._counted(self._calls.push(text))

    def _counted(self, found: list[Found]) -> list[Said]:
        said: list[Said] = []
        for one in found:
            if isinstance(one, Call | Begun):
                self._is_left_out = self._num_calls == self._reading.max_calls
                self._num_calls += not self._is_left_out
            if isinstance(one, str) or not self._is_left_out:
                said.append(one)
        return said


class _Thoughts:
    """Takes a text apart into (thought, words). Line breaks around the marks belong to neither.

    What is kept back is looked at once: what may begin a mark is short, and blanks, of which there may be any number,
    wait as they came until it is known whether they are said.

    calls  looks for calls that end a thought whose own end is missing; None: there are no tools
    """

    def __init__(self, calls: _CallsInThought | None, *, is_thinking: bool) -> None:
        self._calls, self._is_thinking = calls, is_thinking
        self._state: Literal["start", "thought", "words"] = "start"
        self._blanks: list[str] = []  # they stand before what is held
        self._held = ""
        self._drops_breaks = False  # nothing was given out since the last mark
        self._num_chars = 0
        self.span: tuple[int, int | None] = (0, None)  # see `AnswerReader.thought_chars`

    def push(self, text: str) -> tuple[str, str]:
        """The parts that are certain now."""
        self._held += text
        self._num_chars += len(text)
        thought = words = ""
        if self._state == "start":
            self._start()
        if self._state == "thought":
            thought = self._think()
        if self._state == "words":
            words, self._held = self._given(self._held), ""
        return thought, words

    def finish(self, *, is_cut: bool) -> tuple[str, str]:
        """The withheld rest."""
        words = ""
        if self._state == "thought" and self._calls is not None:
            kept, words = self._calls.finish(self._held, is_cut=is_cut)
            self._held = kept
            self.span = self.span[0], self._num_chars - len(words) if words else None
        held, self._held = self._with_blanks(self._held), ""
        if self._state == "thought" or (self._state == "start" and self._is_thinking):
            self._drops_breaks |= self._state == "start"
            return self._given(held).rstrip("\n"), words
        if self._state == "start":
            self.span = 0, 0
        return "", self._given(held)

    def _start(self) -> None:
        """See whether it begins with a thought. A model may repeat the mark that its prompt ends with."""
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._state, self._held, self._drops_breaks = "thought", begun[len(THINK) :], True
            self._blanks.clear()
            self.span = self._num_chars - len(self._held), None
            return
        self._blanks.append(self._held[: len(self._held) - len(begun)])
        self._held = begun
        if not THINK.startswith(begun):
            self._state, self._drops_breaks = ("thought", True) if self._is_thinking else ("words", False)
            self.span = 0, None if self._is_thinking else 0
            self._held = self._with_blanks(begun)

    def _think(self) -> str:
        end, is_over = find_mark(self._held, END_OF_THOUGHT)
        text, self._held = self._held[:end], self._held[end:]
        if self._calls is not None:
            text = self._calls.push(text) + (self._calls.release() if is_over else "")
        thought = text.rstrip("\n")
        breaks = text[len(thought) :]
        if thought:
            thought = self._given(self._with_blanks(thought))
        self._blanks.append(breaks)
        if is_over:
            self.span = self.span[0], self._num_chars - len(self._held)
            self._blanks.clear()
            self._held = self._held[len(END_OF_THOUGHT) :]
            self._state, self._drops_breaks = "words", True
        return thought

    def _with_blanks(self, text: str) -> str:
        whole = "".join((*self._blanks, text))
        self._blanks.clear()
        return whole

    def _given(self, text: str) -> str:
        if self._drops_breaks:
            text = text.lstrip("\n")
            self._drops_breaks = not text
        return text


class _CallsInThought:
    """Keeps back what a thought holds from the first mark of a call on. It is a call if nothing but calls follow to the
    end of the answer: models forget to end the thought first. Anything else is part of the thought."""

    def __init__(self, form: CallFormat, tools: Tools) -> None:
        self._mark, self._separators, self._tools = form.marks[0], form.separators, tools
        self._parser: CallParser | None = form.parser(tools, False)  # None: there was something else
        self._kept: list[str] = []  # from the mark on, or what may begin it

    def push(self, text: str) -> str:
        """Add a piece of the thought; what is certainly none of a call."""
        if self._parser is None:
            return text
        at, held = 0, text
        if not "".join(self._kept[:1]).startswith(self._mark):
            held = self.release() + text
            at, begins = find_mark(held, self._mark)
            if not begins:
                self._kept = [held[at:]] if at < len(held) else []
                return held[:at]
        self._kept.append(held[at:])
        if self._are_calls(self._parser.push(held[at:])):
            return held[:at]
        self._parser = None
        return held[:at] + self.release()

    def release(self) -> str:
        """The text that was kept back, as part of the thought."""
        kept = "".join(self._kept)
        self._kept.clear()
        return kept

    def finish(self, text: str, *, is_cut: bool) -> tuple[str, str]:
        """Add the last piece; (what is left of the thought, the calls)."""
        thought = self.push(text)
        kept = self.release()
        are_calls = self._parser is not None and kept.startswith(self._mark) and not is_cut
        if are_calls and self._parser is not None and self._are_calls(self._parser.finish()):
            return thought, kept
        return thought + kept, ""

    def _are_calls(self, found: list[Found]) -> bool:
        """Whether there are calls of tools that there are, and nothing else."""
        return all(
            one.name in self._tools if isinstance(one, Call) else not str(one).strip(_BLANKS + self._separators)
            for one in found
        )


# Characters that `str.strip` removes; all of them are below that.
_BLANKS = "".join(filter(str.isspace, map(chr, range(0x3001))))


class _Calls:
    """A parser, without the blanks and separators around its calls. They wait as they came, as those of thoughts do."""

    def __init__(self, form: CallFormat, reading: ParserConfig, in_pieces: bool) -> None:
        self._parser: CallParser = form.parser(reading.tools, in_pieces)
        self._separators, self._marks = form.separators, form.marks
        self._must_call = reading.must_call
        self._is_after_call = False
        self.is_begun = False  # the answer was cut where a call began, of which nothing is there yet
        self._blanks: list[str] = []

    def push(self, text: str) -> list[Found]:
        """The parts that are certain now."""
        return self._trimmed(self._parser.push(text))

    def finish(self, *, is_cut: bool) -> list[Found]:
        """The withheld rest. Blanks at the end of words are part of them."""
        kept = self._parser.finish(is_cut=is_cut)
        if is_cut and kept and isinstance(kept[0], str):
            self.is_begun = self._must_call or self._is_after_call or kept[0].startswith(self._marks)
        found = self._trimmed([] if self.is_begun else kept)
        if (held := "".join(self._blanks)) and not (self._is_after_call or self.is_begun):
            found.append(held)
        self._blanks.clear()
        return found

    def _trimmed(self, found: Iterable[Found]) -> list[Found]:
        trimmed: list[Found] = []
        for one in found:
            if not isinstance(one, str):
                self._is_after_call = True
                self._blanks.clear()
                trimmed.append(one)
                continue
            self._blanks.append(one)
            if one.strip(_BLANKS + (self._separators if self._is_after_call else "")):
                held = "".join(self._blanks)
                words = held.lstrip() if self._is_after_call else held
                self._is_after_call = False
                said = words.rstrip()
                self._blanks = [words[len(said) :]]
                trimmed.append(said)
        return trimmed
