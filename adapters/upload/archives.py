"""Archives from strangers: members are looked at one by one, and only known files are written, under names of ours.
And archives for them."""

from __future__ import annotations

import gzip
import io
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from adapters.errors import AdapterError, Malformed, TooLarge, Unsupported
from adapters.files.paths import CONFIG_FILE
from adapters.files.safetensors_header import printable

CHUNK_BYTES = 1 << 20
# More than this many bytes out of one byte in is a bomb; LoRA weights hardly compress. Small archives may exceed it.
MAX_RATIO = 200
RATIO_FREE_BYTES = 16 << 20
# Parsed, what an archive says about its entries takes many times its bytes of memory. The largest directory of a zip:
ZIP_ENTRY_BYTES = 4096  # per file allowed, and never less than a chunk
# The headers of one entry of a tar (names and attributes that do not fit in a block come in headers of their own), and
# how many settings may hold for all entries: tarfile copies those for each header that follows.
TAR_HEADER_BYTES = 64 << 10
TAR_GLOBALS = 64
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile, struct.error, EOFError)
# tarfile calls itself once more for each extended header that follows another one.
_EXHAUSTED = (RecursionError, MemoryError)
_JUNK = {"__MACOSX", ".DS_Store"}

# Takes the member's path and a reader of its bytes; called in the archive's order, but of a zip, whose directory tells
# where they are, with the configurations first.
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
    except (*_BROKEN, *_EXHAUSTED, ValueError, ArithmeticError, NotImplementedError) as error:
        raise Malformed(
            f"The archive is damaged or of a kind that is not supported ({type(error).__name__})."
        ) from None


def pack(files: Iterable[tuple[str, int, Iterable[bytes]]], time_seconds: int) -> Generator[bytes, None, None]:
    """A .tar.gz of files (name, size, content in pieces), each a piece at a time. It is not compressed, since weights
    hardly are. Malformed, in the middle, for content of another size than was said."""
    stored = zlib.compressobj(level=0, wbits=16 + zlib.MAX_WBITS)
    for name, num_bytes, pieces in files:
        member = tarfile.TarInfo(name)
        member.size, member.mtime = num_bytes, time_seconds
        yield stored.compress(member.tobuf())
        left = num_bytes
        for piece in pieces:
            left -= len(piece)
            yield stored.compress(piece)
        if left:
            raise Malformed(f"{name} has {num_bytes - left} bytes, and should have {num_bytes}.")
        yield stored.compress(bytes(-num_bytes % tarfile.BLOCKSIZE))
    yield stored.compress(bytes(2 * tarfile.BLOCKSIZE)) + stored.flush()


def adapter_folders(paths: list[PurePosixPath]) -> tuple[PurePosixPath, list[PurePosixPath]]:
    """The directory of the adapter, and those below it that hold adapters too: trainers leave their checkpoints below
    what they save last. Raises Malformed when there is none, or none that the others lie below."""
    found = {path.parent for path in paths if path.name == CONFIG_FILE}
    folders = sorted(found, key=lambda folder: (len(folder.parts), folder))
    if not folders:
        raise Malformed(f"The archive holds no {CONFIG_FILE}.")
    root, *below = folders
    if not all(folder.is_relative_to(root) for folder in below):
        names = ", ".join(printable(str(folder)[:100]) for folder in folders[:5])
        raise Malformed(f"The archive holds {len(folders)} adapters ({names}); upload each on its own.")
    return root, below


def _unpack_tar(archive: Path, sink: Sink, max_files: int, limit: int) -> None:
    with gzip.open(archive, "rb") as unzipped:
        reader = _TarReader(unzipped, limit)
        with tarfile.open(fileobj=reader, mode="r:", tarinfo=tarfile.TarInfo) as tar:  # type: ignore[call-overload]
            for count, member in enumerate(tar):
                if count >= max_files:
                    raise TooLarge(f"The archive has more than {max_files} entries.")
                if len(tar.pax_headers) > TAR_GLOBALS:
                    raise TooLarge(f"The archive has more than {TAR_GLOBALS} global header fields; pack it without.")
                reader.num_header_bytes = 0
                member.pax_headers = {}  # the archive keeps its entries
                path = _safe(member.name)
                if member.isdir() or _is_junk(path):
                    continue
                _refuse_special(member)
                data = tar.extractfile(member)
                assert data is not None
                with reader.data():
                    sink(path, data)
        with reader.data():  # tarfile stops at the end mark; gzip's checksum comes after
            while reader.read(CHUNK_BYTES):
                pass


