"""OpenEnv's protocol; being rewritten."""

from __future__ import annotations

from starlette.routing import BaseRoute

from server.context import Context


def openenv_routes(context: Context) -> list[BaseRoute]:
    """Routes of OpenEnv's protocol."""
    return []
