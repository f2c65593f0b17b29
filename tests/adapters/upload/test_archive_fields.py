"""Archives whose fields say what no packer writes: an error of ours each, or harmless; never an error of a library."""

from __future__ import annotations

import gzip
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.errors import AdapterError, Malformed
from adapters.upload.staging import Staging
from tests.adapters.upload.test_archives import GOOD, LIMITS, tar_gz, zip_of

ENTRY, DIRECTORY_ENTRY, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
ZIP_RECORD_BYTES = {ENTRY: 30, DIRECTORY_ENTRY: 46, END: 22}
# Start and length of what tarfile reads: name, mode, size, time, type, link, magic, device, prefix, sparse map.
TAR_FIELDS = [
    (0, 100),
    (100, 8),
    (124, 12),
    (136, 12),
    (156, 1),
    (157, 100),
    (257, 8),
    (329, 8),
    (345, 155),
    (386, 126),
]
TAR_VALUES = [b"", b"7" * 200, b"-1", b" " * 200, b"\x80" + b"\xff" * 200, b"\xff" * 200, b"..", b"/", b"S", b"L", b"x"]


def unpack(directory: Path, archive: bytes) -> None:
    staging = Staging(directory, LIMITS)
    try:
        staging.files["archive"] = directory / "part-archive"
        staging.files["archive"].write_bytes(archive)
        staging.unpack_archive()
    finally:
        staging.remove()


def with_zip_field(rng: random.Random) -> bytes:
    """Up to eight bytes of one record say something else."""
    archive, signature = bytearray(zip_of(GOOD)), rng.choice(list(ZIP_RECORD_BYTES))
    at = rng.choice([at for at in range(len(archive)) if archive.startswith(signature, at)])
    start, length = rng.randrange(4, ZIP_RECORD_BYTES[signature]), rng.choice((1, 2, 4, 8))
    value = rng.choice((b"\0" * 8, b"\xff" * 8, b"\x01" + b"\0" * 7, b"\xfe" + b"\xff" * 7, rng.randbytes(8)))
    archive[at + start : at + start + length] = value[:length]
    return bytes(archive)


def with_tar_field(rng: random.Random) -> bytes:
    """One field of one header says something else, and the header's checksum is right."""
    archive = bytearray(gzip.decompress(tar_gz(GOOD)))
    at = rng.choice([at for at in range(0, len(archive), tarfile.BLOCKSIZE) if archive.startswith(b"ustar", at + 257)])
    header = archive[at : at + tarfile.BLOCKSIZE]
    start, length = rng.choice(TAR_FIELDS)
    header[start : start + length] = rng.choice([*TAR_VALUES, rng.randbytes(200)])[:length].ljust(length, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    archive[at : at + tarfile.BLOCKSIZE] = header
    return gzip.compress(bytes(archive), compresslevel=1)


@pytest.mark.parametrize("damage", [with_zip_field, with_tar_field])
def test_a_wrong_field_is_an_error_of_ours_or_harmless(
    damage: Callable[[random.Random], bytes], tmp_path: Path
) -> None:
    rng, num_refused = random.Random(0), 0
    for _ in range(400):
        try:
            unpack(tmp_path / "staging", damage(rng))
        except AdapterError:
            num_refused += 1
    assert 100 < num_refused < 400


@pytest.mark.parametrize("name_bytes", [0, 6], ids=["empty", "begins with NUL"])
def test_a_zip_entry_without_a_name_is_refused(name_bytes: int, tmp_path: Path) -> None:
    extra = b"\xff\xff\2\0##"  # of a kind that nobody knows
    archive = bytearray(zip_of({**GOOD, "a name": b"x"}).replace(b"a name", b"\0 name" if name_bytes else extra))
    for signature, at in ((ENTRY, 26), (DIRECTORY_ENTRY, 28)):  # the last one's name becomes its extra field, or stays
        struct.pack_into("<HH", archive, archive.rindex(signature) + at, name_bytes, len(extra) - name_bytes)
    with pytest.raises(Malformed, match="an entry without a name"):
        unpack(tmp_path / "staging", bytes(archive))


def test_a_tar_entry_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Malformed, match="an entry without a name"):
        unpack(tmp_path / "staging", tar_gz(GOOD, tarfile.TarInfo("")))


def test_a_zip_entry_beyond_all_that_a_file_can_hold_is_refused(tmp_path: Path) -> None:
    """The system itself refuses to go there, which is no fault of the disk."""
    archive = zip_of(GOOD)
    at, end = archive.rindex(DIRECTORY_ENTRY), archive.rindex(END)
    name_bytes = struct.unpack_from("<H", archive, at + 28)[0]
    zip64 = struct.pack("<HHQ", 1, 8, 2**62)
    entry = bytearray(archive[at : at + 46 + name_bytes] + zip64)
    struct.pack_into("<H", entry, 30, len(zip64))
    struct.pack_into("<L", entry, 42, 0xFFFFFFFF)  # where it begins is said in the extra field
    record = bytearray(archive[end:])
    struct.pack_into("<L", record, 12, struct.unpack_from("<L", record, 12)[0] + len(zip64))
    with pytest.raises(Malformed, match="outside the archive"):
        unpack(tmp_path / "staging", archive[:at] + bytes(entry) + bytes(record))
