"""Pinned adapters of a real server: there before anybody asks, beside those that are asked for, and after any death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.row_plan import row_bytes
from service.cli.main import main
from service.models.layouts import layout_in
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server, start_server, wait_for
from tests.support.http.uploads import parts_of
from tests.support.models.tiny_models import make_adapter

NUM_OTHERS = 12


@pytest.fixture(scope="module")
def settings(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A server with one engine that has rows for eight adapters of rank 4 at a time, of thirteen."""
    preloaded = tmp_path_factory.mktemp("preloaded")
    for seed in range(NUM_OTHERS + 1):
        name = f"other-{seed}" if seed < NUM_OTHERS else "kept"
        make_adapter(checkpoints.base, preloaded / name, rank=4, target_modules=["q_proj", "w1"], seed=seed)
    large = preloaded / "large"
    make_adapter(checkpoints.base, large, rank=30, target_modules=["q_proj", "w1"], seed=99)
    budget_bytes = int(sum(row_bytes(layout_in(checkpoints.base), 4).values()) * 33)
    return {
        "model_name": BASE,
        "dtype": "float32",
        "preload_adapters_dir": preloaded,
        "adapter_row_bytes": budget_bytes,
        "adapter_side_bytes": 0,
        "log_format": "json",
        "replicas": 1,
    }


