"""Adapters over HTTP: what is taken, what is refused and when, and what becomes of a deleted one."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import load_file, save_file

from adapters.files.disk import StoreFiles
from adapters.row_plan import plan_rows
from adapters.store.store import AdapterStore, Upload
from service.api.access.auth import Access
from service.api.adapter_routes import adapters as adapter_routes
from service.api.adapter_routes import vllm_lora
from service.api.engine_protocol import EngineProtocol
from service.api.entry.middleware import BodyRule, EntryMiddleware
from service.api.http.json_body import BodyBudget
from service.api.metrics.metrics import Metrics
from service.api.state import Services
from service.cli.main import main
from service.settings import Settings
from service.tenants.tenants import Tenants
from service.text.tokenizer import TextTokenizer
from tests.api.conftest import ADAPTERS, BASE, Checkpoints
from tests.support.adapter_files import (
    config_bytes,
    lora_tensors,
    modules_ending,
    safetensors_bytes,
    small_layout,
    upload_small,
    write_peft_directory,
)
from tests.support.http.server import Server, standing_still, wait_for
from tests.support.http.uploads import CONFIG, MULTIPART, multipart, parts_of, tar_of, upload, zip_of
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_adapter

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    """A store in this process."""
    layout = small_layout()
    plan = plan_rows(layout, 1 << 20, element_bytes=4)
    store = AdapterStore(tmp_path / "store", layout, base_name="base", row_plan=plan)
    yield store
    store.close()


@pytest.fixture
def gone(server: Server) -> Iterator[list[str]]:
    """Names to delete after the test, whatever happened."""
    names: list[str] = []
    yield names
    for name in names:
        server.http.delete(f"{server.url}/v1/adapters/{name}")


class TestUpload:
    def test_parts_and_archives_of_one_adapter_are_one_content(
        self, server: Server, checkpoints: Checkpoints, gone: list[str]
    ) -> None:
        gone += ["parts", "by-file-name", "tar", "zip"]
        spare = checkpoints.spare
        answers = [
            upload(server, "parts", spare),
            server.post(
                "/v1/adapters",
                data={"name": "by-file-name"},
                files=[("file", content) for content in parts_of(spare).values()],
            ),
            server.post(
                "/v1/adapters", data={"name": "tar"}, files={"archive": ("x.tar.gz", tar_of(spare, prefix="d/"))}
            ),
            server.post("/v1/adapters", data={"name": "zip"}, files={"file": ("x.zip", zip_of(spare))}),
        ]
        assert [answer.status_code for answer in answers] == [201] * 4, [answer.text for answer in answers]
        reports = [answer.json() for answer in answers]
        assert len({report["digest"] for report in reports}) == 1
        assert [report["name"] for report in reports] == gone
        modules = {module["module"]: module for module in reports[0]["modules"]}
        assert set(modules) >= {"model.layers.1.self_attn.q_proj", "model.layers.0.feed_forward.w1"}
        assert all(module["rank"] == 2 and module["scaling"] == 2.0 for module in modules.values())
        assert sum(module["bytes"] for module in modules.values()) == reports[0]["bytes"]

    def test_the_same_again_is_200_and_other_content_409(
        self, server: Server, checkpoints: Checkpoints, gone: list[str]
    ) -> None:
        gone.append("again")
        assert upload(server, "again", checkpoints.spare).status_code == 201
        assert upload(server, "again", checkpoints.spare).status_code == 200
        answer = upload(server, "again", checkpoints.adapters / "alpha")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")

    def test_an_adapter_serves_as_soon_as_the_upload_has_returned(
        self, server: Server, client: openai.OpenAI, checkpoints: Checkpoints, gone: list[str], tmp_path: Path
    ) -> None:
        gone.append("fresh")
        fresh = make_adapter(
            checkpoints.base, tmp_path / "fresh", rank=5, target_modules=["q_proj", "in_proj"], seed=77
        )
        assert upload(server, "fresh", fresh).status_code == 201
        base = client.completions.create(model=BASE, prompt="the", **GREEDY).choices[0].text
        assert client.completions.create(model="fresh", prompt="the", **GREEDY).choices[0].text != base
        shown = server.get("/v1/adapters/fresh").json()
        assert shown["base"] == BASE
        assert shown["rank"] == 5
        wait_for(lambda: server.get("/v1/adapters/fresh").json()["state"] == "device", "the adapter to be resident")

    def test_the_listing_tells_when_an_adapter_was_last_used(
        self, server: Server, client: openai.OpenAI, checkpoints: Checkpoints, gone: list[str]
    ) -> None:
        gone.append("used")
        assert upload(server, "used", checkpoints.spare).json()["last_used"] is None
        before = int(time.time())
        client.completions.create(model="used", prompt="the", **GREEDY)
        shown = server.get("/v1/adapters/used").json()["last_used"]
        assert before <= shown <= time.time()
        assert {one["name"]: one["last_used"] for one in server.get("/v1/adapters").json()["data"]}["used"] == shown
        server.http.delete(f"{server.url}/v1/adapters/used").raise_for_status()
        assert upload(server, "used", checkpoints.spare).json()["last_used"] is None

    def test_an_adapter_brings_its_own_chat_template(
        self, server: Server, checkpoints: Checkpoints, gone: list[str]
    ) -> None:
        gone += ["speaker", "broken"]
        template = ("chat_template.jinja", b"TALK {{ messages[0].content }}")
        files = {**parts_of(checkpoints.spare), "chat_template": template}
        answer = server.post("/v1/adapters", data={"name": "speaker"}, files=files)
        assert answer.json()["has_chat_template"]
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        tokens = server.post("/tokenize", json={**chat, "model": "speaker"}).json()["tokens"]
        assert server.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "TALK hi"
        files["chat_template"] = ("chat_template.jinja", b"{% for")
        answer = server.post("/v1/adapters", data={"name": "broken"}, files=files)
        assert answer.status_code == 400
        assert "jinja2" in answer.json()["error"]["message"]

    def test_every_part_that_openapi_lists_is_known_by_its_name_alone(
        self, server: Server, checkpoints: Checkpoints, gone: list[str]
    ) -> None:
        gone += ["by-parts", "by-archive"]
        files = {part: content for part, (_, content) in parts_of(checkpoints.spare).items()}
        uploads = {
            "by-parts": {**files, "chat_template": b"TALK {{ messages[0].content }}"},
            "by-archive": {"archive": tar_of(checkpoints.spare)},
        }
        schema = server.get("/openapi.json").json()["paths"]["/v1/adapters"]["post"]["requestBody"]["content"]
        listed = set(schema["multipart/form-data"]["schema"]["properties"])
        assert listed == {"name", "note", "visibility", "shared_with"}.union(*uploads.values())
        for name, parts in uploads.items():
            named = {"name": name.encode(), **parts}
            body = multipart([(f'name="{part}"', content) for part, content in named.items()])
            answer = server.post("/v1/adapters", content=body, headers=MULTIPART)
            assert answer.status_code == 201, answer.text
            assert answer.json()["has_chat_template"] == ("chat_template" in parts)


def broken_config(directory: Path, **change: Any) -> dict[str, tuple[str, bytes]]:
    config = {**json.loads((directory / CONFIG).read_text()), **change}
    return {**parts_of(directory), "adapter_config": (CONFIG, json.dumps(config).encode())}


class TestRefusals:
    @pytest.mark.parametrize(("name", "status"), [("../x", 400), ("", 400), (".x", 400), ("a" * 129, 400), (BASE, 409)])
    def test_names(self, server: Server, checkpoints: Checkpoints, name: str, status: int) -> None:
        assert upload(server, name, checkpoints.spare).status_code == status

    @pytest.mark.parametrize(
        "change",
        [{"layer_replication": [[0, 2]]}, {"bias": "some"}, {"peft_type": "IA3"}, {"use_qalora": True}, {"r": 0}],
    )
    def test_configurations(self, server: Server, checkpoints: Checkpoints, change: dict[str, Any]) -> None:
        files = broken_config(checkpoints.spare, **change)
        answer = server.post("/v1/adapters", data={"name": "bad"}, files=files)
        assert answer.status_code == 400
        assert next(iter(change)).removesuffix("_type") in answer.json()["error"]["message"].replace("`", "")

    def test_a_configuration_that_is_refused_ends_the_upload_before_its_tensors_have_come(
        self, server: Server, checkpoints: Checkpoints
    ) -> None:
        config = broken_config(checkpoints.spare, use_qalora=True)["adapter_config"][1]
        files = [('name="adapter_config"', config), ('name="adapter_model"', bytes(2 << 20))]
        body = multipart([('name="name"', b"bad"), *files]).removesuffix(b"\r\n--frontier--\r\n")
        head = f"POST /v1/adapters HTTP/1.1\r\nHost: x\r\nContent-Type: {MULTIPART['Content-Type']}\r\n"
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS) as connection:
            connection.sendall(f"{head}Content-Length: {64 << 20}\r\n\r\n".encode() + body)
            answer = HTTPResponse(connection)
            answer.begin()
            assert (answer.status, b"use_qalora" in answer.read()) == (400, True)

    def test_tensors_that_bind_to_nothing_are_all_named(self, server: Server, checkpoints: Checkpoints) -> None:
        files = broken_config(checkpoints.spare, target_modules=["q_proj"])
        answer = server.post("/v1/adapters", data={"name": "bad"}, files=files)
        assert answer.status_code == 400
        problems = answer.json()["error"]["problems"]
        assert len(problems) == 4
        assert all("w1" in problem["name"] for problem in problems)

    def test_pickles(self, server: Server, checkpoints: Checkpoints) -> None:
        parts = [parts_of(checkpoints.spare)["adapter_config"], ("adapter_model.bin", b"\x80\x04")]
        answer = server.post("/v1/adapters", data={"name": "bad"}, files=[("file", part) for part in parts])
        assert answer.status_code == 400
        assert "safetensors" in answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("body", "headers", "words"),
        [
            (b"{}", {"Content-Type": "application/json"}, "multipart/form-data"),
            (b"", {}, "multipart/form-data"),
            (b"x", {"Content-Type": "multipart/form-data"}, "multipart/form-data"),
            (b"", MULTIPART, "ends in the middle"),
            (b"garbage", MULTIPART, "broken"),
            (multipart([('name="name"', b"n")])[:-8], MULTIPART, "ends in the middle"),
            (multipart([]), MULTIPART, ""),
            (multipart([('name="name"', b"n")]), MULTIPART, "adapter_config"),
            (multipart([('name="name"', b"n"), ('name="name"', b"m")]), MULTIPART, "twice"),
            (multipart([('name="name"', b"n" * 2000)]), MULTIPART, "too long"),
            (multipart([('name="name"', b"\xff")]), MULTIPART, ""),
            (multipart([('name="readme"; filename="x.exe"', b"x")]), MULTIPART, ""),
            (multipart([(f'name="adapter_config"; filename="{CONFIG}"', config_bytes())]), MULTIPART, "name"),
            (multipart([('name="x"; filename="../../etc/passwd"', b"x")]), MULTIPART, ""),
            (multipart([("x" * 100_000, b"x")]), MULTIPART, "broken"),
            (multipart([('name="name"', b"n"), ('name="archive"; filename="a.zip"', b"PK no")]), MULTIPART, ""),
        ],
    )
    def test_bodies(self, server: Server, body: bytes, headers: dict[str, str], words: str) -> None:
        answer = server.post("/v1/adapters", content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]

    def test_a_listed_adapter_is_told_in_full_by_its_own_address(self, server: Server) -> None:
        listed = server.get("/v1/adapters").json()["data"]
        assert [one["name"] for one in listed] == sorted(ADAPTERS)
        for one in listed:
            told = server.get(f"/v1/adapters/{one['name']}").json()
            assert told.pop("modules")
            assert told.pop("notes") is not None
            assert told.pop("eos_token_ids") == []
            assert told.pop("labels") == []
            assert told == one

    def test_nothing_of_a_refused_upload_stays(self, server: Server) -> None:
        names = {adapter["name"] for adapter in server.get("/v1/adapters").json()["data"]}
        assert names == set(ADAPTERS)
        staging = list(server.store_dir.glob("*/staging"))
        assert len(staging) == 1
        assert list(staging[0].iterdir()) == []


class TestDelete:
    def test_the_name_goes_at_once_and_the_rest_with_the_last_request(
        self, server: Server, client: openai.OpenAI, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        doomed = make_adapter(checkpoints.base, tmp_path / "doomed", rank=32, target_modules="all-linear", seed=5)
        digest = upload(server, "doomed", doomed).json()["digest"]
        options: Any = {"model": "doomed", "prompt": "the", "temperature": 0, "extra_body": {"ignore_eos": True}}
        expected = client.completions.create(max_tokens=400, **options).choices[0].text
        wait_for(lambda: server.get("/v1/adapters/doomed").json()["state"] == "device", "the engine to tell of it")
        held = self.held(server)
        assert min(held) > 0
        with ThreadPoolExecutor(1) as pool, standing_still(*server.engine_pids()):
            last = pool.submit(client.completions.create, max_tokens=400, **options)
            wait_for(lambda: server.metric("num_requests_open") == 1, "the request to be the engine's")
            answer = server.http.delete(f"{server.url}/v1/adapters/doomed")
            assert answer.json() == {"name": "doomed", "object": "adapter.deleted", "digest": digest, "deleted": True}
            assert server.get("/v1/adapters/doomed").status_code == 404
            with pytest.raises(openai.NotFoundError):
                client.completions.create(**options)
            assert self.held(server) == held
            assert server.metric("num_requests_open") == 1
        assert last.result().choices[0].text == expected
        wait_for(lambda: not list(server.store_dir.glob(f"*/adapters/{digest}")), "the files to go")
        for at, what in enumerate(("rows", "host memory", "files")):
            wait_for(lambda at=at: self.held(server)[at] < held[at], f"the {what} to be free")
        assert 'adapter="doomed"' not in server.get("/metrics").text

    def held(self, server: Server) -> tuple[float, float, float]:
        """Rows on the device, adapters in host memory, adapters on disk."""
        return (
            server.metric("adapter_row_bytes_used"),
            server.metric("adapters", tier="host"),
            server.metric("adapters_on_disk"),
        )

    def test_what_is_uploaded_is_told_to_be_on_the_device_although_nobody_has_asked_for_it(
        self, server: Server, checkpoints: Checkpoints, gone: list[str]
    ) -> None:
        gone.append("eager")
        assert upload(server, "eager", checkpoints.spare).status_code == 201
        wait_for(lambda: server.get("/v1/adapters/eager").json()["state"] == "device", "the engine to tell of it")

    def test_a_deleted_content_can_come_back_under_its_digest(
        self, server: Server, client: openai.OpenAI, checkpoints: Checkpoints, gone: list[str]
    ) -> None:
        gone.append("phoenix")
        texts = []
        for _ in range(3):
            assert upload(server, "phoenix", checkpoints.spare).status_code == 201
            texts.append(client.completions.create(model="phoenix", prompt="the", **GREEDY).choices[0].text)
            assert server.http.delete(f"{server.url}/v1/adapters/phoenix").status_code == 200
        assert len(set(texts)) == 1

    def test_files_are_counted_once_for_all_names_and_until_they_are_removed(
        self, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remove, num_after_removal = StoreFiles.remove_adapter, []

        def remove_and_count(files: StoreFiles, digest: str) -> bool:
            is_gone = remove(files, digest)
            num_after_removal.append(store.num_on_disk())
            return is_gone

        monkeypatch.setattr(StoreFiles, "remove_adapter", remove_and_count)
        for name in ("one", "two"):
            upload_small(store, small_layout(), name)
        assert (store.num_names(), store.num_on_disk()) == (2, 1)
        lease = store.lease("one")
        for name in ("one", "two"):
            store.delete(name)
            assert (store.num_on_disk(), num_after_removal) == (1, [])
        lease.release()
        store.settle()
        assert (store.num_on_disk(), num_after_removal) == (0, [1])

    def test_an_unknown_name_is_404(self, server: Server) -> None:
        assert server.http.delete(f"{server.url}/v1/adapters/nobody").status_code == 404
        answer = server.http.delete(f"{server.url}/v1/adapters/{BASE}")
        assert (answer.status_code, "base model" in answer.json()["error"]["message"]) == (400, True)


class HeldBack:
    """A call that is done at once, in its own thread, and returns when the test says so."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.done, self.may_return = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._call(*args, **kwargs)
        self.done.set()
        assert self.may_return.wait(LIMIT_SECONDS)
        return result


