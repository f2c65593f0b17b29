"""Listings: pages, filters, and what of a query is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from service.cli.main import main
from tests.api.conftest import ADAPTERS, BASE, Checkpoints
from tests.support.http.server import Server, wait_for
from tests.support.http.uploads import upload

OWN = ("page-a", "page-b", "page-c")


@pytest.fixture
def own(server: Server, checkpoints: Checkpoints) -> Iterator[tuple[str, ...]]:
    """Three adapters of rank 2 beside those that the server has."""
    for name in OWN:
        upload(server, name, checkpoints.spare).raise_for_status()
    yield OWN
    for name in OWN:
        server.http.delete(f"{server.url}/v1/adapters/{name}").raise_for_status()


def pages_of(server: Server, path: str, field: str, **query: Any) -> list[list[str]]:
    pages: list[list[str]] = []
    while True:
        page = server.get(path, params=query).raise_for_status().json()
        names = [one[field] for one in page["data"]]
        assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))
        pages.append(names)
        if not page["has_more"]:
            return pages
        query["after"] = page["last_id"]


def test_adapters_come_in_pages(server: Server, own: tuple[str, ...]) -> None:
    every = sorted([*ADAPTERS, *own])
    assert pages_of(server, "/v1/adapters", "name") == [every]
    assert pages_of(server, "/v1/adapters", "name", limit=2) == [every[:2], every[2:4], every[4:]]
    assert pages_of(server, "/v1/adapters", "name", limit=6) == [every]
    assert pages_of(server, "/v1/adapters", "name", prefix="page-", limit=2) == [["page-a", "page-b"], ["page-c"]]
    assert pages_of(server, "/v1/adapters", "name", rank=2) == [list(own)]
    assert pages_of(server, "/v1/adapters", "name", rank=3) == [[]]
    assert pages_of(server, "/v1/adapters", "name", owner="acme") == [[]]
    assert pages_of(server, "/v1/adapters", "name", owner="", prefix="page-c") == [["page-c"]]


def test_models_come_in_pages_the_base_first(server: Server, client: openai.OpenAI, own: tuple[str, ...]) -> None:
    every = [BASE, *sorted([*ADAPTERS, *own])]
    assert pages_of(server, "/v1/models", "id") == [every]
    assert pages_of(server, "/v1/models", "id", limit=1) == [[name] for name in every]
    assert pages_of(server, "/v1/models", "id", limit=3) == [every[:3], every[3:6], every[6:]]
    assert pages_of(server, "/v1/models", "id", prefix="page-") == [list(own)]
    assert pages_of(server, "/v1/models", "id", prefix=BASE[:2]) == [[BASE]]
    assert pages_of(server, "/v1/models", "id", rank=2) == [list(own)]
    assert [card.id for card in client.models.list()] == every


def test_adapters_are_found_by_where_they_are(server: Server, client: openai.OpenAI, own: tuple[str, ...]) -> None:
    client.completions.create(model=own[0], prompt="the", max_tokens=1)
    wait_for(lambda: own[0] in pages_of(server, "/v1/adapters", "name", state="device")[0], "it to be on the device")
    by_state = {state: pages_of(server, "/v1/adapters", "name", state=state)[0] for state in ("disk", "host", "device")}
    assert sorted(name for names in by_state.values() for name in names) == sorted([*ADAPTERS, *own])
    for state, names in by_state.items():
        assert all(server.get(f"/v1/adapters/{name}").json()["state"] == state for name in names)


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/v1/adapters?verbose=1", "verbose"),
        ("GET", "/v1/adapters?limit=0", "limit"),
        ("GET", "/v1/adapters?limit=1001", "limit"),
        ("GET", "/v1/adapters?limit=many", "limit"),
        ("GET", "/v1/adapters?limit=1_0", "limit"),
        ("GET", "/v1/models?limit=5.0", "limit"),
        ("GET", "/v1/models?limit=%2B5", "limit"),
        ("GET", "/v1/adapters?rank=%204", "rank"),
        ("GET", "/v1/models?rank=%D9%A4", "rank"),
        ("GET", "/v1/adapters?rank=-1", "rank"),
        ("GET", f"/v1/models?rank={1 << 63}", "rank"),
        ("GET", "/v1/adapters?state=gone", "state"),
        ("GET", f"/v1/adapters?prefix={'a' * 257}", "prefix"),
        ("GET", "/v1/models?page=2", "page"),
        ("GET", "/v1/models/alpha?page=2", "page"),
        ("GET", "/v1/models?api-version=1&page=2", "page"),
        ("GET", "/v1/adapters/alpha?full=true", "full"),
        ("GET", "/v1/adapters/alpha/history?limit=2", "limit"),
        ("POST", "/v1/adapters?name=x", "name"),
        ("PUT", "/v1/adapters/x?force=1", "force"),
        ("POST", "/v1/adapters/alpha/rollback?to=1", "to"),
        ("DELETE", "/v1/adapters/alpha?version=1", "version"),
        ("GET", "/metrics?adaptor=alpha", "adaptor"),
        ("GET", "/v1/adapters?limit=1&limit=2", "limit"),
        ("GET", "/v1/models?prefix=a&prefix=a", "prefix"),
        ("POST", "/v1/adapters?probe=true&probe=false", "probe"),
        ("PUT", "/v1/adapters/x?probe=true&probe=false", "probe"),
        ("POST", "/v1/completions?stream=true", "stream"),
        ("POST", "/v1/chat/completions?model=alpha", "model"),
        ("POST", "/v1/completions/batch?model=alpha", "model"),
        ("POST", "/v1/responses?api-version=1&model=alpha", "model"),
        ("POST", "/v1/embeddings?model=alpha", "model"),
        ("POST", "/classify?model=alpha", "model"),
        ("POST", "/v2/rerank?top_n=1", "top_n"),
        ("POST", "/tokenize?model=alpha", "model"),
        ("POST", "/detokenize?model=alpha", "model"),
    ],
)
def test_what_no_query_has_is_refused_by_name(server: Server, method: str, path: str, param: str) -> None:
    answer = server.http.request(method, f"{server.url}{path}", json={} if method == "POST" else None)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert f"`{param}`" in error["message"]


def test_what_azure_s_clients_send_with_every_request_means_nothing(server: Server, client: openai.OpenAI) -> None:
    theirs = client.with_options(default_query={"api-version": "preview"})
    assert theirs.completions.create(model="alpha", prompt="hi", max_tokens=1).model == "alpha"
    assert [card.id for card in theirs.models.list()] == [card.id for card in client.models.list()]
    assert theirs.models.retrieve("alpha") == client.models.retrieve("alpha")
    for path in ("/v1/adapters?limit=1&api-version=preview&api-version=", "/v1/adapters/alpha?api-version"):
        assert server.get(path).status_code == 200


def test_the_terminal_lists_all_pages_and_filters(
    server: Server, own: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, names in ((["page-"], set(own)), (["page-", "--rank=3"], set()), ([], {*own, *ADAPTERS})):
        assert main(["ls", *arguments, f"--url={server.url}"]) == 0
        shown = capsys.readouterr().out
        assert {name for name in (*own, *ADAPTERS) if name in shown} == names
