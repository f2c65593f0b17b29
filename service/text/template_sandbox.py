"""Where chat templates run: jinja2's immutable sandbox, with bounds on what a line of it may make, and the names that
transformers gives to templates.

Python's own objects are hidden from templates, since their texts would show memory addresses. A template gets plain
data, and besides it methods, functions and iterators. Those are wrapped the moment it gets them, so that their text is
the name of their type, however it is asked for: printed, joined, formatted or put into an error.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from types import NoneType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
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


_MAX_REPEATED_ITEMS = 1_000_000
_MAX_REPLACED_ITEMS = 1 << 30
_WIDE_FORMAT = re.compile(r"\d{5,}|\*")
# Only the last colon before a brace counts: from each of them to the brace would be quadratic.
_WIDE_FIELD = re.compile(r"\d{5,}|:[^{}:]*\{")
_PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs"})


class TemplateError(ValueError):
    """The template cannot render these messages: its own `raise_exception`, or an error in it."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks training targets; for serving its body is rendered as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(HidingEnvironment):
    """The sandbox, with repetition bounded: `"x" * 10**10`, `10 ** 10**10`, `"%9999999999s" % 1` and their like would
    take the process down."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        obj = unwrapped(obj)
        name, text = getattr(obj, "__name__", ""), getattr(obj, "__self__", None)
        if isinstance(text, str):
            sizes = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
            if name in _PADDING_METHODS and any(size > _MAX_REPEATED_ITEMS for size in sizes):
                raise jinja2.exceptions.SecurityError("the template pads a text too far")
            if name == "replace" and len(args) > 1 and (len(text) + 1) * len(str(args[1])) > _MAX_REPLACED_ITEMS:
                raise jinja2.exceptions.SecurityError("the template replaces with too long a text")
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        # A width may be a number, or come from an argument: "{:>{}}".
        if wrapped is not None and _WIDE_FIELD.search(value.__self__):
            raise jinja2.exceptions.SecurityError("the template formats a text too wide")
        return wrapped

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not all(isinstance(side, int | float) and abs(side) <= 1024 for side in (left, right)):
            raise jinja2.exceptions.SecurityError("the template raises a number to too high a power")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise jinja2.exceptions.SecurityError("the template formats a text too wide")
        for items, count in ((left, right), (right, left)):
            repeats = hasattr(items, "__len__") and isinstance(count, int)
            if operator == "*" and repeats and len(items) * count > _MAX_REPEATED_ITEMS:
                raise jinja2.exceptions.SecurityError("the template repeats a text too often")
        return super().call_binop(context, operator, left, right)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without underscore names, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


class _Dict:
    """`dict(...)` in templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which prompts must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _center(value: str, width: int = 80) -> str:
    if width > _MAX_REPEATED_ITEMS:
        raise jinja2.exceptions.SecurityError("the template pads a text too far")
    return str(value).center(width)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    if _WIDE_FORMAT.search(str(value)):
        raise jinja2.exceptions.SecurityError("the template formats a text too wide")
    return str(value) % (kwargs or args)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment for compiling templates, with the filters and functions that transformers provides."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["center"] = _center
    environment.filters["format"] = _format
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    environment.hide_names()
    return environment