class Routes:
    """The routes of adapters over a real store, in this process, so that a test can order their threads."""

    def __init__(self, tmp_path: Path, store: AdapterStore, *, as_vllm: bool) -> None:
        layout, self._as_vllm = small_layout(), as_vllm
        tensors = safetensors_bytes(lora_tensors(layout, modules_ending(layout, "q_proj"), 4))
        self._directory = write_peft_directory(tmp_path / "root" / "peft", config_bytes(), tensors)
        self.metrics = Metrics("base")
        app = FastAPI()
        app.include_router(adapter_routes.router)
        app.include_router(vllm_lora.router)
        rule, budget = BodyRule(1 << 20), BodyBudget(1 << 20)
        access = Access(Tenants(), ())
        app.add_middleware(
            EntryMiddleware, access=access, metrics=self.metrics, body_rule=lambda *_: rule, budget=budget
        )
        self.services = app.state.services = Services(
            settings=Settings(model_name="base", lora_path_root=tmp_path / "root"),
            engine=cast(EngineProtocol, SimpleNamespace(state="starting", tiers={}, places_of=lambda _digest: {})),
            layout=layout,
            tokenizer=cast(TextTokenizer, None),
            templates={},
            metrics=self.metrics,
            store=store,
        )
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")

    async def put(self) -> None:
        if self._as_vllm:
            body = {"lora_name": "mine", "lora_path": "peft"}
            answer = await self._http.post("/v1/load_lora_adapter", json=body)
        else:
            answer = await self._http.post("/v1/adapters", data={"name": "mine"}, files=parts_of(self._directory))
        assert answer.is_success, answer.text

    async def names_and_states(self) -> dict[str, tuple[str, int | None]]:
        """As the first page lists them: where each adapter is, and when it was last used."""
        answer = await self._http.get("/v1/adapters")
        return {one["name"]: (one["state"], one["last_used"]) for one in answer.raise_for_status().json()["data"]}

    async def delete(self) -> None:
        if self._as_vllm:
            answer = await self._http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        else:
            answer = await self._http.delete("/v1/adapters/mine")
        assert answer.is_success, answer.text


