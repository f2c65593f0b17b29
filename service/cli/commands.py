"""`multilora upload`, `ls`, `history`, `rollback`, `pin`, `unpin` and `rm`: adapters of a server, from the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.client import ClientError, Missing, answer_of, connect, pages, path_of, sentences
from service.cli.upload_client import CONFIG, TENSORS, Multipart, put

if TYPE_CHECKING:
    import httpx

_SHARDS, _INDEX = "adapter_model-*-of-*.safetensors", "adapter_model.safetensors.index.json"
# The file of older versions of PEFT: a pickle, whose reading can run code; `weights_only` keeps to tensors.
_PICKLE = "adapter_model.bin"
_MLX = "adapters.safetensors"
_CONVERT = """\
import sys, torch
from safetensors.torch import save_file
tensors = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
save_file({name: one.clone().contiguous() for name, one in tensors.items()}, sys.argv[2])
"""
# Other files that the server reads: chat templates, end tokens, tokens that the base has not.
_BESIDE = (
    *("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.json", "generation_config.json"),
)
_TEMPLATES = "additional_chat_templates"
_ARCHIVES = (".tar.gz", ".tgz", ".zip")


def upload(arguments: argparse.Namespace) -> int:
    """Send a PEFT directory or an archive of one; says what was bound."""
    with _readable(arguments.path):
        files = _files_of(arguments.path)
    own_name = _sendable(arguments.path.resolve())
    name = arguments.name or own_name.removesuffix(".zip").removesuffix(".gz").removesuffix(".tar")
    path, headers = path_of("/v1/adapters", name), _conditions(arguments)
    said = {part: getattr(arguments, part) for part in ("note", "visibility", "shared_with")}
    data = {part: text for part, text in said.items() if text}
    asked = [f"{one}=true" for one in ("probe", "without_tokenizer", "ephemeral") if getattr(arguments, one)]
    for one in ("on_new_version", "expert_b_order"):
        if getattr(arguments, one) is not None:
            asked.append(f"{one}={getattr(arguments, one)}")
    path += "?" * bool(asked) + "&".join(asked)
    with ExitStack() as opened, _readable(arguments.path):
        parts = [(part, _sendable(file), opened.enter_context(file.open("rb"))) for part, file in files.items()]
        body = Multipart(data, parts)
        bar = opened.enter_context(_Bar(own_name, body.num_bytes))
        answer = put(arguments.url, arguments.api_key, path, body, headers, bar.advance)
    print(answer_of(answer, lambda report: _bound(report, is_new=answer.status_code == 201)))
    if unsent := _unsent(arguments.path, files):
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


def _sendable(path: Path) -> str:
    """The name of a file, with `?` for what is not UTF-8: the server then says which names there are."""
    return path.name.encode(errors="replace").decode()


def _bound(report: Any, *, is_new: bool) -> str:
    """The lines that report an upload."""
    first = (
        f"{report['name']}@{report['version']} {'is there' if is_new else 'was there already'}: rank {report['rank']}, "
        f"{len(report['modules'])} modules, {report['bytes']} bytes, digest {report['digest'][:12]}"
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
    if not path.exists():
        raise ClientError(f"There is no {path} on this machine.")
    if not path.is_dir():
        raise ClientError(f"{path} is neither a directory nor an archive ({', '.join(_ARCHIVES)}).")
    if (path / _PICKLE).is_file() and not (path / TENSORS).is_file():
        import shlex

        command = shlex.join(["python", "-c", _CONVERT, str(path / _PICKLE), str(path / TENSORS)])
        raise ClientError(
            f"{path} has its weights in {_PICKLE}, a pickle, which no server takes; make {TENSORS} of it, where torch "
            f"and safetensors are installed, and upload again:\n{command}"
        )
    if (path / _MLX).is_file() and not (path / TENSORS).is_file():
        raise ClientError(
            f"{path} has its weights in {_MLX}: an adapter of MLX (mlx_lm.lora), whose tensors have other names and "
            f"are transposed; convert it to PEFT's form, {TENSORS} (docs/adapters.md)."
        )
    shards = sorted(file.name for file in path.glob(_SHARDS)) if not (path / TENSORS).is_file() else []
    weights = [*shards, _INDEX] if shards else [TENSORS]
    missing = [name for name in (CONFIG, *weights) if name != _INDEX and not (path / name).is_file()]
    if missing:
        # Checkpoints of a trainer, and snapshots of a repository in Hugging Face's cache.
        below = [str(found.parent) for pattern in ("*", "snapshots/*") for found in path.glob(f"{pattern}/{CONFIG}")]
        others = f"one of those below it: {', '.join(sorted(below)[:5])}"
        advice = others if below else "a directory that PEFT's save_pretrained wrote"
        raise ClientError(f"{path} has no {' and no '.join(missing)}; give {advice}.")
    templates = sorted(f"{_TEMPLATES}/{file.name}" for file in (path / _TEMPLATES).glob("*.jinja"))
    # The tensors last: the server hashes them as they come, once it has what the digest covers besides.
    return {name: path / name for name in (CONFIG, *_BESIDE, *templates, *weights) if (path / name).is_file()}


def _unsent(path: Path, files: dict[str, Path]) -> list[str]:
    """Names in a directory of which nothing was sent, folders with a slash."""
    if not path.is_dir():
        return []
    sent = {name.partition("/")[0] for name in files}
    return [_sendable(one) + "/" * one.is_dir() for one in sorted(path.iterdir()) if one.name not in sent]


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
