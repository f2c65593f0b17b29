"""Which version this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def server_version() -> str:
    """Version of the installed distribution; "not installed" where it runs from a source tree that nobody installed."""
    try:
        return version("multilora")
    except PackageNotFoundError:
        return "not installed"