@pytest.mark.parametrize("as_vllm", [False, True])
class TestCrossing:
    """An upload and a delete of one name whose news reach the metrics in the other order."""

    def test_a_name_that_came_back_during_its_delete_is_counted_as_its_own(
        self, tmp_path: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch, as_vllm: bool
    ) -> None:
        routes, held = Routes(tmp_path, store, as_vllm=as_vllm), HeldBack(store.delete)
        monkeypatch.setattr(store, "delete", held)

        async def cross() -> None:
            await routes.put()
            delete = asyncio.create_task(routes.delete())
            assert await asyncio.to_thread(held.done.wait, 30)
            await routes.put()
            held.may_return.set()
            await delete

        asyncio.run(cross())
        assert list(store.names()) == ["mine"]
        assert routes.metrics.by_adapter.label_of("mine") == "mine"

    def test_a_name_that_was_deleted_during_its_upload_is_known_no_more(
        self, tmp_path: Path, store: AdapterStore, monkeypatch: pytest.MonkeyPatch, as_vllm: bool
    ) -> None:
        routes, held = Routes(tmp_path, store, as_vllm=as_vllm), HeldBack(Upload.finish)
        monkeypatch.setattr(Upload, "finish", lambda *args, **kwargs: held(*args, **kwargs))

        async def cross() -> None:
            put = asyncio.create_task(routes.put())
            assert await asyncio.to_thread(held.done.wait, 30)
            await routes.delete()
            held.may_return.set()
            await put

        asyncio.run(cross())
        assert store.names() == {}
        assert routes.metrics.by_adapter.label_of("mine") == "deleted:"


