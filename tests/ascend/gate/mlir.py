"""A small parser for MLIR's generic text form (`bishengir-opt --mlir-print-op-generic`).

Enough for the modules that the AscendNPU IR compiler leaves behind: nested regions of one block each, attributes kept
as text. Regions with several blocks (Ascend950 vector functions) are flattened, which is enough for counting.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

_OPEN, _CLOSE = "<([{", ">)]}"
_RESULT = re.compile(r"%[\w\$]+(:\d+)?")
_BLOCK_LABEL = re.compile(r"\^\w+")


@dataclass
class Region:
    """The operations of one region and its arguments as (name, type)."""

    arguments: list[tuple[str, str]]
    ops: list[Op]


@dataclass
class Op:
    """One operation; `properties` and `attributes` are the texts between `<{ }>` and `{ }`."""

    name: str
    operands: list[str]
    results: list[str]
    properties: str = ""
    attributes: str = ""
    regions: list[Region] = field(default_factory=list)
    operand_types: list[str] = field(default_factory=list)
    result_types: list[str] = field(default_factory=list)

    def attribute(self, key: str) -> str:
        """The text of an attribute or property; "" when it is absent."""
        for text in (self.properties, self.attributes):
            for entry in split_top(text):
                name, _, value = entry.partition(" = ")
                if name.strip() == key:
                    return value.strip()
        return ""


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside brackets and quotes; empty pieces are dropped."""
    pieces: list[str] = []
    depth, start, position, quoted = 0, 0, 0, False
    while position < len(text):
        char = text[position]
        if quoted:
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif text.startswith("->", position):
            position += 1
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == separator and depth == 0:
            pieces.append(text[start:position].strip())
            start = position + 1
        position += 1
    pieces.append(text[start:].strip())
    return [piece for piece in pieces if piece]


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def skip_space(self) -> None:
        while self.position < len(self.text):
            if self.text[self.position].isspace():
                self.position += 1
            elif self.text.startswith("//", self.position):
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                return

    def at(self, token: str) -> bool:
        self.skip_space()
        return self.text.startswith(token, self.position)

    def eat(self, token: str) -> None:
        if not self.at(token):
            raise SyntaxError(f"expected {token!r} at {self.text[self.position : self.position + 80]!r}")
        self.position += len(token)

    def match(self, pattern: re.Pattern[str]) -> str:
        self.skip_space()
        found = pattern.match(self.text, self.position)
        if found is None:
            raise SyntaxError(f"expected {pattern.pattern!r} at {self.text[self.position : self.position + 80]!r}")
        self.position = found.end()
        return found.group(0)

    def balanced(self, opening: str) -> str:
        """Consume a bracketed text, and return what stands between the brackets."""
        self.eat(opening)
        start, depth, quoted = self.position, 1, False
        while depth:
            char = self.text[self.position]
            if quoted:
                if char == "\\":
                    self.position += 1
                quoted = char != '"'
            elif char == '"':
                quoted = True
            elif self.text.startswith(("->", ">=", "<="), self.position):
                self.position += 1
            elif char in _OPEN:
                depth += 1
            elif char in _CLOSE:
                depth -= 1
            self.position += 1
        return self.text[start : self.position - 1]

    def results(self) -> list[str]:
        names: list[str] = []
        while self.at("%"):
            base, _, count = self.match(_RESULT).partition(":")
            names += [f"{base}#{index}" for index in range(int(count))] if count else [base]
            self.eat("," if self.at(",") else "=")
        return names

    def op(self) -> Op:
        results = self.results()
        self.eat('"')
        end = self.text.index('"', self.position)
        name = self.text[self.position : end]
        self.position = end + 1
        op = Op(name, split_top(self.balanced("(")), results)
        if self.at("["):
            self.balanced("[")  # successors
        if self.at("<{"):
            self.eat("<")
            op.properties = self.balanced("{")
            self.eat(">")
        if self.at("("):
            self.eat("(")
            while not self.at(")"):
                op.regions.append(self.region())
                if self.at(","):
                    self.eat(",")
            self.eat(")")
        if self.at("{"):
            op.attributes = self.balanced("{")
        self.eat(":")
        op.operand_types = split_top(self.balanced("("))
        self.eat("->")
        op.result_types = split_top(self.balanced("(")) if self.at("(") else [self.rest_of_line()]
        return op

    def rest_of_line(self) -> str:
        self.skip_space()
        end = self.text.find("\n", self.position)
        end = len(self.text) if end < 0 else end
        line = self.text[self.position : end]
        self.position = end
        return re.sub(r"\s+loc\(.*$", "", line).strip()

    def region(self) -> Region:
        self.eat("{")
        region = Region([], [])
        while not self.at("}"):
            if not self.at("^"):
                region.ops.append(self.op())
                continue
            self.match(_BLOCK_LABEL)
            arguments = split_top(self.balanced("(")) if self.at("(") else []
            if not region.ops:
                pairs = (argument.split(":", 1) for argument in arguments)
                region.arguments = [(name.strip(), kind.strip()) for name, kind in pairs]
            self.eat(":")
        self.eat("}")
        return region


@functools.lru_cache(maxsize=8)
def parse(text: str) -> tuple[Op, dict[str, str]]:
    """The module op, and the text of each named affine map (`#map3` -> `(d0) -> (d0 + 1)`). Both are read only."""
    maps: dict[str, str] = {}
    body: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            name, _, value = line.partition(" = ")
            affine = re.fullmatch(r"affine_(?:map|set)<(.*)>\s*", value)
            maps[name] = affine.group(1) if affine else value
        else:
            body.append(line)
    return _Parser("\n".join(body)).op(), maps


def walk(op: Op, visit: Callable[[Op, tuple[Op, ...]], None], path: tuple[Op, ...] = ()) -> None:
    """Call visit(op, ancestors, outermost first) for the op and everything inside it."""
    visit(op, path)
    for region in op.regions:
        for inner in region.ops:
            walk(inner, visit, (*path, op))
