"""Replacing adapters over HTTP: conditions, history, the way back, and which version speaks."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openai
import peft
import pytest
import transformers
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file as load_torch

from service.cli.client import ClientError, Missing
from service.cli.main import main
from service.client import AsyncClient, Client, Version
from tests.api.adapter_routes import moves
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server, wait_for
from tests.support.http.uploads import parts_of, tar_of

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}


@pytest.fixture
def contents(checkpoints: Checkpoints) -> list[Path]:
    return [checkpoints.adapters / name for name in ("alpha", "beta", "gamma")]


@pytest.fixture
def name(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name that no other test has had, and that is deleted after this one."""
    name = re.sub(r"\W+", "-", request.node.name)
    yield name
    server.http.delete(f"{server.url}/v1/adapters/{name}")


def put(server: Server, name: str, directory: Path, note: str = "", **headers: str) -> Any:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    data = {"note": note} if note else {}
    return server.http.put(f"{server.url}/v1/adapters/{name}", data=data, files=parts_of(directory), headers=named)


def code_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_put_creates_and_then_replaces(server: Server, contents: list[Path], name: str) -> None:
    first, second, same = (put(server, name, contents[at], note=f"try {at}") for at in (0, 1, 1))
    assert [one.status_code for one in (first, second, same)] == [201, 201, 200]
    assert [one.json()["version"] for one in (first, second, same)] == [1, 2, 2]
    assert second.headers["etag"] == f'"{second.json()["digest"]}"'
    history = server.get(f"/v1/adapters/{name}/history").json()
    assert [(one["number"], one["digest"], one["note"]) for one in history["data"]] == [
        (2, second.json()["digest"], "try 1"),
        (1, first.json()["digest"], "try 0"),
    ]
    assert server.get(f"/v1/adapters/{name}").json()["version"] == 2
    assert server.get(f"/v1/adapters/{name}@1").json()["digest"] == first.json()["digest"]


def test_a_note_has_as_many_characters_in_a_put_as_in_a_rollback(
    server: Server, contents: list[Path], name: str
) -> None:
    longest = "注" * 4096
    assert put(server, name, contents[0]).status_code == 201
    assert put(server, name, contents[1], note=longest).status_code == 201
    assert server.post(f"/v1/adapters/{name}/rollback", json={"note": longest}).status_code == 200
    notes = [one["note"] for one in server.get(f"/v1/adapters/{name}/history").json()["data"]]
    assert notes == [longest, longest, ""]
    for content, note in ((2, "x" * 4097), (2, "注" * 4097), (1, "x" * (1 << 20))):
        refused = put(server, name, contents[content], note=note)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "note")
        assert "4096 characters" in refused.json()["error"]["message"]
    assert server.get(f"/v1/adapters/{name}").json()["version"] == 3


def test_a_note_on_what_makes_no_version_is_not_dropped_in_silence(
    server: Server, contents: list[Path], name: str
) -> None:
    def told(answer: Any) -> list[str]:
        assert answer.status_code in (200, 201)
        return [note for note in answer.json()["notes"] if "sent with this" in note]

    assert told(put(server, name, contents[0], note="first")) == []
    assert told(put(server, name, contents[0], note="first")) == []  # sent again, as a client may
    assert told(put(server, name, contents[0])) == []
    (sentence,) = told(put(server, name, contents[0], note="second"))
    assert "version 1" in sentence
    assert told(server.post(f"/v1/adapters/{name}/rollback", json={"version": 1, "note": "third"})) == [sentence]
    files, named = parts_of(contents[0]), {"name": name, "note": "fourth"}
    assert told(server.post("/v1/adapters", data=named, files=files)) == [sentence]
    (kept,) = server.get(f"/v1/adapters/{name}/history").json()["data"]
    assert kept["note"] == "first"
    assert told(server.get(f"/v1/adapters/{name}")) == []


