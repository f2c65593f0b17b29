"""A server with a keys file: who may do what, what nobody may learn, and limits that many at once cannot pass."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from service.api.access.auth import ROUTES, route_of
from service.server.app import create_app
from service.settings import load_settings
from service.tenants.edit import add_key, revoke_key
from service.tenants.keys_file import SCOPES, Scope
from tests.api.conftest import BASE, ENDLESS, Checkpoints
from tests.support.http.scripted_server import got
from tests.support.http.server import Server, running_server, standing_still, wait_for
from tests.support.http.uploads import MULTIPART, multipart, parts_of
from tests.support.limits import LIMIT_SECONDS

CHAT = [{"role": "user", "content": "hi"}]
# What tests of limits use, each of a tenant of its own.
LIMITS = {
    "few-requests": "requests_in_flight = 3",
    "few-tokens": "tokens_per_minute = 1000",
    "few-uploads": "uploads_per_minute = 4",
    "no-changes": "uploads_per_minute = 0",
    "leaving": "uploads_per_minute = 10",
    "few-probes": "requests_in_flight = 1\ntokens_per_minute = 100",
    "no-probes": "tokens_per_minute = 1",
    "few-adapters": "adapters = 3",
    "few-bytes": "adapter_bytes = 40000",
}
MANY = 50


@dataclass(frozen=True)
class Keyed:
    """A server and its keys file."""

    server: Server
    path: Path

    def key(self, tenant: str, *scopes: Scope) -> dict[str, str]:
        """Headers with a new key."""
        return bearer(add_key(self.path, tenant, scopes or ("infer", "upload", "delete"))[0])

    def ask(self, method: str, path: str, headers: dict[str, str], **options: Any) -> httpx.Response:
        return self.server.http.request(method, f"{self.server.url}{path}", headers=headers, **options)

    def put(self, name: str, directory: Path, headers: dict[str, str], **parts: str) -> httpx.Response:
        """An upload."""
        data = {"name": name, **parts}
        return self.ask("POST", "/v1/adapters", headers, data=data, files=parts_of(directory))

    def names(self, headers: dict[str, str]) -> set[str]:
        """What the key's tenant sees, which all lists agree about."""
        adapters = {one["name"] for one in self.ask("GET", "/v1/adapters", headers).json()["data"]}
        models = {one["id"] for one in self.ask("GET", "/v1/models", headers).json()["data"]}
        assert models == adapters | {BASE}
        return adapters

    def at_once(self, call: Callable[[int], httpx.Response], count: int = MANY) -> list[httpx.Response]:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(call, range(count)))

    def audit(self) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.server.log.splitlines() if line.startswith("{"))
        return [line for line in lines if line["logger"] == "multilora.audit"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    root = tmp_path_factory.mktemp("tenants")
    path = root / "keys.toml"
    path.write_text("".join(f"[tenants.{name}]\n{limit}\n" for name, limit in LIMITS.items()))
    (root / "allowed").mkdir()
    settings = {
        "model_name": BASE,
        "preload_adapters_dir": checkpoints.adapters,
        "keys_file": path,
        "admin_api_keys": "operator",
        "lora_path_root": root / "allowed",
        "log_format": "json",
        "refusal_lines_per_minute": 1_000_000,
        "max_uploads": 64,  # the tests ask for more at once than one tenant may have of the usual number
    }
    with running_server(checkpoints.endless_base, root / "server", **settings) as running:
        yield Keyed(running, path)


@pytest.fixture(scope="module")
def acme(keyed: Keyed, checkpoints: Checkpoints) -> dict[str, str]:
    """A tenant with an adapter that is nobody else's."""
    headers = keyed.key("acme")
    assert keyed.put("mine", checkpoints.spare, headers).status_code == 201
    return headers


@pytest.fixture(scope="module")
def zeta(keyed: Keyed) -> dict[str, str]:
    return keyed.key("zeta")


class TestScopes:
    def test_every_route_asks_for_its_scope_and_takes_no_other_key(self, keyed: Keyed) -> None:
        """All that there are, and some that there are not, with every key that there can be."""
        paths = keyed.ask("GET", "/openapi.json", {}).json()["paths"]
        routes = [(method.upper(), path) for path, operations in paths.items() for method in operations]
        routes += [("GET", "/nothing"), ("POST", "/v1/nothing"), ("GET", "/metrics/x"), ("POST", "/v1/adapters/x/y/z")]
        keys = {scope: keyed.key("scopes", scope) for scope in SCOPES}
        for method, template in routes:
            path = re.sub(r"\{\w+\}", "nobody", template)
            route = route_of(method, path)
            need = "any" if route is None else route.need
            if template in ("/docs", "/openapi.json", "/version"):
                need = "open"
            elif template in ("/metrics", "/load"):
                need = "admin" if template == "/metrics" else "control"
            for headers in ({}, bearer("wrong"), {"Authorization": "Bearer"}, {"Authorization": "Basic cmVhZGVy"}):
                status = keyed.ask(method, path, headers).status_code
                assert (status == 401) == (need != "open"), f"{method} {path} {headers} {status}"
            for scope, headers in keys.items():
                answer = keyed.ask(method, path, headers)
                allowed = need in ("open", "any", scope) or scope == "admin"
                assert answer.status_code != 401
                assert (answer.status_code == 403) != allowed, f"{method} {path} {scope} {answer.text}"

    def test_two_keys_are_one_too_many(self, keyed: Keyed, acme: dict[str, str], zeta: dict[str, str]) -> None:
        """A proxy that looks at the other one lets its owner in as somebody else."""
        for keys in ((acme, zeta), (acme, acme), (zeta, {"Authorization": "Basic cmVhZGVy"})):
            headers = [item for key in keys for item in key.items()]
            answer = httpx.get(f"{keyed.server.url}/v1/models", headers=headers, timeout=LIMIT_SECONDS)
            assert (answer.status_code, "several" in answer.json()["error"]["message"]) == (401, True)

    def test_each_line_of_the_table_is_a_route(self, keyed: Keyed) -> None:
        for route in ROUTES:
            if route.path.endswith("/") and route.path != "/":
                continue  # the names below it
            method = route.methods[0] if route.methods else "GET"
            status = keyed.ask(method, route.path, bearer("operator")).status_code
            assert status != 404, route

    def test_keys_of_the_settings_are_the_default_tenant_s(self, keyed: Keyed) -> None:
        """Who has all scopes, as the operator's admin key has, sees all."""
        assert {"alpha", "beta", "gamma"} <= keyed.names(bearer("operator"))

    def test_the_real_client(self, keyed: Keyed, acme: dict[str, str]) -> None:
        key = acme["Authorization"].removeprefix("Bearer ")
        with openai.OpenAI(base_url=keyed.server.openai_url, api_key=key, max_retries=0) as client:
            answer = client.chat.completions.create(model="mine", messages=CHAT, max_tokens=2)  # type: ignore[arg-type]
            assert answer.model == "mine"
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(model="zeta/x", messages=CHAT, max_tokens=2)  # type: ignore[arg-type]
        with (
            openai.OpenAI(base_url=keyed.server.openai_url, api_key="x", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()


class TestDownloads:
    def test_a_tenant_takes_out_its_own_with_a_key_for_it_and_nobody_else_s(
        self, keyed: Keyed, checkpoints: Checkpoints
    ) -> None:
        """Not even what it may use: a public adapter's weights stay with its owner."""
        owner = keyed.key("exporter", "upload", "download")
        assert keyed.put("public", checkpoints.adapters / "beta", owner, visibility="public").status_code == 201
        other = keyed.key("importer", "infer", "download")
        wanted = ("public", "exporter/public")
        own, *strangers = (
            keyed.ask("GET", f"/v1/adapters/{name}/archive", headers)
            for headers, name in ((owner, wanted[0]), (other, wanted[0]), (other, wanted[1]), (other, "exporter/none"))
        )
        assert own.status_code == 200
        assert [one.status_code for one in strangers] == [404] * 3
        assert keyed.ask("GET", "/v1/adapters/exporter/public", other).status_code == 200
        without = keyed.ask("GET", "/v1/adapters/public/archive", keyed.key("exporter", "infer", "upload", "delete"))
        assert (without.status_code, "`download`" in without.json()["error"]["message"]) == (403, True)
        assert keyed.ask("GET", "/v1/adapters/exporter/public/archive", bearer("operator")).status_code == 200
        lines = [line for line in keyed.audit() if line["event"] == "download"]
        assert [(line["tenant"], line["adapter"]) for line in lines] == [
            ("exporter", "exporter/public"),
            ("default", "exporter/public"),
        ]
        assert keyed.ask("DELETE", "/v1/adapters/exporter/public", bearer("operator")).status_code == 200


# Everything that one can send about an adapter's name.
ABOUT_A_NAME: dict[str, Callable[[str], tuple[str, str, dict[str, Any]]]] = {
    "chat": lambda name: ("POST", "/v1/chat/completions", {"json": {"model": name, "messages": CHAT, "max_tokens": 1}}),
    "completion": lambda name: ("POST", "/v1/completions", {"json": {"model": name, "prompt": "a", "max_tokens": 1}}),
    "a version": lambda name: ("POST", "/v1/completions", {"json": {"model": f"{name}@1", "prompt": "a"}}),
    "adapter_id": lambda name: ("POST", "/v1/completions", {"json": {"adapter_id": name, "prompt": "a"}}),
    "of the base": lambda name: ("POST", "/v1/completions", {"json": {"model": f"{BASE}:{name}", "prompt": "a"}}),
    "stream": lambda name: ("POST", "/v1/completions", {"json": {"model": name, "prompt": "a", "stream": True}}),
    "batch": lambda name: ("POST", "/v1/completions/batch", {"json": {"items": [{"model": name, "prompt": "a"}]}}),
    "batch of several": lambda name: (
        "POST",
        "/v1/completions/batch",
        {"json": {"items": [{"model": name, "prompt": "a"}, {"model": f"{BASE}:{name}", "messages": CHAT}] * 2}},
    ),
    "response": lambda name: ("POST", "/v1/responses", {"json": {"model": name, "input": "a"}}),
    "message": lambda name: ("POST", "/v1/messages", {"json": {"model": name, "messages": CHAT, "max_tokens": 1}}),
    "tokens of a message": lambda name: (
        "POST",
        "/v1/messages/count_tokens",
        {"json": {"model": name, "messages": CHAT}},
    ),
    "embedding": lambda name: ("POST", "/v1/embeddings", {"json": {"model": name, "input": "a"}}),
    "classes": lambda name: ("POST", "/classify", {"json": {"model": name, "input": "a"}}),
    "pooling": lambda name: ("POST", "/pooling", {"json": {"model": name, "input": "a"}}),
    "score": lambda name: ("POST", "/v1/score", {"json": {"model": name, "text_1": "a", "text_2": "b"}}),
    "ranking": lambda name: ("POST", "/v2/rerank", {"json": {"model": name, "query": "a", "documents": ["b"]}}),
    "what is wrong otherwise": lambda name: ("POST", "/v1/completions", {"json": {"model": name, "prompt": [10**6]}}),
    "too long": lambda name: ("POST", "/v1/completions", {"json": {"model": name, "prompt": "a " * 50_000}}),
    "several choices": lambda name: ("POST", "/v1/completions", {"json": {"model": name, "prompt": "a", "n": 999}}),
    "tokenize": lambda name: ("POST", "/tokenize", {"json": {"model": name, "prompt": "a"}}),
    "tokenize a chat": lambda name: ("POST", "/tokenize", {"json": {"model": name, "messages": CHAT}}),
    "detokenize": lambda name: ("POST", "/detokenize", {"json": {"model": name, "tokens": [1]}}),
    "model": lambda name: ("GET", f"/v1/models/{name}", {}),
    "escaped": lambda name: ("GET", f"/v1/models/{name.replace('/', '%2F')}", {}),
    "adapter": lambda name: ("GET", f"/v1/adapters/{name}", {}),
    "history": lambda name: ("GET", f"/v1/adapters/{name}/history", {}),
}
CHANGES: dict[str, Callable[[str], tuple[str, str, dict[str, Any]]]] = {
    "delete": lambda name: ("DELETE", f"/v1/adapters/{name}", {}),
    "delete if": lambda name: ("DELETE", f"/v1/adapters/{name}", {"headers": {"If-Match": "1"}}),
    "rollback": lambda name: ("POST", f"/v1/adapters/{name}/rollback", {"json": {}}),
    "pin": lambda name: ("PUT", f"/v1/adapters/{name}/pin", {}),
    "unpin": lambda name: ("DELETE", f"/v1/adapters/{name}/pin", {}),
    "visibility": lambda name: ("PATCH", f"/v1/adapters/{name}", {"json": {"visibility": "public"}}),
    "replace": lambda name: ("PUT", f"/v1/adapters/{name}", {"files": {"adapter_config": b"{}"}}),
    "replace if": lambda name: ("PUT", f"/v1/adapters/{name}", {"headers": {"If-Match": "1"}}),
    "replace if there": lambda name: ("PUT", f"/v1/adapters/{name}", {"headers": {"If-None-Match": "*"}}),
    "load": lambda name: ("POST", "/v1/load_lora_adapter", {"json": {"lora_name": name, "lora_path": "/"}}),
    "unload": lambda name: ("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": name}}),
    "probe": lambda name: ("PUT", f"/v1/adapters/{name}?probe=true", {"files": {"adapter_config": b"{}"}}),
    "upload": lambda name: ("POST", "/v1/adapters", {"data": {"name": name}, "files": {"adapter_config": b"{}"}}),
}


# Lists and the like, where a name only says which part is wanted.
LISTS: dict[str, Callable[[str], tuple[str, str, dict[str, Any]]]] = {
    "after": lambda name: ("GET", f"/v1/adapters?after={name}", {}),
    "prefix": lambda name: ("GET", f"/v1/adapters?prefix={name[:-2]}", {}),
    "owner": lambda name: ("GET", f"/v1/adapters?owner={name.partition('/')[0]}", {}),
    "models after": lambda name: ("GET", f"/v1/models?after={name}", {}),
    "metrics": lambda name: ("GET", f"/metrics?adapter={name}", {}),
    "tokenizer": lambda name: ("GET", f"/tokenizer_info?model={name}", {}),
}


def told(keyed: Keyed, headers: dict[str, str], about: Any, name: str) -> tuple[int, str, dict[str, str], list[Any]]:
    """All that an answer tells, and the log of it, but for the name that was asked for and times."""
    method, path, options = about(name)
    more, request_id = options.pop("headers", {}), uuid4().hex
    answer = keyed.ask(method, path, {**headers, **more, "X-Request-Id": request_id}, **options)
    lines = wait_for(lambda: keyed.server.log_lines(request_id), "the request's line in the log")
    logged = [{field: value for field, value in line.items() if field not in ("ms", "time")} for line in lines]
    whole = json.dumps([answer.text, {**answer.headers, "date": ""}, logged])
    for spelling in (name, name.replace("/", "%2F")):
        whole = whole.replace(spelling, "NAME")
    text, all_headers, logged = json.loads(whole.replace(request_id, "ID"))
    for quoted in (all_headers, *logged):
        quoted.pop("content-length", None)
    return answer.status_code, text, all_headers, logged


class TestSecrets:
    @pytest.mark.usefixtures("acme")
    def test_keys_without_admin_learn_no_path_of_this_machine(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        """All routes that change nothing are asked, and those that refuse what they are sent."""
        control, others = keyed.key("acme", "control"), keyed.key("acme", "infer", "upload", "delete", "download")
        paths = keyed.ask("GET", "/openapi.json", {}).json()["paths"]
        answers = {}
        for template, operations in paths.items():
            if template.endswith("/archive"):  # adapter_config.json names the base as its trainer did
                continue
            for name, headers in (("mine", control), ("default/alpha", others)):
                path = re.sub(r"\{\w+\}", name, template)
                for method in {"get", "post", "put"} & operations.keys():
                    if method == "get" or headers is others:
                        answer = keyed.ask(method.upper(), path, headers, content=b"" if method == "get" else b"{}")
                        answers[method, path] = answer
        assert {answer.status_code for answer in answers.values()} >= {200, 400, 403, 404}
        assert len([one for one in answers.values() if one.status_code == 200]) > 10
        for asked, answer in answers.items():
            for directory in (keyed.path.parent, checkpoints.base.parent):
                assert str(directory) not in answer.text + str(answer.headers), asked
        cards = {one["id"]: one for one in keyed.ask("GET", "/v1/models", others).json()["data"]}
        adapter = keyed.ask("GET", "/v1/adapters/default/alpha", others).json()
        assert (cards[BASE]["root"], cards["default/alpha"]["root"]) == (BASE, adapter["digest"])
        assert keyed.ask("GET", "/v1/models/default/alpha", others).json() == cards["default/alpha"]
        told = {one["id"]: one["root"] for one in keyed.ask("GET", "/v1/models", bearer("operator")).json()["data"]}
        assert told[BASE] == str(checkpoints.endless_base)
        assert told["alpha"] == str(checkpoints.adapters / "alpha")

    @pytest.mark.parametrize("about", [*ABOUT_A_NAME.values(), *CHANGES.values()], ids=[*ABOUT_A_NAME, *CHANGES])
    def test_another_s_adapter_is_as_one_that_is_not_there(
        self, keyed: Keyed, acme: dict[str, str], zeta: dict[str, str], about: Any
    ) -> None:
        theirs, nothing = (told(keyed, zeta, about, name) for name in ("acme/mine", "acme/none"))
        assert theirs == nothing
        # What makes a name makes one of their own, and refuses what was sent for it.
        is_new = about in (CHANGES[one] for one in ("replace", "replace if there", "load", "probe", "upload"))
        assert theirs[0] in ((400, 403) if is_new else (404, 403, 412)) or "does not exist" in theirs[1]
        assert told(keyed, zeta, about, "nobody/mine") == theirs
        assert "mine" in keyed.names(acme)
        assert "acme/mine" not in keyed.names(zeta)
        assert keyed.ask("GET", "/v1/adapters/mine", acme).json()["visibility"] == "private"

    @pytest.mark.parametrize("about", LISTS.values(), ids=LISTS)
    def test_no_list_tells_of_it(self, keyed: Keyed, acme: dict[str, str], zeta: dict[str, str], about: Any) -> None:
        theirs, nothing = (told(keyed, zeta, about, name) for name in ("acme/mine", "acme/none"))
        assert theirs == nothing
        digest = keyed.ask("GET", "/v1/adapters/mine", acme).json()["digest"]
        assert not {"acme/mine", digest} & set(re.findall(r"[\w/:-]+", theirs[1]))

    @pytest.mark.parametrize("about", CHANGES.values(), ids=CHANGES)
    def test_what_all_may_use_only_its_owner_changes(self, keyed: Keyed, zeta: dict[str, str], about: Any) -> None:
        theirs, nothing = (told(keyed, zeta, about, f"default/{name}") for name in ("alpha", "none"))
        assert theirs == nothing
        assert theirs[0] in (403, 404)
        assert "default/alpha" in keyed.names(zeta)

    def test_the_same_name_of_two_tenants_is_two_adapters(
        self, keyed: Keyed, acme: dict[str, str], checkpoints: Checkpoints
    ) -> None:
        other = keyed.key("other")
        assert keyed.put("mine", checkpoints.adapters / "beta", other).status_code == 201
        answers = [
            keyed.ask("POST", "/v1/completions", headers, json={"model": model, "prompt": "a", "max_tokens": 1})
            for headers in (acme, other)
            for model in ("mine", f"{'acme' if headers is acme else 'other'}/mine", f"{BASE}:mine", "mine@1")
        ]
        digests = [answer.headers["x-multilora-adapter"].split("sha256:")[1] for answer in answers]
        assert len(set(digests[:4])) == len(set(digests[4:])) == 1
        assert digests[0] != digests[4]
        assert all(answer.json()["model"] == "mine" for answer in answers)
        assert keyed.ask("DELETE", "/v1/adapters/mine", other).status_code == 200
        assert keyed.ask("GET", "/v1/adapters/mine", acme).status_code == 200

    @pytest.mark.parametrize("path", ["/v1/adapters", "/v1/models"])
    def test_a_page_goes_on_after_an_own_name_with_its_tenant_too(
        self, keyed: Keyed, acme: dict[str, str], path: str
    ) -> None:
        for headers, tenant, own in ((acme, "acme", "mine"), (bearer("operator"), "default", "alpha")):
            one, same = (keyed.ask("GET", f"{path}?after={name}", headers).json() for name in (own, f"{tenant}/{own}"))
            assert one == same
        assert one["first_id"] == "beta"

    def test_visibility_counts_from_the_answer_on(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        owner, friend, stranger = (keyed.key(name) for name in ("owner", "friend", "stranger"))
        sent = keyed.put("shown", checkpoints.spare, owner, visibility="shared", shared_with="friend, friend")
        assert (sent.status_code, sent.json()["visibility"]) == (201, "shared")

        def seen() -> tuple[bool, bool, bool]:
            sees = []
            for headers, name in ((owner, "shown"), (friend, "owner/shown"), (stranger, "owner/shown")):
                used = keyed.ask(
                    "POST", "/v1/completions", headers, json={"model": name, "prompt": "a", "max_tokens": 1}
                )
                assert (used.status_code == 200) == (name in keyed.names(headers))
                sees.append(used.status_code == 200)
            return sees[0], sees[1], sees[2]

        def change(headers: dict[str, str] = owner, **body: Any) -> httpx.Response:
            return keyed.ask("PATCH", "/v1/adapters/shown", headers, json=body)

        assert seen() == (True, True, False)
        assert keyed.ask("GET", "/v1/adapters/shown/history", owner).json()["shared_with"] == ["friend"]
        seen_by_friend = keyed.ask("GET", "/v1/adapters/owner/shown/history", friend).json()
        assert seen_by_friend["shared_with"] == []
        keys_shown = [version["by"] for version in seen_by_friend["data"]]
        assert keys_shown == [""], "which of the owner's keys made a version is the owner's to know"
        assert change(visibility="public").status_code == 200
        assert seen() == (True, True, True)
        assert change(visibility="shared", shared_with=["stranger"]).status_code == 200
        assert seen() == (True, False, True)
        assert change(visibility="private").status_code == 200
        assert seen() == (True, False, False)
        # Another upload says nothing of it, so it stays; one that says something changes it, new content or not.
        path = "/v1/adapters/shown"
        for directory, parts, visibility in (
            (checkpoints.adapters / "beta", {}, "private"),
            (checkpoints.adapters / "beta", {"visibility": "public"}, "public"),
            (checkpoints.spare, {"visibility": "private"}, "private"),
        ):
            answer = keyed.ask("PUT", path, owner, data=parts, files=parts_of(directory))
            assert answer.json()["visibility"] == visibility
        for wrong in (
            {"visibility": "shared"},
            {"visibility": "private", "shared_with": ["friend"]},
            {"visibility": "shared", "shared_with": ["A/B"]},
            {"visibility": "secret"},
            {},
        ):
            assert change(**wrong).status_code == 400
        assert keyed.put("x", checkpoints.spare, owner, visibility="secret").status_code == 400

    def test_names_that_differ_in_case_alone_are_the_same(
        self, keyed: Keyed, acme: dict[str, str], checkpoints: Checkpoints
    ) -> None:
        answer = keyed.put("MINE", checkpoints.spare, acme)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        for name in ("history", "rollback", "a/pin", "acme/acme/b", "default/b", "/a", "a/", BASE, BASE.upper(), ""):
            assert keyed.put(name, checkpoints.spare, acme).status_code in (400, 403, 409)

    def test_an_admin_reaches_every_tenant_s(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        ops, tenant = keyed.key("ops", "admin"), keyed.key("tenant")
        assert keyed.put("tenant/given", checkpoints.spare, ops).json()["name"] == "tenant/given"
        assert "given" in keyed.names(tenant)
        assert "tenant/given" in keyed.names(ops)
        own = keyed.put("nobody/given", checkpoints.spare, ops).json()
        assert (own["name"], own["owner"]) == ("nobody/given", "ops"), "there is no such tenant"
        assert keyed.ask("DELETE", "/v1/adapters/nobody/given", ops).status_code == 200
        assert keyed.ask("DELETE", "/v1/adapters/tenant/given", ops).status_code == 200
        assert "given" not in keyed.names(tenant)

    def test_a_name_may_have_a_slash_of_its_own(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        """A name that might be another tenant's is one's own, whether there is such a tenant or not, and stays so."""
        mill, lake = keyed.key("mill"), keyed.key("lake")

        def content(headers: dict[str, str], name: str) -> str:
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            answer = keyed.ask("POST", "/v1/completions", headers, json=body)
            return answer.headers["x-multilora-adapter"] if answer.status_code == 200 else str(answer.status_code)

        assert content(mill, "lake/net") == "404"
        made = keyed.put("lake/net", checkpoints.adapters / "beta", mill).json()
        assert (made["name"], made["owner"]) == ("lake/net", "mill")
        assert keyed.put("net", checkpoints.spare, lake, visibility="public").status_code == 201
        own = content(mill, "lake/net")
        assert own == f"lake/net@1 sha256:{made['digest']}"
        assert content(mill, "mill/lake/net") == content(mill, f"{BASE}:lake/net@1") == own
        assert content(lake, "net") == content(lake, "lake/net") != own
        assert content(keyed.key("wood"), "lake/net") == f"lake/{content(lake, 'net')}"
        assert content(lake, "mill/lake/net") == "404", "it is private"
        assert {"lake/net"} == {name for name in keyed.names(mill) if name.endswith("net")}
        share = {"visibility": "public"}
        assert keyed.ask("PATCH", "/v1/adapters/lake%2Fnet", mill, json=share).json()["name"] == "lake/net"
        assert content(lake, "mill/lake/net") == f"mill/{own}"
        assert {"net", "mill/lake/net"} == {name for name in keyed.names(lake) if name.endswith("net")}
        # What may be used by a name cannot be hidden by one of that name.
        assert keyed.put("lake/net", checkpoints.spare, keyed.key("wood")).status_code == 403
        assert keyed.ask("POST", "/v1/adapters/lake/net/rollback", lake, json={}).status_code == 404
        assert keyed.ask("DELETE", "/v1/adapters/lake/net", mill).json()["name"] == "lake/net"
        assert keyed.ask("GET", "/v1/adapters/net", lake).status_code == 200
        assert keyed.ask("DELETE", "/v1/adapters/lake/net", mill).status_code == 404, "the other is lake's"
        assert keyed.ask("DELETE", "/v1/adapters/net", lake).status_code == 200

    def test_the_operator_s_names_with_a_slash_are_no_tenant_s(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        operator, river = bearer("operator"), keyed.key("river")
        made = keyed.put("delta/sand", checkpoints.spare, operator).json()
        assert (made["name"], made["owner"]) == ("delta/sand", "default")
        delta = keyed.key("delta")  # a tenant of the name comes later
        assert keyed.put("sand", checkpoints.adapters / "beta", delta).status_code == 201
        assert keyed.ask("GET", "/v1/adapters/delta/sand", operator).json()["digest"] == made["digest"]
        assert keyed.ask("GET", "/v1/adapters/sand", delta).json()["digest"] != made["digest"]
        assert keyed.ask("GET", "/v1/adapters/default/delta/sand", operator).json()["name"] == "delta/sand"
        labels = "adapter=delta/sand&adapter=default/delta/sand"
        metrics = keyed.ask("GET", f"/metrics?{labels}", operator).text
        told = re.findall(r'adapter_info{adapter="(.+?)",digest="(.+?)"', metrics)
        assert {label for label, _ in told} == {"delta/sand", "default/delta/sand"}
        assert dict(told)["default/delta/sand"] == made["digest"][:12] != dict(told)["delta/sand"]
        assert "delta/sand" not in keyed.names(river)
        assert keyed.ask("DELETE", "/v1/adapters/delta/sand", operator).status_code == 200
        assert keyed.ask("GET", "/v1/adapters/sand", delta).status_code == 200

    def test_owners_outlast_a_kill(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        """And what a server without tenants took is the operator's when there are some."""
        settings: dict[str, Any] = {
            "model_name": BASE,
            "store_dir": tmp_path / "store",
        }
        path = tmp_path / "keys.toml"
        path.write_text("")
        with running_server(checkpoints.base, tmp_path / "server", **settings) as server:
            parts = parts_of(checkpoints.spare)
            assert server.post("/v1/adapters", data={"name": "old"}, files=parts).json()["visibility"] == "public"
        acme = ""
        for _ in range(2):
            with running_server(checkpoints.base, tmp_path / "server", keys_file=path, **settings) as server:
                keyed = Keyed(server, path)
                if not acme:
                    acme, _ = add_key(path, "acme", ["upload"])
                    assert keyed.put("mine", checkpoints.adapters / "beta", bearer(acme)).status_code == 201
                assert keyed.names(bearer(acme)) == {"mine", "default/old"}
                assert keyed.names(keyed.key("zeta")) == {"default/old"}
                server.process.send_signal(signal.SIGKILL)
                server.process.wait(LIMIT_SECONDS)


def _is_limit(answer: httpx.Response) -> bool:
    """Refused by a limit, and told so."""
    if answer.status_code != 429:
        return False
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert int(answer.headers["Retry-After"]) >= 1
    return True


class TestSums:
    """Sums of adapters with weights, each of which is the caller's to use or not."""

    def test_each_adapter_must_be_the_caller_s_to_use(
        self, keyed: Keyed, acme: dict[str, str], zeta: dict[str, str]
    ) -> None:
        body = {"prompt": "the", "max_tokens": 2}
        for name, headers, status in (("mine", acme, 200), ("acme/mine", zeta, 404), ("nobody", zeta, 404)):
            for weight in (0.5, 0):
                asked = [{"name": "default/alpha", "weight": 0.5}, {"name": name, "weight": weight}]
                answer = keyed.ask("POST", "/v1/completions", headers, json={**body, "model": asked})
                assert answer.status_code == status, answer.text
                if status == 404:
                    assert answer.json()["error"]["message"].startswith(f"The model `{name}` does not exist")
                elif weight:
                    assert answer.json()["model"] == "default/alpha * 0.5 + mine * 0.5"

    def test_one_that_runs_keeps_the_versions_it_began_with(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        """Its adapter moves and is deleted meanwhile; then nothing of it is left."""
        headers, server = keyed.key("moving"), keyed.server
        parts = parts_of(checkpoints.spare)
        config = json.loads(parts["adapter_config"][1]) | {"lora_alpha": 5}  # nobody else's content
        parts["adapter_config"] = ("adapter_config.json", json.dumps(config).encode())
        digest = keyed.ask("PUT", "/v1/adapters/own", headers, files=parts).json()["digest"]
        asked = [{"name": "own", "weight": 0.5}, {"name": "default/gamma", "weight": 0.5}]
        body = {**ENDLESS, "model": asked, "stream": True}
        with server.http.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as running:
            events = (json.loads(line.removeprefix("data: ")) for line in running.iter_lines() if line)
            began = next(events)["system_fingerprint"]
            parts = parts_of(checkpoints.adapters / "beta")
            assert keyed.ask("PUT", "/v1/adapters/own", headers, files=parts).status_code == 201
            short = {**body, "max_tokens": 2, "stream": False}
            later = keyed.ask("POST", "/v1/completions", headers, json=short).json()
            assert later["system_fingerprint"] != began
            assert keyed.ask("DELETE", "/v1/adapters/own", headers).status_code == 200
            assert keyed.ask("POST", "/v1/completions", headers, json=short).status_code == 404
            assert {next(events)["system_fingerprint"] for _ in range(20)} == {began}
            assert list(server.store_dir.glob(f"*/adapters/{digest}"))
        wait_for(lambda: not list(server.store_dir.glob(f"*/adapters/{digest}")), "the files to go")


class TestLimits:
    def test_requests_in_flight(self, keyed: Keyed) -> None:
        headers = keyed.key("few-requests")
        body = {"prompt": "a", "max_tokens": 2}

        def call(_: int) -> httpx.Response:
            return keyed.ask("POST", "/v1/completions", headers, json=body)

        with ThreadPoolExecutor(MANY) as pool:
            with standing_still(*keyed.server.engine_pids()):  # so that none of them can end
                calls = [pool.submit(call, index) for index in range(MANY)]
                wait_for(lambda: sum(one.done() for one in calls) >= MANY - 3, "all but three to be refused")
                refused = [one.result() for one in calls if one.done()]
                assert len(refused) == MANY - 3
                assert all(map(_is_limit, refused))
                assert {one.headers["x-ratelimit-limit-requests"] for one in refused} == {"3"}
                assert {one.headers["x-ratelimit-remaining-requests"] for one in refused} == {"0"}
                # Others are not in its way, nor it in theirs.
                batch = keyed.ask("POST", "/v1/completions/batch", headers, json={"items": [body]})
                assert _is_limit(batch)
            statuses = [one.result().status_code for one in calls]
        assert (statuses.count(200), statuses.count(429)) == (3, MANY - 3)
        assert call(0).headers["x-ratelimit-remaining-requests"] == "3"
        for path, wrong, status in (
            ("/v1/completions", {**body, "n": 4}, 400),
            ("/v1/completions", {**body, "prompt": ["a"] * 4}, 400),
            ("/v1/completions/batch", {"items": [body] * 4}, 413),
        ):
            assert keyed.ask("POST", path, headers, json=wrong).status_code == status
        whole = keyed.ask("POST", "/v1/completions/batch", headers, json={"items": [body] * 3}).json()
        assert all("choices" in item for item in whole["items"])

    def test_more_inputs_than_places_are_embedded_one_after_the_other(self, keyed: Keyed) -> None:
        """It is no matter of waiting for other requests: there are none."""
        headers = keyed.key("few-requests")
        answer = keyed.ask("POST", "/v1/embeddings", headers, json={"input": ["a", "b", "c", "d", "e"]})
        assert (answer.status_code, [one["index"] for one in answer.json()["data"]]) == (200, [0, 1, 2, 3, 4])
        assert answer.headers["x-ratelimit-remaining-requests"] == "3"

    def test_tokens_per_minute(self, keyed: Keyed) -> None:
        headers = keyed.key("few-tokens")
        started = time.monotonic()
        prompt = [5] * 50

        def call(index: int) -> httpx.Response:
            body = {"prompt": prompt, "max_tokens": 50, "ignore_eos": True, "cache_salt": f"{index} finds nothing"}
            return keyed.ask("POST", "/v1/completions", headers, json=body)

        answers = keyed.at_once(call)
        num_minutes = 1 + int((time.monotonic() - started) / 60)  # a machine may be slow
        served = [answer for answer in answers if answer.status_code == 200]
        assert 10 <= len(served) <= 10 * num_minutes
        assert all(_is_limit(answer) for answer in answers if answer not in served)
        assert all(answer.json()["usage"]["total_tokens"] == 100 for answer in served)
        assert all(int(answer.headers["x-ratelimit-remaining-tokens"]) <= 900 for answer in served)
        too_much = keyed.ask("POST", "/v1/completions", headers, json={"prompt": prompt, "max_tokens": 951})
        assert (too_much.status_code, too_much.json()["error"]["param"]) == (400, "max_tokens")
        (item,) = keyed.ask(
            "POST", "/v1/completions/batch", headers, json={"items": [{"prompt": "a", "max_tokens": 990}]}
        ).json()["items"]
        if time.monotonic() - started < 55:  # else a new minute has begun
            assert item["error"]["code"] == "rate_limit_exceeded"

    def test_tokens_that_the_prefix_cache_had_are_given_back(self, keyed: Keyed) -> None:
        keyed.path.write_text(keyed.path.read_text() + "[tenants.finding]\ntokens_per_minute = 1000\n")
        headers = keyed.key("finding")
        for _ in range(5):
            body = {"prompt": [5] * 390, "max_tokens": 1}
            answer = keyed.ask("POST", "/v1/completions", headers, json=body)
            assert answer.status_code == 200, answer.text
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 600, "the first one was computed"

    def test_what_is_not_used_of_the_tokens_is_given_back(self, keyed: Keyed) -> None:
        keyed.path.write_text(keyed.path.read_text() + "[tenants.giving]\ntokens_per_minute = 1000\n")
        headers = keyed.key("giving")
        used = 0
        for _ in range(5):
            body = {"prompt": [5] * 10, "max_tokens": 600, "stop_token_ids": list(range(300))}
            answer = keyed.ask("POST", "/v1/completions", headers, json=body)
            assert answer.status_code == 200, answer.text
            used += answer.json()["usage"]["total_tokens"]
            assert 1000 - used <= int(answer.headers["x-ratelimit-remaining-tokens"])
        # What is refused after its places were taken takes nothing.
        wrong = keyed.ask("POST", "/v1/completions", headers, json={"prompt": [10**6], "max_tokens": 600})
        assert wrong.status_code == 400
        assert int(wrong.headers["x-ratelimit-remaining-tokens"]) >= 1000 - used

    def test_uploads_per_minute(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        headers = keyed.key("few-uploads")
        started = time.monotonic()
        answers = keyed.at_once(lambda index: keyed.put(f"a{index}", checkpoints.spare, headers))
        num_minutes = 1 + int((time.monotonic() - started) / 60)
        created = [answer for answer in answers if answer.status_code == 201]
        assert 4 <= len(created) <= 4 * num_minutes
        refused = [answer for answer in answers if answer not in created]
        assert all(map(_is_limit, refused))
        assert {answer.headers["x-ratelimit-limit-uploads"] for answer in refused} == {"4"}
        assert len([name for name in keyed.names(headers) if "/" not in name]) == len(created)

    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [
            ("DELETE", "/v1/adapters/a", None),
            ("POST", "/v1/adapters/a/rollback", {}),
            ("PATCH", "/v1/adapters/a", {"visibility": "public"}),
        ],
    )
    def test_other_changes_count_as_uploads(self, keyed: Keyed, method: str, path: str, body: Any) -> None:
        """Whether there is such an adapter or not."""
        answer = keyed.ask(method, path, keyed.key("no-changes"), json=body)
        assert _is_limit(answer), answer.text
        assert "count as uploads" in answer.json()["error"]["message"]
        assert answer.headers["x-ratelimit-limit-uploads"] == "0"
        unlimited = keyed.ask(method, path, keyed.key("few-adapters"), json=body)
        assert unlimited.status_code == 404

    def test_a_probe_counts_as_a_request(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        """Two sequences of 24 tokens, one after the other: with a key for uploads alone, in a single place."""
        headers = keyed.key("few-probes", "upload")
        path, started = "/v1/adapters/probed?probe=true", time.monotonic()

        def put(_: int = 0) -> httpx.Response:
            return keyed.ask("PUT", path, headers, files=parts_of(checkpoints.spare))

        with ThreadPoolExecutor(1) as pool:
            with standing_still(*keyed.server.engine_pids()):
                first = pool.submit(put)
                wait_for(
                    lambda: keyed.ask("GET", "/v1/models", headers).headers["x-ratelimit-remaining-tokens"] == "52",
                    "the probe to be paid",
                )
                refused = put()
                assert _is_limit(refused)
                assert refused.headers["x-ratelimit-remaining-requests"] == "0"
                assert refused.headers["x-ratelimit-remaining-tokens"] == "52", "what is refused takes nothing"
            assert first.result().status_code == 201, first.result().text
        assert put().status_code == 200
        answers = [put() for _ in range(3)]
        if time.monotonic() - started < 55:  # else a new minute has begun
            assert all(map(_is_limit, answers))
            assert {one.headers["x-ratelimit-remaining-tokens"] for one in answers} == {"4"}
            assert {one.headers["x-ratelimit-remaining-requests"] for one in answers} == {"1"}

    def test_a_probe_that_may_never_be_is_refused_and_names_nothing(
        self, keyed: Keyed, checkpoints: Checkpoints
    ) -> None:
        headers = keyed.key("no-probes", "upload")
        answer = keyed.ask("PUT", "/v1/adapters/never?probe=true", headers, files=parts_of(checkpoints.spare))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "probe")
        assert keyed.ask("GET", "/v1/adapters/never", headers).status_code == 404
        assert answer.headers["x-ratelimit-remaining-tokens"] == "1"

    def test_adapters(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        headers = keyed.key("few-adapters")
        answers = keyed.at_once(lambda index: keyed.put(f"a{index}", checkpoints.spare, headers), 20)
        created = [answer.json()["name"] for answer in answers if answer.status_code == 201]
        refused = [answer for answer in answers if answer.status_code != 201]
        assert len(created) == 3
        assert all(map(_is_limit, refused))
        assert {answer.headers["x-ratelimit-limit-adapters"] for answer in refused} == {"3"}
        assert keyed.names(headers) == {*created, "default/alpha", "default/beta", "default/gamma"}
        # A name that is there may have new content, and one that goes makes room.
        replaced = keyed.ask(
            "PUT", f"/v1/adapters/{created[0]}", headers, files=parts_of(checkpoints.adapters / "beta")
        )
        assert replaced.status_code == 201
        assert keyed.ask("DELETE", f"/v1/adapters/{created[0]}", headers).status_code == 200
        assert keyed.put("another", checkpoints.spare, headers).status_code == 201
        assert keyed.put("one-more", checkpoints.spare, headers).status_code == 429

    def test_adapter_bytes(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        headers = keyed.key("few-bytes")
        sizes = {}
        for name in ("alpha", "beta", "gamma"):
            sizes[name] = keyed.ask("GET", f"/v1/adapters/default/{name}", headers).json()["bytes"]
        limit = sizes["alpha"] + sizes["beta"]
        keyed.path.write_text(keyed.path.read_text().replace("adapter_bytes = 40000", f"adapter_bytes = {limit}"))
        adapters = checkpoints.adapters
        assert keyed.put("one", adapters / "alpha", headers).status_code == 201
        assert keyed.put("two", adapters / "alpha", headers).status_code == 201, "one content counts once"
        refused = keyed.put("three", adapters / "gamma", headers)
        assert _is_limit(refused)
        assert refused.headers["x-ratelimit-limit-adapter-bytes"] == str(limit)
        assert refused.headers["x-ratelimit-remaining-adapter-bytes"] == str(sizes["beta"])
        # A version that is kept counts as well.
        assert keyed.ask("PUT", "/v1/adapters/one", headers, files=parts_of(adapters / "beta")).status_code == 201
        assert keyed.put("four", checkpoints.spare, headers).status_code == 429
        assert keyed.ask("DELETE", "/v1/adapters/one", headers).status_code == 200
        assert keyed.put("four", checkpoints.spare, headers).status_code == 201

    def test_a_stranger_s_limits_are_not_told(self, keyed: Keyed, zeta: dict[str, str]) -> None:
        assert not [name for name in keyed.ask("GET", "/v1/models", zeta).headers if name.startswith("x-ratelimit")]


class TestKeysFile:
    def test_a_revoked_key_opens_nothing_from_then_on(self, keyed: Keyed) -> None:
        for _ in range(5):
            secret, key = add_key(keyed.path, "brief", ["infer"])
            assert keyed.ask("GET", "/v1/models", bearer(secret)).status_code == 200
            revoke_key(keyed.path, key.key_id)
            assert keyed.ask("GET", "/v1/models", bearer(secret)).status_code == 401

    def test_an_upload_whose_key_is_revoked_meanwhile_leaves_nothing(
        self, keyed: Keyed, checkpoints: Checkpoints
    ) -> None:
        secret, key = add_key(keyed.path, "leaving", ["upload"])
        other = keyed.key("leaving")
        body = multipart(
            [
                ('name="name"', b"late"),
                *(
                    (f'name="{name}"; filename="{file}"', content)
                    for name, (file, content) in parts_of(checkpoints.spare).items()
                ),
            ]
        )

        def revoked_halfway() -> Iterator[bytes]:
            yield body[:-100]
            wait_for(
                lambda: keyed.ask("GET", "/v1/models", other).headers["x-ratelimit-remaining-uploads"] == "9",
                "the upload to begin",
            )
            revoke_key(keyed.path, key.key_id)
            yield body[-100:]

        headers = {**bearer(secret), **MULTIPART, "Content-Length": str(len(body))}
        answer = keyed.ask("POST", "/v1/adapters", headers, content=revoked_halfway())
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error"), answer.text
        assert "revoked while the request ran" in answer.json()["error"]["message"]
        assert "late" not in keyed.names(other)
        again = keyed.ask("POST", "/v1/adapters", headers | other, content=body)
        assert (again.status_code, again.json()["version"]) == (201, 1), again.text

    def test_a_broken_file_keeps_the_keys_and_hangup_says_so(self, keyed: Keyed) -> None:
        headers = keyed.key("steady")
        assert keyed.ask("GET", "/v1/models", headers).status_code == 200
        whole = keyed.path.read_text()
        try:
            keyed.path.write_text(whole + "[tenants.broken\n")
            keyed.server.process.send_signal(signal.SIGHUP)
            wait_for(lambda: "The keys that were there stay" in keyed.server.log, "the fault to be logged")
            assert "it is no TOML" in keyed.server.log
            assert keyed.ask("GET", "/v1/models", headers).status_code == 200
        finally:
            keyed.path.write_text(whole)
        assert keyed.ask("GET", "/v1/models", headers).status_code == 200

    def test_a_start_without_a_whole_file_is_refused_in_a_sentence(
        self, checkpoints: Checkpoints, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        from service.cli.main import main

        assert main(["serve", "--port=0", f"--model-dir={checkpoints.base}", f"--keys-file={tmp_path / 'none'}"]) == 1
        assert "cannot be read: No such file" in capfd.readouterr().err

    def test_changes_are_audited_and_keys_are_not_logged(self, keyed: Keyed, checkpoints: Checkpoints) -> None:
        secret, key = add_key(keyed.path, "watched", ["upload", "delete"])
        headers = bearer(secret)
        for directory in (checkpoints.spare, checkpoints.adapters / "beta"):
            keyed.ask("PUT", "/v1/adapters/seen", headers, files=parts_of(directory))
        keyed.ask("POST", "/v1/adapters/seen/rollback", headers, json={})
        keyed.ask("PATCH", "/v1/adapters/seen", headers, json={"visibility": "public"})
        keyed.ask("DELETE", "/v1/adapters/seen", headers)
        revoke_key(keyed.path, key.key_id)
        assert keyed.ask("GET", "/v1/models", headers).status_code == 401
        lines = [line for line in keyed.audit() if line.get("tenant") == "watched"]
        assert [(line["event"], line.get("adapter"), line.get("version")) for line in lines] == [
            ("key added", None, None),
            ("upload", "watched/seen", 1),
            ("replacement", "watched/seen", 2),
            ("rollback", "watched/seen", 3),
            ("visibility", "watched/seen", 3),
            ("deletion", "watched/seen", None),
            ("key revoked", None, None),
        ]
        assert {line["key"] for line in lines} == {key.key_id}
        assert lines[1]["visibility"] == "private"
        assert len({line["digest"] for line in lines[1:3]}) == 2
        assert secret not in keyed.server.log
        assert "operator" not in keyed.server.log


class TestOpenPaths:
    @pytest.mark.parametrize(
        ("setting", "are_open"), [("/metrics,/version", {"/metrics", "/version"}), ("none", set())]
    )
    def test_which_paths_need_no_key_follows_the_setting(
        self, checkpoints: Checkpoints, tmp_path: Path, setting: str, are_open: set[str]
    ) -> None:
        paths = ("/docs", "/openapi.json", "/version", "/metrics")
        settings: dict[str, Any] = {"open_paths": setting, "api_keys": "reader", "store_dir": tmp_path}
        app = create_app(load_settings(model_dir=checkpoints.base, **settings))
        for path, answer in zip(paths, got(app, *paths), strict=True):
            assert answer.status_code == (200 if path in are_open else 401)
        assert {answer.status_code for answer in got(app, *paths, headers=bearer("reader"))} == {200}
        assert got(app, "/health")[0].status_code != 401
        app.state.services.store.close()
