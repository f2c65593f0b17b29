"""An index of all names for listings: pages without reading a file.

It is in memory alone. The names' files and the manifests are the truth, and each start reads a summary of every
manifest.
"""

from __future__ import annotations

import heapq
import logging
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import msgspec

from adapters.errors import Damaged, NotFound
from adapters.files.manifest import Summary
from adapters.files.name_versions import NameRecord, OnNewVersion, Visibility
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
