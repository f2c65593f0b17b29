"""`multilora upload`, `ls`, `history`, `rollback`, `pin`, `unpin` and `rm`: adapters of a server, from the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.adapter_files import adapter_files, sendable
from service.cli.client import Missing, answer_of, connect, pages, path_of, sentences
from service.cli.upload_client import Multipart, put

if TYPE_CHECKING:
    import httpx


def upload(arguments: argparse.Namespace) -> int:
    """Send a PEFT directory or an archive of one; says what was bound."""
    own_name = sendable(arguments.path.resolve())
    name = arguments.name or own_name.removesuffix(".zip").removesuffix(".gz").removesuffix(".tar")
    said = {part: getattr(arguments, part) for part in ("note", "visibility", "shared_with")}
    data = {part: text for part, text in said.items() if text}
    asked = [f"{one}=true" for one in ("probe", "without_tokenizer", "ephemeral") if getattr(arguments, one)]
    for one in ("on_new_version", "expert_b_order"):
        if getattr(arguments, one) is not None:
            asked.append(f"{one}={getattr(arguments, one)}")
    with adapter_files(arguments.path) as parts:
        path = path_of("/v1/adapters", name) + "?" * bool(asked) + "&".join(asked)
        body = Multipart(data, parts)
        with _Bar(own_name, body.num_bytes) as bar:
            answer = put(arguments.url, arguments.api_key, path, body, _conditions(arguments), bar.advance)
    print(answer_of(answer, lambda report: _bound(report, is_new=answer.status_code == 201)))
    if unsent := _unsent(arguments.path, {part.partition("/")[0] for part, _, _ in parts}):
        print(f"  Not sent, since no server needs it: {', '.join(unsent)}.")
    return 0


class _Bar:
    """How far an upload is, in one line of a terminal; a context manager. Written by hand: rich takes longer to import
    than most adapters take to send."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self._name = "".join(one if one.isprintable() else "?" for one in name[:40])
        self._num_bytes, self._num_sent, self._shown_at = num_bytes, 0, 0.0
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are sent."""
        self._num_sent += num_bytes
        if self._is_shown and time.monotonic() - self._shown_at > 0.1:
            self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        part = 100 * self._num_sent // self._num_bytes
        print(f"\r{self._name} {part:3d}% of {self._num_bytes / 1e6:.1f} MB", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._is_shown:
            return
        if kind is None:
            self._num_sent = self._num_bytes
        self._show()
        print(file=sys.stderr)


def _conditions(arguments: argparse.Namespace) -> dict[str, str]:
    if arguments.new:
        return {"If-None-Match": "*"}
    return {} if arguments.if_version is None else {"If-Match": f'"{arguments.if_version}"'}


def _bound(report: Any, *, is_new: bool) -> str:
    """The lines that report an upload."""
    first = (
        f"{report['name']}@{report['version']} {'is there' if is_new else 'was there already'}: rank {report['rank']}, "
        f"{len(report['modules'])} modules, {report['bytes']} bytes, digest {report['digest'][:12]}"
    )
    return "\n".join([first, *(f"  {sentence}" for sentence in report["notes"])])


def _unsent(path: Path, sent: set[str]) -> list[str]:
    """Names in a directory of which nothing was sent, folders with a slash."""
    if not path.is_dir():
        return []
    return [sendable(one) + "/" * one.is_dir() for one in sorted(path.iterdir()) if one.name not in sent]


def ls(arguments: argparse.Namespace) -> int:
    """List the adapters."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        rows = pages(client, "/v1/adapters", _row, **_filters(arguments))
    table = Table(Column("name", overflow="fold"), "version", "rank", "bytes", "where", Column("digest", no_wrap=True))
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    return 0


def _filters(arguments: argparse.Namespace) -> dict[str, str | int]:
    wanted: dict[str, Any] = {
        "prefix": arguments.prefix,
        "rank": arguments.rank,
        "state": arguments.state,
        "owner": arguments.owner,
    }
    if arguments.pinned:
        wanted["pinned"] = "true"
    return {name: value for name, value in wanted.items() if value is not None}


def _row(one: Any) -> tuple[str, ...]:
    size = f"{one['bytes']:,}"
    return str(one["name"]), str(one["version"]), str(one["rank"]), size, _where(one), str(one["digest"])[:12]


def _where(one: Any) -> str:
    """The fastest place, and of several engines each that holds it, and whether it is pinned; a server of an older
    version tells of neither."""
    places = ", ".join(f"{name} {tier}" for name, tier in sorted(one.get("replicas", {}).items()))
    return (places or str(one["state"])) + (", pinned" if one.get("pinned") else "")


def history(arguments: argparse.Namespace) -> int:
    """List the versions of an adapter, newest first."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        response = client.get(f"{path_of('/v1/adapters', arguments.name)}/history")
        rows = answer_of(response, lambda body: [_version_row(one) for one in body["data"]])
    if arguments.json:
        print(response.text)
        return 0
    table = Table("version", Column("digest", no_wrap=True), "since", "by", Column("note", overflow="fold"))
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    return 0


def _version_row(one: Any) -> tuple[str, ...]:
    from datetime import datetime

    since = datetime.fromtimestamp(one["created"]).isoformat(" ", timespec="seconds")
    return str(one["number"]), str(one["digest"])[:12], since, str(one["by"]), str(one["note"])


def rollback(arguments: argparse.Namespace) -> int:
    """Make an earlier version's content the current one again."""
    body = {"note": arguments.note} if arguments.to is None else {"note": arguments.note, "version": arguments.to}
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        response = client.post(f"{path_of('/v1/adapters', arguments.name)}/rollback", json=body)
        print(answer_of(response, lambda report: _bound(report, is_new=True)))
    return 0


def rm(arguments: argparse.Namespace) -> int:
    """Delete adapters by name."""
    return _each(arguments, lambda client, path: client.delete(path), "deleted")


def pin(arguments: argparse.Namespace) -> int:
    """Keep adapters on the device."""
    return _each(arguments, lambda client, path: client.put(f"{path}/pin"), "pinned")


def unpin(arguments: argparse.Namespace) -> int:
    """Keep them there no longer."""
    return _each(arguments, lambda client, path: client.delete(f"{path}/pin"), "no longer pinned")


def _each(arguments: argparse.Namespace, send: Callable[[httpx.Client, str], httpx.Response], done: str) -> int:
    """Do it to adapters by name; 1 if one of them is not there, which keeps none of the others."""
    code = 0
    with sentences(arguments.url), connect(arguments.url, arguments.api_key) as client:
        for name in arguments.name:
            try:
                answer_of(send(client, path_of("/v1/adapters", name)), lambda body: body["name"])
                print(f"{name} is {done}", flush=True)
            except Missing as error:
                print(f"multilora: {error}", file=sys.stderr)
                code = 1
    return code
