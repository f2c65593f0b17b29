"""GET / and its files: a page to try the server in a browser. It uses the same API as every other client.

The files need no API key; the calls that the page makes do. They are read once, and nothing of a request
becomes a path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

_FILES_DIR = Path(__file__).parent / "static"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# The page runs its own scripts and talks to its own server, and nothing else.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class _File:
    """A file as it is sent."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> _File:
        content = path.read_bytes()
        headers = {
            "Content-Type": f"{_MEDIA_TYPES[path.suffix]}; charset=utf-8",
            # Asked for each time, sent only if it has changed: a new version never meets an old one's scripts.
            "Cache-Control": "no-cache",
            "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return cls(content, headers)


_FILES = {
    "/" if path.name == "index.html" else f"/static/{path.name}": _File.read(path)
    for path in sorted(_FILES_DIR.iterdir())
    if path.suffix in _MEDIA_TYPES
}
PAGE_PATHS = frozenset(_FILES)


def _endpoint(path: str, file: _File) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        asked = request.scope["raw_path"].decode()
        if path == "/" and not asked.endswith("/"):  # --root-path itself, to whose end the page's links are relative
            return RedirectResponse(f"{asked}/")
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if file.headers["ETag"] in known:
            headers = {name: value for name, value in file.headers.items() if name != "Content-Type"}
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=file.headers)

    return send


# One route for each file, so that logs and metrics name them and everything else stays an unknown route.
router = APIRouter(include_in_schema=False)
for _path, _file in _FILES.items():
    router.add_api_route(_path, _endpoint(_path, _file), methods=["GET"])
