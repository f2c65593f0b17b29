"""The gate runs in an environment of its own (scripts/test-ascend.sh); elsewhere this folder is left alone."""

from __future__ import annotations

import importlib.util

# triton-ascend installs itself under the name of Triton, beside a backend of its own.
_triton = importlib.util.find_spec("triton")
_locations = list(_triton.submodule_search_locations or []) if _triton else []


def _has_ascend_backend() -> bool:
    from pathlib import Path

    return any((Path(location) / "backends" / "ascend").is_dir() for location in _locations)


if not _has_ascend_backend():
    collect_ignore_glob = ["*"]
