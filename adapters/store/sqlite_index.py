"""An index of all names for listings, in SQLite beside the store: pages without reading a manifest.

The names' files and the manifests are the truth. The index is compared with the names at each start, rebuilt where it
is lost or torn, and held only in memory where the disk cannot take it: it is never a reason to refuse anything.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from adapters.errors import Damaged, NotFound
from adapters.files.manifest import UNREADABLE, Summary
from adapters.files.name_versions import NameRecord, Visibility

log = logging.getLogger(__name__)

# Raised when the table changes: an index of another form is built anew.
_FORM = 4
_TABLE = """
CREATE TABLE names (
    name TEXT PRIMARY KEY, owner TEXT NOT NULL, visibility TEXT NOT NULL, shared_with TEXT NOT NULL,
    number INTEGER NOT NULL,
    digest TEXT NOT NULL, created_at_seconds REAL NOT NULL, is_pinned INTEGER NOT NULL,
    rank INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    rows TEXT NOT NULL, has_chat_template INTEGER NOT NULL
) WITHOUT ROWID
"""
# As who has no owner calls all names: the order of its pages, in which nothing needs to be sorted.
_ORDER = "CREATE INDEX shown ON names (ltrim(name, '/'))"


_TENANTS = msgspec.json.Decoder(tuple[str, ...])
_ROWS = msgspec.json.Decoder(dict[str, int])


class Row(msgspec.Struct, frozen=True):
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
    """Thread-safe. `read` gives the summary of a digest; a name whose summary is damaged or missing is left out.

    Opening compares it with `names`. The callers serialise changes. Without a path it is in memory alone.

    num_changes  after each that pages may show; one that was read before counts as older
    """

    def __init__(self, path: Path | None, names: Mapping[str, NameRecord], read: Callable[[str], Summary]) -> None:
        self.num_changes = 0
        self._path = path
        self._read = read
        self._lock = threading.Lock()
        try:
            self._database = _open(path)
            self._compare(names)
        except sqlite3.Error as error:
            log.warning("the index of adapters is built anew: %s", error)
            self.rebuild(names)

    def close(self) -> None:
        with self._lock, suppress(sqlite3.Error):
            self._database.close()

    def rebuild(self, names: Mapping[str, NameRecord]) -> None:
        """Forget what there is, and read all again."""
        with suppress(AttributeError, sqlite3.Error):
            self._database.close()
        try:
            if self._path is not None:
                for end in ("", "-wal", "-shm"):
                    self._path.with_name(f"{self._path.name}{end}").unlink(missing_ok=True)
            self._database = _open(self._path)
            self._compare(names)
        except (OSError, sqlite3.Error) as error:
            log.error("the index of adapters is in memory alone, until the next start: %s", error)
            self._database = _open(None)
            self._compare(names)
        self.num_changes += 1

    def put(self, name: str, record: NameRecord) -> None:
        """The name stands for this now. Raises sqlite3.Error; the index must be rebuilt then."""
        with self._lock, self._database:
            self._write(name, record)
        self.num_changes += 1

    def remove(self, name: str) -> None:
        """The name is gone. Raises as `put` does."""
        with self._lock, self._database:
            self._database.execute("DELETE FROM names WHERE name = ?", (name,))
        self.num_changes += 1

    def page(self, query: Query) -> list[Row]:
        """Raises sqlite3.Error; the index must be rebuilt then."""
        table, told = _seen(query.viewer)
        wheres, values = _conditions(query)
        statement = f"SELECT * FROM {table} WHERE {' AND '.join(wheres)} ORDER BY shown LIMIT ?"
        with self._lock:
            found = self._database.execute(statement, (*told, *values, query.limit)).fetchall()
        return [_row(one[:-1]) for one in found]

    def sizes(self, owner: str) -> dict[str, int]:
        """Bytes by digest, of the owner's current ones. Raises sqlite3.Error."""
        with self._lock:
            return dict(self._database.execute("SELECT digest, num_bytes FROM names WHERE owner = ?", (owner,)))

    def each(self) -> Iterator[Row]:
        """All rows, by name."""
        with self._lock:
            found = self._database.execute("SELECT * FROM names ORDER BY name").fetchall()
        return map(_row, found)

    def _compare(self, names: Mapping[str, NameRecord]) -> None:
        """Make it say what the names say, reading only the summaries of those that changed."""
        with self._lock, self._database:
            columns = "name, owner, visibility, shared_with, number, digest, created_at_seconds, is_pinned"
            kept = self._database.execute(f"SELECT {columns} FROM names")
            known = {one[0]: one[1:] for one in kept}
            for name in known.keys() - names.keys():
                self._database.execute("DELETE FROM names WHERE name = ?", (name,))
            for name, record in names.items():
                if known.get(name) != _facts(record):
                    self._write(name, record)

    def _write(self, name: str, record: NameRecord) -> None:
        try:
            summary = self._read(record.digest)
        except (Damaged, NotFound) as error:
            log.error("adapter %s is left out of listings: %s", name, error)
            self._database.execute("DELETE FROM names WHERE name = ?", (name,))
            return
        facts = (summary.rank, summary.num_bytes, json.dumps(summary.rows), summary.has_chat_template)
        self._database.execute(
            "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (name, *_facts(record), *facts)
        )


