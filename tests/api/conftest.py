"""One tiny model with adapters and one running server for all tests of the HTTP side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.support.http.server import Server, running_server
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import LINEAR_MODULES, make_adapter, make_tiny_model

BASE = "tiny"
# Rank of each adapter that the shared server has from its start.
ADAPTERS = {"alpha": 4, "beta": 8, "gamma": 16}

# Many seconds of steps: with the endless base it goes on until somebody ends it, however late a test looks.
ENDLESS = {"model": "alpha", "prompt": "the", "max_tokens": 15_000, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class Checkpoints:
    """Directories of the base, of the same with room for ENDLESS, of the adapters the server starts with, and of one
    that tests may upload."""

    base: Path
    endless_base: Path
    adapters: Path
    spare: Path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")
    base = make_tiny_model("lfm2", root / "base")
    endless_base = make_tiny_model("lfm2", root / "endless-base", max_position_embeddings=16_384)
    targets = LINEAR_MODULES["lfm2"]
    for seed, (name, rank) in enumerate(ADAPTERS.items(), start=1):
        make_adapter(base, root / "adapters" / name, rank=rank, target_modules=targets, seed=seed)
    spare = make_adapter(base, root / "spare", rank=2, target_modules=["q_proj", "w1"], seed=9)
    return Checkpoints(base, endless_base, root / "adapters", spare)


@pytest.fixture(scope="session")
def server(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Without keys, with room for everything a test may want."""
    settings = {"model_name": BASE, "preload_adapters_dir": checkpoints.adapters, "log_format": "json"}
    settings |= {"refusal_lines_per_minute": 1_000_000}  # the tests are one client, and look for lines
    with running_server(checkpoints.base, tmp_path_factory.mktemp("server"), **settings) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """The real client, without retries: an error is an error."""
    with openai.OpenAI(base_url=server.openai_url, api_key="unused", max_retries=0, timeout=LIMIT_SECONDS) as made:
        yield made
