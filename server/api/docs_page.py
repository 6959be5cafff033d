"""The page ``/docs``: the OpenAPI document as plain HTML, without scripts and external files.

FastAPI's own page loads its viewer from a content delivery network, and is empty without access to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from server.api.openapi import inlined_paths
from server.api.web import content_policy
from server.settings import Settings


def docs_route(settings: Settings) -> Route:
    """``GET /docs``."""
    headers = {"content-security-policy": content_policy(settings), "cache-control": "no-cache"}

    async def page(request: Request) -> HTMLResponse:
        document = await asyncio.to_thread(request.app.openapi)
        return HTMLResponse(await asyncio.to_thread(docs_page, document), headers=headers)

    return Route("/docs", page, include_in_schema=False)


def docs_page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as an HTML page; links are relative, so that it works behind a proxy's path."""
    title = escape(f"{document['info']['title']}: HTTP interface")
    paths = [(path, method, told) for path, item in inlined_paths(document).items() for method, told in item.items()]
    listed = "".join(f"<li><a href='#{_anchor(p, m)}'>{_name(p, m)}</a> {_summary(told)}</li>" for p, m, told in paths)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='stylesheet' href='web/style.css'></head><body><main><h1>{title}</h1>"
        f"<p>{escape(document['info'].get('description', ''))}</p>"
        "<p>The same for programs: <a href='openapi.json'>openapi.json</a>. "
        "To play by hand: <a href='web/'>the page</a>."
        f"</p><ul>{listed}</ul>{''.join(_operation(*one) for one in paths)}</main></body></html>"
    )


def _operation(path: str, method: str, told: Mapping[str, Any]) -> str:
    parts = [f"<h2 id='{_anchor(path, method)}'>{_name(path, method)}</h2><p>{_summary(told)}</p>"]
    for parameter in told.get("parameters", ()):
        parts.append(_details(f"{parameter['in']} parameter {parameter['name']}", parameter))
    for kind, media in told.get("requestBody", {}).get("content", {}).items():
        parts.append(_details(f"body, {kind}", media.get("schema", {})))
    for status, answer in told.get("responses", {}).items():
        schemas = {kind: media.get("schema", {}) for kind, media in answer.get("content", {}).items()}
        parts.append(_details(f"{status} {answer.get('description', '')}", schemas))
    return f"<section>{''.join(parts)}</section>"


def _details(heading: str, schema: Any) -> str:
    text = json.dumps(schema, indent=1, ensure_ascii=False)
    return f"<details><summary>{escape(heading)}</summary><pre>{escape(text)}</pre></details>"


def _summary(told: Mapping[str, Any]) -> str:
    return escape(told.get("summary", ""))


def _name(path: str, method: str) -> str:
    return f"<code>{method.upper()} {escape(path)}</code>"


def _anchor(path: str, method: str) -> str:
    return escape(f"{method}-{path}", quote=True)
