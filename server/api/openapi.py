"""OpenAPI document of the server: FastAPI's, with whole bounds written as integers and texts in Markdown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from inferencegym.messages import inlined, plain_schema
from server.api.route import Problem


def install_openapi(app: FastAPI) -> None:
    """Serve the document of ``app`` with whole bounds as integers and docstrings as Markdown, which OpenAPI reads.

    FastAPI reads every bound as a double and writes 2^63 as 9.223372036854776e+18. In decimal digits this is a larger
    number, which clients that generate requests from the document would use.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = FastAPI.openapi(app)
            made["components"]["schemas"]["Problem"] = plain_schema(Problem)
            app.openapi_schema = whole_numbers(as_markdown(made))
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def openapi_route(prefix: str) -> Route:
    """``GET <prefix>/openapi.json``, for OpenEnv's validator: the paths below, as if a server were mounted there."""

    async def published(request: Request) -> JSONResponse:
        whole = await asyncio.to_thread(request.app.openapi)
        paths = {p.removeprefix(prefix): item for p, item in whole["paths"].items() if p.startswith(f"{prefix}/")}
        return JSONResponse({**whole, "paths": paths, "servers": [{"url": prefix}]})

    return Route(f"{prefix}/openapi.json", published, include_in_schema=False)


def inlined_paths(document: Mapping[str, Any]) -> dict[str, Any]:
    """The paths of a document, with schemas in place of references."""
    paths: dict[str, Any] = inlined(document["paths"], document["components"]["schemas"])
    return paths


def as_markdown(value: Any) -> Any:
    """The same JSON with reStructuredText's literals and literal blocks in Markdown."""
    return json.loads(json.dumps(value).replace("``", "`").replace(r"::\n", r":\n"))


def whole_numbers(value: Any) -> Any:
    """The same JSON with 2.0 written as 2."""

    def number(text: str) -> float:
        found = float(text)
        return int(found) if found.is_integer() else found

    return json.loads(json.dumps(value), parse_float=number)
