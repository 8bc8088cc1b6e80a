"""The page at `/`: chat and live figures. Its three files are in the folder `page`, and read nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sidestream.server.middleware import PAGE_PATHS

_FILES = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css"}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes(root_path: str) -> list[Route]:
    """The routes of the page and its files. `root_path`: the prefix below which the page asks for them."""
    return [_route(path, root_path) for path in PAGE_PATHS]


def _route(path: str, root_path: str) -> Route:
    name = _FILES[path]
    content = files("sidestream.server").joinpath("page", name).read_text("utf-8").replace("{root}", root_path)

    async def page_file(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=_TYPES[name.partition(".")[2]])

    return Route(path, page_file)
