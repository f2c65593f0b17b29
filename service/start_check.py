"""Checks before the first import of a package that may be missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path


class StartError(ValueError):
    """The server cannot start; one sentence."""


def check_kernels_package() -> None:
    """StartError if `import kernels` would find another distribution: Hugging Face publishes one of the same name."""
    found = importlib.util.find_spec("kernels")
    ours = Path(__file__).resolve().parent.parent / "kernels" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() != ours:
        raise StartError(
            f"`import kernels` finds {found.origin if found else 'nothing'} and not multilora's own package; uninstall "
            "the distribution called kernels (pip uninstall kernels), or put multilora's directory first on the path."
        )
