"""`multilora keys`: adds, lists and revokes keys of tenants in the keys file on this machine. Only the blocks that come
or go are changed, the whole file in one step."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from adapters.files.durable_files import replace_file
from service.tenants.keys_file import (
    SCOPES,
    TENANT,
    Key,
    KeysFile,
    KeysFileError,
    Limits,
    Scope,
    hash_of,
    parse_keys,
    read_keys,
)

# Prefix that scanners of leaked secrets can look for.
_KEY_PREFIX = "ml_"
_KEY_BYTES = 32
_HEADER = re.compile(r"\s*\[")
_KEYS_HEADER = re.compile(r"\s*\[\[\s*keys\s*\]\]\s*(#.*)?")


def add_key(path: Path, tenant: str, scopes: Sequence[Scope], note: str = "") -> tuple[str, Key]:
    """Make a key, and the file or the tenant's table if there are none yet. The key itself is kept nowhere.

    KeysFileError for a tenant that cannot be named so, and for a file that cannot be read, understood or written.
    """
    if not TENANT.fullmatch(tenant):
        raise KeysFileError(f"The tenant {tenant!r} must be named by lower-case letters, digits and '-', at most 63.")
    if not note.isprintable():
        raise KeysFileError("The note must be one line of printable text.")
    secret = _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    key = Key(
        tenant=tenant,
        sha256=hash_of(secret).hex(),
        scopes=tuple(scopes),
        created=datetime.now(UTC).date(),
        note=note,
    )
    with _changing(path) as real_path:
        text, file = _read(real_path)
        tenants = file.tenants | ({} if tenant in file.tenants else {tenant: Limits()})
        table = "" if tenant in file.tenants else f"\n[tenants.{tenant}]\n"
        after = (text if text.endswith("\n") or not text else text + "\n") + table + _block(key)
        _write(real_path, after.lstrip("\n"), KeysFile(tenants=tenants, keys=(*file.keys, key)))
    return secret, key


def revoke_key(path: Path, key_id: str) -> Key:
    """Remove the key whose id is, or alone begins with, `key_id`. KeysFileError if there is none, or the file cannot be
    changed."""
    with _changing(path) as real_path:
        text, file = _read(real_path)
        found = [key for key in file.keys if key_id and key.sha256.startswith(key_id.lower())]
        if len(found) != 1:
            what = f"{len(found)} keys have ids that begin" if found else "no key has an id that begins"
            raise KeysFileError(f"In {path} {what} with {key_id!r}; multilora keys list shows them.")
        kept = tuple(key for key in file.keys if key is not found[0])
        _write(real_path, _without(text, found[0]), KeysFile(tenants=file.tenants, keys=kept))
    return found[0]


@contextmanager
def _changing(path: Path) -> Iterator[Path]:
    """One change at a time. Yields the file itself, where `path` is a link to it."""
    try:
        real_path = path.resolve()
        directory = os.open(real_path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, RuntimeError) as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield real_path
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        os.close(directory)


def _unwritable(path: Path, error: Exception) -> KeysFileError:
    reason = error.strerror if isinstance(error, OSError) else None
    return KeysFileError(f"The keys file {path} cannot be changed: {reason or error}.")


def _read(path: Path) -> tuple[str, KeysFile]:
    """The file's text and what it says; nothing where there is no file yet."""
    if not path.exists():
        return "", KeysFile()
    file = read_keys(path)
    return path.read_bytes().decode(), file


def _block(key: Key) -> str:
    note = json.dumps(key.note, ensure_ascii=False)  # of printable text, TOML's form as well
    return (
        f"\n[[keys]]\ntenant = {json.dumps(key.tenant)}\nsha256 = {json.dumps(key.sha256)}\n"
        f"scopes = {json.dumps(key.scopes)}\ncreated = {key.created}\nnote = {note}\n"
    )


def _without(text: str, key: Key) -> str:
    """The text without the key's block: from its header to the next one, or the comments before that."""
    kept: list[str] = []
    block: list[str] = []
    for line in [*text.splitlines(keepends=True), "[end"]:
        if _HEADER.match(line):
            is_key = block and _KEYS_HEADER.fullmatch(block[0].rstrip("\r\n")) and key.sha256 in "".join(block)
            kept += _last_comments(block) if is_key else block
            block = []
        block.append(line)
    return "".join(kept)


def _last_comments(lines: list[str]) -> list[str]:
    at = len(lines)
    while at and (not lines[at - 1].strip() or lines[at - 1].lstrip().startswith("#")):
        at -= 1
    while at < len(lines) and not lines[at].strip():
        at += 1
    return lines[at:]


def _write(path: Path, text: str, wanted: KeysFile) -> None:
    """Put the text in the file's place. KeysFileError if it says anything else than `wanted`: who wrote the file by
    hand may have used forms that are not looked for here."""
    try:
        is_wanted = parse_keys(text) == wanted
    except KeysFileError:
        is_wanted = False
    if not is_wanted:
        raise KeysFileError(f"The keys file {path} is written in a way that this cannot change; edit it by hand.")
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    replace_file(path, text.encode(), mode=mode)


def keys(arguments: argparse.Namespace) -> int:
    """Run the sub-command; the exit code."""
    if arguments.keys_file is None:
        print("multilora: which file? Give --keys-file, or set MULTILORA_KEYS_FILE.", file=sys.stderr)
        return 2
    work = {"add": _add, "list": _list, "revoke": _revoke}[arguments.action]
    try:
        work(arguments.keys_file, arguments)
    except KeysFileError as error:
        print(f"multilora: {error}", file=sys.stderr)
        return 1
    return 0


def _add(path: Path, arguments: argparse.Namespace) -> None:
    """The key alone on stdout, for `KEY=$(multilora keys add ...)`."""
    secret, key = add_key(path, arguments.tenant, _scopes(arguments.scopes), arguments.note)
    print(secret, flush=True)
    print(
        f"This is the key {key.key_id} of {key.tenant} for {', '.join(key.scopes)}. Keep it: it is shown this once, "
        "and the file has its hash alone.",
        file=sys.stderr,
    )


def _scopes(text: str) -> list[Scope]:
    """The scopes in a list with commas. KeysFileError for others."""
    scopes = list(dict.fromkeys(scope.strip() for scope in text.split(",") if scope.strip()))
    if not scopes or not set(scopes) <= set(SCOPES):
        raise KeysFileError(f"--scopes {text!r}: give some of {', '.join(SCOPES)}, with commas between them.")
    return [cast("Scope", scope) for scope in scopes]


def _list(path: Path, _arguments: argparse.Namespace) -> None:
    file = read_keys(path)
    table = Table(Column("tenant", overflow="fold"), Column("id", no_wrap=True), "scopes", "created", "note")
    used = {key.tenant for key in file.keys}
    for key in sorted(file.keys, key=lambda key: key.tenant):
        row = (key.tenant, key.key_id, ",".join(key.scopes), str(key.created or ""), key.note)
        table.add_row(*map(escape, row))
    for tenant in sorted(file.tenants.keys() - used):
        table.add_row(tenant, "-", "no key", "", "")
    Console().print(table)


def _revoke(path: Path, arguments: argparse.Namespace) -> None:
    key = revoke_key(path, arguments.id)
    print(f"The key {key.key_id} of {key.tenant} is revoked.")