def test_whoever_has_lost_changes_nothing(server: Server, contents: list[Path], name: str) -> None:
    digest = put(server, name, contents[0], If_None_Match="*").json()["digest"]
    lost = [
        put(server, name, contents[1], If_None_Match="*"),
        put(server, name, contents[1], If_Match='"2"'),
        put(server, name, contents[1], If_Match=f'W/"{digest}"'),
        put(server, "nobody", contents[1], If_Match="*"),
        server.post(f"/v1/adapters/{name}/rollback", json={}, headers={"If-Match": "7"}),
        server.http.delete(f"{server.url}/v1/adapters/{name}", headers={"If-Match": "7"}),
    ]
    assert [code_of(one) for one in lost] == [(412, "precondition_failed")] * len(lost)
    assert server.get(f"/v1/adapters/{name}").json()["digest"] == digest
    assert put(server, name, contents[1], If_Match=f'"5", "{digest}"').json()["version"] == 2
    assert put(server, name, contents[2], If_Match="2").json()["version"] == 3
    for headers in ({"If_None_Match": '"x"'}, {"If_None_Match": "*", "If_Match": "1"}):
        assert code_of(put(server, name, contents[0], **headers)) == (400, "bad_request")
    posted = server.post("/v1/adapters", data={"name": name}, files=parts_of(contents[2]), headers={"If-Match": "3"})
    assert code_of(posted) == (400, "bad_request")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("PUT", "/pin", None), ("DELETE", "/pin", None), ("PATCH", "", {"visibility": "private"})],
)
def test_a_condition_is_refused_where_none_is_looked_at(
    server: Server, contents: list[Path], name: str, method: str, path: str, body: dict[str, str] | None
) -> None:
    put(server, name, contents[0])
    before = server.get(f"/v1/adapters/{name}").json()
    url, headers = f"{server.url}/v1/adapters/{name}{path}", {"If-Match": '"7"'}
    assert code_of(server.http.request(method, url, json=body, headers=headers)) == (400, "bad_request")
    after = server.get(f"/v1/adapters/{name}").json()
    assert [after[field] for field in ("pinned", "visibility")] == [before[field] for field in ("pinned", "visibility")]


def test_a_put_whose_answer_was_lost_can_be_sent_again_under_its_condition(
    server: Server, contents: list[Path], name: str
) -> None:
    for content, number, condition in ((0, 1, {"If_None_Match": "*"}), (1, 2, {"If_Match": "1"})):
        made, again = (put(server, name, contents[content], **condition) for _ in range(2))
        assert (made.status_code, again.status_code) == (201, 200)
        assert made.json()["version"] == again.json()["version"] == number
    lost = [
        put(server, name, contents[2], If_Match="1"),  # other content than it stands for
        put(server, name, contents[1], If_None_Match="*"),  # it was not free before this content came
        server.post(f"/v1/adapters/{name}/rollback", json={}, headers={"If-Match": "1"}),
        server.http.delete(f"{server.url}/v1/adapters/{name}", headers={"If-Match": "1"}),
    ]
    assert [code_of(one) for one in lost] == [(412, "precondition_failed")] * len(lost)
    assert server.get(f"/v1/adapters/{name}").json()["version"] == 2


def test_a_name_in_the_body_is_the_one_in_the_address(server: Server, contents: list[Path], name: str) -> None:
    path = f"{server.url}/v1/adapters/{name}"
    archive = {"archive": ("x.tar.gz", tar_of(contents[0]))}
    assert server.http.put(path, data={"name": name}, files=archive).status_code == 201
    assert code_of(server.http.put(path, data={"name": "other"}, files=archive)) == (400, "bad_request")
    assert code_of(put(server, BASE, contents[0])) == (409, "conflict")
    assert code_of(put(server, ".x", contents[0])) == (400, "invalid_name")


def test_back_and_forth(server: Server, contents: list[Path], name: str) -> None:
    digests = [put(server, name, content).json()["digest"] for content in contents]
    path = f"/v1/adapters/{name}/rollback"
    back = server.post(path, json={"version": 1, "note": "worse"})
    assert (back.status_code, back.json()["version"], back.json()["digest"]) == (200, 4, digests[0])
    assert server.post(path, json={}).json()["digest"] == digests[2]
    assert server.post(path, json={"version": digests[1][:12]}).json()["version"] == 6
    for body, code in (
        ({"version": 99}, "not_found"),
        ({"version": "x"}, "not_found"),
        ({"version": 1.5}, "bad_request"),
        ({"version": ""}, "bad_request"),  # of a variable that is not set: nobody asked for the version before
    ):
        assert server.post(path, json=body).json()["error"]["code"] == code, body
    assert code_of(server.post("/v1/adapters/nobody/rollback", json={})) == (404, "not_found")
    assert code_of(server.get("/v1/adapters/nobody/history")) == (404, "not_found")


