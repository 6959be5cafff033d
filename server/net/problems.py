"""Errors as HTTP answers: ``{"detail": {"message", "code", "field", "allowed", "next"}}`` for every one of them."""

from __future__ import annotations

import http
from collections.abc import Mapping
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from inferencegym.errors import ForgedLogError, InferenceGymError, MalformedLogError
from inferencegym.families import FAMILIES
from server.net.json_io import REQUEST_ID_KEY, JsonReply, RawHeaders

NEXT: Final[dict[str, str]] = {
    "invalid_action": "correct the action and send the step again; nothing was changed",
    "invalid_config": "correct the request and send it again; GET /openapi.json has the schemas",
    "invalid_request": "correct the request and send it again; GET /openapi.json has the schemas",
    "invalid_json": "send one JSON object as UTF-8, without NaN, Infinity or repeated keys",
    "invalid_batch": "GET /openapi.json describes the layout under {at}/step/batch",
    "unknown_task": "GET {at}/tasks lists the tasks",
    "unknown_session": "POST {at}/reset starts a session and returns its session_id",
    "not_reset": "POST {at}/reset first",
    "episode_done": "POST {at}/reset starts the next episode; POST {at}/grader scores this one",
    "step_conflict": "GET {at}/state returns how many steps were taken; continue from there",
    "unknown_policy": "GET {at}/policies lists the policies that play each task",
    "session_conflict": "leave out what contradicts the session, or its session_id; GET {at}/state returns its task",
    "data_format": "correct the file and send it again",
    "malformed_log": "send the log as the environment wrote it; GET /openapi.json has its schema",
    "forged_log": "send the log of the episode as it was played, with its seed and config; another release, table or "
    "calibration gives other numbers",
    "store": "send the request again after the time in Retry-After; give a step its number to make that safe",
    "job_lost": "try again after the time in Retry-After with a shorter part of the log",
    "capacity": "try again after the time in Retry-After, or restart a session of yours with its session_id",
    "table": "try again after the time in Retry-After; the server's log has the cause",
    "body_too_large": "send less in one request",
    "head_too_large": "send fewer or shorter headers",
    "unsupported_media_type": "send the header Content-Type: application/json",
    "body_timeout": "send the whole body at once",
    "unauthorized": "send Authorization: Bearer KEY, or X-API-Key: KEY",
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
    "session_conflict": "leave out the session_id, and another session is started",
}
"""What to do next; ``{at}`` is the prefix of the environment that was asked. Batch sessions have paths of their own."""

RETRY_AFTER_S: Final = 1


_STATUS_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


def problem_reply(error: InferenceGymError, path: str) -> JsonReply:
    """The answer to a request for ``path`` that ended in ``error``."""
    detail: dict[str, Any] = {"message": str(error), "code": error.code}
    for key in ("field", "allowed"):
        value = getattr(error, key, None)
        if value is not None:
            detail[key] = str(value)
    if isinstance(error, (ForgedLogError, MalformedLogError)) and error.step is not None:
        detail["step"] = error.step
    if getattr(error, "line", None) is not None:
        detail["line"] = vars(error)["line"]
    detail["next"] = _next(error.code, path)
    headers: list[tuple[bytes, bytes]] = []
    if error.http_status in (429, 503):
        seconds = max(RETRY_AFTER_S, int(getattr(error, "retry_after_s", 0) + 0.999))
        headers.append((b"retry-after", str(seconds).encode()))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.http_status in (408, 413):
        # The rest of the body is not waited for.
        headers.append((b"connection", b"close"))
    return JsonReply(orjson.dumps({"detail": detail}), error.http_status, headers)


def _next(code: str, path: str) -> str:
    text = NEXT.get(code, "correct the request and send it again")
    if path.endswith("/batch"):
        text = NEXT_OF_BATCHES.get(code, text)
    return text.format(at=next((f"/{name}" for name in FAMILIES if path.startswith(f"/{name}/")), ""))


def install_problem_handlers(app: FastAPI) -> None:
    """Answer every kind of error in the same form; unexpected exceptions become a 500 without details."""
    app.add_exception_handler(InferenceGymError, _on_known)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unknown)


async def _on_known(request: Request, error: Exception) -> JsonReply:
    assert isinstance(error, InferenceGymError)
    return problem_reply(error, request.scope["path"])


async def _on_http(request: Request, error: Exception) -> JsonReply:
    assert isinstance(error, HTTPException)
    code = _STATUS_CODES.get(error.status_code, "http_error")
    message = error.detail or http.HTTPStatus(error.status_code).phrase
    detail = {"message": str(message), "code": code, "next": _next(code, request.scope["path"])}
    headers = [(k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()]
    return JsonReply(orjson.dumps({"detail": detail}), error.status_code, headers)


async def _on_unknown(request: Request, _error: Exception) -> JsonReply:
    # This answer does not pass the middleware that adds the header to all others.
    headers = [(b"x-request-id", request.scope[REQUEST_ID_KEY])] if REQUEST_ID_KEY in request.scope else []
    return failure_reply(headers)


def failure_reply(headers: RawHeaders = ()) -> JsonReply:
    """Answer to a request that failed by a fault of the server (HTTP 500)."""
    detail = {
        "message": "the server failed on this request; the cause is in its log under this answer's X-Request-Id",
        "code": "internal",
        "next": "report the request id; if it was a step, send it again with its number",
    }
    return JsonReply(orjson.dumps({"detail": detail}), 500, headers)


_STATUS_TEXTS: Final = {
    400: "The request cannot be answered as things stand (the episode is over, for one)",
    401: "The API key is missing or wrong",
    403: "A page of another origin wants to do more than read, or the Host header has another name than the server",
    404: "There is no such session, or no such environment",
    408: "The body did not arrive in time",
    409: "Another action was already accepted for this step, or the session plays another task",
    413: "The body is too large",
    415: "The body is not JSON",
    422: "A field is missing, unknown or out of range",
    429: "Too many requests; see Retry-After",
    431: "The request's path and headers are too large",
    503: "The store or the table cannot be used now, or too much is under way; see Retry-After",
}


def documented(schema: Mapping[str, Any], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses: 200 with this schema, errors of these statuses, and those of any path with a body."""
    ok = {"description": "OK", "content": {"application/json": {"schema": dict(schema)}}}
    return {200: ok, **documented_errors(401, 403, 408, 413, 415, 422, 429, 431, 503, *statuses)}


def detail_schema() -> dict[str, Any]:
    """JSON schema of an error's body."""
    text = {"type": "string"}
    properties: dict[str, Any] = {"message": text, "code": text, "field": text, "allowed": text, "next": text}
    properties["step"] = {
        "type": "integer",
        "description": "of a forged or malformed log: the first entry at fault, counted from 0",
    }
    properties["line"] = {"type": "integer", "description": "of a request log: the line at fault, counted from 1"}
    detail = {"type": "object", "properties": properties, "required": ["message", "code", "next"]}
    return {"type": "object", "properties": {"detail": detail}, "required": ["detail"]}


def documented_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses of errors by status."""
    content = {"application/json": {"schema": detail_schema()}}
    return {status: {"description": _STATUS_TEXTS[status], "content": content} for status in sorted({*statuses})}
