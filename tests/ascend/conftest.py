"""The gate runs in an environment of its own (scripts/test-ascend.sh); elsewhere this folder is left alone."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def _has_ascend_backend() -> bool:
    """triton-ascend installs itself under the name of Triton, with a backend folder of its own."""
    triton = importlib.util.find_spec("triton")
    folders = triton.submodule_search_locations if triton else None
    return any((Path(folder) / "backends" / "ascend").is_dir() for folder in folders or [])


# Triton interprets or compiles, for the whole process: the script runs pytest once for each.
_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

if not _has_ascend_backend():
    collect_ignore_glob = ["*"]
elif _INTERPRETS:
    collect_ignore_glob = ["test_*"]
else:
    collect_ignore_glob = ["interpreted/*"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gate-cases", default="tests.ascend.registry", help="module whose CASES the gate judges")


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """The rest of the suite, whose conftest is read before this one, would have Triton interpreted."""
    if _has_ascend_backend() and not _INTERPRETS:
        os.environ.pop("TRITON_INTERPRET", None)
