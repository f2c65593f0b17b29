"""The flags of `multilora serve` from the settings, and `multilora help`, which shows the settings by topic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize

from service.settings import Settings

# Shown first by --help.
_COMMON_SETTINGS = (
    *("host", "port", "model_dir", "model_name", "preload_adapters_dir", "store_dir", "device", "dtype", "replicas"),
    *("max_model_len_tokens", "max_sequences", "kv_bytes", "adapter_row_bytes", "api_keys", "keys_file"),
)
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


def flag_parser() -> argparse.ArgumentParser:
    """One flag per setting, those that most people set first."""
    parser = argparse.ArgumentParser(
        prog="multilora serve",
        usage="multilora serve [--SETTING VALUE ...]",
        description="Start the server. Each setting is also an environment variable: --kv-bytes is MULTILORA_KV_BYTES. "
        "Sizes (-bytes) are numbers or texts such as 512MiB; durations (-seconds) are numbers.",
        allow_abbrev=False,
    )
    common = parser.add_argument_group("settings")
    advanced = parser.add_argument_group("advanced settings")
    for name in (*_COMMON_SETTINGS, *(name for name in Settings.model_fields if name not in _COMMON_SETTINGS)):
        default = default_of(name)
        text = f"{Settings.model_fields[name].description}{f' (default {default})' if default else ''}"
        group = common if name in _COMMON_SETTINGS else advanced
        values = f"{{{','.join(choices)}}}" if (choices := choices_of(name)) else "VALUE"
        annotation = Settings.model_fields[name].annotation
        is_switch = bool in (annotation, *get_args(annotation))
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if is_switch else {}
        group.add_argument(flag_of(name), dest=name, metavar=values, help=text.replace("%", "%%"), **bare)
        if is_switch:
            no_flag = flag_of(f"no_{name}")
            group.add_argument(no_flag, dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
    return parser


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


def flag_of(setting: str) -> str:
    """The flag of `multilora serve`."""
    return f"--{setting.replace('_', '-')}"


def choices_of(setting: str) -> tuple[str, ...]:
    """The values that a setting can have, if they are few."""
    annotation = Settings.model_fields[setting].annotation
    return tuple(map(str, get_args(annotation))) if get_origin(annotation) is Literal else ()


def default_of(setting: str) -> str:
    """The default as text; empty where the description says it."""
    field = Settings.model_fields[setting]
    default = None if field.default_factory else field.default  # a factory asks the machine
    if default in (None, (), "") or (isinstance(default, Path) and default.is_absolute()):
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, bool):
        return str(default).lower()
    return default.human_readable() if isinstance(default, ByteSize) else str(default)


def _show(settings: Iterable[str]) -> None:
    for name in settings:
        print(f"  {flag_of(name)} VALUE, MULTILORA_{name.upper()}")
        print(f"      {Settings.model_fields[name].description}")
        if choices := choices_of(name):
            print(f"      one of: {', '.join(choices)}")
        if default := default_of(name):
            print(f"      default: {default}")
        print()
