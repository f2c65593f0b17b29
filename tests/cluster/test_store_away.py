"""The adapters' directory is away while servers run, as when a file server fails: here it has another name."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.errors import StorageFull, StoreUnreachable
from adapters.files.durable_files import store_fault
from tests.support.http.server import Server, running_server
from tests.support.http.uploads import parts_of
from tests.support.models.tiny_models import make_adapter, make_tiny_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("away")
    make_tiny_model("llama", root / "base", max_position_embeddings=1024)
    for seed, name in enumerate(("loaded", "moved", "new")):
        make_adapter(root / "base", root / name, rank=4, target_modules=["q_proj", "v_proj"], seed=seed)
    return root


@pytest.fixture(scope="module", params=["alone", "shared"])
def server(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[Server]:
    work_dir = checkpoints / request.param
    is_shared = request.param == "shared"
    with running_server(checkpoints / "base", work_dir, model_name="tiny", store_shared=is_shared) as running:
        yield running


def _text(server: Server, model: str) -> str:
    body = {"model": model, "prompt": "the cat", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_what_is_loaded_is_served_changes_are_refused_and_all_comes_back(server: Server, checkpoints: Path) -> None:
    files = {name: parts_of(checkpoints / name) for name in ("loaded", "moved", "new")}
    path = f"{server.url}/v1/adapters"
    server.http.put(f"{path}/loaded", files=files["loaded"]).raise_for_status()
    server.http.put(f"{path}/loaded", files=files["moved"]).raise_for_status()
    expected = {model: _text(server, model) for model in ("tiny", "loaded", "loaded@1")}
    assert len(set(expected.values())) == 3
    assert "store" not in server.get("/health").json()

    away = server.store_dir.rename(server.store_dir.with_name("away"))
    try:
        assert {model: _text(server, model) for model in expected} == expected
        assert [one["name"] for one in server.get("/v1/adapters").json()["data"]] == ["loaded"]
        for answer in (
            server.http.put(f"{path}/new", files=files["new"]),
            server.post("/v1/adapters/loaded/rollback", json={}),
            server.http.delete(f"{path}/loaded"),
            server.http.put(f"{path}/loaded/pin"),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "store_unreachable"), answer.text
            assert "adapter store cannot be read or written" in error["message"]
            assert str(server.store_dir) not in answer.text
            assert answer.headers["Retry-After"]
        health = server.get("/health")
        assert (health.status_code, health.json()["store"]) == (200, "unreachable")
        assert server.get("/ready").status_code == 200
        assert not server.store_dir.exists()
    finally:
        away.rename(server.store_dir)

    assert "store" not in server.get("/health").json()
    assert {model: _text(server, model) for model in expected} == expected
    server.http.put(f"{path}/new", files=files["new"]).raise_for_status()
    assert _text(server, "new") not in expected.values()
    assert server.post("/v1/adapters/loaded/rollback", json={}).json()["version"] == 3
    assert _text(server, "loaded") == expected["loaded@1"]
    assert server.http.delete(f"{path}/new").status_code == 200


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((number, StoreUnreachable) for number in (errno.EROFS, errno.ESTALE, errno.EIO, errno.EACCES)),
        (errno.ENOSPC, StorageFull),
        (errno.EMFILE, type(None)),
    ],
)
def test_what_the_system_says_of_the_disk_is_told_without_a_path(number: int, kind: type) -> None:
    fault = store_fault(OSError(number, "reason", "/srv/store/names/mine"))
    assert type(fault) is kind
    assert "/srv" not in str(fault)
