"""The server that the clients talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.http.server import Server, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What `make serve` starts, on a free port."""
    with running_server(None, tmp_path_factory.mktemp("clients")) as running:
        yield running
