"""A name's versions, its owner and its visibility: plain data, and rules without files.

Version numbers start at 1, or after those of a deleted name that was called the same, and never change. The last
version is current. A rollback makes a new version with the older content, so one number always means one content and
the history is complete.

`gc=False`: see `adapters.files.manifest`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from adapters.errors import Conflict, NotFound, Stale
from adapters.files.paths import DIGEST, is_name, without_root

Visibility = Literal["private", "shared", "public"]
# What running requests do when the name moves, where they do not say.
OnNewVersion = Literal["keep", "continue", "restart"]

# A name, an owner's prefix included, and a version of it: `name@3`, `name@<12 to 64 digits of its digest>`.
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_DIGEST_START = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")


class Version(msgspec.Struct, frozen=True, gc=False):
    """One content that a name has stood for.

    by       the caller who set it, as the API names callers; "" if unknown
    note     the caller's note
    same_as  the version with the same weights, value by value, in another float type; None if none is known
    root     the directory that it was copied from, as its caller named it; "" for an upload
    """

    number: int
    digest: str
    created_at_seconds: float
    by: str = ""
    note: str = ""
    same_as: int | None = None
    root: str = ""


class NameRecord(msgspec.Struct, frozen=True, gc=False):
    """The content of a name's file.

    versions    the versions that are kept, oldest first, at least one
    owner       the tenant that owns the name, "" without tenants
    visibility  the users beside the owner: nobody, the tenants in `shared_with`, or all tenants
    is_pinned   whether engines keep the current content on the device; see `adapters.store.catalog`
    first       number of the name's first version, kept or not
    is_ephemeral  whether the name, with all its versions, is gone when the server ends; no file has it
    on_new_version  what running requests do when the name moves, if they do not say; None: what the server says
    """

    versions: tuple[Version, ...]
    owner: str = ""
    visibility: Visibility = "public"
    shared_with: tuple[str, ...] = ()
    is_pinned: bool = False
    first: int = 1
    is_ephemeral: bool = False
    on_new_version: OnNewVersion | None = None

    @property
    def current(self) -> Version:
        """The current version."""
        return self.versions[-1]

    @property
    def digest(self) -> str:
        """Digest of the current version."""
        return self.current.digest

    @property
    def created_at_seconds(self) -> float:
        """When the name came to stand for its content."""
        return self.current.created_at_seconds

    @property
    def digests(self) -> set[str]:
        """Digests whose files the name keeps."""
        return {version.digest for version in self.versions}

    def version(self, selector: str) -> Version | None:
        """The version of this number, or the newest one whose digest begins so (12 digits or more); None if none."""
        return next((one for one in reversed(self.versions) if _is_meant(one, selector)), None)


class Quota(msgspec.Struct, frozen=True):
    """An owner's limits, None for no limit: names, and bytes of all contents that they keep, each content counted
    once."""

    max_names: int | None = None
    max_bytes: int | None = None


class Change(msgspec.Struct, frozen=True):
    """The caller, owner and visibility of a change of a name's content.

    owner       owner of a new name; an existing name keeps its own
    visibility  None: an existing name's own, `usual` for a new one. With "shared", `shared_with` lists the tenants
    quota       the owner's limits
    is_ephemeral  of a name's content, as in `NameRecord`
    root        see `Version`
    on_new_version  None: an existing name's own
    """

    by: str = ""
    note: str = ""
    owner: str = ""
    visibility: Visibility | None = None
    shared_with: tuple[str, ...] = ()
    usual: Visibility = "public"
    quota: Quota = Quota()
    is_ephemeral: bool = False
    root: str = ""
    on_new_version: OnNewVersion | None = None


# Raises where a name may not be given content: what the name is now (None: free), and the content's digest once known.
Condition = Callable[[NameRecord | None, str | None], None]


def keep(record: NameRecord | None, digest: str | None) -> None:
    """Condition: the name is free, or has this content already. Raises Conflict."""
    if record is not None and digest not in (None, record.digest):
        raise Conflict("The name is taken by another adapter; replace that with PUT, delete it or choose another name.")


def move(_record: NameRecord | None, _digest: str | None) -> None:
    """Condition: always true."""


def if_absent(record: NameRecord | None, _digest: str | None) -> None:
    """Condition: the name is free. Raises Stale."""
    if record is not None:
        raise Stale(f"The name is taken: it stands for version {record.current.number}. Nothing was changed.")


def while_ephemeral(condition: Condition) -> Condition:
    """Condition for an ephemeral version: `condition`, and the name has no durable one. Raises Conflict."""

    def check(record: NameRecord | None, digest: str | None) -> None:
        condition(record, digest)
        if record is not None and not record.is_ephemeral:
            raise Conflict(
                f"The name stands for version {record.current.number}, which is on the disk and would come back when "
                "the server ends; choose another name for ephemeral versions, or delete this one first."
            )

    return check


def if_match(selectors: Iterable[str]) -> Condition:
    """Condition: the current version is one of these, each a number, a digest or "*" for any. Raises Stale."""
    wanted = tuple(selectors)

    def check(record: NameRecord | None, _digest: str | None) -> None:
        if record is None:
            raise Stale("The name stands for nothing. Nothing was changed; leave out the condition to create it.")
        if not any(one == "*" or _is_meant(record.current, one) for one in wanted):
            raise Stale(
                f"The name stands for version {record.current.number} ({record.digest[:12]}) by now. Nothing was "
                "changed; look at that version before you replace it."
            )

    return check


def or_made(condition: Condition) -> Condition:
    """Condition for an upload: `condition` holds, or it held for the previous version and the name has had this content
    since. A client that lost the answer may thus repeat the request (RFC 9110, 13.1.1). Raises what `condition`
    does."""

    def check(record: NameRecord | None, digest: str | None) -> None:
        try:
            condition(record, digest)
        except Stale as lost:
            if record is None or digest not in (None, record.digest) or not _held_before(condition, record):
                raise lost

    return check


def _held_before(condition: Condition, record: NameRecord) -> bool:
    """Whether `condition` held before the current version came. False where the version before is not kept."""
    kept = record.versions[:-1]
    if not kept and record.current.number > record.first:
        return False
    try:
        condition(msgspec.structs.replace(record, versions=kept) if kept else None, None)
    except Stale:
        return False
    return True


def created(digest: str, now_seconds: float, change: Change, number: int = 1) -> NameRecord:
    """A new name, whose first version has this number."""
    version = Version(number, digest, now_seconds, change.by, change.note, root=change.root)
    made = NameRecord((version,), change.owner, change.usual, first=number, is_ephemeral=change.is_ephemeral)
    return seen(made, change)


def changed(
    record: NameRecord, digest: str, now_seconds: float, change: Change, same_as: int | None = None
) -> NameRecord:
    """The name with `digest` as its new current version. Those before it go where they were ephemeral and this one is
    durable."""
    number = record.current.number + 1
    version = Version(number, digest, now_seconds, change.by, change.note, same_as, change.root)
    kept = record.versions if record.is_ephemeral == change.is_ephemeral else ()
    after = msgspec.structs.replace(record, versions=(*kept, version), is_ephemeral=change.is_ephemeral)
    return seen(after, change)


def seen(record: NameRecord, change: Change) -> NameRecord:
    """The record with the change's visibility and setting, if it has them."""
    if change.on_new_version is not None:
        record = msgspec.structs.replace(record, on_new_version=change.on_new_version)
    if change.visibility is None:
        return record
    return msgspec.structs.replace(record, visibility=change.visibility, shared_with=change.shared_with)


