"""The flags of `multilora serve` from the settings; `multilora help`, which shows the settings by topic; and `multilora
completion`: what bash and zsh need to complete the command line, made from its parsers."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
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
        "Sizes (-bytes) are numbers or texts such as 512MiB; durations (-seconds) are numbers; --no-SETTING turns off "
        "a setting that is true or false.",
        allow_abbrev=False,
    )
    common = parser.add_argument_group("settings")
    advanced = parser.add_argument_group("advanced settings")
    for name in (*_COMMON_SETTINGS, *(name for name in Settings.model_fields if name not in _COMMON_SETTINGS)):
        default = default_of(name)
        text = f"{Settings.model_fields[name].description}{f'; default: {default}' if default else ''}"
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


_BASH = """\
# multilora in bash: eval "$(multilora completion bash)"
_multilora() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD - 1]}}" words=""
    if [[ $current == "=" ]]; then  # bash makes --flag=value three words
        current=""
    elif [[ $previous == "=" ]]; then
        previous="${{COMP_WORDS[COMP_CWORD - 2]}}"
    fi
    if ((COMP_CWORD == 1)); then
        words={commands}
    else
        case "${{COMP_WORDS[1]}} $previous" in
{values}
        *)
            case "${{COMP_WORDS[1]}} $current" in
{words}
            esac
            ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
# Where nothing is known, names of files.
complete -o default -F _multilora multilora
"""
_ZSH = """\
#compdef multilora
# multilora in zsh: source <(multilora completion zsh), after compinit; or as the file _multilora in a folder of $fpath.
_multilora() {{
    local -a names=(
{commands}
    )
    if ((CURRENT == 2)); then
        _describe command names
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
{cases}
    esac
}}
if [[ $funcstack[1] == _multilora ]]; then
    _multilora "$@"
else
    compdef _multilora multilora
fi
"""


@dataclass(frozen=True)
class _Argument:
    """A flag, or what stands without one (`flag` is None). `values` are all there are, if they are known."""

    flag: str | None
    text: str
    takes_value: bool
    values: tuple[str, ...]


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script for the shell, "bash" or "zsh"."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    texts = {str(one.dest): str(one.help) for one in commands._choices_actions}
    arguments = {name: _unlike(_arguments_of(name, one)) for name, one in commands.choices.items()}
    return (_bash if shell == "bash" else _zsh)(texts, arguments)


def _arguments_of(command: str, parser: argparse.ArgumentParser) -> Iterable[_Argument]:
    if command == "serve":
        parser = flag_parser()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        # Without those defaults that may be this machine's own.
        text = (action.help or "").replace("; default: %(default)s", "").replace("%%", "%")
        values = tuple(map(str, action.choices or ()))
        if command == "serve" and action.dest in Settings.model_fields:
            values = choices_of(action.dest)
        elif command == "help" and not action.option_strings:
            values = (*topics(), *(name.replace("_", "-") for name in Settings.model_fields))
        flag = action.option_strings[-1] if action.option_strings else None
        yield _Argument(flag, text, action.nargs != 0, values)
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from (argument for argument in _arguments_of(command, one) if argument.flag is not None)


def _unlike(arguments: Iterable[_Argument]) -> list[_Argument]:
    """Each flag once: those of a command and of its actions are offered together."""
    kept: list[_Argument] = []
    for one in arguments:
        if one.flag is None or all(one.flag != other.flag for other in kept):
            kept.append(one)
    return kept


def _bash(commands: dict[str, str], arguments: dict[str, list[_Argument]]) -> str:
    values, words = [], []
    for command, own in arguments.items():
        for one in own:
            if one.flag is not None and one.values:
                values.append(f'        "{command} {one.flag}") words={shlex.quote(" ".join(one.values))} ;;')
        flags = " ".join(one.flag for one in own if one.flag is not None)
        words.append(f'            "{command} -"*) words={shlex.quote(flags)} ;;')
        places = " ".join(value for one in own if one.flag is None for value in one.values)
        words.append(f'            "{command} "*) words={shlex.quote(places)} ;;')
    return _BASH.format(commands=shlex.quote(" ".join(commands)), values="\n".join(values), words="\n".join(words))


def _zsh(commands: dict[str, str], arguments: dict[str, list[_Argument]]) -> str:
    described = "\n".join(f"        {_quoted(f'{name}:{text}')}" for name, text in commands.items())
    cases = []
    for command, own in arguments.items():
        specs = " \\\n            ".join(_quoted(_spec(one)) for one in own)
        cases.append(f"    {command})\n        _arguments \\\n            {specs}\n        ;;")
    return _ZSH.format(commands=described, cases="\n".join(cases))


def _spec(one: _Argument) -> str:
    """For zsh's _arguments."""
    what = f"({' '.join(one.values)})" if one.values else "_files"
    if one.flag is None:
        return f"*:value:{what}"
    text = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in one.text)
    return f"{one.flag}=[{text}]:value:{what}" if one.takes_value else f"{one.flag}[{text}]"


def _quoted(text: str) -> str:
    """A word in single quotes, whatever is in it."""
    return "'" + text.replace("'", "'\\''") + "'"
