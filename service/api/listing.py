"""Answers that grow with the number of adapters, or with a text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import Response
from pydantic import BaseModel


async def listing(build: Callable[[], BaseModel]) -> Response:
    """What `build` returns, built and written in a thread: other requests' streams go on meanwhile."""
    return Response(await asyncio.to_thread(lambda: build().model_dump_json()), media_type="application/json")
