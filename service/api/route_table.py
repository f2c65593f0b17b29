"""FastAPI builds what it needs of a router's routes when the first request comes to them, or past them to others."""

from __future__ import annotations

from fastapi import FastAPI


def build_routes(app: FastAPI) -> None:
    """Have all of them built: 0.05 to 0.1 s, in which the event loop would do nothing else."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "", "root_path": "", "headers": []})
