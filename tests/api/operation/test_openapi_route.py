"""GET /openapi.json is built and written where no other request waits for it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.server.app import create_app
from service.settings import load_settings
from tests.api.conftest import Checkpoints


def test_the_schema_is_built_once_and_not_by_the_event_loop(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(load_settings(model_dir=checkpoints.base, store_dir=tmp_path))
    app.state.services.store.close()
    build, threads = app.openapi, []

    def noted() -> dict[str, Any]:
        threads.append(threading.current_thread())
        return build()

    monkeypatch.setattr(app, "openapi", noted)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await asyncio.gather(*(client.get("/openapi.json") for _ in range(8)))

    answers = asyncio.run(ask())
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
    assert all(answer.json() == build() for answer in answers)
    assert answers[0].json()["openapi"].startswith("3.")
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
