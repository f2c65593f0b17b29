"""FastAPI builds what it needs of a router's routes when the first request comes to them, or past them to others."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.utils import get_fields_from_routes


def build_routes(app: FastAPI) -> None:
    """Have all of them built: 0.05 to 0.1 s, in which the event loop would do nothing else."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "", "root_path": "", "headers": []})
    # Queries' fields are kept when they are first asked for. If a request and /openapi.json asked at once, each would
    # have its own, and a schema of the one knows nothing of the other.
    get_fields_from_routes(app.routes)
