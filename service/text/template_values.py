"""Hides Python's own objects from chat templates: their texts would show memory addresses.

A template gets plain data, and besides it methods, functions and iterators. Those are wrapped the moment it gets them,
so that their text is the name of their type, however it is asked for: printed, joined, formatted or put into an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

from jinja2 import Undefined
from jinja2.runtime import LoopContext, Macro, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Their texts tell what they hold, or a name.
_EMPTY: dict[str, str] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_PLAIN: tuple[type, ...] = (str, int, float, bool, NoneType, list, dict, tuple, bytes, complex, range, *_VIEWS)
_PLAIN += (Undefined, Namespace, LoopContext, Macro, TemplateReference)


class Opaque:
    """Something that a template may call, and look into as far as the sandbox lets it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return f"<{type(self._value).__name__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return hidden(self._value(*args, **kwargs))


class _OpaqueIterator(Opaque):
    """Something that it may walk through."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return hidden(next(self._value))


_KNOWN = (*_PLAIN, Opaque)


def hidden(value: Any) -> Any:
    """The value, wrapped unless it is plain."""
    if isinstance(value, _KNOWN):
        return value
    return _OpaqueIterator(value) if hasattr(value, "__next__") else Opaque(value)


def unwrapped(value: Any) -> Any:
    """The value that `hidden` wrapped."""
    return value._value if isinstance(value, Opaque) else value


class HidingEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, whose attributes, items and results are hidden. Call `hide_names` once all filters
    and globals are there."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return hidden(super().getattr(unwrapped(obj), attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return hidden(super().getitem(unwrapped(obj), argument))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden(super().call(context, unwrapped(obj), *args, **kwargs))

    def hide_names(self) -> None:
        """Hide the results of filters, and the globals themselves."""
        self.filters = {name: _hiding(call) for name, call in self.filters.items()}
        self.globals = {name: hidden(value) for name, value in self.globals.items()}


def _hiding(call: Callable[..., Any]) -> Callable[..., Any]:
    # jinja2's marks on the filter (its extra arguments) are copied as well.
    @functools.wraps(call)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        return hidden(call(*args, **kwargs))

    return filtered
