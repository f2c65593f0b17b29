"""What a server with keys and small limits refuses, and what vLLM's endpoints may read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import httpx
import pytest

from adapters.errors import StoreUnreachable
from adapters.store.store import AdapterStore
from service.api.access.namespace import Namespace
from service.api.adapter_routes.vllm_lora import load_directory
from service.api.errors import BadRequest
from service.api.page import PAGE_PATHS
from service.api.schema.control import LoadLoraRequest
from service.models.layouts import layout_in
from service.server.preloading import preload
from service.settings import Settings
from service.start_check import StartError
from service.tenants.tenants import Tenants
from tests.api.conftest import ADAPTERS, BASE, ENDLESS, Checkpoints
from tests.support.adapter_files import hub_snapshot
from tests.support.http.server import Server, posted, running_server, wait_for
from tests.support.http.uploads import CONFIG, MULTIPART, TENSORS, multipart, upload
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_adapter


@pytest.fixture(scope="module")
def strict(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With keys, small limits, and a directory to load from."""
    root = tmp_path_factory.mktemp("strict")
    (root / "allowed").mkdir()
    (root / "allowed" / "alpha").symlink_to(checkpoints.adapters / "alpha")
    for name in ("beta", "spare"):
        source = checkpoints.adapters / name if name == "beta" else checkpoints.spare
        (root / "allowed" / name).mkdir()
        for file in (CONFIG, TENSORS):
            (root / "allowed" / name / file).write_bytes((source / file).read_bytes())
    hub_snapshot(checkpoints.spare, root / "allowed" / "models--me--ad")
    settings: dict[str, Any] = {
        "model_name": BASE,
        "api_keys": "reader,other",
        "admin_api_keys": "writer",
        "max_upload_bytes": 1_000_000,
        "max_queued_requests": 4,
        "max_batch_items": 4,
        "lora_path_root": root / "allowed",
        "adapter_row_bytes": 300_000,
        "root_path": "/team/lora/",
        "cors_origins": "https://ui.example, http://localhost:3000",
    }
    with running_server(checkpoints.endless_base, root / "server", **settings) as running:
        running.http.headers["Authorization"] = "Bearer writer"
        yield running