def _refuse_special(member: tarfile.TarInfo) -> None:
    """Raises Unsupported for anything but plain files. Sparse files are refused too, though some keep that type: their
    holes are zeros that no limit on reads would see."""
    if member.issparse():
        raise Unsupported(f"The archive entry {member.name[:200]!r} is a sparse file; pack it without --sparse.")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise Unsupported(f"The archive entry {member.name[:200]!r} is a link or a device; pack plain files.")


def _unpack_zip(archive: Path, sink: Sink, max_files: int, limit: int) -> None:
    with _ZipReader(archive, max(CHUNK_BYTES, max_files * ZIP_ENTRY_BYTES)) as file, zipfile.ZipFile(file) as packed:
        members = _plain_members(packed, max_files)
        adapter_folders([path for path, _ in members])  # refused before anything is unpacked
        members.sort(key=lambda member: member[0].name != CONFIG_FILE)
        left = limit
        for path, member in members:
            with packed.open(member) as data:
                reader = _Limited(data, left)
                sink(path, reader)  # type: ignore[arg-type]
                left -= reader.num_read


def _plain_members(packed: zipfile.ZipFile, max_files: int) -> list[tuple[PurePosixPath, zipfile.ZipInfo]]:
    """The files in a zip. Raises as `unpack` does if its directory has anything else than files and directories."""
    members, found = packed.infolist(), []
    if len(members) > max_files:
        raise TooLarge(f"The archive has more than {max_files} entries.")
    for member in members:
        # Some programs of Windows write folders with the other slash, which zipfile leaves.
        path = _safe(member.filename.replace("\\", "/"))
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise Unsupported(f"The archive entry {member.filename[:200]!r} is a link or a device; pack plain files.")
        if member.filename.endswith(("/", "\\")) or _is_junk(path):
            continue
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Unsupported(f"The archive entry {member.filename[:200]!r} is encrypted or not deflated.")
        found.append((path, member))
    return found


def _safe(name: str) -> PurePosixPath:
    """The member's path, relative and without tricks. Raises Malformed."""
    if not name:  # zipfile cuts a name at its first NUL
        raise Malformed("The archive has an entry without a name; pack the adapter's directory anew.")
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or "\0" in name or ":" in path.as_posix().split("/")[0]:
        raise Malformed(f"The archive entry {name[:200]!r} leads outside the archive; pack relative names only.")
    if "\\" in name:
        raise Malformed(f"The archive entry {name[:200]!r} has a backslash in its name; pack names with / in them.")
    return path


def _is_junk(path: PurePosixPath) -> bool:
    return any(part in _JUNK or part.startswith("._") for part in path.parts)


class _ZipReader(io.BufferedReader):
    """A file that refuses to read more than `limit` bytes at once. zipfile reads an archive's whole directory in one
    piece and makes an object of each entry before anyone can count them; only the size that it asks for is certain,
    since an archive may hold several end records that claim different counts."""

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(io.FileIO(path))
        self._limit = limit
        self._size = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        all_of_it = size is None or size < 0
        if all_of_it or size <= self._limit:  # type: ignore[operator]
            data = super().read(self._limit + 1 if all_of_it else size)
            if len(data) <= self._limit:
                return data
        raise TooLarge(
            f"The archive's directory is larger than {self._limit} bytes; pack only the adapter's own files."
        )

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        # Damaged offsets add up to it, and the file would raise OSError.
        if whence == io.SEEK_SET and not 0 <= position <= self._size:
            raise Malformed("The archive is damaged: an entry begins outside the archive.")
        return super().seek(position, whence)


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


class _TarReader(_Limited):
    """Also limits what is read as headers until `num_header_bytes` is reset: extended headers, and the maps of sparse
    files, may follow each other without end before tarfile hands out the entry that they belong to."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, limit: int) -> None:
        super().__init__(file, limit)
        self.num_header_bytes = 0
        self._in_data = False

    @contextmanager
    def data(self) -> Iterator[None]:
        """Reads in this context are of a member's data."""
        self._in_data = True
        try:
            yield
        finally:
            self._in_data = False

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        if not self._in_data:
            self.num_header_bytes += len(data)
            if self.num_header_bytes > TAR_HEADER_BYTES:
                raise TooLarge(
                    f"The headers of an archive entry are larger than {TAR_HEADER_BYTES} bytes; pack plain files "
                    "without extended attributes."
                )
        return data
