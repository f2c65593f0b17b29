"""The version that the service and the doctor give."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from service import server_version

ROOT = Path(__file__).parents[1]


def test_installed_distribution() -> None:
    assert server_version() == version("multilora")


def test_source_tree_that_nobody_installed(tmp_path: Path) -> None:
    """`service` copied away from its distribution still answers, where the doctor and /version ask."""
    archive = tmp_path / "copy.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(ROOT / "service" / "__init__.py", "service/__init__.py")
    script = f"import sys; sys.path.insert(0, {str(archive)!r}); import service as v; print(v.server_version())"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "not installed"
