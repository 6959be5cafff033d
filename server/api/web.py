"""The web page at ``/web/``: our files, and uPlot, the chart library, in ``charts/``.

Links and redirects are relative, so the page works behind a proxy's path and in a frame. There are no inline scripts
and no external files, so the content security policy allows only this origin. The page itself is sent with its styles
in it (the policy names their digest), so that something is visible after one answer on a slow connection.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Final

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from env.families import FAMILIES, SERVING
from server.net.json_io import reply
from server.settings import Settings

PAGE_DIR: Final = Path(__file__).resolve().parents[1] / "web"

Endpoint = Callable[[Request], Awaitable[Response]]


def web_routes(settings: Settings) -> list[BaseRoute]:
    """``/`` and ``/web`` lead to ``/web/``, ``/traffic`` and ``/rollouts`` to their tabs; below it lies the page."""
    page = Router([Route("/", _page), Mount("", StaticFiles(directory=PAGE_DIR))])
    policy = content_policy(settings, _styles())
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


def content_policy(settings: Settings, styles: str = "") -> str:
    """Content security policy of a page: this origin, no inline code but ``styles``, frames as the settings say."""
    digest = f" 'sha256-{base64.b64encode(hashlib.sha256(styles.encode()).digest()).decode()}'" if styles else ""
    own = f"script-src 'self'; style-src 'self'{digest}; img-src 'self' data:; connect-src 'self'; manifest-src 'self'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors {settings.frame_ancestors}"


@cache
def _styles() -> str:
    """The page's style sheets as one."""
    return "".join((PAGE_DIR / name).read_text(encoding="utf-8") for name in ("charts/uPlot.min.css", "style.css"))


@cache
def _index() -> str:
    """The page with its styles in it."""
    text = (PAGE_DIR / "index.html").read_text(encoding="utf-8")
    without = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", text)
    return without.replace("</head>", f"<style>{_styles()}</style>\n</head>")


async def _page(request: Request) -> Response:
    """The page. Previews of a link name its ``beat``, a friend's score; their picture needs an absolute address."""
    text = _index()
    if re.fullmatch(r"[01]\.\d{1,3}", beat := request.query_params.get("beat", "")):
        text = text.replace("Beat the heuristic at running", f"Beat my {beat} at running")
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
    picture = html.escape(str(request.url.replace(scheme=scheme, query="", path=f"{request.url.path}img/card.png")))
    return HTMLResponse(text.replace('content="img/card.png"', f'content="{picture}"'))


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
