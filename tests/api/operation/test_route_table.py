"""A server's first requests build nothing of its routes, which would keep the event loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pytest

from service.server.app import build_routes, create_app
from service.settings import load_settings
from tests.api.conftest import Checkpoints
from tests.support.http.scripted_server import got

# One of a router, one past all of them, and one with a query that is a model.
PATHS = ("/version", "/nowhere", "/v1/adapters?limit=3")


def test_built_routes_are_built_no_more(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(load_settings(model_dir=checkpoints.base, store_dir=tmp_path))
    build, built = pydantic.TypeAdapter.__init__, list[Any]()

    def noted(self: Any, kind: Any, **options: Any) -> None:
        built.append(kind)
        build(self, kind, **options)

    monkeypatch.setattr(pydantic.TypeAdapter, "__init__", noted)
    build_routes(app)
    assert len(built) > 100
    built.clear()

    assert [answer.status_code for answer in got(app, *PATHS)] == [200, 404, 200]
    assert not built
    app.state.services.store.close()
