"""An index of all names for listings: pages without reading a file. Names and bytes of each owner are counted as names
change, so that a change does not scan the owner's thousands of names.

It is in memory alone. The names' files and the manifests are the truth, and each start reads a summary of every
manifest.
"""

from __future__ import annotations

import heapq
import logging
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import msgspec

from adapters.errors import Conflict, Damaged, NotFound, QuotaExceeded
from adapters.files.manifest import Summary
from adapters.files.name_versions import NameRecord, OnNewVersion, Quota, Visibility, folded
from adapters.files.paths import without_root

log = logging.getLogger(__name__)


class Row(msgspec.Struct, frozen=True, gc=False):
    """A name's current version, as listings show it; see `NameRecord` and `Manifest`."""

    name: str
    owner: str
    visibility: Visibility
    shared_with: tuple[str, ...]
    number: int
    digest: str
    created_at_seconds: float
    is_pinned: bool
    rank: int
    num_bytes: int
    rows: dict[str, int]
    has_chat_template: bool
    is_ephemeral: bool = False
    root: str = ""
    on_new_version: OnNewVersion | None = None


class Viewer(msgspec.Struct, frozen=True):
    """A tenant that looks: what it may see, and how it calls that.

    owner        of its own names, which it calls by what stands behind `<owner>/`
    sees_all     whether names that are neither its own nor public nor shared with it are shown too
    unowned      what stands before names without an owner, "" if those are its own
    """

    tenant: str
    owner: str
    sees_all: bool = False
    unowned: str = ""


class Query(msgspec.Struct, frozen=True):
    """A page of names in alphabetical order, of those that all given filters let through.

    after       the last name of the page before
    viewer      only what it may see; order, `after` and `prefix` are of the names as it calls them
    in_digests  the current digest is one of these; `not_in_digests` none of these
    """

    limit: int
    after: str = ""
    prefix: str = ""
    rank: int | None = None
    owner: str | None = None
    is_pinned: bool | None = None
    in_digests: frozenset[str] | None = None
    not_in_digests: frozenset[str] = frozenset()
    viewer: Viewer | None = None


class Index:
    """Thread-safe. `read` gives the summary of a digest; a name whose summary is damaged or missing is left out. The
    callers serialise changes.

    rows         by name
    num_changes  after each that pages may show; one that was read before counts as older
    """

    def __init__(self, names: Mapping[str, NameRecord], read: Callable[[str], Summary]) -> None:
        self.num_changes = 0
        self._read = read
        self._lock = threading.Lock()
        self.rows = {name: row for name, record in names.items() if (row := self._row(name, record)) is not None}
        # In the order of pages of a caller without an owner; a tenant's names are neighbours.
        self._unowned = sorted((name for name, row in self.rows.items() if not row.owner), key=without_root)
        self._owned = sorted(name for name, row in self.rows.items() if row.owner)

    def put(self, name: str, record: NameRecord) -> None:
        """The name stands for this now."""
        row = self._row(name, record)
        with self._lock:
            self._remove(name)
            if row is not None:
                self.rows[name] = row
                insort(self._owned if row.owner else self._unowned, name, key=without_root)
            self.num_changes += 1

    def remove(self, name: str) -> None:
        """The name is gone."""
        with self._lock:
            self._remove(name)
            self.num_changes += 1

    def page(self, query: Query) -> list[Row]:
        """The rows in order. Takes some microseconds for each row that filters leave out."""
        with self._lock:
            return [self.rows[name] for _, name in islice(heapq.merge(*self._shown(query)), query.limit)]

    def sizes(self, owner: str) -> dict[str, int]:
        """Bytes by digest, of the owner's current ones."""
        with self._lock:
            return {row.digest: row.num_bytes for row in self.rows.values() if row.owner == owner}

    def _remove(self, name: str) -> None:
        row = self.rows.pop(name, None)
        if row is not None:
            names = self._owned if row.owner else self._unowned
            del names[bisect_left(names, without_root(name), key=without_root)]

    def _row(self, name: str, record: NameRecord) -> Row | None:
        try:
            summary = self._read(record.digest)
        except (Damaged, NotFound) as error:
            log.error("adapter %s is left out of listings: %s", name, error)
            return None
        return Row(
            name=name,
            owner=record.owner,
            visibility=record.visibility,
            shared_with=record.shared_with,
            number=record.current.number,
            digest=record.digest,
            created_at_seconds=record.created_at_seconds,
            is_pinned=record.is_pinned,
            rank=summary.rank,
            num_bytes=summary.num_bytes,
            rows=summary.rows,
            is_ephemeral=record.is_ephemeral,
            has_chat_template=summary.has_chat_template,
            root=record.current.root,
            on_new_version=record.on_new_version,
        )

    def _shown(self, query: Query) -> list[Iterator[tuple[str, str]]]:
        """Pairs of a name as the viewer calls it and the name, in parts that are each in order."""
        viewer = query.viewer or Viewer("", "", sees_all=True)
        own = f"{viewer.owner}/"
        begin = end = 0
        if viewer.owner:
            begin, end = bisect_left(self._owned, own), bisect_left(self._owned, f"{viewer.owner}0")  # after "/"
        parts = (
            (self._unowned, 0, len(self._unowned), lambda name: viewer.unowned + without_root(name)),
            (self._owned, begin, end, lambda name: name.removeprefix(own)),
            (self._owned, 0, begin, str),
            (self._owned, end, len(self._owned), str),
        )
        return [self._part(query, viewer, *part) for part in parts]

    def _part(
        self, query: Query, viewer: Viewer, names: list[str], begin: int, end: int, shown_of: Callable[[str], str]
    ) -> Iterator[tuple[str, str]]:
        if query.prefix > query.after:
            at = bisect_left(names, query.prefix, begin, end, key=shown_of)
        else:
            at = bisect_right(names, query.after, begin, end, key=shown_of)
        for name in islice(names, at, end):
            shown = shown_of(name)
            if not shown.startswith(query.prefix):
                return
            if _fits(row := self.rows[name], query) and (
                row.owner == viewer.owner or self._may_see(viewer, row, shown)
            ):
                yield shown, name

    def _may_see(self, viewer: Viewer, row: Row, shown: str) -> bool:
        """Whether another's name is shown. One of the viewer's own hides another's that it would call the same."""
        is_shared = row.visibility == "shared" and viewer.tenant in row.shared_with
        may_see = viewer.sees_all or is_shared or row.visibility == "public"
        return may_see and f"{viewer.owner}/{shown}" not in self.rows


