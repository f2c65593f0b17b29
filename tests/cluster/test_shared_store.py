"""Two servers with an engine each on one store: what one has answered holds for the next request to the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.tenants.keys_file import hash_of
from tests.support.http.server import Server, posted, running_server, start_server, wait_for
from tests.support.models.tiny_models import make_adapter, make_tiny_model

# Of a tenant whose key is "limited".
KEYS = f"""
[tenants.acme]
tokens_per_minute = 20000
requests_in_flight = 2

[[keys]]
tenant = "acme"
sha256 = "{hash_of("limited").hex()}"
scopes = ["infer"]
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shared")
    make_tiny_model("llama", root / "base", max_position_embeddings=16_384)
    for seed in range(3):
        make_adapter(root / "base", root / f"adapter-{seed}", rank=4, target_modules=["q_proj", "v_proj"], seed=seed)
    return root


@pytest.fixture(scope="module")
def servers(checkpoints: Path) -> Iterator[tuple[Server, Server]]:
    (checkpoints / "keys.toml").write_text(KEYS)
    settings = {"model_name": "tiny", "store_shared": True, "store_dir": checkpoints / "store"}
    settings |= {"kv_bytes": "24MiB", "admin_api_keys": "operator", "keys_file": checkpoints / "keys.toml"}
    with (
        running_server(checkpoints / "base", checkpoints / "one", **settings) as one,
        running_server(checkpoints / "base", checkpoints / "other", **settings) as other,
    ):
        for server in (one, other):
            server.http.headers["Authorization"] = "Bearer operator"
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


def test_a_tenant_s_limits_count_on_both(servers: tuple[Server, Server]) -> None:
    one, other = servers
    key = {"Authorization": "Bearer limited"}

    def left(server: Server, what: str) -> int:
        return int(server.get("/v1/models", headers=key).headers[f"x-ratelimit-remaining-{what}"])

    body = {"model": "tiny", "prompt": "the", "ignore_eos": True, "stream": True}

    def refused(**fields: int) -> str:
        answer = other.post("/v1/completions", json=body | fields, headers=key)
        assert answer.status_code == 429
        message: str = answer.json()["error"]["message"]
        return message

    endless = body | {"max_tokens": 15_000}
    with one.http.stream("POST", f"{one.url}/v1/completions", json=endless, headers=key) as stream:
        assert stream.status_code == 200
        wait_for(lambda: left(other, "requests") == 1, "the request in flight being known")
        assert "1 of your 2 requests" in refused(n=2, max_tokens=1)
        assert "tokens per minute" in refused(max_tokens=6000)
    wait_for(lambda: left(other, "requests") == 2, "its end being known")


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
