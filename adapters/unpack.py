"""Archives from strangers: members are looked at one by one, and only known files are written, under names of ours."""

from __future__ import annotations

import gzip
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO

from adapters.errors import AdapterError, Malformed, TooLarge, Unsupported
from adapters.paths import CONFIG_FILE

CHUNK_BYTES = 1 << 20
# More than this many bytes out of one byte in is a bomb; LoRA weights hardly compress. Small archives may exceed it.
MAX_RATIO = 200
RATIO_FREE_BYTES = 16 << 20
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile, struct.error, EOFError)
_JUNK = {"__MACOSX", ".DS_Store"}

# Takes the member's path and a reader of its bytes; called in the archive's order.
Sink = Callable[[PurePosixPath, IO[bytes]], None]


def unpack(archive: Path, sink: Sink, *, max_files: int, max_bytes: int) -> None:
    """Hand each regular file of a .tar.gz or .zip to `sink`.

    Raises Malformed (broken, unsafe names), Unsupported (links, devices, encryption), TooLarge (bombs). What the sink
    raises passes through.
    """
    with archive.open("rb") as file:
        magic = file.read(4)
    limit = min(max_bytes, max(RATIO_FREE_BYTES, archive.stat().st_size * MAX_RATIO))
    try:
        if magic[:2] == b"\x1f\x8b":
            _unpack_tar(archive, sink, max_files, limit)
        elif magic == b"PK\x03\x04":
            _unpack_zip(archive, sink, max_files, limit)
        else:
            raise Malformed("The archive is neither .tar.gz nor .zip; pack the adapter's directory as one of these.")
    except AdapterError:
        raise
    except (*_BROKEN, ValueError, ArithmeticError, NotImplementedError) as error:
        raise Malformed(
            f"The archive is damaged or of a kind that is not supported ({type(error).__name__})."
        ) from None


def adapter_root(paths: list[PurePosixPath]) -> PurePosixPath:
    """The one directory that holds an adapter_config.json. Raises Malformed when there is none or more than one."""
    roots = sorted({path.parent for path in paths if path.name == CONFIG_FILE})
    if not roots:
        raise Malformed(f"The archive holds no {CONFIG_FILE}.")
    if len(roots) > 1:
        names = ", ".join(str(root)[:100] for root in roots[:5])
        raise Malformed(f"The archive holds {len(roots)} adapters ({names}); upload each on its own.")
    return roots[0]


def _unpack_tar(archive: Path, sink: Sink, max_files: int, limit: int) -> None:
    with gzip.open(archive, "rb") as unzipped:
        reader = _Limited(unzipped, limit)
        with tarfile.open(fileobj=reader, mode="r:", tarinfo=tarfile.TarInfo) as tar:  # type: ignore[call-overload]
            for count, member in enumerate(tar):
                if count >= max_files:
                    raise TooLarge(f"The archive has more than {max_files} entries.")
                path = _safe(member.name)
                if member.isdir() or _is_junk(path):
                    continue
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    raise Unsupported(
                        f"The archive entry {member.name[:200]!r} is a link or a device; pack plain files."
                    )
                data = tar.extractfile(member)
                assert data is not None
                sink(path, data)


def _unpack_zip(archive: Path, sink: Sink, max_files: int, limit: int) -> None:
    with zipfile.ZipFile(archive) as packed:
        members = packed.infolist()
        if len(members) > max_files:
            raise TooLarge(f"The archive has more than {max_files} entries.")
        left = limit
        for member in members:
            path = _safe(member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise Unsupported(
                    f"The archive entry {member.filename[:200]!r} is a link or a device; pack plain files."
                )
            if member.is_dir() or _is_junk(path):
                continue
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise Unsupported(f"The archive entry {member.filename[:200]!r} is encrypted or not deflated.")
            with packed.open(member) as data:
                reader = _Limited(data, left)
                sink(path, reader)  # type: ignore[arg-type]
                left -= reader.num_read


def _safe(name: str) -> PurePosixPath:
    """The member's path, relative and without tricks. Raises Malformed."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name.split("/")[0]:
        raise Malformed(f"The archive entry {name[:200]!r} leads outside the archive; pack relative names only.")
    return path


def _is_junk(path: PurePosixPath) -> bool:
    return any(part in _JUNK or part.startswith("._") for part in path.parts)


class _Limited:
    """A reader that stops at `limit` bytes in all, and never hands out more than a chunk at a time: tarfile would read
    a header that claims gigabytes in one piece."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, limit: int) -> None:
        self._file = file
        self._limit = limit
        self.num_read = 0

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > CHUNK_BYTES:
            raise Malformed("The archive has an entry header of an absurd size.")
        data = self._file.read(size)
        self._count(len(data))
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        """Forward, or back within a block, as tarfile does."""
        assert whence == 0
        here = self._file.tell()
        if position < here - tarfile.BLOCKSIZE:
            raise Malformed("The archive has an entry of negative size.")
        self._count(max(0, position - here))
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()

    def _count(self, num_bytes: int) -> None:
        self.num_read += num_bytes
        if self.num_read > self._limit:
            raise TooLarge(f"The archive unpacks to more than {self._limit} bytes.")
