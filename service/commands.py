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
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from service.client import ClientError, checked, connect, events, sentences

_CONFIG, _TENSORS, _TEMPLATE = "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"
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
        console.print(f"[dim]{model} - an empty line starts anew, Ctrl-D ends[/dim]")
        talk = list(messages)
        while True:
            try:
                said = console.input("[bold cyan]> [/bold cyan]")
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
                console.print(f"[red]{error}[/red]", markup=True)


def _answer(client: httpx.Client, model: str, messages: list[dict[str, str]], arguments: argparse.Namespace) -> str:
    """Stream one answer to the terminal; the whole of it."""
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    body |= {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    said = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for event in events(checked(response)):
            piece = event["choices"][0]["delta"].get("content") or ""
            said += piece
            print(piece, end="", flush=True)
    print(flush=True)
    return said


def upload(arguments: argparse.Namespace) -> int:
    """Send a PEFT directory or an archive of one; says what was bound."""
    with _readable(arguments.path):
        files = _files_of(arguments.path)
    name = arguments.name or arguments.path.resolve().name.removesuffix(".zip").removesuffix(".gz").removesuffix(".tar")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client, _readable(arguments.path):
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            opened = {
                part: (path.name, progress.open(path, "rb", description=path.name)) for part, path in files.items()
            }
            response = checked(client.post("/v1/adapters", data={"name": name}, files=opened))
        report = response.json()
    created = "is there" if response.status_code == 201 else "was there already"
    print(
        f"{report['name']} {created}: rank {report['rank']}, {len(report['modules'])} modules, "
        f"{report['bytes']} bytes, digest {report['digest'][:12]}"
    )
    for sentence in report["notes"]:
        print(f"  {sentence}")
    return 0


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
    files = {"adapter_config": path / _CONFIG, "adapter_model": path / _TENSORS}
    return files | ({"chat_template": path / _TEMPLATE} if (path / _TEMPLATE).is_file() else {})


def ls(arguments: argparse.Namespace) -> int:
    """List the adapters."""
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        adapters = checked(client.get("/v1/adapters")).json()["data"]
    table = Table("name", "rank", "bytes", "where", "digest")
    for one in adapters:
        table.add_row(one["name"], str(one["rank"]), f"{one['bytes']:,}", one["state"], one["digest"][:12])
    Console().print(table)
    return 0


def rm(arguments: argparse.Namespace) -> int:
    """Delete adapters by name."""
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        for name in arguments.name:
            checked(client.delete(_path_of(name)))
            print(f"{name} is deleted")
    return 0


def _path_of(name: str) -> str:
    """The adapter's path at the server. ClientError for what would be another path: nothing, or dots alone."""
    if not name.strip("."):
        raise ClientError(f"{name!r} is no adapter's name; multilora ls lists the adapters.")
    return f"/v1/adapters/{quote(name, safe='')}"


def _base_name(client: httpx.Client) -> str:
    cards = checked(client.get("/v1/models")).json()["data"]
    return str(next(card["id"] for card in cards if card["parent"] is None))
