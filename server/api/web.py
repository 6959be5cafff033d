"""The web page at ``/web/``: our files, and the chart library from the package that ships it.

Links and redirects are relative, so the page works behind a proxy's path and in a frame. Nothing is inline and nothing
comes from elsewhere, so the content security policy allows this origin alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.net.json_io import reply
from server.settings import Settings

PAGE_DIR: Final = Path(__file__).resolve().parents[1] / "web"
CHARTS_PACKAGE: Final = "uplot"
"""Import name of uplot-python; it ships uPlot's script and style sheet. Its Python code is never imported."""

DAY_S: Final = 86_400

Endpoint = Callable[[Request], Awaitable[Response]]


def web_routes(settings: Settings) -> list[BaseRoute]:
    """``/`` and ``/web`` lead to ``/web/``, ``/traffic`` to its tab for that environment; below it lies the page."""
    charts = StaticFiles(directory=_charts_dir())
    page = StaticFiles(directory=PAGE_DIR, html=True)
    policy = content_policy(settings)
    return [
        Route("/", _to("web/"), include_in_schema=False),
        Route("/web", _to("web/"), include_in_schema=False),
        Route("/traffic", _to("web/#traffic"), include_in_schema=False),
        # Browsers request this on pages without an icon, such as /health.
        Route("/favicon.ico", _to("web/img/icon.svg"), include_in_schema=False),
        Route("/web/site.json", _site(settings), include_in_schema=False),
        # What a pinned package ships changes only with its version.
        Mount("/web/charts", app=_Headers(GZipMiddleware(charts), policy, f"public, max-age={DAY_S}")),
        # Ours is asked for again each time, and answered with 304 while it is the same.
        Mount("/web", app=_Headers(GZipMiddleware(page), policy, "no-cache")),
    ]


def content_policy(settings: Settings) -> str:
    """The page's content security policy: this origin, no inline script or style, frames as the settings say."""
    own = "script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; manifest-src 'self'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors {settings.frame_ancestors}"


def _charts_dir() -> Path:
    spec = find_spec(CHARTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the page needs the package uplot-python; run `make serve`, or install it with pip")
    return Path(spec.origin).parent / "static"


def _to(place: str) -> Endpoint:
    async def redirect(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return Response(status_code=307, headers={"location": place + query, "cache-control": "no-cache"})

    return redirect


def _site(settings: Settings) -> Endpoint:
    """Where the two environments are, seen from the page."""
    serving, traffic = ("../", "../traffic/") if settings.env == "serving" else ("../serving/", "../traffic/")

    async def site(_request: Request) -> Response:
        return reply({"serving": serving, "traffic": traffic, "env": settings.env})

    return site


class _Headers:
    """Adds the page's policy and caching to every answer of an application."""

    def __init__(self, app: ASGIApp, policy: str, caching: str) -> None:
        self.app = app
        self._headers = [(b"content-security-policy", policy.encode()), (b"cache-control", caching.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._headers]
            await send(message)

        await self.app(scope, receive, send_with_headers)
