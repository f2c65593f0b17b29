"""Reading the file of a name."""

from __future__ import annotations

import msgspec

from adapters.files.name_versions import NameRecord, Version
from adapters.files.paths import DIGEST, is_name


class _FirstForm(msgspec.Struct, frozen=True):
    """The content of a name's file before names had versions."""

    digest: str
    created_at_seconds: float


def decode_name(data: bytes) -> NameRecord:
    """Raises UNREADABLE. A file of the first form is a name with one version."""
    try:
        return msgspec.json.decode(data, type=NameRecord)
    except msgspec.ValidationError:
        first = msgspec.json.decode(data, type=_FirstForm)
        return NameRecord((Version(1, first.digest, first.created_at_seconds),))


def is_ours(name: str, record: NameRecord) -> bool:
    numbers = [version.number for version in record.versions]
    return (
        is_name(name, record.owner)
        and bool(numbers)
        and numbers == sorted(set(numbers))
        and all(DIGEST.fullmatch(version.digest) for version in record.versions)
    )