def are_twins(one: str, other: str) -> bool:
    """Whether the names differ at most in case and Unicode form."""
    return folded(one) == folded(other)


def folded(name: str) -> str:
    """A key that is equal for twins."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def split(reference: str) -> tuple[str, str]:
    """A name as requests give it: the name itself, and the version's selector, "" for the current one."""
    name, _, selector = reference.partition("@")
    return name, selector


def record_of(names: dict[str, NameRecord], name: str) -> NameRecord:
    """Raises NotFound."""
    record = names.get(name)
    if record is None:
        raise NotFound(f"The adapter {without_root(name)[:200]!r} does not exist.")
    return record


def find(names: dict[str, NameRecord], reference: str) -> tuple[str, Version]:
    """The name and the version that a request's `name`, `name@number` or `name@digest` means. Raises NotFound."""
    name, selector = split(reference)
    record = record_of(names, name)
    if "@" not in reference:
        return name, record.current
    version = record.version(selector)
    if version is None:
        raise NotFound(
            f"The adapter {without_root(name)[:200]!r} has no version {selector[:80]!r}; its history lists those it "
            "has."
        )
    return name, version


def before(name: str, record: NameRecord) -> str:
    """The reference of the newest version whose content is not the current one. Raises NotFound."""
    version = next((one for one in reversed(record.versions) if one.digest != record.digest), None)
    if version is None:
        raise NotFound(f"The adapter {without_root(name)[:200]!r} has no earlier version.")
    return f"{name}@{version.number}"


def pruned(record: NameRecord, num_bytes: Callable[[str], int], *, most: int, most_bytes: int) -> NameRecord:
    """The record with its newest versions: at most `most`, of which all but the current content have `most_bytes`
    together. The current version always stays; nothing older stays than the first one that is too much."""
    kept, digests, total_bytes = [record.current], {record.digest}, 0
    for version in reversed(record.versions[:-1]):
        if version.digest not in digests:
            total_bytes += num_bytes(version.digest)
        if len(kept) == most or total_bytes > most_bytes:
            break
        digests.add(version.digest)
        kept.append(version)
    return msgspec.structs.replace(record, versions=tuple(reversed(kept)))


def uses(records: Iterable[NameRecord]) -> Iterator[str]:
    """Digests, each as often as a name keeps it."""
    return (digest for record in records for digest in record.digests)


def is_selector(text: str) -> bool:
    """Whether some version can be meant by it: a number, or the first digits of a digest."""
    return _NUMBER.fullmatch(text) is not None or _DIGEST_START.fullmatch(text) is not None


def _is_meant(version: Version, selector: str) -> bool:
    if _NUMBER.fullmatch(selector):
        return version.number == int(selector)
    start = _DIGEST_START.fullmatch(selector)
    return start is not None and version.digest.startswith(start.group(1))


def decode_name(data: bytes) -> NameRecord:
    """The record in the bytes of a name's file. Raises UNREADABLE."""
    return msgspec.json.decode(data, type=NameRecord)


def is_ours(name: str, record: NameRecord) -> bool:
    numbers = [version.number for version in record.versions]
    return (
        is_name(name, record.owner)
        and bool(numbers)
        and numbers == sorted(set(numbers))
        and all(DIGEST.fullmatch(version.digest) for version in record.versions)
    )
