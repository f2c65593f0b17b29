"""`multilora completion`: what bash and zsh need to complete the command line, made from its parsers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from service.cli.help import choices_of, flag_parser, topics
from service.settings import Settings

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
        # Without defaults, which may be this machine's own.
        text = re.sub(r" \((default .*|%\(default\)s)\)", "", action.help or "").replace("%%", "%")
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
