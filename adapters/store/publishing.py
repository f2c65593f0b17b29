"""Publishing a checked adapter under a name: compare with the current content, publish, and move the name in one step.

Reading, which may be gigabytes, happens before the store is locked, and again if somebody changed the content
meanwhile: no other upload waits for this one's files.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import Conflict, Damaged, InvalidName, Malformed, NotFound, QuotaExceeded
from adapters.files import name_versions as rules
from adapters.files.disk import StoreFiles
from adapters.files.manifest import AdapterRecord, Manifest
from adapters.files.memory_files import is_in_memory
from adapters.files.name_versions import Change, Condition, NameRecord, Quota, Version
from adapters.files.paths import OWNERLESS, RESERVED, TENSOR_FILE, is_name, separate, without_root
from adapters.files.safetensors_header import ELEMENT_BYTES, Tensor, header_of, read_chunks, read_header, widened
from adapters.store.catalog import Catalog
from adapters.store.transactions import Changes
from adapters.upload.prepare import Intake
from adapters.upload.staging_bytes import StoreLimits

_STEP_ELEMENTS = 1 << 18
# Versions of an ephemeral name that requests may still ask for, the current one included.
MAX_EPHEMERAL_VERSIONS = 4


def have_same_weights(one: Path, one_manifest: Manifest, other: Path, other_manifest: Manifest) -> bool:
    """For two published directories of different content: whether they differ in nothing but the float types of
    tensors, and all values are equal when widened to float32, which every type allows exactly.

    Reads both files as far as they agree. OSError, Malformed if one cannot be read.
    """
    if _structure(one_manifest) != _structure(other_manifest):
        return False
    if header_of(one / TENSOR_FILE) == header_of(other / TENSOR_FILE):
        return False  # the values differ, or something else that changes the digest
    tensors, others = read_header(one / TENSOR_FILE), read_header(other / TENSOR_FILE)
    if {name: tensor.shape for name, tensor in tensors.items()} != {
        name: tensor.shape for name, tensor in others.items()
    }:
        return False
    return all(
        _are_equal(one / TENSOR_FILE, tensor, other / TENSOR_FILE, others[name]) for name, tensor in tensors.items()
    )


def _structure(manifest: Manifest) -> object:
    modules = [(one.module, one.rank, one.scaling, one.token_ids) for one in manifest.modules]
    text = manifest.has_chat_template, manifest.special_tokens, sorted(manifest.eos_token_ids)
    return sorted(modules), text, manifest.invocation


def _are_equal(path: Path, tensor: Tensor, other_path: Path, other: Tensor) -> bool:
    pieces = (
        read_chunks(file, one, _STEP_ELEMENTS * ELEMENT_BYTES[one.dtype])
        for file, one in ((path, tensor), (other_path, other))
    )
    return all((_bits(a, tensor.dtype) == _bits(b, other.dtype)).all() for a, b in zip(*pieces, strict=True))


def _bits(data: bytes, dtype: str) -> Any:
    """Bit patterns of the elements as float32, uint32: -0 differs from 0."""
    return widened(data, dtype).view("<u4")


@dataclass(frozen=True, slots=True)
class _Found:
    """The state that an upload's files were compared with: the name's versions, and the identity of the digest's files.

    is_whole  the store has the same files
    same_as   see `Publishing._same_as`
    """

    record: NameRecord | None
    identity: tuple[int, ...] | None
    is_whole: bool
    same_as: int | None

    def still_holds(self, record: NameRecord | None, identity: tuple[int, ...] | None) -> bool:
        return (record, identity) == (self.record, self.identity)


class Publishing:
    """`intake` checks what is to be published; see `adapters.store.store.AdapterStore` for the others."""

    def __init__(
        self,
        files: StoreFiles,
        catalog: Catalog,
        changes: Changes,
        intake: Intake,
        limits: StoreLimits,
        base_name: str,
    ) -> None:
        self.intake = intake
        self.changes = changes
        self._files = files
        self._catalog = catalog
        self._limits = limits
        self._base_name = base_name

    def check_name(self, name: str, owner: str) -> None:
        """Raises InvalidName, or Conflict for the base model's name."""
        if "@" in name:
            raise InvalidName(
                "An adapter's name has no '@': `name@version` is one version of a name, and those have numbers of the "
                "server's. Load each step under `name` alone, or write another sign."
            )
        if not is_name(name, owner):
            raise InvalidName(
                "An adapter's name has 1 to 128 letters, digits, '.', '_', '-' and '/', of which each part between two "
                "'/' starts with a letter or a digit; there are at most 8 parts."
            )
        own = separate(name)[1]  # which its owner calls so
        first, slash, _ = own.partition("/")
        if (owner or slash) and own.rpartition("/")[2] in RESERVED:
            raise InvalidName(f"The name {without_root(name)!r} would be mistaken in addresses; choose another.")
        if slash and first in (owner, OWNERLESS):
            raise InvalidName(f"An adapter's name cannot begin with {first + '/'!r} once more; leave that out.")
        base = self._base_name
        if base in (own, name) or (owner and any(rules.are_twins(one, base) for one in (own, name))):
            raise Conflict(f"The name {base!r} is the base model's; choose another.")

    def publish(
        self, name: str, manifest: Manifest, ready: Path | None, change: Change, condition: Condition
    ) -> tuple[AdapterRecord, bool]:
        """Returns (record, created) as `Upload.finish` does.

        ready  None if a lease of `hold` keeps the files
        """
        while True:
            found = self._look(name, manifest, ready, condition)
            gone: list[str] = []
            try:
                with self.changes.change():
                    if found.still_holds(self._catalog.find(name), self._files.identity(manifest.digest)):
                        return self._publish_found(name, manifest, ready, change, found, gone)
            finally:
                self.changes.notify_gone(gone)

    def hold(self, manifest: Manifest, ready: Path) -> AdapterRecord:
        """Put a checked directory into the store, if it is not there, for as long as the caller holds its digest."""
        digest, is_held, was_replaced = manifest.digest, False, False
        while not is_held:  # as in `publish`
            identity, is_whole = self._files.identity(digest), self._has_files(manifest, ready)
            with self.changes.change():
                is_held = identity == self._files.identity(digest)
                if is_held:
                    was_replaced = not is_whole and self.changes.put(ready, digest)
                    self._catalog.hold(digest)
        self.changes.notify_gone([digest] if was_replaced else [])
        return AdapterRecord("", Version(0, digest, time.time()), manifest)

    def rollback(self, name: str, selector: str, change: Change, condition: Condition) -> tuple[AdapterRecord, bool]:
        """See `AdapterStore.rollback`."""
        gone: list[str] = []
        with self.changes.change():
            record = self._catalog.record_of(name)
            condition(record, None)
            change = msgspec.structs.replace(change, is_ephemeral=record.is_ephemeral)
            reference = f"{name}@{selector}" if selector else rules.before(name, record)
            digest = rules.find({name: record}, reference)[1].digest
            manifest = self._catalog.manifest(digest)
            is_new = digest != record.digest
            if is_new:
                gone = self._move(name, digest, change)
            shown = self._shown(name, manifest)
        self.changes.notify_gone(gone)
        return shown, is_new

    def show(self, name: str, change: Change) -> None:
        """In a change: set an existing name's visibility and setting, and nothing else."""
        before = self._catalog.record_of(name)
        record = rules.seen(before, change)
        if record != before:
            self.changes.write(name, record)

    def _look(self, name: str, manifest: Manifest, ready: Path | None, condition: Condition) -> _Found:
        """Compare the files that are `ready` with those that the store has. Raises what `condition` does."""
        self.changes.catch_up()
        record, identity = self._catalog.find(name), self._files.identity(manifest.digest)
        condition(record, manifest.digest)
        is_whole = ready is None or self._has_files(manifest, ready)
        is_new = record is None or record.digest != manifest.digest
        same_as = self._same_as(record, manifest, ready or self._files.adapter(manifest.digest)) if is_new else None
        return _Found(record, identity, is_whole, same_as)

    def _has_files(self, manifest: Manifest, ready: Path) -> bool:
        """Whether the store has the files that are `ready`, and on the disk if these are there."""
        is_on_disk = is_in_memory(ready, TENSOR_FILE) or not self._files.is_ephemeral(manifest.digest)
        return is_on_disk and self._files.is_whole(manifest, ready)

    def _publish_found(
        self, name: str, manifest: Manifest, ready: Path | None, change: Change, found: _Found, gone: list[str]
    ) -> tuple[AdapterRecord, bool]:
        """In a change. Adds digests whose files are gone by it to `gone`, whatever is raised."""
        digest = manifest.digest
        if ready is not None and not found.is_whole and self.changes.put(ready, digest):
            gone.append(digest)
        before = found.record
        is_new = before is None or (before.digest, before.is_ephemeral) != (digest, change.is_ephemeral)
        try:
            if is_new:
                gone += self._move(name, digest, change, found.same_as)
            else:
                self.show(name, change)
        except (OSError, Conflict, QuotaExceeded):
            if self.changes.remove_if_unused(digest):
                gone.append(digest)
            raise
        return self._shown(name, manifest), is_new or not found.is_whole

    def _same_as(self, record: NameRecord | None, manifest: Manifest, ready: Path) -> int | None:
        """The newest version of the name that has the same weights as those that are `ready`, in another float type."""
        for version in reversed(record.versions if record is not None else ()):
            with suppress(NotFound, Damaged, Malformed, OSError):
                path = self._files.adapter(version.digest)
                if have_same_weights(ready, manifest, path, self._catalog.manifest(version.digest)):
                    return version.number
        return None

    def _move(self, name: str, digest: str, change: Change, same_as: int | None = None) -> list[str]:
        """In a change: make a digest with files the name's current version. Returns the digests whose files were
        removed. After an OSError, a Conflict or QuotaExceeded the name is as before."""
        before, limits, num_bytes = self._catalog.find(name), self._limits, self._catalog.num_bytes
        if before is None:
            record = rules.created(digest, time.time(), change, self._files.first_number(name))
        else:
            record = rules.changed(before, digest, time.time(), change, same_as)
        most, most_bytes = limits.max_versions, limits.max_version_bytes
        if record.is_ephemeral:
            most, most_bytes = MAX_EPHEMERAL_VERSIONS, (limits.max_ephemeral_bytes or 0) // 8
        record = rules.pruned(record, num_bytes, most=most, most_bytes=most_bytes)
        self._refuse_for_owner(name, before, record, change.quota)
        self.changes.write(name, record)
        unused = before.digests - record.digests if before is not None else set()
        return [one for one in unused if self.changes.remove_if_unused(one)]

    def _refuse_for_owner(self, name: str, before: NameRecord | None, after: NameRecord, quota: Quota) -> None:
        """Raises Conflict, QuotaExceeded. Names without an owner may be twins."""
        if not after.owner and quota == Quota():
            return
        owned = self._catalog.owned(after.owner)
        if before is None and after.owner:
            owned.refuse_twin(name)
        owned.refuse_excess(before, after, quota)

    def _shown(self, name: str, manifest: Manifest) -> AdapterRecord:
        return self._catalog.shown(name, self._catalog.record_of(name).current, manifest)
