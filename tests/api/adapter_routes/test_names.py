"""Names with a `/`, as repositories have them: `Qwen/Qwen3-0.6B` as the base's, `org/name` as an adapter's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest

from service.cli.main import main
from service.settings import SettingsError, load_settings
from tests.api.conftest import Checkpoints
from tests.support.http.server import Server, running_server
from tests.support.http.uploads import parts_of
from tests.support.limits import LIMIT_SECONDS

BASE = "Qwen/Qwen3-0.6B"
PRELOADED = "acme/summary"


@pytest.fixture(scope="module")
def slashed(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A base with a `/`, an adapter in a folder of a folder, and one beside that."""
    root = tmp_path_factory.mktemp("names")
    shutil.copytree(checkpoints.spare, root / "adapters" / PRELOADED)
    shutil.copytree(checkpoints.adapters / "beta", root / "adapters" / "plain")
    shutil.copytree(checkpoints.spare, root / "adapters" / "plain" / "checkpoint-1")
    shutil.copytree(checkpoints.spare, root / "adapters" / ".cache" / "hidden")
    settings = {"model_name": BASE, "preload_adapters_dir": root / "adapters", "lora_path_root": root / "adapters"}
    settings |= {"root_path": "/llm"}
    with running_server(checkpoints.base, root / "server", log_format="json", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(slashed: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=slashed.openai_url, api_key="unused", max_retries=0, timeout=LIMIT_SECONDS) as made:
        yield made


def put(server: Server, path: str, directory: Path) -> Any:
    answer = server.http.put(f"{server.url}/v1/adapters/{path}", files=parts_of(directory))
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def test_they_are_listed_and_shown(slashed: Server, client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == [BASE, PRELOADED, "plain"]
    for name in (BASE, PRELOADED):
        for spelling in (name, quote(name, safe="")):
            assert slashed.get(f"/v1/models/{spelling}").json()["id"] == name
        assert client.models.retrieve(name).id == name
    card = slashed.get(f"/v1/models/{PRELOADED}@1").json()
    assert (card["id"], card["parent"]) == (f"{PRELOADED}@1", BASE)
    assert [one["name"] for one in slashed.get("/v1/adapters", params={"prefix": "acme/"}).json()["data"]] == [
        PRELOADED
    ]
    page = slashed.get("/v1/adapters", params={"limit": 1}).json()
    assert (page["last_id"], page["has_more"]) == (PRELOADED, True)
    after = slashed.get("/v1/adapters", params={"after": page["last_id"]}).json()
    assert [one["name"] for one in after["data"]] == ["plain"]
    assert slashed.http.delete(f"{slashed.url}/v1/adapters/{quote(BASE, safe='')}").status_code == 400


@pytest.mark.parametrize("adapter", [PRELOADED, f"{PRELOADED}@1"])
def test_requests_name_them(slashed: Server, client: openai.OpenAI, adapter: str) -> None:
    asked: dict[str, Any] = {"prompt": "the", "max_tokens": 4, "temperature": 0}
    wanted = client.completions.create(model=adapter, **asked)
    assert wanted.model == PRELOADED
    assert client.completions.create(model=BASE, **asked).model == BASE
    for other in (f"{BASE}:{adapter}", f"default/{adapter}"):
        same = client.completions.create(model=other, **asked)
        assert (same.model, same.choices[0].text) == (PRELOADED, wanted.choices[0].text)
    chat = client.chat.completions.create(
        model=BASE, messages=[{"role": "user", "content": "a"}], max_tokens=1, extra_body={"adapter_id": adapter}
    )
    assert chat.model == PRELOADED
    for path, body in (
        ("/v1/completions/batch", {"items": [{"model": adapter, "prompt": "a", "max_tokens": 1}]}),
        ("/v1/responses", {"model": adapter, "input": "a", "max_output_tokens": 1}),
        ("/v1/messages", {"model": adapter, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ("/tokenize", {"model": adapter, "prompt": "a"}),
        ("/detokenize", {"model": adapter, "tokens": [1]}),
    ):
        assert slashed.post(path, json=body).status_code == 200, path
    metrics = slashed.get("/metrics", params={"adapter": PRELOADED}).text
    assert f'multilora_requests_total{{adapter="{PRELOADED}",outcome="length"}}' in metrics
    assert f'multilora_requests_total{{adapter="{BASE}",outcome="length"}}' in metrics
    assert "/acme" not in metrics
    for wrong in (f"/{adapter}", f"{adapter}/", adapter.replace("/", "//"), f"org/{adapter}", "acme", "summary"):
        assert slashed.post("/v1/completions", json={"model": wrong, "prompt": "a"}).status_code == 404, wrong


@pytest.mark.parametrize("is_escaped", [False, True], ids=["plain", "escaped"])
def test_every_route_below_a_name(slashed: Server, checkpoints: Checkpoints, is_escaped: bool) -> None:
    name = f"Org.{is_escaped:d}/team/net_1"
    path = quote(name, safe="") if is_escaped else name
    assert put(slashed, path, checkpoints.spare)["name"] == name
    assert put(slashed, path, checkpoints.adapters / "beta")["version"] == 2
    history = slashed.get(f"/v1/adapters/{path}/history").json()
    assert (history["name"], [one["number"] for one in history["data"]]) == (name, [2, 1])
    url = f"{slashed.url}/v1/adapters/{path}"
    back = slashed.http.post(f"{url}/rollback", json={"version": 1}).json()
    assert (back["name"], back["version"]) == (name, 3)
    for method, is_pinned in (("PUT", True), ("DELETE", False)):
        assert slashed.http.request(method, f"{url}/pin").json()["pinned"] is is_pinned
    assert slashed.http.patch(url, json={"visibility": "private"}).json()["name"] == name
    assert slashed.get(f"/v1/adapters/{path}@2").json()["version"] == 2
    assert slashed.http.delete(url).json()["name"] == name
    assert slashed.get(f"/v1/adapters/{path}").status_code == 404
    audited = [json.loads(line) for line in slashed.log.splitlines() if "multilora.audit" in line]
    assert {"upload", "rollback", "deletion", "pin"} <= {one["event"] for one in audited if one["adapter"] == name}


def test_vllm_s_routes_load_and_unload_them(slashed: Server) -> None:
    body = {"lora_name": "org/loaded", "lora_path": PRELOADED}
    assert slashed.post("/v1/load_lora_adapter", json=body).text.startswith("Success")
    card = slashed.get("/v1/models/org%2Floaded").json()
    assert card in slashed.get("/v1/models", params={"prefix": "org/loaded"}).json()["data"]
    assert (card["root"], card["parent"]) == (PRELOADED, BASE)  # as vLLM has it, the path that was sent
    assert slashed.post("/v1/unload_lora_adapter", json={"lora_name": "org/loaded"}).status_code == 200


def test_every_route_is_below_the_root_path_too(slashed: Server) -> None:
    """A proxy may leave its prefix in the path, or cut it off."""
    body = {"model": PRELOADED, "prompt": "a", "max_tokens": 1}
    for prefix in ("/llm", ""):
        assert slashed.post(f"{prefix}/v1/completions", json=body).json()["model"] == PRELOADED
        assert slashed.get(f"{prefix}/v1/adapters/{PRELOADED}").json()["name"] == PRELOADED
        assert slashed.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert slashed.get("/llm", follow_redirects=True).text == slashed.get("/").text
    for wrong in ("/llmx", "/llmx/v1/models", "/llm/llm/v1/models"):
        assert slashed.get(wrong).status_code == 404


def test_many_are_loaded_at_once(slashed: Server) -> None:
    """Beyond those that may be on their way they wait."""
    names = [f"many/{number}" for number in range(20)]

    def change(what: str, **more: str) -> Callable[[str], int]:
        return lambda name: slashed.post(f"/v1/{what}_lora_adapter", json={"lora_name": name, **more}).status_code

    with ThreadPoolExecutor(len(names)) as pool:
        assert set(pool.map(change("load", lora_path=PRELOADED), names)) == {200}
        assert len(slashed.get("/v1/adapters", params={"prefix": "many/"}).json()["data"]) == len(names)
        assert set(pool.map(change("unload"), names)) == {200}


def test_the_terminal_takes_them(
    slashed: Server, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTILORA_URL", slashed.url)
    monkeypatch.setenv("COLUMNS", "200")
    for command, said in (
        (["upload", "--name", "org/cli", str(checkpoints.spare)], "org/cli@1 is there"),
        (["upload", "--name", "org/cli", str(checkpoints.adapters / "beta")], "org/cli@2 is there"),
        (["ls", "org/"], "org/cli"),
        (["history", "org/cli"], "2"),
        (["rollback", "org/cli"], "org/cli@3 is there"),
        (["pin", "org/cli"], "org/cli is pinned"),
        (["unpin", "org/cli"], "org/cli is no longer pinned"),
        (["rm", "org/cli"], "org/cli is deleted"),
    ):
        assert main(command) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "../evil", "a/../b", "a/..", "a/.", "./a", "/etc/passwd", "//a", "a//b", "a/", "a\\..\\b", "a/.hidden",
        "a/\x00b", "..%2Fevil", "%2e%2e/evil", "a/" * 8 + "a", "a/" + "b" * 127, "a/history", "a/pin", "a/rollback",
        "org/a@1", "base:org/a", "default/org/default/", "default/default/a",
    ],
)  # fmt: skip
def test_no_name_leads_elsewhere(slashed: Server, checkpoints: Checkpoints, name: str) -> None:
    before = sorted(path for path in slashed.store_dir.rglob("*") if "staging" not in path.parts)
    parts = parts_of(checkpoints.spare)
    assert slashed.post("/v1/adapters", data={"name": name}, files=parts).status_code == 400
    answer = slashed.http.put(f"{slashed.url}/v1/adapters/{quote(name, safe='')}", files=parts)
    assert answer.status_code in (400, 404, 405), answer.text
    assert sorted(path for path in slashed.store_dir.rglob("*") if "staging" not in path.parts) == before


def test_the_base_s_name_is_nobody_else_s(slashed: Server, checkpoints: Checkpoints) -> None:
    for name in (BASE, f"default/{BASE}"):
        answer = slashed.post("/v1/adapters", data={"name": name}, files=parts_of(checkpoints.spare))
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize("name", ["", "/", "/a", "a/", "a//b", "../a", "a/./b", "a:b"])
def test_a_base_cannot_be_called_so(checkpoints: Checkpoints, name: str) -> None:
    with pytest.raises(SettingsError, match="model_name"):
        load_settings(model_dir=checkpoints.base, model_name=name)
