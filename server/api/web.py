"""The web page at ``/web/``: our files, and uPlot, the chart library, in ``charts/``.

Links and redirects are relative, so the page works behind a proxy's path and in a frame. The page itself is sent with
its styles in it (the policy names their digest), so that something is visible after one answer on a slow connection.
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
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from env.families import FAMILIES, SERVING
from server.net.json_io import to_json
from server.settings import Settings

PAGE_DIR: Final = Path(__file__).resolve().parents[1] / "web"

Endpoint = Callable[[Request], Awaitable[Response]]


def web_routes(settings: Settings) -> list[BaseRoute]:
    """``/`` and ``/web`` lead to ``/web/``, ``/traffic`` and ``/rollouts`` to their tabs; below it lies the page."""
    return [
        Route("/", _to("web/"), include_in_schema=False),
        Route("/web", _to("web/"), include_in_schema=False),
        *(Route(f"/{tab}", _to(f"web/#{tab}"), include_in_schema=False) for tab in ("traffic", "rollouts")),
        # Browsers request this on pages without an icon, such as /health.
        Route("/favicon.ico", _to("web/img/icon.svg"), include_in_schema=False),
        Mount("/web", app=GZipMiddleware(_Page(settings))),
    ]


def page_headers(settings: Settings, styles: str = "") -> dict[str, str]:
    """Headers of a page. Its content: this origin, no inline code but ``styles``, frames as the settings say.

    It is asked for again each time, and answered with 304 while it is the same.
    """
    digest = f" 'sha256-{base64.b64encode(hashlib.sha256(styles.encode()).digest()).decode()}'" if styles else ""
    own = f"script-src 'self'; style-src 'self'{digest}; img-src 'self' data:; connect-src 'self'; manifest-src 'self'"
    # Not X-Frame-Options: the page is shown in a frame on its Space.
    rest = f"base-uri 'none'; form-action 'none'; frame-ancestors {settings.frame_ancestors}"
    policy = f"default-src 'none'; {own}; {rest}"
    return {"content-security-policy": policy, "referrer-policy": "no-referrer", "cache-control": "no-cache"}


@cache
def _styles() -> str:
    """The page's style sheets as one."""
    return "".join((PAGE_DIR / name).read_text(encoding="utf-8") for name in ("charts/uPlot.min.css", "style.css"))


@cache
def _index(env: str) -> str:
    """The page with its styles in it, and with the paths of the environments, of which ``env`` is at the root."""
    text = (PAGE_DIR / "index.html").read_text(encoding="utf-8")
    without = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", text)
    site = {name: "../" if name == SERVING == env else f"../{name}/" for name in FAMILIES} | {"env": env}
    placed = without.replace("<html", f'<html data-site="{html.escape(to_json(site).decode())}"')
    return placed.replace("</head>", f"<style>{_styles()}</style>\n</head>")


def _page(request: Request, env: str) -> Response:
    """The page. Previews of a link name its ``beat``, a friend's score; their picture needs an absolute address."""
    text = _index(env)
    if re.fullmatch(r"[01]\.\d{1,3}", beat := request.query_params.get("beat", "")):
        text = text.replace("Beat vLLM's defaults at running", f"Beat my {beat} at running")
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
    picture = html.escape(str(request.url.replace(scheme=scheme, query="", path=f"{request.url.path}img/card.png")))
    return HTMLResponse(text.replace('content="img/card.png"', f'content="{picture}"'))


def _to(place: str) -> Endpoint:
    async def redirect(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return Response(status_code=307, headers={"location": place + query, "cache-control": "no-cache"})

    return redirect


class _Page(StaticFiles):
    """The page and its files, with its headers."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(directory=PAGE_DIR)
        self._env, self._headers = settings.env, page_headers(settings, _styles())

    async def get_response(self, path: str, scope: Scope) -> Response:
        is_page = path == "." and scope["method"] in ("GET", "HEAD")
        response = _page(Request(scope), self._env) if is_page else await super().get_response(path, scope)
        response.headers.update(self._headers)
        return response
