"""OpenEnv's routes, made once the server is up.

Importing OpenEnv takes longer than everything else that a start does. So the server answers first and imports then, on
a thread; whoever asks for one of OpenEnv's paths before it is done, or for the OpenAPI document, waits for it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Final

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from server.api.serving import Context
from server.families import SERVING, TRAFFIC

log = logging.getLogger(__name__)

START_AFTER_S: Final = 0.5
"""The first answers go out undisturbed: an import keeps the interpreter busy."""
PATHS: Final = ("/ws", "/mcp", "/metadata", "/schema", "/list_environments")
TASK_API: Final = tuple(f"/{{env_name}}/{name}" for name in ("splits", "tasks", "num_tasks", "task", "task_range"))

Running = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def places(context: Context) -> list[tuple[str, str]]:
    """Family and prefix of every place where a family is served."""
    if context.settings.env == SERVING:
        return [(SERVING, ""), (TRAFFIC, "/traffic")]
    return [(TRAFFIC, ""), (TRAFFIC, "/traffic"), (SERVING, "/serving")]


class LateOpenEnv:
    """Stands for OpenEnv's routes in ``app`` until they are there."""

    def __init__(self, app: FastAPI, context: Context) -> None:
        self._app = app
        self._context = context
        self._lock = threading.Lock()
        self._running: Running | None = None
        prefixes = [prefix for _, prefix in places(context)]
        first = [prefix + path for prefix in prefixes for path in PATHS]
        first += [prefix + path for prefix in prefixes if prefix for path in TASK_API]
        # At the root the names of environments could be ours, so our own routes are asked before.
        self._waiting = [_Waiting(self, first), _Waiting(self, list(TASK_API))]
        app.router.routes.insert(0, self._waiting[0])
        app.router.routes.append(self._waiting[1])

    def load(self) -> Running:
        """Import OpenEnv and put its routes in place, once; safe to call from any thread."""
        with self._lock:
            if self._running is None:
                from server.openenv import add_openenv  # imports OpenEnv

                running = add_openenv(self._app, self._context)
                for route in self._waiting:
                    self._app.router.routes.remove(route)
                self._context.metrics.know(route.path for route in self._app.routes if hasattr(route, "path"))
                self._running = running
            return self._running

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for one of the paths as soon as it can be."""
        await asyncio.to_thread(self.load)
        await self._app.router(scope, receive, send)

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Load while the server runs, and do around its life what OpenEnv wants done."""
        async with AsyncExitStack() as stack:

            async def start() -> None:
                await asyncio.sleep(START_AFTER_S)
                running = await asyncio.to_thread(_load_for_good, self.load)
                await stack.enter_async_context(running(app))

            task = asyncio.create_task(start())
            task.add_done_callback(_report)
            try:
                yield
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


def _load_for_good(load: Callable[[], Running]) -> Running:
    running = load()
    # Everything is imported now and stays. The garbage collector need not look at it again: each of its full rounds
    # would hold up all clients for a tenth of a second and more.
    gc.collect()
    gc.freeze()
    return running


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("OpenEnv's paths (/ws, /mcp and others) cannot be served", exc_info=error)


class _Waiting(BaseRoute):
    """Takes requests for paths whose routes are not there yet."""

    def __init__(self, late: LateOpenEnv, paths: list[str]) -> None:
        self._late = late
        patterns = [re.escape(path).replace(r"\{env_name\}", "[^/]+") for path in paths]
        self._pattern = re.compile("|".join(patterns))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        asked = scope["type"] in ("http", "websocket") and self._pattern.fullmatch(scope["path"])
        return (Match.FULL if asked else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._late.answer(scope, receive, send)
