"""The page at /: its files and their headers. tests/page looks at it in a browser."""

from __future__ import annotations

import http.client
import re
from pathlib import Path

import pytest

from service.api import page
from service.server.app import create_app
from service.settings import load_settings
from tests.api.conftest import Checkpoints
from tests.support.http.scripted_server import got
from tests.support.http.server import Server
from tests.support.limits import LIMIT_SECONDS

FILES = sorted((Path(page.__file__).parent / "static").iterdir())


@pytest.mark.parametrize("path", sorted(page.PAGE_PATHS))
def test_each_file_comes_with_its_type_and_a_strict_policy(server: Server, path: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 200
    kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    directives = dict(one.split(" ", 1) for one in answer.headers["content-security-policy"].split("; "))
    own = dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'")
    none = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert directives == {**own, **none, "img-src": "'self' data:"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", sorted(page.PAGE_PATHS))
def test_it_is_sent_again_only_if_it_has_changed(server: Server, path: str) -> None:
    first = server.get(path)
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = server.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert "content-security-policy" in again.headers
    assert server.get(path, headers={"If-None-Match": '"other"'}).content == first.content


def test_head_has_the_headers_and_no_body(server: Server) -> None:
    got, head = server.get("/"), server.http.head(f"{server.url}/")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-type", "content-length", "etag", "content-security-policy"):
        assert head.headers[name] == got.headers[name]


def test_every_file_is_served_and_named_by_another_with_a_relative_address() -> None:
    """So that nothing is missing, nothing lies about, and a proxy may put a path before all of it."""
    assert {f"/static/{path.name}" for path in FILES if path.name != "index.html"} | {"/"} == page.PAGE_PATHS
    named = {"index.html"}
    for path in FILES:
        text = path.read_text()
        named |= {Path(one).name for one in re.findall(r'(?:href|src|from)(?:=| )"((?:static/|\./)[\w.]+)"', text)}
        calls = re.findall(r'(?:call|getJson|upload|fetch)\([`"]([^`"$]*)', text)
        assert not [one for one in calls if one.startswith("/")], path
    assert named == {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_names_another_server_or_builds_html_from_text(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"https?:|wss?:|[\"'(]//|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function", text)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)
    assert not re.search(r"<[^>]+ (?:style|on\w+)=|<script(?![^>]* src=)|<style", text), "the policy would refuse it"


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static",
        "/static/index.html",
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/page.py",
        "/static/..%5cpage.py",
        "/static//main.js",
        "/static/main.js/",
        "/static/main.js%00",
        "//static/main.js",
    ],
)
def test_there_is_nothing_beside_the_files(server: Server, path: str) -> None:
    # Built by hand: the client would tidy the path up.
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LIMIT_SECONDS)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert (answer.status, b"There is no GET" in answer.read()) == (404, True)
    connection.close()


def test_other_methods_are_refused_by_name(server: Server) -> None:
    answer = server.post("/", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_the_schema_speaks_of_the_api_alone(server: Server) -> None:
    assert page.PAGE_PATHS.isdisjoint(server.get("/openapi.json").json()["paths"])


def test_a_setting_turns_it_off(checkpoints: Checkpoints, tmp_path: Path) -> None:
    app = create_app(load_settings(model_dir=checkpoints.base, store_dir=tmp_path, page=False))
    *files, version = got(app, *page.PAGE_PATHS, "/version")
    app.state.services.store.close()
    assert len(files) > 1
    for answer in files:
        assert (answer.status_code, "There is no GET" in answer.json()["error"]["message"]) == (404, True)
    assert version.status_code == 200
