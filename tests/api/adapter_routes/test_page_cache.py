"""Pages that are kept: written once while nothing changes, never old, and bounded in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from adapters.store.name_index import Query, Row
from adapters.store.store import AdapterStore
from service.api.page_cache import PageCache, WrittenPage
from tests.api.adapter_routes.test_adapters import Routes
from tests.support.adapter_files import small_layout, upload_small

LAYOUT = small_layout()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    store = AdapterStore(tmp_path / "store", LAYOUT, base_name="base")
    yield store
    store.close()


@pytest.fixture
def pages_read(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> list[Query]:
    """From the index."""
    queries: list[Query] = []
    page: Callable[[Query], list[Row]] = store.page

    def noted(query: Query) -> list[Row]:
        queries.append(query)
        return page(query)

    monkeypatch.setattr(store, "page", noted)
    return queries


def test_a_page_is_written_again_when_something_that_it_shows_has_changed(
    tmp_path: Path, store: AdapterStore, pages_read: list[Query]
) -> None:
    upload_small(store, LAYOUT, "a", rank=1, seed=1)
    upload_small(store, LAYOUT, "b", rank=1, seed=2)
    routes = Routes(tmp_path, store, as_vllm=False)
    services = routes.services
    tiers = cast(dict[str, str], services.engine.tiers)
    num_read = 0

    async def expect(**wanted: tuple[str, int | None]) -> None:
        """The first time it is written anew, the second time it is not."""
        nonlocal num_read
        num_read += 1
        for _ in range(2):
            assert await routes.names_and_states() == wanted
            assert len(pages_read) == num_read

    async def change() -> None:
        await expect(a=("disk", None), b=("disk", None))
        tiers[store.get("a").digest] = "device"
        await expect(a=("device", None), b=("disk", None))
        services.last_used_seconds["b"] = 7
        await expect(a=("device", None), b=("disk", 7))
        upload_small(store, LAYOUT, "c", rank=1, seed=3)
        await expect(a=("device", None), b=("disk", 7), c=("disk", None))
        tiers["sha256:of an adapter that is on no page"] = "device"
        assert await routes.names_and_states() and len(pages_read) == num_read
        store.delete("a")
        await expect(b=("disk", 7), c=("disk", None))
        store.delete("b")
        upload_small(store, LAYOUT, "b", rank=1, seed=1)  # what "a" was
        await expect(b=("device", 7), c=("disk", None))

    asyncio.run(change())


def test_pages_that_nobody_asks_for_make_room() -> None:
    def page(num_bytes: int) -> WrittenPage:
        return WrittenPage(0, (), (), bytes(num_bytes))

    pages = PageCache(most_bytes=100)
    pages.put("a", page(40))
    pages.put("b", page(40))
    assert pages.get("a") is not None
    pages.put("c", page(40))
    assert pages.num_bytes == 80
    assert [pages.get(key) is not None for key in ("a", "b", "c")] == [True, False, True]
    pages.put("a", page(50))
    assert pages.num_bytes == 90
    pages.put("d", page(101))  # which is larger than all of it
    assert pages.num_bytes == 0 and pages.get("d") is None
