"""The index of names: pages and filters, and that it is never more than a copy."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from adapters.store.sqlite_index import Query, Row, Viewer
from adapters.store.store import AdapterStore, StoreLimits
from tests.support.adapter_files import put_version, small_layout, upload_small

LAYOUT = small_layout()


def opened(root: Path) -> AdapterStore:
    return AdapterStore(root, LAYOUT, StoreLimits(free_disk_floor_bytes=0), base_name="base")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    one = opened(tmp_path)
    yield one
    one.check_integrity()
    one.close()


def index_of(root: Path) -> Path:
    (path,) = root.glob("*/index.sqlite")
    return path


def everything(store: AdapterStore) -> list[Row]:
    return store.page(Query(limit=1000))


def names(store: AdapterStore, limit: int = 1000, **query: object) -> list[str]:
    return [row.name for row in store.page(Query(limit, **query))]  # type: ignore[arg-type]


def test_a_row_says_what_the_name_stands_for(store: AdapterStore) -> None:
    upload_small(store, LAYOUT, "x", rank=3)
    record = put_version(store, LAYOUT, "x", 5)[0]
    (row,) = everything(store)
    manifest = record.manifest
    assert (row.name, row.number, row.digest, row.created_at_seconds) == (
        "x",
        2,
        record.digest,
        record.version.created_at_seconds,
    )
    assert (row.rank, row.num_bytes, row.rows) == (manifest.rank, manifest.num_bytes, manifest.rows)
    assert (row.owner, row.visibility, row.has_chat_template) == ("", "public", False)
    store.set_visibility("x", "private")
    assert everything(store)[0].visibility == "private"
    store.rollback("x")
    assert everything(store)[0].rank == 3
    store.delete("x")
    assert everything(store) == []


def test_pages_follow_one_another_and_filters_add_up(store: AdapterStore) -> None:
    for at, name in enumerate(("a", "a.b", "a_b", "b", "ba", "c")):
        upload_small(store, LAYOUT, name, rank=1 + at % 2, seed=at)
    put_version(store, LAYOUT, "acme/a", 7, owner="acme")
    every = ["a", "a.b", "a_b", "acme/a", "b", "ba", "c"]
    assert names(store) == every
    assert [names(store, 3, after=after) for after in ("", "a_b", "ba", "c")] == [every[:3], every[3:6], ["c"], []]
    assert names(store, prefix="a") == ["a", "a.b", "a_b", "acme/a"]
    assert names(store, prefix="a_") == ["a_b"]  # no pattern of SQL's
    assert names(store, prefix="b", after="b") == ["ba"]
    assert names(store, prefix="b", after="a") == ["b", "ba"]
    assert names(store, prefix="a", after="b") == []
    assert names(store, rank=1, prefix="a") == ["a", "a_b"]
    assert names(store, owner="acme") == ["acme/a"]
    digests = frozenset({store.get("a").digest, store.get("c").digest})
    assert names(store, in_digests=digests) == ["a", "c"]
    assert names(store, in_digests=digests, prefix="c") == ["c"]
    assert names(store, in_digests=frozenset()) == []
    assert names(store, not_in_digests=digests, owner="") == ["a.b", "a_b", "b", "ba"]


def test_a_viewer_sees_what_it_may_under_the_names_that_it_gives(store: AdapterStore) -> None:
    """Of each tenant's names one is its own, one is for all, and one is shared."""
    for at, owner in enumerate(("", "acme", "zeta")):
        prefix = f"{owner}/" if owner else ""
        for name, visibility in (("own", "private"), ("all", "public"), ("some", "shared")):
            put_version(store, LAYOUT, f"{prefix}{name}", at, owner=owner)
            store.set_visibility(f"{prefix}{name}", visibility, ("acme",) if visibility == "shared" else ())

    def seen(viewer: Viewer, **query: object) -> list[str]:
        return names(store, viewer=viewer, **query)

    acme, zeta = (Viewer(owner, owner, unowned="default/") for owner in ("acme", "zeta"))
    default = Viewer("default", "")
    # As acme calls them: all, default/all, default/some, own, some, zeta/all, zeta/some.
    every = ["acme/all", "all", "some", "acme/own", "acme/some", "zeta/all", "zeta/some"]
    assert seen(acme) == every
    assert [seen(acme, limit=3, after=after) for after in ("", "default/some", "zeta/all")] == [
        every[:3],
        every[3:6],
        every[6:],
    ]
    assert seen(acme, prefix="a") == ["acme/all"]
    assert seen(acme, prefix="default/") == ["all", "some"]
    assert seen(acme, prefix="acme/") == []
    assert seen(acme, owner="zeta") == ["zeta/all", "zeta/some"]
    assert seen(zeta) == ["acme/all", "zeta/all", "all", "zeta/own", "zeta/some"]
    assert seen(default) == ["acme/all", "all", "own", "some", "zeta/all"]
    assert len(seen(msgspec.structs.replace(zeta, sees_all=True))) == 9


