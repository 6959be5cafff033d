"""The web page at ``/web/``: our files, and uPlot, the chart library, in ``charts/``.

Links and redirects are relative, so the page works behind a proxy's path and in a frame. There are no inline scripts or
styles and no external files, so the content security policy allows only this origin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from env.families import FAMILIES, SERVING
from server.net.json_io import reply
from server.settings import Settings

PAGE_DIR: Final = Path(__file__).resolve().parents[1] / "web"

Endpoint = Callable[[Request], Awaitable[Response]]


def web_routes(settings: Settings) -> list[BaseRoute]:
    """``/`` and ``/web`` lead to ``/web/``, ``/traffic`` and ``/rollouts`` to their tabs; below it lies the page."""
    page = StaticFiles(directory=PAGE_DIR, html=True)
    policy = content_policy(settings)
    return [
        Route("/", _to("web/"), include_in_schema=False),
        Route("/web", _to("web/"), include_in_schema=False),
        *(Route(f"/{tab}", _to(f"web/#{tab}"), include_in_schema=False) for tab in ("traffic", "rollouts")),
        # Browsers request this on pages without an icon, such as /health.
        Route("/favicon.ico", _to("web/img/icon.svg"), include_in_schema=False),
        Route("/web/site.json", _site(settings), include_in_schema=False),
        # Asked for again each time, and answered with 304 while it is the same.
        Mount("/web", app=_Headers(GZipMiddleware(page), policy, "no-cache")),
    ]


def content_policy(settings: Settings) -> str:
    """The page's content security policy: this origin, no inline script or style, frames as the settings say."""
    own = "script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; manifest-src 'self'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors {settings.frame_ancestors}"


def _to(place: str) -> Endpoint:
    async def redirect(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return Response(status_code=307, headers={"location": place + query, "cache-control": "no-cache"})

    return redirect


def _site(settings: Settings) -> Endpoint:
    """Paths of the environments, relative to the page."""
    places = {name: "../" if name == SERVING == settings.env else f"../{name}/" for name in FAMILIES}

    async def site(_request: Request) -> Response:
        return reply({**places, "env": settings.env})

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
