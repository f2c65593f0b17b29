"""Every benchmark can be imported: what they take from the service is there."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import bench

NAMES = [module.name for module in pkgutil.walk_packages(bench.__path__, "bench.")]
MODULES = sorted(name for name in NAMES if not name.endswith("__main__") and not name.startswith("bench.tests"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        pytest.skip(f"NOT RUN: {name} is for where Ray is installed")
