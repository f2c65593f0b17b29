"""`multilora help`: the settings of the server by topic, in their own words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from service.settings import Settings, choices_of, default_of, flag_of

# Name, title, first setting. A topic goes on, in the order of `Settings`, up to the first setting of the next one.
_TOPICS = (
    ("network", "the server's address", "host"),
    ("model", "the base model", "model_dir"),
    ("adapters", "adapters at the start, and the store", "preload_adapters_dir"),
    ("answers", "tool calls, thoughts and schemas in answers", "tool_parser"),
    ("device", "device, dtype, engines, threads", "dtype"),
    ("steps", "sizes of a step, and how it is launched", "max_model_len_tokens"),
    ("memory", "memory that is allocated once, at the start", "kv_bytes"),
    ("limits", "bounds of requests and uploads", "max_queued_requests"),
    ("keys", "keys, paths, browsers, slow clients", "api_keys"),
    ("operation", "shutdown, metrics, log", "shutdown_limit_seconds"),
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
            "Settings of multilora serve by topic. `multilora help TOPIC` and `multilora help SETTING` describe them."
        )
        print("`multilora COMMAND --help` describes a command.\n")
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
            f"multilora: {wanted!r} is neither a topic nor a setting; the topics are {', '.join(titles)}. "
            "`multilora COMMAND --help` describes a command.",
            file=sys.stderr,
        )
        return 2
    return 0


def _show(settings: Iterable[str]) -> None:
    for name in settings:
        print(f"  {flag_of(name)} VALUE, MULTILORA_{name.upper()}")
        print(f"      {Settings.model_fields[name].description}")
        if choices := choices_of(name):
            print(f"      one of: {', '.join(choices)}")
        if default := default_of(name):
            print(f"      default: {default}")
        print()
