"""The playground, a client of the API.

It has a page at / that draws samples and their drafts, a chat at /chat, an editor at /editor.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from shoal.serve.api_errors import ApiError

if TYPE_CHECKING:
    from importlib.abc import Traversable

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""The headers of the page: it runs only scripts of this server, and text of a model cannot become
markup."""
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


def page() -> APIRouter:
    """Returns the routes of the page and its files, which are kept in memory. They need no key."""
    folder = files("shoal.serve") / "playground"
    parts = {name: part.read_bytes() for name, part in _files(folder)}
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return _answer("index.html")

    @router.get("/chat")
    async def chat() -> Response:
        return _answer("chat.html")

    @router.get("/editor")
    async def editor() -> Response:
        return _answer("editor.html")

    @router.get("/playground/{name:path}")
    async def part(name: str) -> Response:
        return _answer(name)

    def _answer(name: str) -> Response:
        if name not in parts:
            raise ApiError(404, f"the playground has no {name!r}")
        return Response(parts[name], media_type=TYPES[_suffix(name)], headers=HEADERS)

    return router


def _files(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yields relative paths and files of the page, third-party files (`vendor/`) included."""
    for part in folder.iterdir():
        if part.is_dir():
            yield from _files(part, f"{above}{part.name}/")
        elif _suffix(part.name) in TYPES:
            yield above + part.name, part


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
