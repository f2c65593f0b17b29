"""`multilora chat`, `upload`, `ls` and `rm`: a server's client at the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column, Table

from service.client import ClientError, answer_of, checked, connect, events, sentences, utf8

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# What a directory may hold beside them that the server looks at: a chat template, tokens that the base has not.
_BESIDE = ("chat_template.jinja", "tokenizer_config.json", "added_tokens.json", "tokenizer.json")
_ARCHIVES = (".tar.gz", ".tgz", ".zip")


def chat(arguments: argparse.Namespace) -> int:
    """Talk to the base or an adapter until the end of the input; with a message on the command line, one answer."""
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        model = arguments.adapter or _base_name(client)
        messages: list[dict[str, str]] = []
        if arguments.system:
            messages.append({"role": "system", "content": arguments.system})
        if arguments.message:
            _answer(client, model, [*messages, {"role": "user", "content": " ".join(arguments.message)}], arguments)
            return 0
        console = Console(highlight=False)
        console.print(f"[dim]{escape(model)} - an empty line starts anew, Ctrl-D ends[/dim]")
        talk = list(messages)
        while True:
            try:
                with utf8("message"):
                    said = console.input("[bold cyan]> [/bold cyan]")
                    said.encode()
            except EOFError:
                console.print()
                return 0
            if not said.strip():
                talk = list(messages)
                console.print("[dim]a new chat[/dim]")
                continue
            talk.append({"role": "user", "content": said})
            try:
                talk.append({"role": "assistant", "content": _answer(client, model, talk, arguments)})
            except ClientError as error:
                talk.pop()
                console.print(f"[red]{escape(str(error))}[/red]")


def _answer(client: httpx.Client, model: str, messages: list[dict[str, str]], arguments: argparse.Namespace) -> str:
    """Stream one answer to the terminal; the whole of it."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    body |= {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    said = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for piece in events(checked(response), _piece):
            said += piece
            print(piece, end="", flush=True)
    print(flush=True)
    return said


def _piece(event: Any) -> str:
    return str(event["choices"][0]["delta"].get("content") or "")


def upload(arguments: argparse.Namespace) -> int:
    """Send a PEFT directory or an archive of one; says what was bound."""
    with _readable(arguments.path):
        files = _files_of(arguments.path)
    own_name = _sendable(arguments.path.resolve())
    name = arguments.name or own_name.removesuffix(".zip").removesuffix(".gz").removesuffix(".tar")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client, _readable(arguments.path):
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            opened = {
                part: (_sendable(path), progress.open(path, "rb", description=_sendable(path)))
                for part, path in files.items()
            }
            response = client.post("/v1/adapters", data={"name": name}, files=opened)
        created = "is there" if response.status_code == 201 else "was there already"
        print(answer_of(response, lambda report: _bound(report, created)))
    return 0


def _sendable(path: Path) -> str:
    """The name of a file, with `?` for what is not UTF-8: the server then says which names there are."""
    return path.name.encode(errors="replace").decode()


def _bound(report: Any, created: str) -> str:
    """What the server made of an upload, in lines."""
    first = (
        f"{report['name']} {created}: rank {report['rank']}, {len(report['modules'])} modules, "
        f"{report['bytes']} bytes, digest {report['digest'][:12]}"
    )
    return "\n".join([first, *(f"  {sentence}" for sentence in report["notes"])])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what the operating system says of the files below `path` into ClientError."""
    try:
        yield
    except OSError as error:
        raise ClientError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error


def _files_of(path: Path) -> dict[str, Path]:
    """Part name to file. ClientError if the path is neither a PEFT directory nor an archive."""
    if path.is_file() and path.name.endswith(_ARCHIVES):
        return {"archive": path}
    if not path.is_dir():
        raise ClientError(f"{path} is neither a directory nor an archive ({', '.join(_ARCHIVES)}).")
    missing = [name for name in (_CONFIG, _TENSORS) if not (path / name).is_file()]
    if missing:
        raise ClientError(
            f"{path} has no {' and no '.join(missing)}; give a directory that PEFT's save_pretrained wrote."
        )
    return {name: path / name for name in (_CONFIG, _TENSORS, *_BESIDE) if (path / name).is_file()}


def ls(arguments: argparse.Namespace) -> int:
    """List the adapters."""
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        rows = answer_of(client.get("/v1/adapters"), lambda body: [_row(one) for one in body["data"]])
    table = Table(Column("name", overflow="fold"), "rank", "bytes", "where", Column("digest", no_wrap=True))
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    return 0


def _row(one: Any) -> tuple[str, ...]:
    return str(one["name"]), str(one["rank"]), f"{one['bytes']:,}", str(one["state"]), str(one["digest"])[:12]


def rm(arguments: argparse.Namespace) -> int:
    """Delete adapters by name."""
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        for name in arguments.name:
            answer_of(client.delete(_path_of(name)), lambda body: body["deleted"])
            print(f"{name} is deleted")
    return 0


def _path_of(name: str) -> str:
    """The adapter's path at the server. ClientError for what would be another path: nothing, or dots alone."""
    if not name.strip("."):
        raise ClientError(f"{name!r} is no adapter's name; multilora ls lists the adapters.")
    return f"/v1/adapters/{quote(name, safe='')}"


def _base_name(client: httpx.Client) -> str:
    def base(body: Any) -> str:
        return str(next(card["id"] for card in body["data"] if card["parent"] is None))

    return answer_of(client.get("/v1/models"), base)