def test_every_answer_says_which_version_spoke(
    server: Server, client: openai.OpenAI, contents: list[Path], name: str
) -> None:
    digests = [put(server, name, content).json()["digest"] for content in contents[:2]]
    texts = []
    for model, number in ((name, 2), (f"{name}@1", 1), (f"{BASE}:{name}@{digests[0]}", 1)):
        raw = client.completions.with_raw_response.create(model=model, prompt="the", **GREEDY)
        answer, digest = raw.parse(), digests[number - 1]
        assert raw.headers["x-multilora-adapter"] == f"{name}@{number} sha256:{digest}"
        assert answer.system_fingerprint is not None
        assert answer.system_fingerprint.endswith(f"_{digest[:16]}")
        assert answer.model == name
        texts.append(answer.choices[0].text)
        request_id = raw.headers["x-request-id"]
        (line,) = wait_for(lambda request_id=request_id: server.log_lines(request_id), "the request to be logged")
        assert line["version"] == f"{name}@{number}:{digest[:12]}"
    assert texts[1] == texts[2] != texts[0]
    chat = {"model": f"{name}@1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    assert server.post("/v1/chat/completions", json=chat).headers["x-multilora-adapter"].startswith(f"{name}@1 ")
    batch = [{"model": model, "prompt": "the", "max_tokens": 1} for model in (name, f"{name}@1", BASE)]
    sent = server.post("/v1/completions/batch", json={"items": batch})
    assert sent.headers["x-multilora-adapter"] == "several"
    assert "x-multilora-adapter" not in server.post("/v1/completions", json={"prompt": "the"}).headers
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=f"{name}@7", prompt="the", **GREEDY)


def test_a_stream_ends_on_the_version_that_it_began_with(
    server: Server, client: openai.OpenAI, contents: list[Path], name: str
) -> None:
    put(server, name, contents[0])
    options: Any = {"model": name, "prompt": "the", "temperature": 0, "extra_body": {"ignore_eos": True}}
    expected = client.completions.create(max_tokens=300, **options).choices[0].text
    stream = client.completions.create(max_tokens=300, stream=True, **options)
    chunks = [next(stream)]
    put(server, name, contents[1])
    new = client.completions.with_raw_response.create(max_tokens=1, **options)
    assert new.headers["x-multilora-adapter"].startswith(f"{name}@2 ")
    chunks += stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert len({chunk.system_fingerprint for chunk in chunks}) == 1


def test_no_request_fails_while_names_move(server: Server, contents: list[Path]) -> None:
    """`python -m tests.api.adapter_routes.moves` has 10,000 requests and 200 moves."""
    outcome = moves.run(server.url, contents, num_requests=600, num_moves=45)
    assert set(outcome.statuses) == {200}
    assert outcome.statuses[200] >= 600
    assert (outcome.late, outcome.mixed, outcome.num_moves) == (0, 0, 45)
    assert outcome.num_versions_seen > 9, "the names moved before or after the requests, not among them"


