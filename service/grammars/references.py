"""`$ref` in JSON schemas: which of them lead only to themselves, and which keep their meaning in a part of a schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

DEFINITIONS = ("$defs", "definitions")


def endless_reference(schema: dict[str, Any]) -> str | None:
    """A `$ref` that leads back to itself before it says what may stand there; None where an answer meets none.

    `{"$ref": "#"}` is one; a list whose items are lists of its own kind is not, for it begins with a bracket. What is
    followed are references within the schema, and the schemas that must be fit with them: all of `allOf`, and the one
    of an `anyOf` or `oneOf` that has one alone.
    """
    done: set[int] = set()
    for start in _reached(schema):
        # Depth first, without recursion: chains may be thousands of references long.
        path: dict[int, Iterator[tuple[str, dict[str, Any]]]] = {}
        if id(start) not in done and "$ref" in start:
            path[id(start)] = _followed(schema, start)
        while path:
            at, following = next(reversed(path.items()))
            for reference, target in following:
                if id(target) in path:
                    return reference
                if id(target) not in done:
                    path[id(target)] = _followed(schema, target)
                    break
            else:
                del path[at]
                done.add(at)
    return None


def refers_to_definitions_alone(schema: Mapping[str, Any]) -> bool:
    """Whether each part of the schema means the same wherever it stands, if the definitions stand beside it."""
    references = [one["$ref"] for one in objects_of(schema) if isinstance(one.get("$ref"), str)]
    return all(reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)) for reference in references)


def _followed(schema: dict[str, Any], one: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the reference, what it leads to) of all that must be fit where `one` must."""
    target = target_of(schema, one.get("$ref"))
    if target is not None:
        yield one["$ref"], target
    for name in ("allOf", "anyOf", "oneOf"):
        parts = one.get(name)
        if isinstance(parts, list) and (name == "allOf" or len(parts) == 1):
            yield from ((str(part.get("$ref", "#")), part) for part in parts if isinstance(part, dict))


def target_of(schema: Mapping[str, Any], reference: Any) -> dict[str, Any] | None:
    """The object within the schema that a reference names; None for one that names none, which the library refuses."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = schema
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def objects_of(schema: Any) -> Iterator[dict[str, Any]]:
    """All objects in plain data, itself first."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
        waiting.extend(one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())


def _reached(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All objects of the schema, of its definitions those alone that something refers to."""
    seen: set[int] = set()
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting.extend(value for name, value in one.items() if name not in DEFINITIONS)
            waiting.append(target_of(schema, one.get("$ref")))
        elif isinstance(one, list):
            waiting.extend(one)
