"""Two servers with an engine each on one store: what one has answered holds for the next request to the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, posted, running_server, start_server, wait_for
from tests.support.tiny_models import make_adapter, make_tiny_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    make_tiny_model("llama", root / "base")
    for seed in range(3):
        make_adapter(root / "base", root / f"adapter-{seed}", rank=4, target_modules=["q_proj", "v_proj"], seed=seed)
    return root


@pytest.fixture(scope="module")
def servers(checkpoints: Path) -> Iterator[tuple[Server, Server]]:
    settings = {"model_name": "tiny", "store_shared": True, "store_dir": checkpoints / "store"}
    with (
        running_server(checkpoints / "base", checkpoints / "one", **settings) as one,
        running_server(checkpoints / "base", checkpoints / "other", **settings) as other,
    ):
        yield one, other


def _files(checkpoints: Path, seed: int) -> dict[str, bytes]:
    names = "adapter_config.json", "adapter_model.safetensors"
    return {name.partition(".")[0]: (checkpoints / f"adapter-{seed}" / name).read_bytes() for name in names}


def _put(server: Server, checkpoints: Path, name: str, seed: int) -> int:
    answer = server.http.put(f"{server.url}/v1/adapters/{name}", files=_files(checkpoints, seed))
    assert answer.status_code in (200, 201), answer.text
    version: int = answer.json()["version"]
    return version


def _text(server: Server, name: str) -> str:
    body = {"model": name, "prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_what_one_server_answered_holds_on_the_other(servers: tuple[Server, Server], checkpoints: Path) -> None:
    one, other = servers
    texts = set()
    for seed in range(3):
        writer, reader = (one, other) if seed % 2 else (other, one)
        version = _put(writer, checkpoints, "mine", seed)
        assert version == seed + 1
        assert reader.get("/v1/adapters/mine").json()["version"] == version
        assert _text(reader, "mine") == _text(writer, "mine") == _text(reader, f"mine@{version}")
        texts.add(_text(reader, "mine"))
    assert len(texts) == 3
    assert other.post("/v1/adapters/mine/rollback", json={"version": 1}).json()["version"] == 4
    assert _text(one, "mine") == _text(one, "mine@1")
    assert [model["id"] for model in one.get("/v1/models").json()["data"]] == ["tiny", "mine"]
    assert one.http.delete(f"{one.url}/v1/adapters/mine").status_code == 200
    body = {"model": "mine", "prompt": "the", "max_tokens": 1}
    assert other.post("/v1/completions", json=body).status_code == 404
    assert [model["id"] for model in other.get("/v1/models").json()["data"]] == ["tiny"]


def test_what_is_pinned_on_one_server_is_on_the_device_of_both(
    servers: tuple[Server, Server], checkpoints: Path
) -> None:
    one, other = servers
    _put(one, checkpoints, "pinned", 0)
    path = f"{one.url}/v1/adapters/pinned"
    assert one.http.put(f"{path}/pin").status_code == 200
    for server in servers:
        wait_for(lambda server=server: server.get("/v1/adapters/pinned").json()["state"] == "device", "it to be there")
    assert other.get("/v1/adapters/pinned").json()["pinned"] is True
    assert one.http.delete(path).status_code == 200


def test_a_stream_goes_on_while_its_adapter_is_deleted_on_the_other(
    servers: tuple[Server, Server], checkpoints: Path
) -> None:
    one, other = servers
    _put(one, checkpoints, "brief", 0)
    body = {"model": "brief", "prompt": "the", "max_tokens": 60, "stream": True, "ignore_eos": True}
    with other.http.stream("POST", f"{other.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        assert one.http.delete(f"{one.url}/v1/adapters/brief").status_code == 200
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "error" not in "".join(events)


def test_nothing_that_was_answered_is_lost_when_a_server_is_killed(
    servers: tuple[Server, Server], checkpoints: Path
) -> None:
    """A third server takes changes, like the others, and is killed in the middle of one."""
    settings = {"model_name": "tiny", "store_shared": True, "store_dir": checkpoints / "store"}
    third = start_server(checkpoints / "base", checkpoints / "third", **settings)
    expected = {}
    try:
        for seed in range(3):
            for server in (third, servers[seed % 2]):
                expected[f"name-{seed}"] = _put(server, checkpoints, f"name-{seed}", (seed + (server is third)) % 3)
        with posted(third, "/v1/adapters", {}):  # whatever it was about to do
            third.process.kill()
    finally:
        third.process.kill()
        third.process.wait()
    for server in servers:
        listed = json.loads(server.get("/v1/adapters").text)["data"]
        assert {row["name"]: row["version"] for row in listed} == expected == dict.fromkeys(expected, 2)
        assert _text(server, "name-0") == _text(server, "name-2@1")
    for name in expected:
        assert servers[0].http.delete(f"{servers[0].url}/v1/adapters/{name}").status_code == 200