def test_the_commands_of_an_operator(
    server: Server, contents: list[Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    at = f"--url={server.url}"

    def said(*arguments: str) -> str:
        assert main([*arguments, at]) == 0
        return capsys.readouterr().out

    assert f"{name}@1 is there" in said("upload", str(contents[0]), f"--name={name}", "--note=first")
    assert f"{name}@2 is there" in said("upload", str(contents[1]), f"--name={name}")
    assert f"{name}@2 was there already" in said("upload", str(contents[1]), f"--name={name}")
    for setting in ("restart", "continue"):
        said("upload", str(contents[1]), f"--name={name}", "--without-tokenizer", f"--on-new-version={setting}")
        assert server.get(f"/v1/adapters/{name}").json()["on_new_version"] == setting
    with pytest.raises(SystemExit, match="2"):
        main(["upload", str(contents[1]), f"--name={name}", "--on-new-version=again", at])
    refusal = capsys.readouterr().err
    assert [word in refusal for word in ("again", "keep", "continue", "restart")] == [True] * 4
    assert main(["upload", str(contents[1]), f"--name={name}", "--expert-b-order=grouped_by_expert", at]) == 1
    assert "has no experts; leave expert_b_order out" in capsys.readouterr().err
    assert main(["upload", str(contents[2]), f"--name={name}", "--ephemeral", at]) == 1
    assert "on the disk" in capsys.readouterr().err
    assert main(["upload", str(contents[2]), f"--name={name}", "--new", at]) == 1
    assert "taken" in capsys.readouterr().err
    assert main(["upload", str(contents[2]), f"--name={name}", "--if-version=1", at]) == 1
    assert "version 2" in capsys.readouterr().err
    assert f"{name}@3 is there" in said("rollback", name, "--to=1", "--note=worse")
    listed = said("history", name)
    assert [word in listed for word in ("first", "worse", "1", "2", "3")] == [True] * 5
    assert main(["history", "nobody", at]) == 1
    assert json.loads(said("history", name, "--json"))["data"][0]["number"] == 3


def put_ephemeral(server: Server, name: str, directory: Path) -> Any:
    return server.http.put(f"{server.url}/v1/adapters/{name}?ephemeral=true", files=parts_of(directory))


def test_ephemeral_versions_answer_and_go_with_the_server(
    checkpoints: Checkpoints, contents: list[Path], tmp_path: Path
) -> None:
    """Also where it is killed: nothing of them is found by the next one."""
    with running_server(checkpoints.base, tmp_path, model_name=BASE, max_ephemeral_bytes="8MiB") as server:
        durable = put(server, "durable", contents[0]).json()
        stored = len(list((tmp_path / "store").rglob("adapter_model.safetensors")))
        refused = put_ephemeral(server, "durable", contents[1])
        assert code_of(refused) == (409, "conflict")
        assert "another name" in refused.json()["error"]["message"]
        digests = [put(server, f"kept-{at}", content).json()["digest"] for at, content in enumerate(contents)]
        texts = [
            server.post("/v1/completions", json={"model": f"kept-{at}", "prompt": "the", **GREEDY}).json()["choices"]
            for at in range(len(contents))
        ]
        for at in range(len(contents)):
            server.http.delete(f"{server.url}/v1/adapters/kept-{at}")
        for step in range(6):
            at = step % 2 + 1
            answer = put_ephemeral(server, "policy", contents[at])
            assert answer.status_code == 201, answer.text
            shown = answer.json()
            assert (shown["ephemeral"], shown["version"], shown["digest"]) == (True, step + 1, digests[at])
            spoken = server.post("/v1/completions", json={"model": "policy", "prompt": "the", **GREEDY})
            assert spoken.headers["x-multilora-adapter"] == f"policy@{step + 1} sha256:{digests[at]}"
            assert spoken.json()["choices"][0]["text"] == texts[at][0]["text"]
        listed = {one["name"]: one["ephemeral"] for one in server.get("/v1/adapters").json()["data"]}
        assert listed == {"durable": False, "policy": True}
        history = server.get("/v1/adapters/policy/history").json()["data"]
        assert [one["number"] for one in history] == [6, 5, 4, 3]
        assert server.get(f"/v1/adapters/policy@{digests[1]}").status_code == 200
        assert len([one for one in (tmp_path / "store").rglob("*.safetensors") if not one.is_symlink()]) == stored
        server.process.kill()
        server.process.wait()
    with running_server(checkpoints.base, tmp_path, model_name=BASE, max_ephemeral_bytes=0) as server:
        assert [one["name"] for one in server.get("/v1/adapters").json()["data"]] == ["durable"]
        assert server.get("/v1/adapters/durable").json()["digest"] == durable["digest"]
        assert len(list((tmp_path / "store").rglob("*.safetensors"))) == stored
        refused = put_ephemeral(server, "policy", contents[1])
        assert refused.status_code == 400
        assert "--max-ephemeral-bytes" in refused.json()["error"]["message"]


def test_tensors_load_as_an_ephemeral_version(server: Server, contents: list[Path], name: str) -> None:
    """By SGLang's route, whose body may be as large as an upload."""

    def load(config: Any, tensors: bytes) -> Any:
        body = {"lora_name": name, "config_dict": config, "serialized_tensors": base64.b64encode(tensors).decode()}
        return server.post("/load_lora_adapter_from_tensors", json=body)

    durable = put(server, f"{name}-durable", contents[0]).json()["digest"]
    server.http.delete(f"{server.url}/v1/adapters/{name}-durable")
    config = json.loads((contents[0] / "adapter_config.json").read_text())
    for version, content in ((1, contents[0]), (2, contents[1])):
        config = json.loads((content / "adapter_config.json").read_text())
        answer = load(config, (content / "adapter_model.safetensors").read_bytes())
        assert (answer.status_code, answer.json()["success"], answer.json()["version"]) == (200, True, version)
        assert (answer.json()["digest"] == durable) == (version == 1)
    spoken = server.post("/v1/completions", json={"model": name, "prompt": "the", **GREEDY})
    assert spoken.headers["x-multilora-adapter"] == f"{name}@2 sha256:{answer.json()['digest']}"
    refused = load(config, b"\x80\x05" + b"\0" * (6 << 20))
    assert refused.status_code == 400
    assert "safetensors.torch.save" in refused.json()["error"]["message"]
    gone = server.post("/unload_lora_adapter", json={"lora_name": name}).json()
    assert gone == {"success": True, "error_message": "", "version": None, "digest": answer.json()["digest"]}
    assert code_of(server.post("/unload_lora_adapter", json={"lora_name": name})) == (404, "not_found")


class TestClient:
    """`service.client`, for trainers."""

    PROMPT = (20, 30, 40)
    SAMPLING: Mapping[str, Any] = {"max_tokens": 6, "temperature": 0, "logprobs": 0}

    def test_tensors_a_directory_and_a_model_are_one_content(
        self, server: Server, checkpoints: Checkpoints, contents: list[Path], name: str
    ) -> None:
        directory = contents[0]
        config = json.loads((directory / "adapter_config.json").read_text())
        tensors = directory / "adapter_model.safetensors"
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.base)
        model = peft.PeftModel.from_pretrained(base, directory)
        durable = put(server, f"{name}-durable", directory).json()["digest"]
        server.http.delete(f"{server.url}/v1/adapters/{name}-durable")
        with Client(server.openai_url) as client:
            given = [
                (directory, None),
                (load_numpy(tensors), config),
                ({key: np.asfortranarray(value) for key, value in load_numpy(tensors).items()}, config),
                (load_torch(tensors), model.peft_config["default"]),
            ]
            for adapter, of in (*given, (model, None)):
                assert client.upload(name, adapter, of) == Version(name, 1, durable)
            assert server.get(f"/v1/adapters/{name}").json()["ephemeral"]
            with pytest.raises(TypeError, match="config"):
                client.upload(name, load_numpy(tensors))

    def test_a_directory_goes_with_all_that_the_server_reads(
        self, server: Server, contents: list[Path], name: str, tmp_path: Path
    ) -> None:
        directory = shutil.copytree(contents[0], tmp_path / "adapter")
        (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
        with Client(server.url) as client:
            client.upload(name, directory)
            assert server.get(f"/v1/adapters/{name}").json()["has_chat_template"]
            with pytest.raises(TypeError, match="config"):
                client.upload(name, directory, {"r": 8})
            (directory / "adapter_config.json").unlink()
            with pytest.raises(ClientError, match=r"no adapter_config\.json"):
                client.upload(name, directory)

    def test_answers_say_which_version_made_them(self, server: Server, contents: list[Path], name: str) -> None:
        with Client(server.url) as client:
            versions = [client.upload(name, content, note="by the client") for content in contents[:2]]
            first, second = (client.generate(f"{name}@{one.number}", self.PROMPT, **self.SAMPLING) for one in versions)
            assert (first.digest, second.digest) == (versions[0].digest, versions[1].digest)
            assert first.choices[0]["token_ids"] != second.choices[0]["token_ids"]
            assert len(first.logprobs(0)) == 6
            assert client.move(name, 1).digest == versions[0].digest
            assert client.generate(name, self.PROMPT, **self.SAMPLING).choices[0] == first.choices[0]
            assert client.generate(BASE, self.PROMPT, **self.SAMPLING).digest == ""
            client.pause("wait")
            assert server.get("/is_paused").json() == {"is_paused": True}
            assert client.upload(name, contents[2]).number == 4, "a paused server takes uploads"
            client.resume()
            with pytest.raises(ClientError, match="version 4"):
                client.upload(name, contents[0], if_version="3")
            client.delete(name)
            with pytest.raises(Missing, match=name):
                client.generate(name, self.PROMPT)

    def test_the_asynchronous_client_has_the_same(self, server: Server, contents: list[Path], name: str) -> None:
        async def run() -> None:
            async with AsyncClient(server.url) as client:
                version = await client.upload(name, contents[0])
                asked = [client.generate(name, self.PROMPT, **self.SAMPLING) for _ in range(20)]
                assert {one.digest for one in await asyncio.gather(*asked)} == {version.digest}
                with pytest.raises(ClientError, match="max_tokens"):
                    await client.generate(name, self.PROMPT, max_tokens=-1)
                await client.delete(name)

        asyncio.run(run())
