"""`multilora keys`: add, list and revoke the keys of tenants, in the keys file on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from service.tenants.edit import add_key, revoke_key
from service.tenants.keys_file import SCOPES, KeysFileError, Scope, read_keys


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