def lose(path: Path) -> None:
    path.unlink()


def tear(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 500)


def garble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)


def empty(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM names")


def lie(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE names SET number = 9 WHERE name = 'n1'")
        database.execute("UPDATE names SET name = 'ghost' WHERE name = 'n2'")


def scramble(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE names SET rows = '{' WHERE name = 'n1'")


def mix_pages(path: Path) -> None:
    """The last two leaves of its table, which are in a page of 4096 bytes each, in the place of one another."""
    content = bytearray(path.read_bytes())
    pages = [content[start : start + 4096] for start in range(0, len(content), 4096)]
    leaves = [at for at, page in enumerate(pages) if page[0] == 10]  # of an index, which has the rows here
    one, other = leaves[-2:]
    pages[one], pages[other] = pages[other], pages[one]
    path.write_bytes(b"".join(pages))


def older_form(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE names DROP COLUMN rank")
        database.execute("PRAGMA user_version = 0")


@pytest.mark.parametrize("harm", [lose, tear, overwrite, garble, empty, lie, scramble, mix_pages, older_form])
def test_an_index_that_is_lost_or_torn_is_built_anew(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    store = opened(tmp_path)
    for at in range(40):
        upload_small(store, LAYOUT, f"n{at}", rank=1 + at % 3, seed=at)
    kept = everything(store)
    store.close()
    harm(index_of(tmp_path))
    store = opened(tmp_path)
    assert everything(store) == kept
    store.check_integrity()
    store.close()


def test_an_index_that_fails_while_the_server_runs_is_built_anew(store: AdapterStore, tmp_path: Path) -> None:
    record, _ = upload_small(store, LAYOUT, "x")
    for change in (lambda: upload_small(store, LAYOUT, "y"), lambda: store.delete("y"), lambda: None):
        with sqlite3.connect(index_of(tmp_path)) as database:
            database.execute("DROP TABLE names")
        change()
        assert everything(store)[0].digest == record.digest
    assert names(store) == ["x"]


@pytest.mark.parametrize("damage", ["rows = '{'", "rows = 5", "shared_with = '['"])
def test_a_value_that_cannot_be_read_while_the_server_runs_has_it_built_anew(
    store: AdapterStore, tmp_path: Path, damage: str
) -> None:
    upload_small(store, LAYOUT, "x")
    kept = everything(store)
    with sqlite3.connect(index_of(tmp_path)) as database:
        database.execute(f"UPDATE names SET {damage}")
    assert everything(store) == kept


def test_a_disk_that_holds_no_index_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    upload_small(store, LAYOUT, "x")
    store.close()
    path = index_of(tmp_path)
    path.unlink()
    path.mkdir()
    store = opened(tmp_path)
    upload_small(store, LAYOUT, "y")
    assert names(store) == ["x", "y"]
    assert "in memory alone" in caplog.text
    store.close()


def test_a_damaged_adapter_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    record, _ = upload_small(store, LAYOUT, "hurt", seed=1)
    upload_small(store, LAYOUT, "whole", seed=2)
    manifest = store.path_of(record.digest) / "manifest.json"
    store.close()
    lose(index_of(tmp_path))
    manifest.write_bytes(b"{")
    store = opened(tmp_path)
    assert names(store) == ["whole"]
    assert "hurt" in caplog.text
    upload_small(store, LAYOUT, "hurt", seed=1)
    assert names(store) == ["hurt", "whole"]
    store.close()


def test_a_page_reads_no_manifest(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    upload_small(store, LAYOUT, "x")
    read = Path.read_bytes
    opened_files: list[Path] = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened_files.append(path) or read(path))
    assert names(store) == ["x"]
    assert opened_files == []
