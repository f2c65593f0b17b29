"""The environments of scripts/client_environments.py."""

from __future__ import annotations

from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]


def environment(name: str) -> Path:
    """The directory of the client's environment. Skips, loudly, where it has not been made of the pins of this tree."""
    home = _ROOT / ".venv-clients" / name
    (folder,) = (_ROOT / "tests").glob(f"*/{name}")
    (pins,) = (path for path in folder.iterdir() if path.name in ("requirements.txt", "package-lock.json"))
    made_of = home / "made-of"
    if not made_of.is_file() or made_of.read_text() != pins.read_text():
        pytest.skip(f"NOT RUN: {name} has no environment; make clients CLIENTS={name} makes it, with the network")
    return home