def _open(path: Path | None) -> sqlite3.Connection:
    """A database with the table; None: in memory. Raises sqlite3.Error."""
    database = sqlite3.connect(path or ":memory:", check_same_thread=False)
    try:
        # The comparison at the next start finds losses by a power failure: nothing waits for the disk.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = OFF")
        (form,) = database.execute("PRAGMA user_version").fetchone()
        if form != _FORM:
            with database:
                database.execute("DROP TABLE IF EXISTS names")
                database.execute(_TABLE)
                database.execute(_ORDER)
                database.execute(f"PRAGMA user_version = {_FORM}")
        # Pages of different moments may be whole one by one, and hide names from a search.
        (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
    except BaseException:
        database.close()
        raise
    return database


def _facts(record: NameRecord) -> tuple[str, str, str, int, str, float, bool]:
    current = record.current
    seen = record.owner, record.visibility, json.dumps(record.shared_with)
    return *seen, current.number, current.digest, current.created_at_seconds, record.is_pinned


def _seen(viewer: Viewer | None) -> tuple[str, list[object]]:
    """The rows that a viewer may see, with the name that it calls each as their last column; SQL and its values."""
    if viewer is None:
        return "(SELECT *, name AS shown FROM names)", []
    shown = "ltrim(name, '/') AS shown"
    values: list[object] = []
    if viewer.owner or viewer.unowned:
        shown = (
            "CASE WHEN owner = ? THEN substr(name, ?) WHEN owner = '' THEN ? || ltrim(name, '/') ELSE name END AS shown"
        )
        values = [viewer.owner, len(viewer.owner) + 2, viewer.unowned]
    # One of its own hides another's that it would call the same.
    may_see = "(owner = ? OR NOT EXISTS (SELECT 1 FROM names AS own WHERE own.name = ? || called.shown))"
    values += [viewer.owner, f"{viewer.owner}/"]
    if not viewer.sees_all:
        is_shared = "visibility = 'shared' AND ? IN (SELECT value FROM json_each(shared_with))"
        may_see += f" AND (owner = ? OR visibility = 'public' OR ({is_shared}))"
        values += [viewer.owner, viewer.tenant]
    return f"(SELECT * FROM (SELECT *, {shown} FROM names) AS called WHERE {may_see})", values


def _conditions(query: Query) -> tuple[list[str], list[object]]:
    """SQL and its values."""
    wheres: list[str] = ["shown > ?"]
    values: list[object] = [query.after]
    if query.prefix:
        wheres.append("substr(shown, 1, ?) = ?")
        values += [len(query.prefix), query.prefix]
        if query.prefix > query.after:  # begin where the prefix does
            wheres[0], values[0] = "shown >= ?", query.prefix
    for column, value in (("rank", query.rank), ("owner", query.owner), ("is_pinned", query.is_pinned)):
        if value is not None:
            wheres.append(f"{column} = ?")
            values.append(value)
    if query.in_digests is not None:
        wheres.append("digest IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(sorted(query.in_digests)))
    if query.not_in_digests:
        wheres.append("digest NOT IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(sorted(query.not_in_digests)))
    return wheres, values


def _row(values: tuple[Any, ...]) -> Row:
    """Raises sqlite3.DatabaseError for what was never written so: SQLite looks at no value."""
    *facts, rows, has_chat_template = values
    try:
        facts[3] = _TENANTS.decode(facts[3])
        needed = _ROWS.decode(rows)
    except (*UNREADABLE, TypeError) as error:
        raise sqlite3.DatabaseError(f"a value is damaged: {error}") from error
    facts[7] = bool(facts[7])
    return Row(*(*facts, needed, bool(has_chat_template)))
