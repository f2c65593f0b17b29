"""Which modules a configuration's names and regular expressions match, exactly as PEFT decides it.

Regular expressions come from strangers, and Python's can take exponential time. Plain names are matched here; anything
with operators is matched in a child process of its own (`adapters.peft.pattern_child`), whose processor time and memory
the kernel limits, and which reaches no files and no network (`adapters.isolation.bounded_child`).
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Literal

from adapters.errors import Malformed
from adapters.isolation.bounded_child import BoundedChild
from adapters.peft.config import AdapterConfig

# Processor time to compile and match: one expression; all keys of rank_pattern or alpha_pattern. What people train
# with takes a millisecond on hundreds of modules.
EXPRESSION_SECONDS = 0.05
KEYS_SECONDS = 1.0
# At least, for an expression and each module, of which there are tens of thousands where each expert is three.
_MODULE_SECONDS = 1e-5
# Of a key with a module: seconds of Python. Modules are many where each expert is one.
_MOST_COMPARISONS = 1 << 23
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_CHILD = "adapters.peft.pattern_child"


def targeted(config: AdapterConfig, paths: Sequence[str], linear_paths: Iterable[str]) -> set[str]:
    """Those of `paths` (module paths as the trainer saw them) that the configuration adapts.

    linear_paths: what "all-linear" stands for. Raises Malformed for a broken or too slow regular expression.
    """
    paths = [path for path in paths if not _is_saved(config, path)]
    if isinstance(config.target_modules, str):
        if config.is_all_linear:
            found = set(paths) & set(linear_paths)
        else:
            found = _full_matches(config.target_modules, paths, "target_modules")
    else:
        names, layers = frozenset(config.target_modules), frozenset(config.layers_to_transform or ())
        found = {path for path in paths if _in_targets(config, names, layers, path)}
    if isinstance(config.exclude_modules, str):
        excluded = (
            _full_matches(config.exclude_modules, sorted(found), "exclude_modules") if config.exclude_modules else ()
        )
    else:
        excluded = {path for path in found if _ends_with_any(path, frozenset(config.exclude_modules))}
    return found.difference(excluded) | {path for path in paths if is_targeted_parameter(config, f"{path}.weight")}


def is_targeted_parameter(config: AdapterConfig, path: str) -> bool:
    """Whether target_parameters names the parameter: PEFT excludes none of them."""
    return _ends_with_any(path, frozenset(config.target_parameters))


def pattern_values(keys: Sequence[str], paths: Sequence[str], what: str) -> dict[str, str]:
    """path -> the first of `keys` that matches it; paths that none matches are left out.

    As PEFT reads rank_pattern and alpha_pattern: a key is a regular expression for the path's end, beginning
    after a dot or at the start.
    """
    if len(keys) * len(paths) > _MOST_COMPARISONS:
        raise Malformed(f"adapter_config.json: {what} has too many keys for {len(paths)} modules; write fewer.")
    regular = [key for key in keys if not _PLAIN.fullmatch(key)]
    matches = _match_in_child("match", {key: rf"(.*\.)?({key})$" for key in regular}, paths, what, KEYS_SECONDS)
    found: dict[str, str] = {}
    for key in keys:
        hits = matches[key] if key in matches else [path for path in paths if _plain_key_matches(key, path)]
        for path in hits:
            found.setdefault(path, key)
    return found


def endings(path: str) -> list[str]:
    """The path and what follows each of its dots: "a.b.c", "b.c", "c"."""
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]


def _plain_key_matches(key: str, path: str) -> bool:
    """re.match(rf"(.*\\.)?({key})$", path) for a key of word characters and dots, a dot matching any character."""
    before, tail = path[: -len(key)], path[-len(key) :]
    return (not before or before.endswith(".")) and _plain_matches(key, tail)


def _plain_matches(pattern: str, text: str) -> bool:
    """re.fullmatch of word characters and dots, a dot matching any character."""
    return len(pattern) == len(text) and all(
        wanted in (".", found) for wanted, found in zip(pattern, text, strict=True)
    )


def _in_targets(config: AdapterConfig, names: frozenset[str], layers: frozenset[int], path: str) -> bool:
    if path in names:
        return True  # PEFT does not look at the layers of a path given in full
    if not _ends_with_any(path, names):
        return False
    return config.layers_to_transform is None or _layer_of(path, config.layers_pattern) in layers


def _is_saved(config: AdapterConfig, path: str) -> bool:
    """Whether modules_to_save names the module or one around it: PEFT adapts no such module, whatever names it."""
    return any(f".{name}." in f".{path}." for name in config.modules_to_save)


def _layer_of(path: str, layers_pattern: Sequence[str]) -> int | None:
    if not layers_pattern:
        match = re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", path)
        return int(match["index"]) if match else None
    for name in layers_pattern:
        match = re.match(rf"(?:^|.*?\.){name}\.(?P<index>\d+)\.", path)
        if match:
            return int(match["index"])
    return None


def _ends_with_any(path: str, names: frozenset[str]) -> bool:
    return not names.isdisjoint(endings(path))


def _full_matches(pattern: str, paths: Sequence[str], what: str) -> set[str]:
    if not pattern or _PLAIN.fullmatch(pattern):
        return {path for path in paths if _plain_matches(pattern, path)}
    seconds = max(EXPRESSION_SECONDS, len(paths) * _MODULE_SECONDS)
    return set(_match_in_child("fullmatch", {pattern: pattern}, paths, what, seconds)[pattern])


def _match_in_child(
    method: Literal["match", "fullmatch"],
    patterns: Mapping[str, str],
    paths: Sequence[str],
    what: str,
    seconds: float,
) -> dict[str, list[str]]:
    """name -> paths that its pattern matches. `patterns` maps names (for messages) to regular expressions; `seconds` of
    processor time are all that they get."""
    if not patterns:
        return {}
    fault = f"adapter_config.json: {what} holds a regular expression that"
    job = json.dumps([seconds, method, list(patterns.values()), list(paths)]).encode() + b"\n"
    with closing(BoundedChild(_CHILD, [])) as child:
        answer = child.ask(job)
    if answer == -signal.SIGPROF:
        raise Malformed(f"{fault} takes too long to match; write it more simply or list the modules.")
    if isinstance(answer, int):
        raise Malformed(f"{fault} could not be evaluated; write it more simply or list the modules.")
    names = list(patterns)
    if "broken" in answer:
        raise Malformed(f"{fault} is not valid: {names[answer['broken']][:200]!r} ({answer['why'][:200]}).")
    return {name: [paths[i] for i in hits] for name, hits in zip(names, answer["found"], strict=True)}