@pytest.fixture(scope="module")
def small_server(
    checkpoints: Checkpoints, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with running_server(checkpoints.base, tmp_path_factory.mktemp("small"), **settings) as running:
        yield running


def shown(server: Server, name: str) -> tuple[bool, str]:
    one = server.get(f"/v1/adapters/{name}").json()
    return one["pinned"], one["state"]


def pin(server: Server, name: str) -> Any:
    return server.http.put(f"{server.url}/v1/adapters/{name}/pin")


def unpin(server: Server, name: str) -> Any:
    return server.http.delete(f"{server.url}/v1/adapters/{name}/pin")


def ask(server: Server, name: str) -> None:
    body = {"model": name, "prompt": "the", "max_tokens": 1}
    assert server.post("/v1/completions", json=body).status_code == 200


def test_it_is_brought_unasked_stays_against_others_and_follows_its_name(
    small_server: Server, settings: dict[str, Any]
) -> None:
    server = small_server
    answer = pin(server, "kept")
    assert (answer.status_code, answer.json()["pinned"]) == (200, True)
    wait_for(lambda: shown(server, "kept") == (True, "device"), "the adapter to be brought")
    loads = server.metric("adapter_tier_loaded_bytes_total", tier="device")
    for name in (f"other-{number}" for _ in range(2) for number in range(NUM_OTHERS)):
        ask(server, name)
        assert shown(server, "kept") == (True, "device")
    wait_for(lambda: server.metric("adapter_tier_loaded_bytes_total", tier="device") > loads, "others to be loaded")
    assert server.metric("adapter_evictions_total") > 0
    ask(server, "large")  # which has no room beside it
    wait_for(lambda: shown(server, "kept") == (True, "device"), "it to come back")

    files = parts_of(Path(settings["preload_adapters_dir"]) / "other-1")
    moved = server.http.put(f"{server.url}/v1/adapters/kept", files=files).json()
    assert (moved["version"], moved["pinned"]) == (2, True)
    wait_for(lambda: shown(server, "kept") == (True, "device"), "the new version to be brought")
    server.post("/v1/adapters/kept/rollback", json={}).raise_for_status()
    wait_for(lambda: shown(server, "kept") == (True, "device"), "the old version to be brought")

    assert [one["name"] for one in server.get("/v1/adapters?pinned=true").json()["data"]] == ["kept"]
    assert unpin(server, "kept").json()["pinned"] is False
    assert unpin(server, "kept").status_code == 200
    for number in range(NUM_OTHERS):
        ask(server, f"other-{number}")
    wait_for(lambda: shown(server, "kept")[1] != "device", "it to make room")


def test_more_than_half_of_the_rows_and_what_is_not_there_is_refused(small_server: Server) -> None:
    server = small_server
    for number in range(4):
        assert pin(server, f"other-{number}").status_code == 200
    wait_for(lambda: {shown(server, f"other-{at}") for at in range(4)} == {(True, "device")}, "four to be brought")
    refused = pin(server, "other-4")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert "unpin others first" in refused.json()["error"]["message"]
    for name in ("nobody", "kept@1", BASE):
        assert pin(server, name).json()["error"]["code"] == "not_found"
        assert unpin(server, name).json()["error"]["code"] == "not_found"
    assert server.http.put(f"{server.url}/v1/adapters/kept/pin?x=1").status_code == 400
    for number in range(4):
        assert unpin(server, f"other-{number}").status_code == 200


def test_an_adapter_may_be_called_pin(small_server: Server, settings: dict[str, Any]) -> None:
    server = small_server
    path = f"{server.url}/v1/adapters/pin"
    files = parts_of(Path(settings["preload_adapters_dir"]) / "other-2")
    assert server.http.put(path, files=files).status_code == 201
    assert pin(server, "pin").json()["pinned"] is True
    assert server.http.delete(path).status_code == 200
    assert server.get("/v1/adapters?pinned=true").json()["data"] == []


def test_the_command_line_pins(small_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    url = ["--url", small_server.url]
    assert main(["pin", "kept", "nobody", "other-1", *url]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines() == ["kept is pinned", "other-1 is pinned"]
    assert "'nobody' does not exist" in told.err
    wait_for(lambda: shown(small_server, "kept") == (True, "device"), "the adapter to be brought")
    assert main(["ls", "--pinned", *url]) == 0
    told = capsys.readouterr()
    assert "device, pinned" in told.out
    assert "other-1" in told.out
    assert "other-2" not in told.out
    assert main(["unpin", "kept", "other-1", *url]) == 0
    assert capsys.readouterr().out.splitlines() == ["kept is no longer pinned", "other-1 is no longer pinned"]


def test_the_next_engine_and_the_next_server_have_it_before_anybody_asks(
    checkpoints: Checkpoints, settings: dict[str, Any], tmp_path: Path
) -> None:
    server = start_server(checkpoints.base, tmp_path, **settings)
    try:
        for name in ("kept", "other-3"):
            assert pin(server, name).status_code == 200

        def are_there() -> bool:
            return {shown(server, name) for name in ("kept", "other-3")} == {(True, "device")}

        wait_for(are_there, "both to be brought")
        engines = server.engine_pids()
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: server.metric("engine_restarts_total") == len(engines), "the engine's death to be seen")
        wait_for(are_there, "the next engine to have both")
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        server = start_server(checkpoints.base, tmp_path, **settings)
        wait_for(are_there, "the next server to have both")
        assert server.http.delete(f"{server.url}/v1/adapters/kept").status_code == 200
        assert [one["name"] for one in server.get("/v1/adapters?pinned=true").json()["data"]] == ["other-3"]
    finally:
        server.process.kill()
        server.process.wait()


def test_a_sum_may_have_all_rows_and_no_more(small_server: Server) -> None:
    """A sum of eight adapters, pinned or not, takes the place of all others; with other weights it is another one."""
    others = [{"name": f"other-{at}", "weight": 0.5} for at in range(8)]
    body = {"prompt": "the", "max_tokens": 1}
    for weight in (0.5, 0.25):
        answer = small_server.post(
            "/v1/completions", json={**body, "model": [{**others[0], "weight": weight}, *others[1:]]}
        )
        assert answer.status_code == 200, answer.text
    refused = small_server.post("/v1/completions", json={**body, "adapters": [others[0], {"name": "large"}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "adapters")
    assert "rows on the device together" in refused.json()["error"]["message"]
    assert small_server.metric("rows_used") <= small_server.metric("rows_total")
