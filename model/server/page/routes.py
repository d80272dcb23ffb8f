"""`/` and the files of its page, which hold nothing that is secret."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from ..http.errors import ApiError

_HERE = Path(__file__).parent
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # The page loads nothing from elsewhere, runs no script within a text, and is in no frame.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

FILES = {
    "/" if file.name == "index.html" else f"/page/{file.relative_to(_HERE).as_posix()}": file
    for file in sorted(_HERE.rglob("*"))
    if file.suffix in _TYPES
}
"""The paths of the page; they need no key."""


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = {
        path: Response(
            file.read_bytes(), headers=_HEADERS, media_type=f"{_TYPES[file.suffix]}; charset=utf-8"
        )
        for path, file in FILES.items()
    }

    @router.get("/")
    async def index() -> Response:
        return files["/"]

    @router.get("/page/{name:path}")
    async def part(name: str) -> Response:
        if (response := files.get(f"/page/{name}")) is None:
            raise ApiError(404, f"The page has no file {name}.")
        return response

    return router
