"""All HTTP endpoints of the server, by mount."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from env.families import SERVING
from server.api.batch import BatchRoutes
from server.api.docs_page import docs_route
from server.api.episodes import EpisodeRoutes
from server.api.openapi import openapi_route
from server.api.plan import PlanRoutes
from server.api.policies import PolicyRoutes
from server.api.route import Route, Routes
from server.api.shadow import ShadowRoutes
from server.api.web import web_routes
from server.context import Context
from server.metrics import MEDIA_TYPE

OWN_ROUTES: Final[Mapping[str, tuple[type[Routes], ...]]] = {SERVING: (BatchRoutes, ShadowRoutes, PlanRoutes)}
"""Further endpoints of single families."""


def http_routes(context: Context) -> list[BaseRoute]:
    """Endpoints of every family at its mount, of the process, and the web page."""
    routes: list[BaseRoute] = []
    for mount in context.mounts:
        groups: tuple[type[Routes], ...] = (EpisodeRoutes, PolicyRoutes, *OWN_ROUTES.get(mount.family.name, ()))
        for group in groups:
            routes += group(context, mount).routes()
        if mount.prefix:
            routes.append(openapi_route(mount.prefix))
    return [*routes, _metrics_route(context), docs_route(context.settings), *web_routes(context.settings)]


def _metrics_route(context: Context) -> Route:
    async def metrics() -> Response:
        return Response(context.metrics.exposition(), headers={"content-type": MEDIA_TYPE})

    return Route("/metrics", metrics, "Metrics of the server, for Prometheus", response_class=PlainTextResponse)
