"""The page ``/docs``: the OpenAPI document as plain HTML. FastAPI's own page is empty without access to a network."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from server.api.openapi import inlined_paths
from server.api.web import page_headers
from server.settings import Settings


def docs_route(settings: Settings) -> Route:
    """``GET /docs``."""

    async def page(request: Request) -> HTMLResponse:
        document = await asyncio.to_thread(request.app.openapi)
        return HTMLResponse(await asyncio.to_thread(docs_page, document), headers=page_headers(settings))

    return Route("/docs", page, include_in_schema=False)


def docs_page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as an HTML page; links are relative, so that it works behind a proxy's path."""
    title = escape(f"{document['info']['title']}: HTTP interface")
    paths = inlined_paths(document).items()
    operations = "".join(
        _operation(f"{kind.upper()} {path}", told) for path, item in paths for kind, told in item.items()
    )
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='stylesheet' href='web/style.css'></head><body><main><h1>{title}</h1>"
        f"{_prose(document['info'].get('description', ''))}"
        "<p>The same for programs: <a href='openapi.json'>openapi.json</a>. "
        f"To play by hand: <a href='web/'>the page</a>.</p>{operations}</main></body></html>"
    )


def _operation(name: str, told: Mapping[str, Any]) -> str:
    """A fold with what a request takes, and what it is answered with; errors have one form everywhere."""
    shown = {part: told[part] for part in ("parameters", "requestBody") if part in told}
    answers = {status: answer for status, answer in told["responses"].items() if status < "4"}
    text = json.dumps({**shown, "responses": answers}, indent=1, ensure_ascii=False)
    summary = f"<code>{escape(name)}</code> {escape(told.get('summary', ''))}"
    prose = _prose(told.get("description", ""))
    return f"<details><summary>{summary}</summary>{prose}<pre>{_with_code(text)}</pre></details>"


def _prose(text: str) -> str:
    """Markdown's paragraphs and indented blocks as HTML."""
    blocks = [block for block in text.split("\n\n") if block]
    return "".join(f"<pre>{escape(b)}</pre>" if b.startswith("    ") else f"<p>{_with_code(b)}</p>" for b in blocks)


def _with_code(text: str) -> str:
    """Text as HTML, with what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
