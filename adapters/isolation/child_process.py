"""Start and environment of this service's child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Parts of the names of variables that hold what no child needs: HF_TOKEN, AWS_SECRET_ACCESS_KEY and their like.
_SECRET_PARTS = frozenset({"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS"})


def child_environment() -> dict[str, str]:
    """The environment of a child: the same import path as this process, but no settings, which hold keys, and no other
    secrets. The child is passed what it needs."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: value for name, value in os.environ.items() if not _may_be_secret(name.upper())}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends; a no-op on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _may_be_secret(name: str) -> bool:
    return name.startswith("MULTILORA_") or not _SECRET_PARTS.isdisjoint(name.split("_"))
