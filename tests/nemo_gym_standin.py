"""NeMo Gym's interface of resources servers, as nemo-gym 0.4.0 has it (github.com/NVIDIA-NeMo/Gym, nemo_gym/).

It needs Python 3.12 and brings Ray of its own. Gym makes the class with ``config`` and ``server_client``, serves what
``setup_webserver`` returns, and gives every session an id in a signed cookie. An agent posts a row to
``/seed_session``, the arguments of each call of a tool to ``/NAME``, and the row with the response to ``/verify``.
"""

from __future__ import annotations

import types
import uuid
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_ID_KEY = "session_id"


class BaseResourcesServerConfig(BaseModel):
    host: str
    port: int
    entrypoint: str
    name: str


class BaseSeedSessionRequest(BaseModel):
    pass


class BaseSeedSessionResponse(BaseModel):
    pass


class BaseVerifyRequest(BaseModel):
    responses_create_params: dict[str, Any]
    response: dict[str, Any]


class BaseVerifyResponse(BaseVerifyRequest):
    reward: float


class Sessions:
    """Middleware that gives whoever has no cookie a session of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        session = HTTPConnection(scope).cookies.get("session") or str(uuid.uuid4())
        scope["session"] = {SESSION_ID_KEY: session}

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"set-cookie", f"session={session}".encode())]
            await send(message)

        await self.app(scope, receive, sent)


class SimpleResourcesServer(BaseModel):
    config: BaseResourcesServerConfig
    server_client: Any

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        app.add_middleware(Sessions)
        app.post("/seed_session")(self.seed_session)
        app.post("/verify")(self.verify)
        return app

    def seed_session(self) -> None:
        raise NotImplementedError

    def verify(self) -> None:
        raise NotImplementedError


def modules() -> dict[str, types.ModuleType]:
    """Modules for ``sys.modules``."""
    package, base, utils = (
        types.ModuleType(name) for name in ("nemo_gym", "nemo_gym.base_resources_server", "nemo_gym.server_utils")
    )
    for one in (
        BaseResourcesServerConfig,
        BaseSeedSessionRequest,
        BaseSeedSessionResponse,
        BaseVerifyRequest,
        BaseVerifyResponse,
        SimpleResourcesServer,
    ):
        setattr(base, one.__name__, one)
    utils.SESSION_ID_KEY = SESSION_ID_KEY  # type: ignore[attr-defined]
    return {module.__name__: module for module in (package, base, utils)}
