"""`multilora help`: the settings of the server by topic, in their own words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Literal, get_args, get_origin

from pydantic import ByteSize

from service.settings import Settings

# Name, title, first setting. A topic goes on, in the order of `Settings`, up to the first setting of the next one.
_TOPICS = (
    ("network", "where the server listens", "host"),
    ("model", "the base model", "model_dir"),
    ("adapters", "where adapters come from and live", "preload_adapters_dir"),
    ("answers", "how what the model writes is read", "tool_parser"),
    ("device", "what computes, and how", "dtype"),
    ("steps", "what runs in one step, and how", "max_model_len_tokens"),
    ("memory", "what is allocated once, at the start", "kv_bytes"),
    ("limits", "what clients may ask for", "max_queued_requests"),
    ("keys", "who may ask", "api_keys"),
    ("operation", "the end of the process, and its log", "shutdown_limit_seconds"),
)


def topics() -> dict[str, tuple[str, ...]]:
    """Topic to the names of its settings; each setting is in exactly one."""
    names = list(Settings.model_fields)
    starts = [names.index(first) for _, _, first in _TOPICS]
    ends = [*starts[1:], len(names)]
    return {topic: tuple(names[at:end]) for (topic, _, _), at, end in zip(_TOPICS, starts, ends, strict=True)}


def show_help(arguments: argparse.Namespace) -> int:
    """Without a topic, the list of them; 2 for one that is none."""
    titles = {topic: title for topic, title, _ in _TOPICS}
    wanted = arguments.topic
    if wanted is None:
        print(
            "Settings of multilora serve by topic; multilora help TOPIC shows one, multilora help SETTING one of them."
        )
        print("Of the commands, multilora COMMAND --help tells.\n")
        for topic, names in topics().items():
            flags = ", ".join(flag_of(name).removeprefix("--") for name in names)
            print(f"  {topic:10} {titles[topic]}\n             {flags}")
        return 0
    setting = wanted.lower().removeprefix("multilora_").replace("-", "_")
    if wanted in titles:
        print(f"{wanted} - {titles[wanted]}\n")
        _show(topics()[wanted])
    elif setting in Settings.model_fields:
        _show([setting])
    else:
        print(
            f"multilora: {wanted!r} is neither a topic nor a setting; the topics are {', '.join(titles)}. Of "
            "commands, multilora COMMAND --help tells.",
            file=sys.stderr,
        )
        return 2
    return 0


def flag_of(setting: str) -> str:
    """The flag of `multilora serve`."""
    return f"--{setting.replace('_', '-')}"


def choices_of(setting: str) -> tuple[str, ...]:
    """The values that a setting can have, if they are few."""
    annotation = Settings.model_fields[setting].annotation
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()


def _show(settings: Iterable[str]) -> None:
    for name in settings:
        field = Settings.model_fields[name]
        print(f"  {flag_of(name)} VALUE, MULTILORA_{name.upper()}")
        print(f"      {field.description}")
        if choices := choices_of(name):
            print(f"      one of: {', '.join(choices)}")
        default = field.get_default()
        if default not in (None, ()):
            shown = default.human_readable() if isinstance(default, ByteSize) else default
            print(f"      default: {shown}")
        print()
