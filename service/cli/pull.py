"""`multilora pull`: an adapter of a server as a PEFT directory here."""

from __future__ import annotations

import argparse
import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from adapters.files.durable_files import whole_directory
from service.cli.client import ClientError, checked, connect, path_of, sentences

_BLOCK_BYTES = 1 << 20
_BROKEN = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError)


def pull(arguments: argparse.Namespace) -> int:
    """Write the directory, whole or not at all."""
    name: str = arguments.name
    target: Path = arguments.directory or Path(name.partition("@")[0].rpartition("/")[2])
    path = f"{path_of('/v1/adapters', name)}/archive"
    try:
        with (
            whole_directory(target, may_replace=arguments.force) as directory,
            sentences(arguments.url),
            connect(arguments.url, arguments.api_key) as client,
            client.stream("GET", path) as response,
        ):
            which = checked(response).headers.get("X-Multilora-Adapter", name)
            _unpack(response.iter_raw(), directory)
    except FileExistsError as error:
        raise ClientError(f"{target} is there already; give another directory, or --force to replace it.") from error
    except _BROKEN as error:
        raise ClientError(
            f"What {arguments.url} sent is no whole adapter ({error or type(error).__name__}); pull it again, or set "
            "--url (MULTILORA_URL) to a server of multilora."
        ) from error
    except OSError as error:
        raise ClientError(f"{error.filename or target} cannot be written: {error.strerror or error}.") from error
    print(f"{which} is in {target}")
    return 0


def _unpack(pieces: Iterator[bytes], directory: Path) -> None:
    """Write the files of a .tar.gz, read once to its checksum."""
    reader: Any = _Reader(pieces)
    with gzip.GzipFile(fileobj=reader) as unzipped, tarfile.open(fileobj=unzipped, mode="r|") as packed:
        for member in packed:
            data = packed.extractfile(member)
            file = directory / member.name
            if data is None or not file.resolve().is_relative_to(directory.resolve()):
                raise tarfile.ReadError(f"it holds {member.name[:100]!r}, which is no file of an adapter")
            file.parent.mkdir(exist_ok=True)
            with file.open("wb") as written:
                copyfileobj(data, written, _BLOCK_BYTES)
        while unzipped.read(_BLOCK_BYTES):
            pass


class _Reader:
    """The pieces as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._held = pieces, b""

    def read(self, size: int) -> bytes:
        """At most so many bytes; none at the end."""
        if not self._held:
            self._held = next(self._pieces, b"")
        read, self._held = self._held[:size], self._held[size:]
        return read
