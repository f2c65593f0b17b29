"""The command `multilora`: its commands and their flags. Each command imports what it needs and no more."""

from __future__ import annotations

import argparse
import errno
import gc
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code. A user's fault is one sentence on stderr, never a traceback."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["serve"]:
        with suppress(KeyboardInterrupt):  # while the server starts, which has its own way with it later
            return _serve(given[1:])
        return 130
    arguments = make_parser(given[0] if given and given[0] in _COMMANDS else None).parse_args(given)
    from service.cli.client import ClientError

    try:
        if "url" in arguments:
            _refuse_other_than_utf8(arguments)
        with _ended_by_sigterm() if arguments.command in _LEAVING else nullcontext():
            code = _command(arguments.command)(arguments)
        if sys.stdout is not None:  # as it is where stdout is closed
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads, `head` say, has had enough; nothing may be written at the exit either
        _write_no_more()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _write_no_more()
        print(f"multilora: The output cannot be written: {error.strerror}.", file=sys.stderr)
        return 1
    except ClientError as error:
        print(f"multilora: {error}", file=sys.stderr)
        return 1


# Commands that make a hidden directory, which must go with them.
_LEAVING = frozenset({"merge", "pull"})


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End the body with an exception at SIGTERM, as Python does at SIGINT."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_no_more() -> None:
    """Python writes what it still holds when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse_other_than_utf8(arguments: argparse.Namespace) -> None:
    """ClientError for text that cannot be sent. A Path may be any bytes."""
    from service.cli.client import utf8

    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                with utf8(name.replace("_", " ")):
                    text.encode()


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    if name == "doctor":
        from service.doctor.command import doctor

        return doctor
    if name == "bench":
        from service.cli.load_test import bench

        return bench
    if name == "keys":
        from service.tenants.edit import keys

        return keys
    if name == "help":
        from service.cli.help import show_help

        return show_help
    if name == "completion":
        return _completion
    if name == "merge":
        from service.cli.merge import merge

        return merge
    if name == "pull":
        from service.cli.pull import pull

        return pull
    if name == "chat":
        from service.cli.chat import chat

        return chat
    from service.cli import commands

    table = {
        "upload": commands.upload,
        "ls": commands.ls,
        "history": commands.history,
        "rollback": commands.rollback,
        "rm": commands.rm,
        "pin": commands.pin,
        "unpin": commands.unpin,
    }
    return table[name]


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviated flags, which a flag of a later version would make ambiguous; nor do its sub-parsers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown argument of a sub-parser is an error with this command's usage, not that of
        all."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


class _ShowVersion(argparse.Action):
    """Looks the version up when it is asked for, not at each command's start."""

    def __init__(self, option_strings: list[str], **options: Any) -> None:
        super().__init__(option_strings, nargs=0, **{**options, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from service import server_version

        print(f"{parser.prog} {server_version()}")
        parser.exit()


def _completion(arguments: argparse.Namespace) -> int:
    from service.cli.help import completion

    print(completion(make_parser(), arguments.shell), end="")
    return 0


def _serve(given: list[str]) -> int:
    from service.start_check import StartError, check_kernels_package

    try:
        check_kernels_package()
    except StartError as error:
        print(f"multilora: {error}", file=sys.stderr)
        return 1
    # As the engine's process does: imported objects stay.
    gc.disable()
    # Its flags come from the settings, which no other command needs to import.
    from service.server.serve import serve

    return serve(given)


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands; of one alone, which is built in a tenth of the time, where `command` names one."""
    parser = _Parser(prog="multilora", description="One base model and any number of LoRA adapters.")
    parser.add_argument("--version", action=_ShowVersion, help="show the server's version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if command is None:
        text = "start the server; each setting is a flag and MULTILORA_<NAME>"
        commands.add_parser("serve", help=text, add_help=False)
    for name, (text, add) in _COMMANDS.items():
        if command in (None, name):
            add(commands.add_parser(name, help=text, description=text))
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    url = os.environ.get("MULTILORA_URL", DEFAULT_URL)
    text = "address of the server, with or without /v1; also MULTILORA_URL; default: %(default)s"
    parser.add_argument("--url", default=url, type=_server_url, help=text)
    key = os.environ.get("MULTILORA_API_KEY")
    parser.add_argument("--api-key", default=key, help="your key, where the server needs one; also MULTILORA_API_KEY")


def _add_upload(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("path", type=Path, help="directory that PEFT wrote, or a .tar.gz or .zip of one")
    parser.add_argument("--name", help="name of the adapter; default: the name of the directory or archive")
    parser.add_argument("--note", default="", help="text for the adapter's history")
    text = "tenants that may use it; default: as before, and the server's default for a new one"
    parser.add_argument("--visibility", choices=("private", "shared", "public"), help=text)
    parser.add_argument("--shared-with", help="tenants, separated by commas, with --visibility shared")
    parser.add_argument(
        "--probe", action="store_true", help="refuse an adapter that changes no answer, or yields no finite one"
    )
    text = "leave out the files of its tokenizer, which name tokens that it was not trained with"
    parser.add_argument("--without-tokenizer", action="store_true", help=text)
    text = "order of lora_B in parameters of experts that an older Unsloth trained; default: as the adapter says"
    parser.add_argument("--expert-b-order", choices=("rank_major", "grouped_by_expert"), help=text)
    text = "keep it in the server's memory alone, until that ends"
    parser.add_argument("--ephemeral", action="store_true", help=text)
    text = (
        "version of a running request when the name moves, unless the request says; keep: its own; continue: the new "
        "one; restart: the new one from the first token; default: as before"
    )
    parser.add_argument("--on-new-version", choices=("keep", "continue", "restart"), help=text)
    condition = parser.add_mutually_exclusive_group()
    condition.add_argument("--new", action="store_true", help="refuse if there is an adapter of this name")
    condition.add_argument("--if-version", metavar="VERSION", help="refuse if the adapter is at another version")


def _add_pull(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("name", help="name of the adapter, or name@version")
    parser.add_argument("directory", nargs="?", type=Path, help="directory to make; default: the adapter's name")
    parser.add_argument("--force", action="store_true", help="replace the directory if there is one")


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", type=Path, help="directory of the base model, in Hugging Face's layout")
    parser.add_argument("adapter", type=Path, help="directory that PEFT wrote, or multilora pull")
    parser.add_argument("out", type=Path, help="directory to make")
    text = "write floats where the base is quantised, which is refused otherwise"
    parser.add_argument("--dequantise", action="store_true", help=text)
    text = "compare the merged model with the base and the adapter beside it on some tokens, in float32 on the CPU"
    parser.add_argument("--check", action="store_true", help=text)


def _add_ls(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("prefix", nargs="?", help="first characters of their names; default: all")
    parser.add_argument("--rank", type=_positive, help="only adapters of this rank")
    parser.add_argument("--state", choices=("disk", "host", "device"), help="only adapters whose weights are there")
    parser.add_argument("--pinned", action="store_true", help="only pinned adapters")
    parser.add_argument("--owner", help="only adapters of this tenant; empty: those without one")


def _add_history(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("name", help="name of the adapter")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_rollback(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("name", help="name of the adapter")
    parser.add_argument("--to", metavar="VERSION", help="number or digest; default: the newest other content")
    parser.add_argument("--note", default="", help="text for the adapter's history")


def _add_pin(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("name", nargs="+", help="name of an adapter; its later versions are pinned too")


def _add_names(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("name", nargs="+", help="name of an adapter")


def _add_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", help="a topic or a setting; without one, the list of topics")


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help='bash: eval "$(multilora completion bash)"')


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("message", nargs="*", help="one message; without any an interactive chat")
    parser.add_argument("--adapter", help="name of an adapter; default: the base")
    parser.add_argument("--system", help="system message")
    text = "sampling temperature, 0 for greedy; default: %(default)s"
    parser.add_argument("--temperature", type=_finite, default=0.0, help=text)
    parser.add_argument(
        "--max-tokens", type=_positive, default=256, help="largest number of tokens of the answer; default: %(default)s"
    )


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, npu, npu:1 ...; default: MULTILORA_DEVICE, else the best device")
    parser.add_argument("--model-dir", help="Hugging Face directory of the base model; default: the bundled one")
    parser.add_argument("--store-dir", help="directory of uploaded adapters; default: as for serve")
    parser.add_argument("--dtype", help="auto, float32, bfloat16 or float16; default: as for serve")
    parser.add_argument("--weights", help="auto, bf16, fp8, int8 or nf4; default: as for serve")
    parser.add_argument("--block-size-tokens", help="number of tokens in a KV block; default: as for serve")
    parser.add_argument("--json", action="store_true", help="print JSON, for a bug report, and nothing else")
    deep = parser.add_argument_group("on a new kind of host", "one process for each step, and one report of all")
    text = "also try races, attention, times and settings, within half an hour; takes the device as a server would"
    deep.add_argument("--deep", action="store_true", help=text)
    text = "directory of report.json and report.html; default: doctor-report"
    deep.add_argument("--report-dir", type=Path, help=text)
    deep.add_argument("--resume", action="store_true", help="continue the existing report")
    deep.add_argument("--minutes", type=_minutes, help="limit of all steps together, in minutes; default: 30")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    path = os.environ.get("MULTILORA_KEYS_FILE")
    _add_keys_file(parser, Path(path) if path else None)
    actions = parser.add_subparsers(dest="action", required=True, metavar="add|list|revoke")
    text = "make a key, print it once and store its hash"
    add = actions.add_parser("add", help=text, description=text)
    add.add_argument(
        "tenant", help="name of the tenant (lower-case letters, digits, '-'); a new one gets a table without limits"
    )
    text = "infer, upload, delete, download, control, admin, separated by commas; default: %(default)s"
    add.add_argument("--scopes", default="infer", help=text)
    add.add_argument("--note", default="", help="a note for the list")
    actions.add_parser("list", help="list the keys by id", description="show the keys")
    text = "remove a key; the server refuses it from the next request on"
    revoke = actions.add_parser("revoke", help=text, description=text)
    revoke.add_argument("id", help="id of the list, or its first characters")
    for action in actions.choices.values():
        _add_keys_file(action, argparse.SUPPRESS)  # what stands before the action stays, if nothing stands after it


def _add_keys_file(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument("--keys-file", type=Path, default=default, help="the file; also MULTILORA_KEYS_FILE")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    parser.add_argument("--model", action="append", help="a model name, may be repeated; default: base and adapters")
    for flag, default, text in (
        ("--requests", 64, "number of requests in all"),
        ("--concurrency", 16, "number of requests at a time"),
        ("--prompt-words", 32, "number of words of a prompt"),
        ("--max-tokens", 64, "largest number of tokens of an answer"),
    ):
        parser.add_argument(flag, type=_positive, default=default, help=f"{text}; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON too; -: print it instead of the tables")


def _server_url(text: str) -> str:
    from service.cli.client import server_url

    return server_url(text)


def _positive(text: str) -> int:
    with suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if 0.0 < (value := float(text)) <= 24 * 60:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")


def _finite(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")


# Each command's description, and how its flags are added; `serve` makes its own of the settings.
_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "chat": ("talk to the base or an adapter", _add_chat),
    "upload": ("send an adapter", _add_upload),
    "pull": ("fetch an adapter as a directory that PEFT loads", _add_pull),
    "merge": ("write a base model with an adapter's weights in it", _add_merge),
    "ls": ("list the adapters", _add_ls),
    "history": ("list the versions of an adapter", _add_history),
    "rollback": ("go back to an earlier version of an adapter", _add_rollback),
    "pin": ("keep adapters on the device, even without requests", _add_pin),
    "unpin": ("end the pin of adapters", _add_names),
    "rm": ("delete adapters", _add_names),
    "doctor": ("check this machine: packages, device, model, and the numbers that each op computes", _add_doctor),
    "bench": ("send requests to a running server and show its speed", _add_bench),
    "keys": ("edit the keys of tenants in the server's keys file on this machine", _add_keys),
    "help": ("describe the server's settings", _add_help),
    "completion": ("print the completion script of a shell", _add_completion),
}


if __name__ == "__main__":
    sys.exit(main())
