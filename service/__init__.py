"""The server: HTTP, engine, models, text."""

from __future__ import annotations


def server_version() -> str:
    """Version of the installed distribution; "not installed" where it runs from a source tree that nobody installed."""
    from importlib.metadata import PackageNotFoundError, version  # which commands need not wait for

    try:
        return version("multilora")
    except PackageNotFoundError:
        return "not installed"
