"""The index of names: pages and filters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from adapters.files.name_versions import Change
from adapters.store.name_index import Query, Row, Viewer
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
    store.change_settings("x", Change(visibility="private"))
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
    assert names(store, prefix="a_") == ["a_b"]
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
    """Each tenant has a name of its own, one for all, and one that is shared."""
    for at, owner in enumerate(("", "acme", "zeta")):
        prefix = f"{owner}/" if owner else ""
        for name, visibility in (("own", "private"), ("all", "public"), ("some", "shared")):
            put_version(store, LAYOUT, f"{prefix}{name}", at, owner=owner)
            shared_with = ("acme",) if visibility == "shared" else ()
            store.change_settings(f"{prefix}{name}", Change(visibility=visibility, shared_with=shared_with))

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


def test_a_damaged_adapter_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path)
    record, _ = upload_small(store, LAYOUT, "hurt", seed=1)
    upload_small(store, LAYOUT, "whole", seed=2)
    manifest = store.path_of(record.digest) / "manifest.json"
    store.close()
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
