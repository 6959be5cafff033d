"""Errors as HTTP answers: ``{"detail": {"message", "code", "field", "allowed", "next"}}`` for every one of them."""

from __future__ import annotations

import http
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from env.families import FAMILIES
from inferencegym.errors import InferenceGymError
from server.net.json_io import JsonReply

NEXT: Final[dict[str, str]] = {
    "invalid_action": "correct the action and send the step again; nothing was changed",
    "agent": "choose another agent, and tell who runs this server: a package that they installed is at fault",
    "invalid_json": "send one JSON object as UTF-8, without NaN, Infinity or repeated keys",
    "invalid_batch": "GET /openapi.json describes the layout under {at}/step/batch",
    "unknown_task": "GET {at}/tasks lists the tasks",
    "unknown_session": "POST {at}/reset starts a session and returns its session_id",
    "other_release": "POST {at}/reset starts the next episode, with the same session_id or another",
    "not_reset": "POST {at}/reset first",
    "episode_done": "POST {at}/reset starts the next episode; POST {at}/grader scores this one",
    "step_conflict": "GET {at}/state returns how many steps were taken; continue from there",
    "unknown_policy": "GET {at}/policies lists the policies that play each task",
    "session_conflict": "leave out fields that contradict the session, or its session_id; GET {at}/state has the task",
    "data_format": "correct this in the file",
    "malformed_log": "send the log as the environment wrote it; GET /openapi.json has its schema",
    "forged_log": "send the unchanged log of the episode, with its seed and config; another release, table or "
    "calibration gives other numbers",
    "store": "send the request again after the time in Retry-After; give a step its number to make that safe",
    "job_lost": "try again after the time in Retry-After with a shorter part of the log",
    "capacity": "try again after the time in Retry-After, or restart a session of yours with its session_id",
    "table": "try again after the time in Retry-After; the server's log has the cause",
    "body_too_large": "send less in one request",
    "body_timeout": "send the whole body at once",
    "unauthorized": "set INFERENCEGYM_API_KEY for our clients, else send Authorization: Bearer KEY or X-API-Key: KEY; "
    "a browser takes the key as password",
    "foreign_origin": "play from a program or from this server's page, or have it started with INFERENCEGYM_CORS=all",
    "unknown_host": "use a known host name of the server, or have this one added to INFERENCEGYM_ALLOWED_HOSTS",
    "overloaded": "try again after the time in Retry-After; nothing was changed",
    "rate_limited": "wait for the time in Retry-After",
    "not_found": "GET /openapi.json lists the paths",
    "method_not_allowed": "GET /openapi.json lists the methods of each path",
}
NEXT_OF_BATCHES: Final[dict[str, str]] = {
    "unknown_session": "POST {at}/reset/batch starts a session and returns its session_id",
    "episode_done": "POST {at}/reset/batch with the session_id starts the next episodes",
    "step_conflict": "continue from the step that the message names",
    "session_conflict": "leave out the session_id to start another session",
}
"""What to do next; ``{at}`` is the prefix of the environment. Batch sessions have their own paths."""

RETRY_AFTER_S: Final = 1

_NO_STORE: Final = (b"cache-control", b"no-store")
_STATUS_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


def problem_reply(error: InferenceGymError, path: str) -> JsonReply:
    """The answer to a request for ``path`` that ended in ``error``."""
    detail: dict[str, Any] = {"message": str(error), "code": error.code}
    for key in ("field", "allowed", "step", "line"):
        value = getattr(error, key, None)
        if value is not None:
            detail[key] = value if isinstance(value, int) else str(value)
    detail["next"] = _next(error.code, path)
    headers = [_NO_STORE]
    if error.http_status in (429, 503):
        seconds = max(RETRY_AFTER_S, int(getattr(error, "retry_after_s", 0) + 0.999))
        headers.append((b"retry-after", str(seconds).encode()))
    if error.http_status == 401:
        # The second lets a browser ask its visitor for the key.
        headers += [(b"www-authenticate", b"Bearer"), (b"www-authenticate", b'Basic realm="InferenceGym"')]
    if error.http_status in (408, 413):
        # Does not wait for the rest of the body.
        headers.append((b"connection", b"close"))
    return JsonReply(orjson.dumps({"detail": detail}), error.http_status, headers)


def _next(code: str, path: str) -> str:
    text = NEXT.get(code, "correct the request and send it again; GET /openapi.json has the schemas")
    if path.endswith("/batch"):
        text = NEXT_OF_BATCHES.get(code, text)
    return text.format(at=next((f"/{name}" for name in FAMILIES if path.startswith(f"/{name}/")), ""))


def install_problem_handlers(app: FastAPI) -> None:
    """Answer every kind of error in the same form; unexpected exceptions become a 500 without details."""
    app.add_exception_handler(InferenceGymError, _on_known)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, failure_reply)


async def _on_known(request: Request, error: Exception) -> JsonReply:
    assert isinstance(error, InferenceGymError)
    return problem_reply(error, request.scope["path"])


async def _on_http(request: Request, error: Exception) -> JsonReply:
    assert isinstance(error, HTTPException)
    code = _STATUS_CODES.get(error.status_code, "http_error")
    message = error.detail or http.HTTPStatus(error.status_code).phrase
    detail = {"message": str(message), "code": code, "next": _next(code, request.scope["path"])}
    headers = [_NO_STORE, *((k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items())]
    return JsonReply(orjson.dumps({"detail": detail}), error.status_code, headers)


async def failure_reply(*_: object) -> JsonReply:
    """The answer to a request on which the server failed; the log has the cause."""
    detail = {
        "message": "the server failed on this request; the cause is in its log under this answer's X-Request-Id",
        "code": "internal",
        "next": "report the request id; if it was a step, send it again with its number",
    }
    return JsonReply(orjson.dumps({"detail": detail}), 500, [_NO_STORE])
