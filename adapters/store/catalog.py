"""The store's state in memory: each name's versions, the users of each content, and the index for listings. Every
change follows one on the disk, which `adapters.store.transactions` makes.

A pin keeps an adapter on the device whether it is used or not. It belongs to a name, and follows the name to other
contents. At most half of the rows of each group may be pinned, so others have room; an adapter that needs more than
the rest evicts pinned ones for as long as it is served.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec

from adapters.errors import Conflict, Damaged, NotFound
from adapters.files import name_versions as rules
from adapters.files.disk import StoreFiles
from adapters.files.manifest import AdapterRecord, Manifest
from adapters.files.name_versions import NameRecord, Version
from adapters.layout import NON_LORA_GROUPS, Group
from adapters.row_plan import MEANINGS, RowPlan
from adapters.store.name_index import Index, Query, QuotaUsage, Row


class Pinned(msgspec.Struct, frozen=True):
    """A pinned name, the digest that it stands for, and the rows that this takes."""

    name: str
    digest: str
    rows: Mapping[str, int]


class Pins(msgspec.Struct, frozen=True):
    """Digests to be kept on the device, and pinned names for which there are not enough rows."""

    digests: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


def most_rows(plan: RowPlan, group: Group) -> int:
    """The most rows of the group that may be pinned."""
    return plan.rows[group] // 2


def select(pinned: Iterable[Pinned], plan: RowPlan) -> Pins:
    """The pins that fit, by name. Some do not where the row budget has shrunk, or a name has moved to a larger
    adapter."""
    kept: dict[str, Pinned] = {}
    left_out = []
    for one in sorted(pinned, key=lambda one: one.name):
        if _excess((*kept.values(), one), plan) is None:
            kept[one.digest] = one
        else:
            left_out.append(one.name)
    return Pins(tuple(kept), frozenset(left_out))


def refuse_excess(pinned: Iterable[Pinned], plan: RowPlan) -> None:
    """Raises Conflict if these together take more rows than may be pinned."""
    excess = _excess(pinned, plan)
    if excess is not None:
        group, num_rows = excess
        num_there, most = plan.rows[group], most_rows(plan, group)
        if group in NON_LORA_GROUPS:
            raise Conflict(
                f"The device has room for {num_there} adapters with {MEANINGS[group]}, of which {most} may be pinned, "
                f"and this would be number {num_rows}; unpin others first, or give the server more "
                "--adapter-side-bytes."
            )
        raise Conflict(
            f"The pinned adapters would take {num_rows} {group} rows of the device's {num_there}, of which {most} may "
            "be pinned; unpin others first, or give the server more --adapter-row-bytes."
        )


def _excess(pinned: Iterable[Pinned], plan: RowPlan) -> tuple[Group, int] | None:
    """The first group in which the pins take too many rows, and that number of rows. A content of several names counts
    once."""
    contents = {one.digest: one.rows for one in pinned}
    for group in plan.groups:
        num_rows = sum(plan.length(group, rows.get(group, 0)) for rows in contents.values())
        if num_rows > most_rows(plan, group):
            return group, num_rows
    return None


# A manifest lists every module: thousands of adapters would fill memory with them. The rest is read when asked for.
MAX_MANIFESTS_KEPT = 256


class Catalog:
    """Thread-safe; its lock is held for moments, except while a manifest that is not in memory is read.

    changing  held around `point` and `files_put` while a name's file and its record here are changed together
    """

    def __init__(self, files: StoreFiles, names: dict[str, NameRecord]) -> None:
        self.changing = threading.Lock()
        self._files = files
        self._lock = threading.Lock()
        self._names = names
        self._index = Index(names, files.read_summary)
        self._num_names = Counter(rules.uses(names.values()))
        self._pinned = {name for name, record in names.items() if record.is_pinned}
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._owned: dict[str, QuotaUsage] = {}  # by owner, of those whose names have changed since the start
        # Bytes of all digests that quotas had to look at.
        self._sizes: dict[str, int] = {}
        self._leases: Counter[str] = Counter()

    # ---- names

    def names(self) -> dict[str, NameRecord]:
        """All names, sorted, without reading a file."""
        with self._lock:
            return dict(sorted(self._names.items()))

    def find(self, name: str) -> NameRecord | None:
        """The versions of a name, None if it stands for no adapter."""
        with self._lock:
            return self._names.get(name)

    def record_of(self, name: str) -> NameRecord:
        """The versions of a name. Raises NotFound."""
        with self._lock:
            return rules.record_of(self._names, name)

    def owned(self, owner: str) -> QuotaUsage:
        """The owner's usage of its quota. The first call for an owner looks at all names; later ones do not."""
        with self.changing:
            if owner not in self._owned:
                with self._lock:
                    names = {name: record for name, record in self._names.items() if record.owner == owner}
                self._sizes = self._index.sizes(owner) | self._sizes
                self._owned[owner] = QuotaUsage(names, self.num_bytes)
            return self._owned[owner]

    @property
    def num_names(self) -> int:
        with self._lock:
            return len(self._names)

    @property
    def num_on_disk(self) -> int:
        """Contents that have files here, also those that only leases keep."""
        with self._lock:
            return len(self._num_names)

    @property
    def num_changes(self) -> int:
        """Changes of pages so far."""
        return self._index.num_changes

    def page(self, query: Query) -> list[Row]:
        """Names as listings show them, without reading a file of theirs; damaged ones are left out."""
        return self._index.page(query)

    def pinned(self) -> list[Pinned]:
        """Pinned names, without those whose files are damaged or missing."""
        with self._lock:
            pinned = [(name, self._names[name].digest) for name in self._pinned]
        found = []
        for name, digest in pinned:
            with suppress(NotFound, Damaged):
                found.append(Pinned(name, digest, self.manifest(digest).rows))
        return found

    def point(self, name: str, record: NameRecord | None) -> None:
        """Under `changing`, after the name's file was written: set the name's record; None removes the name."""
        with self._lock:
            before = self._names.pop(name, None)
            if record is not None:
                self._names[name] = record
                self._num_names.update(record.digests)
            if before is not None:
                self._num_names.subtract(before.digests)
            (self._pinned.add if record is not None and record.is_pinned else self._pinned.discard)(name)
        self._update_usage(name, before, record)
        self._update_index(name, record)

    def _update_usage(self, name: str, before: NameRecord | None, after: NameRecord | None) -> None:
        """Under `changing`. Another server of the store may have given the name to another owner."""
        for owner in {record.owner for record in (before, after) if record is not None} & self._owned.keys():
            was, now = (record if record is not None and record.owner == owner else None for record in (before, after))
            self._owned[owner].point(name, was, now)

    def _update_index(self, name: str, record: NameRecord | None) -> None:
        """Under `changing`."""
        if record is None:
            self._index.remove(name)
        else:
            self._index.put(name, record)

    # ---- contents

    def get(self, reference: str) -> AdapterRecord:
        """The version that `name`, `name@number` or `name@digest` refers to. Raises NotFound, Damaged."""
        with self._lock:
            return self._get(reference)

    def shown(self, name: str, version: Version, manifest: Manifest) -> AdapterRecord:
        """A version of a name that is there."""
        record = self._names[name]
        is_first = version.number == record.first
        return AdapterRecord(
            *(name, version, manifest, record.owner, record.visibility),
            is_pinned=record.is_pinned,
            is_first=is_first,
            is_ephemeral=record.is_ephemeral,
            on_new_version=record.on_new_version,
        )

    def manifest(self, digest: str) -> Manifest:
        """Raises NotFound, Damaged."""
        with self._lock:
            return self._manifest(digest)

    def num_bytes(self, digest: str) -> int:
        """Bytes of the tensors; 0 for a digest whose manifest is damaged."""
        if digest not in self._sizes:
            try:
                self._sizes[digest] = self.manifest(digest).num_bytes
            except (NotFound, Damaged):
                return 0
        return self._sizes[digest]

    def files_put(self, digest: str, *, was_used: bool) -> None:
        """Under `changing`: note that the digest's files were replaced. Names that were left out of listings for damage
        are shown again."""
        with self._lock:
            self._manifests.pop(digest, None)
            names = self._names.items() if was_used else ()
            named = [(name, record) for name, record in names if record.digest == digest]
        for name, record in named:
            self._update_index(name, record)

    def forget_manifest(self, digest: str) -> None:
        """Drop the manifest from memory; the next use reads it again."""
        with self._lock:
            self._manifests.pop(digest, None)

    def forget_if_unused(self, digest: str) -> bool:
        """Forget a digest without names or leases, and return True; False where it has any. `files_gone` follows."""
        with self._lock:
            if self._is_used(digest):
                return False
            del self._leases[digest]
            self._sizes.pop(digest, None)
            self._manifests.pop(digest, None)
            return True

    def files_gone(self, digest: str) -> None:
        """Its files were removed; until this call `num_on_disk` counts it."""
        with self._lock:
            if self._num_names[digest] <= 0:
                del self._num_names[digest]

    def _get(self, reference: str) -> AdapterRecord:
        name, version = rules.find(self._names, reference)
        return self.shown(name, version, self._manifest(version.digest))

    def _manifest(self, digest: str) -> Manifest:
        """Under the lock."""
        if digest not in self._manifests:
            self._manifests[digest] = self._files.read_manifest(digest)
            if len(self._manifests) > MAX_MANIFESTS_KEPT:
                self._manifests.popitem(last=False)
        self._manifests.move_to_end(digest)
        return self._manifests[digest]

    # ---- leases

    def lease(self, reference: str) -> AdapterRecord:
        """Resolve as `get` does, and lease the content until `release`."""
        with self._lock:
            record = self._get(reference)
            self._leases[record.digest] += 1
            return record

    def hold(self, digest: str) -> None:
        """Lease a content of the store until `release`."""
        with self._lock:
            self._leases[digest] += 1

    def release(self, digest: str) -> bool:
        """Release one lease; returns whether anything still uses the digest."""
        with self._lock:
            assert self._leases[digest] > 0, digest
            self._leases[digest] -= 1
            return self._is_used(digest)

    def num_leases(self, digest: str) -> int:
        return self._leases[digest]

    def is_used(self, digest: str) -> bool:
        """Whether a name or a lease keeps it."""
        with self._lock:
            return self._is_used(digest)

    def used_by_names(self) -> set[str]:
        """Digests that names keep."""
        with self._lock:
            return set(+self._num_names)

    def held_by_leases_alone(self) -> list[str]:
        """Digests that no name keeps."""
        with self._lock:
            return [digest for digest in +self._leases if not self._num_names[digest] > 0]

    def _is_used(self, digest: str) -> bool:
        return self._leases[digest] > 0 or self._num_names[digest] > 0

    def check_integrity(self) -> None:
        """Assert that names, leases and directories agree, on disk and in memory. Nothing may change meanwhile."""
        with self._lock:
            durable = {name: record for name, record in self._names.items() if not record.is_ephemeral}
            assert self._files.names() == durable
            assert self._pinned == {name for name, record in self._names.items() if record.is_pinned}
            assert +self._num_names == Counter(rules.uses(self._names.values()))
            assert all(count >= 0 for count in self._leases.values())
            wanted = set(+self._num_names) | set(+self._leases)
            assert self._files.digests() == wanted
            assert set(self._manifests) <= wanted
            assert self._index.rows == Index(self._names, self._files.read_summary).rows