def _fits(row: Row, query: Query) -> bool:
    return (
        query.rank in (None, row.rank)
        and query.owner in (None, row.owner)
        and query.is_pinned in (None, row.is_pinned)
        and (query.in_digests is None or row.digest in query.in_digests)
        and row.digest not in query.not_in_digests
    )


class QuotaUsage:
    """Thread-safe. Callers serialise `point`, and hold no lock then that `size_of` acquires.

    size_of  bytes of a digest; 0 for one that cannot be read now, which is asked again
    """

    def __init__(self, names: Mapping[str, NameRecord], size_of: Callable[[str], int]) -> None:
        self._size_of = size_of
        self._lock = threading.Lock()
        self._num_names = 0
        self._names: dict[str, tuple[str, ...]] = {}  # by their folded form; those without an owner may be twins
        self._num_uses: Counter[str] = Counter()  # names that keep a digest
        self._sizes: dict[str, int] = {}  # of digests that are counted
        self._uncounted: set[str] = set()
        self._num_bytes = 0  # of those that are counted
        for name, record in names.items():
            self.point(name, None, record)

    def point(self, name: str, before: NameRecord | None, after: NameRecord | None) -> None:
        """Change the record of one of the owner's names; None means no name."""
        before_digests = before.digests if before is not None else set()
        after_digests = after.digests if after is not None else set()
        with self._lock:
            if (before is None) != (after is None):
                self._name(name, is_there=after is not None)
            for digest in after_digests - before_digests:
                self._num_uses[digest] += 1
                if self._num_uses[digest] == 1:
                    self._uncounted.add(digest)
            for digest in before_digests - after_digests:
                self._num_uses[digest] -= 1
                if not self._num_uses[digest]:
                    del self._num_uses[digest]
                    self._uncounted.discard(digest)
                    self._num_bytes -= self._sizes.pop(digest, 0)

    def refuse_twin(self, name: str) -> None:
        """Conflict if another name differs from `name` in case alone, or in its Unicode form."""
        with self._lock:
            others = self._names.get(folded(name), ())
        twin = next((one for one in others if one != name), None)
        if twin is not None:
            raise Conflict(
                f"The name {without_root(name)!r} differs in case alone from {without_root(twin)!r}, which is there; "
                "choose another."
            )

    def refuse_excess(self, before: NameRecord | None, after: NameRecord, quota: Quota) -> None:
        """Raises QuotaExceeded if the name's record `after` makes the owner's names, or their bytes, more than they
        were and more than the quota. `before` is the name's current record."""
        if quota.max_names is not None and before is None and self._num_names + 1 > quota.max_names:
            raise QuotaExceeded(
                f"You have {self._num_names} of your {quota.max_names} adapters; delete one first.",
                "adapters",
                quota.max_names,
                self._num_names,
            )
        if quota.max_bytes is None:
            return
        before_bytes, after_bytes = self._bytes(before.digests if before is not None else set(), after.digests)
        if after_bytes > max(quota.max_bytes, before_bytes):
            raise QuotaExceeded(
                f"Your adapters have {before_bytes} bytes, with versions that are kept, and would have {after_bytes} "
                f"of your {quota.max_bytes}; delete some first.",
                "adapter-bytes",
                quota.max_bytes,
                before_bytes,
            )

    def _name(self, name: str, *, is_there: bool) -> None:
        """Under the lock: add or remove a name."""
        self._num_names += 1 if is_there else -1
        form = folded(name)
        others = tuple(one for one in self._names.pop(form, ()) if one != name)
        if names := (*others, name) if is_there else others:
            self._names[form] = names

    def _bytes(self, before: set[str], after: set[str]) -> tuple[int, int]:
        """Bytes of all contents, each counted once: now, and with a name's digests `before` replaced by `after`."""
        with self._lock:
            for digest in list(self._uncounted):
                if size := self._size_of(digest):
                    self._sizes[digest] = size
                    self._num_bytes += size
                    self._uncounted.remove(digest)
            gone = sum(self._sizes.get(one, 0) for one in before - after if self._num_uses[one] == 1)
            come = [one for one in after - before if one not in self._num_uses]
            return self._num_bytes, self._num_bytes - gone + sum(map(self._size_of, come))