@pytest.fixture(scope="module")
def anyone() -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(timeout=LIMIT_SECONDS) as made:
        yield made


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class TestPages:
    """A page of another origin, in a browser: it asks before it sends a key, and reads what it is allowed to."""

    ASKS: ClassVar = {
        "Origin": "https://ui.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }

    def test_a_page_of_an_allowed_origin_is_let_in(self, strict: Server, anyone: httpx.Client) -> None:
        url = f"{strict.url}/v1/completions"
        asked = anyone.options(url, headers=self.ASKS)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://ui.example"
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == self.ASKS["Access-Control-Request-Headers"]
        origin = {"Origin": "http://localhost:3000"}
        for headers, status in ((origin | bearer("reader"), 200), (origin, 401)):
            answer = anyone.post(url, json={"prompt": "a", "max_tokens": 1, "stream": status == 200}, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert {"X-Request-Id", "Retry-After", "x-ratelimit-remaining-tokens"} <= set(exposed)

    def test_other_pages_are_not(self, strict: Server, anyone: httpx.Client, server: Server) -> None:
        other = {**self.ASKS, "Origin": "https://evil.example"}
        assert anyone.options(f"{strict.url}/v1/completions", headers=other).status_code == 400
        answer = anyone.get(f"{strict.url}/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        # By default there are none.
        assert anyone.options(f"{server.url}/v1/completions", headers=self.ASKS).status_code == 405
        assert (
            "access-control-allow-origin" not in server.get("/health", headers={"Origin": "https://ui.example"}).headers
        )


class TestKeys:
    @pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/version", "/openapi.json"])
    def test_what_probes_need_is_open(self, strict: Server, anyone: httpx.Client, path: str) -> None:
        assert anyone.get(f"{strict.url}{path}").status_code == 200

    @pytest.mark.parametrize("path", ["/", "/health", "/ping", "/ready", "/version"])
    def test_probes_may_ask_for_the_head_alone(self, strict: Server, anyone: httpx.Client, path: str) -> None:
        answer = anyone.head(f"{strict.url}{path}")
        assert (answer.status_code, answer.content) == (200, b"")

    def test_a_path_below_the_root_is_the_same_path(self, strict: Server, anyone: httpx.Client) -> None:
        url, reader = f"{strict.url}/team/lora", {"Authorization": "Bearer reader"}
        assert anyone.get(f"{url}/v1/models").status_code == 401
        without = anyone.get(f"{strict.url}/v1/models", headers=reader)
        assert anyone.get(f"{url}/v1/models", headers=reader).json() == without.json()
        assert anyone.post(f"{url}/v1/adapters", headers=reader).status_code == 403
        assert anyone.get(f"{url}/health").status_code == 200
        assert anyone.get(f"{url}/openapi.json").json()["servers"] == [{"url": "/team/lora"}]
        assert "'/team/lora/openapi.json'" in anyone.get(f"{url}/docs").text
        for path in ("/team/v1/models", "/team/loraxx/health", "/team/lora/team/lora/health"):
            assert anyone.get(f"{strict.url}{path}", headers=reader).status_code == 404

    def test_the_page_s_files_need_no_key_and_what_they_call_does(self, strict: Server, anyone: httpx.Client) -> None:
        for path in PAGE_PATHS:
            assert (
                anyone.get(f"{strict.url}{path}").status_code == anyone.head(f"{strict.url}{path}").status_code == 200
            )
        for path in ("/v1/adapters", "/metrics", "/v1/models", "/static/other.js"):
            assert anyone.get(f"{strict.url}{path}").status_code == 401
        assert anyone.post(f"{strict.url}/", json={}).status_code == 401

    def test_the_head_alone_needs_the_key_that_the_whole_needs(self, strict: Server, anyone: httpx.Client) -> None:
        url = f"{strict.url}/v1/models"
        refused = anyone.head(url)
        assert (refused.status_code, refused.content) == (401, b"")
        assert anyone.head(url, headers={"Authorization": "Bearer reader"}).status_code == 200

    @pytest.mark.parametrize(
        ("method", "path", "open_to"),
        [
            ("GET", "/v1/models", ("reader", "writer")),
            ("GET", "/v1/adapters", ("reader", "writer")),
            ("GET", "/metrics", ("reader", "writer")),
            ("POST", "/v1/completions", ("reader", "writer")),
            ("POST", "/v1/completions/batch", ("reader", "writer")),
            ("POST", "/v1/messages", ("reader", "writer")),
            ("POST", "/v1/messages/count_tokens", ("reader", "writer")),
            ("POST", "/tokenize", ("reader", "writer")),
            ("POST", "/v1/adapters", ("writer",)),
            ("DELETE", "/v1/adapters/nobody", ("writer",)),
            ("POST", "/v1/load_lora_adapter", ("writer",)),
            ("POST", "/v1/unload_lora_adapter", ("writer",)),
            ("GET", "/nothing", ("reader", "writer")),
        ],
    )
    def test_each_path_wants_its_scope(
        self, strict: Server, anyone: httpx.Client, method: str, path: str, open_to: tuple[str, ...]
    ) -> None:
        url = f"{strict.url}{path}"
        for headers in (
            {},
            bearer("wrong"),
            {"Authorization": "Bearer"},
            {"Authorization": "Basic cmVhZGVy"},
            {"Authorization": "Basic cmVhZGVy", "x-api-key": "writer"},
            {"x-api-key": "wrong"},
            {"x-api-key": ""},
            bearer("writer2"),
        ):
            answer = anyone.request(method, url, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("reader", "other", "writer"):
            answer = anyone.request(method, url, headers=bearer(key))
            assert anyone.request(method, url, headers={"x-api-key": key}).status_code == answer.status_code
            if ("reader" if key == "other" else key) in open_to:
                assert answer.status_code not in (401, 403)
            else:
                assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")

    def test_no_key_is_in_the_log(self, strict: Server, anyone: httpx.Client) -> None:
        anyone.get(f"{strict.url}/v1/models", headers=bearer("almost-a-key"))
        wait_for(lambda: "status=401" in strict.log, "the refusal to be logged")
        assert not any(key in strict.log for key in ("reader", "writer", "almost-a-key"))


class TestLimits:
    def test_key_and_size_are_checked_before_the_body_is_read(self, strict: Server) -> None:
        for key, size, status in (("reader", 10, 403), ("nobody", 10, 401), ("writer", 10**9, 413)):
            head = {**bearer(key), **MULTIPART, "Content-Length": str(size), "Expect": "100-continue"}
            host, port = strict.url.removeprefix("http://").split(":")
            answer = raw_exchange(host, int(port), "POST /v1/adapters HTTP/1.1\r\nHost: x\r\n", head)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
            assert b"100 Continue" not in answer

    @pytest.mark.parametrize("chunked", [False, True])
    def test_an_upload_too_large_is_stopped(self, strict: Server, chunked: bool) -> None:
        zeros = b"\0" * 3_000_000
        body = multipart([('name="name"', b"big"), (f'name="adapter_model"; filename="{TENSORS}"', zeros)])
        content: Any = (body[at : at + 65536] for at in range(0, len(body), 65536)) if chunked else body
        answer = strict.post("/v1/adapters", content=content, headers=MULTIPART)
        assert answer.status_code == 413
        assert "1000000" in answer.json()["error"]["message"] or "1065536" in answer.json()["error"]["message"]

    def test_an_adapter_that_can_never_fit_is_refused_with_both_sizes(
        self, strict: Server, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        wide = make_adapter(checkpoints.base, tmp_path / "wide", rank=64, target_modules="all-linear", seed=1)
        answer = upload(strict, "wide", wide)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "rows_exceeded")
        assert sum(char.isdigit() for char in answer.json()["error"]["message"]) >= 6

    def test_a_full_queue_is_429_at_once_and_says_when(self, strict: Server) -> None:
        body = {**ENDLESS, "model": BASE}
        with posted(strict, "/v1/completions", {**body, "n": 3}):
            wait_for(lambda: strict.metric("num_requests_open") == 3, "three sequences to run")
            refused = strict.post("/v1/completions", json={**body, "n": 2})
            batch = strict.post("/v1/completions/batch", json={"items": [body, body]})
            fits = strict.post("/v1/completions", json={**body, "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert batch.status_code == 429
        assert fits.status_code == 200
        wait_for(lambda: strict.metric("num_requests_open") == 0, "the queue to be empty")

    def test_items_of_a_batch_give_their_places_and_adapters_back_as_they_end(
        self, strict: Server, checkpoints: Checkpoints
    ) -> None:
        for name in ("alpha", "beta"):
            upload(strict, name, checkpoints.adapters / name).raise_for_status()
        on_disk = strict.metric("adapters_on_disk")
        short = [{**ENDLESS, "model": "alpha", "max_tokens": 1}, {**ENDLESS, "model": BASE, "max_tokens": 1}]
        ended = strict.metric("requests_total", outcome="length")
        with posted(strict, "/v1/completions/batch", {"items": [*short, {**ENDLESS, "model": "beta"}]}):
            wait_for(lambda: strict.metric("requests_total", outcome="length") >= ended + 2, "two items to end")
            assert strict.metric("num_requests_open") == 1
            strict.http.delete(f"{strict.url}/v1/adapters/alpha").raise_for_status()
            assert strict.metric("adapters_on_disk") == on_disk - 1
            assert strict.metric("num_requests_open") == 1  # all this while the third one ran
        wait_for(lambda: strict.metric("num_requests_open") == 0, "the third one's place to be free")
        items = [short[1], {**ENDLESS, "model": "beta", "max_tokens": 480}]
        answer = strict.post("/v1/completions/batch", json={"items": items}).json()
        assert [one["usage"]["completion_tokens"] for one in answer["items"]] == [1, 480]
        strict.http.delete(f"{strict.url}/v1/adapters/beta").raise_for_status()

    def test_more_than_the_queue_can_ever_hold_is_refused_for_good(self, strict: Server) -> None:
        body = {"model": BASE, "prompt": ["a", "b", "c"], "n": 2}
        assert strict.post("/v1/completions", json=body).status_code == 400
        assert strict.post("/v1/completions/batch", json={"items": [body]}).status_code in (200, 413)
        items = [{**body, "n": 1}, {**body, "n": 1}]
        assert strict.post("/v1/completions/batch", json={"items": items}).status_code == 413


@pytest.mark.parametrize("where", ["snapshots/0123abcd", "blobs/0"])
def test_a_snapshot_of_the_hub_s_cache_is_preloaded(checkpoints: Checkpoints, tmp_path: Path, where: str) -> None:
    """The adapter is a link, and its files are links; what leads out of the repository is refused."""
    snapshot = hub_snapshot(checkpoints.spare, tmp_path / "models--me--ad")
    wanted = tmp_path / "wanted"
    wanted.mkdir()
    if where == "blobs/0":
        (wanted / "linked").mkdir()
        for file in snapshot.iterdir():
            (wanted / "linked" / file.name).symlink_to(file)
    else:
        (wanted / "linked").symlink_to(snapshot)
    store = AdapterStore(tmp_path / "store", layout_in(checkpoints.base), base_name=BASE)
    services: Any = MagicMock(store=store, settings=Settings(preload_adapters_dir=wanted))
    if where == "blobs/0":
        with pytest.raises(StartError, match=r"leads out of the directory"):
            preload(services)
    else:
        preload(services)
        assert store.get("linked").name == "linked"
    store.close()


def test_a_full_disk_takes_no_adapter_and_ends_no_start_of_a_server_that_preloads(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Not even where everything is stored already; and it is with the server that one deletes adapters."""
    store = AdapterStore(tmp_path / "store", layout_in(checkpoints.base), base_name=BASE)
    stored: Any = MagicMock(store=store, settings=Settings(preload_adapters_dir=checkpoints.adapters))
    preload(stored)
    store.close()
    wanted = tmp_path / "wanted"
    wanted.mkdir()
    for name in ADAPTERS:
        (wanted / name).symlink_to(checkpoints.adapters / name)
    (wanted / "another").symlink_to(checkpoints.spare)
    settings: dict[str, Any] = {"model_name": BASE, "preload_adapters_dir": wanted, "min_free_disk_bytes": 1 << 60}
    with running_server(checkpoints.base, tmp_path, **settings) as server:
        assert {card["id"] for card in server.get("/v1/models").json()["data"]} == {BASE, *ADAPTERS}
        for name in ADAPTERS:
            answer = server.post("/v1/completions", json={"model": name, "prompt": "the", "max_tokens": 2})
            assert answer.status_code == 200, answer.text
        for name in ("another", *ADAPTERS):
            assert server.log.count(f"Not preloaded: the adapter '{name}'") == 1
        assert "--min-free-disk-bytes (MULTILORA_MIN_FREE_DISK_BYTES)" in server.log
        files = {path for path in server.store_dir.rglob("*") if path.name == TENSORS}
        answer = upload(server, "spare", checkpoints.spare)
        assert answer.status_code == 507
        assert "disk is too full" in answer.json()["error"]["message"]
        assert {one["name"] for one in server.get("/v1/adapters").json()["data"]} == set(ADAPTERS)
        assert {path for path in server.store_dir.rglob("*") if path.name == TENSORS} == files


def raw_exchange(host: str, port: int, head: str, headers: dict[str, str]) -> bytes:
    """Send a request's head alone and read the answer's."""
    with socket.create_connection((host, port), timeout=LIMIT_SECONDS) as connection:
        connection.sendall(
            (head + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n").encode()
        )
        return connection.recv(4000)


class TestLoadByPath:
    def test_off_by_default_with_the_setting_s_name(self, server: Server) -> None:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            answer = server.post(
                path, json={"lora_name": "x", "lora_path": "x"} if "un" not in path else {"lora_name": "x"}
            )
            assert answer.status_code == 403
            assert "--lora-path-root" in answer.json()["error"]["message"]

    @pytest.mark.parametrize("content", [b"{}", b"", b"{", b'{"lora_name": ""}'])
    @pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
    def test_that_it_is_off_is_told_before_anything_of_the_body(
        self, server: Server, path: str, content: bytes
    ) -> None:
        answer = server.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 403
        assert "--lora-path-root" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "body", "kind", "param"),
        [
            ("load", {}, "InvalidUserInput", "lora_name"),
            ("load", {"lora_name": "x"}, "InvalidUserInput", "lora_path"),
            ("load", {"lora_name": "", "lora_path": "beta"}, "InvalidUserInput", "lora_name"),
            ("unload", {}, "InvalidUserInput", "lora_name"),
            ("load", {"lora_name": 1}, "invalid_request_error", "lora_name"),
            ("load", {"lora_name": "x", "lora_path": "x", "odd": 1}, "invalid_request_error", "odd"),
            ("unload", [], "invalid_request_error", None),
        ],
    )
    def test_missing_fields_have_vllm_s_type_and_other_faults_openai_s(
        self, strict: Server, path: str, body: Any, kind: str, param: str | None
    ) -> None:
        answer = strict.post(f"/v1/{path}_lora_adapter", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, kind, param)
        assert error["code"] == "bad_request"

    def test_vllm_s_shapes(self, strict: Server) -> None:
        loaded = strict.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": "beta"})
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'one' added successfully.")
        assert loaded.headers["content-type"].startswith("text/plain")
        again = strict.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": "spare"})
        assert (again.status_code, again.json()["error"]["type"]) == (400, "InvalidUserInput")
        assert again.json()["error"]["message"] == (
            "The lora adapter 'one' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True."
        )
        before = strict.get("/v1/adapters/one").json()["digest"]
        body = {"lora_name": "one", "lora_path": "spare", "load_inplace": True}
        assert strict.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert strict.get("/v1/adapters/one").json()["digest"] != before
        gone = strict.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'one' removed successfully.")
        missing = strict.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")

    @pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
    def test_a_condition_is_not_dropped_in_silence(self, strict: Server, header: str) -> None:
        assert strict.post("/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": "beta"}).status_code == 200
        try:
            before = strict.get("/v1/adapters/two").json()["version"]
            body = {"lora_name": "two", "lora_path": "spare", "load_inplace": True}
            for path, sent in (("load", body), ("unload", {"lora_name": "two"})):
                answer = strict.post(f"/v1/{path}_lora_adapter", json=sent, headers={header: "*"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")
                assert "not looked at here" in answer.json()["error"]["message"]
            assert strict.get("/v1/adapters/two").json()["version"] == before
        finally:
            strict.http.delete(f"{strict.url}/v1/adapters/two")

    @pytest.mark.parametrize("path", ["load", "unload"])
    def test_what_no_query_has_is_refused_by_name(self, strict: Server, path: str) -> None:
        body = {"lora_name": "two", **({"lora_path": "beta"} if path == "load" else {})}
        answer = strict.post(f"/v1/{path}_lora_adapter?probe=true", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "probe")
        assert strict.get("/v1/adapters/two").status_code == 404

    def test_a_snapshot_of_the_hub_s_cache_below_the_root_is_loaded(self, strict: Server) -> None:
        body = {"lora_name": "hub", "lora_path": "models--me--ad/snapshots/0123abcd"}
        answer = strict.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        strict.http.delete(f"{strict.url}/v1/adapters/hub").raise_for_status()

    @pytest.mark.parametrize("path", ["..", "/etc", "../allowed/../..", "alpha", "\x00", "beta/../../server"])
    def test_nothing_outside_is_read_not_even_through_a_link(self, strict: Server, path: str) -> None:
        answer = strict.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
        assert answer.status_code in (400, 403)
        assert strict.get("/v1/adapters/x").status_code == 404

    def test_a_path_that_cannot_be_looked_at_is_400_without_the_server_s_paths(self, strict: Server) -> None:
        answer = strict.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "x" * 300})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
        assert "File name too long" in answer.json()["error"]["message"]
        assert "allowed" not in answer.json()["error"]["message"]

    def test_a_file_without_access_is_400_and_a_fault_of_the_store_is_not(self, tmp_path: Path) -> None:
        for filename, kind in ((tmp_path / "in" / CONFIG, BadRequest), (tmp_path / "store" / "part", StoreUnreachable)):
            error = PermissionError(13, "Permission denied", str(filename))
            store = MagicMock(**{"has.return_value": False})
            store.begin.return_value.__enter__.return_value.add_directory.side_effect = error
            store.begin.return_value.__exit__.return_value = None
            namespace = Namespace(store, Tenants(), Tenants().anybody())
            body = LoadLoraRequest(lora_name="x", lora_path="in")
            with pytest.raises(kind, match="Permission denied") as refused:
                load_directory(namespace, tmp_path, tmp_path / "in", body, "x")
            assert str(tmp_path) not in str(refused.value)

    def test_a_path_that_is_not_there_is_404_and_missing_fields_400(self, strict: Server) -> None:
        answer = strict.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "nothing"})
        assert answer.status_code == 404
        assert strict.post("/v1/load_lora_adapter", json={"lora_name": "x"}).status_code == 400