def changed(directory: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """The adapter with other tensors."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "adapter_model.safetensors")
    save_file({name: change(name, one) for name, one in tensors.items()}, target / "adapter_model.safetensors")
    return target


class TestProbe:
    """Uploads that ask for a run before the name stands for them."""

    def test_a_sound_adapter_gets_its_name(self, server: Server, checkpoints: Checkpoints, gone: list[str]) -> None:
        gone.append("probed")
        answer = upload(server, "probed", checkpoints.spare, params={"probe": "true"})
        assert (answer.status_code, answer.json()["notes"]) == (201, [])
        again = server.http.put(
            f"{server.url}/v1/adapters/probed", files=parts_of(checkpoints.spare), params={"probe": "1"}
        )
        assert (again.status_code, again.json()["version"]) == (200, 1)

    def test_one_that_changes_nothing_is_refused_or_taken_with_a_warning(
        self, server: Server, checkpoints: Checkpoints, gone: list[str], tmp_path: Path
    ) -> None:
        idle = changed(checkpoints.spare, tmp_path / "idle", lambda name, one: one * ("lora_A" in name))
        refused = upload(server, "idle", idle, params={"probe": "true"})
        assert (refused.status_code, "changes nothing" in refused.text) == (400, True)
        assert server.get("/v1/adapters/idle").status_code == 404
        gone.append("idle")
        taken = upload(server, "idle", idle)
        assert (taken.status_code, "changes nothing" in taken.json()["notes"][0]) == (201, True)

    def test_one_whose_logits_are_no_numbers_is_refused_and_the_name_stays(
        self, server: Server, checkpoints: Checkpoints, gone: list[str], tmp_path: Path
    ) -> None:
        gone.append("kept")
        before = upload(server, "kept", checkpoints.spare).json()["digest"]
        wild = changed(checkpoints.spare, tmp_path / "wild", lambda _, one: torch.full_like(one, 1e30))
        answer = server.http.put(f"{server.url}/v1/adapters/kept", files=parts_of(wild), params={"probe": "true"})
        assert (answer.status_code, "no finite logits" in answer.text) == (400, True)
        assert server.get("/v1/adapters/kept").json()["digest"] == before

    def test_the_command_asks_for_it(
        self,
        server: Server,
        checkpoints: Checkpoints,
        gone: list[str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        idle = changed(checkpoints.spare, tmp_path / "idle", lambda name, one: one * ("lora_A" in name))
        command = ["upload", "--name=tried", "--probe", f"--url={server.url}"]
        gone.append("tried")
        assert main([*command, str(idle)]) == 1
        assert "changes nothing" in capsys.readouterr().err
        assert main([*command, str(checkpoints.spare)]) == 0
        assert "tried@1 is there" in capsys.readouterr().out

    def test_other_parameters_are_refused(self, server: Server, checkpoints: Checkpoints) -> None:
        for params in ({"prob": "true"}, {"probe": "perhaps"}):
            assert upload(server, "never", checkpoints.spare, params=params).status_code == 400

    def test_activated_and_magnitudes_are_served_and_probed(
        self, server: Server, client: openai.OpenAI, checkpoints: Checkpoints, gone: list[str], tmp_path: Path
    ) -> None:
        kinds: dict[str, dict[str, Any]] = {
            "activated": {"alora_invocation_tokens": [40, 41]},
            "dora": {"use_dora": True},
        }
        for name, kind in kinds.items():
            gone.append(name)
            made = make_adapter(
                checkpoints.base, tmp_path / name, rank=4, target_modules=["q_proj", "w1"], seed=5, **kind
            )
            answer = upload(server, name, made, params={"probe": "true"})
            assert answer.status_code == 201, answer.text
        assert {tuple(one["parts"]) for one in answer.json()["modules"]} == {("lora_magnitude_vector",)}

        def completed(model: str, prompt: list[int]) -> str:
            return str(client.completions.create(model=model, prompt=prompt, **GREEDY).choices[0].text)

        plain, invoked = [30, 31, 32], [30, 31, 40, 41, 32]
        assert completed("activated", plain) == completed(BASE, plain)
        assert completed("activated", invoked) != completed(BASE, invoked)
        assert completed("dora", plain) != completed(BASE, plain)
