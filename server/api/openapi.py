"""OpenAPI document of the server: FastAPI's, with whole bounds written as integers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from inferencegym.messages import inlined, plain_schema
from server.api.route import Problem


def install_openapi(app: FastAPI) -> None:
    """Serve the document of ``app`` with whole bounds as integers.

    FastAPI reads every bound as a double and writes 2^63 as 9.223372036854776e+18. In decimal digits this is a larger
    number, which clients that generate requests from the document would use.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            made["components"]["schemas"]["Problem"] = plain_schema(Problem)
            app.openapi_schema = whole_numbers(made)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def openapi_route(prefix: str) -> Route:
    """``GET <prefix>/openapi.json``, which OpenEnv's validator requests from a server mounted there."""

    async def published(request: Request) -> JSONResponse:
        whole = await asyncio.to_thread(request.app.openapi)
        return JSONResponse(document_below(whole, prefix))

    return Route(f"{prefix}/openapi.json", published, include_in_schema=False)


def document_below(document: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The part of a document that describes the paths below ``prefix``, as a server mounted there would publish it."""
    below = prefix + "/"
    paths = {p.removeprefix(prefix): item for p, item in document["paths"].items() if p.startswith(below)}
    return {**document, "paths": paths, "servers": [{"url": prefix}]}


def inlined_paths(document: Mapping[str, Any]) -> dict[str, Any]:
    """The paths of a document, with schemas in place of references."""
    paths: dict[str, Any] = inlined(document["paths"], document["components"]["schemas"])
    return paths


def whole_numbers(value: Any) -> Any:
    """The same JSON with 2.0 written as 2."""
    if isinstance(value, dict):
        return {key: whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
