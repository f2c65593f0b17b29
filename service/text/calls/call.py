"""A tool call that a model wrote, whole or in parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One call. `arguments` is the text of a JSON object, as far as the model has written one."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Begun:
    """A call of which more follows: its `Arguments`, up to the next of anything else."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of the call that was begun last."""

    text: str


# A parser's result: text that is none of a call, a call, or a part of one.
Found = str | Call | Begun | Arguments
