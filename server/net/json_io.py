"""JSON over HTTP: strict request bodies, JSON answers, and FastAPI routes that use them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import orjson
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferencegym.messages import MAX_DEPTH, parse_json
from server.net.errors import BodyTimeoutError, BodyTooLargeError, InvalidJsonError, UnsupportedMediaTypeError

REQUEST_ID_KEY: Final = "inferencegym.request_id"
"""Key of the ASGI scope that holds the request's id."""

SESSION_KEY: Final = "inferencegym.session"
"""Key of the ASGI scope under which an endpoint leaves the session id for the log."""

RawHeaders = Sequence[tuple[bytes, bytes]]
_JSON_HEADERS: Final = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]


class JsonReply(Response):
    """Response whose body is already JSON; its headers are built once, without Starlette's string handling."""

    media_type = "application/json"
    body: bytes

    def __init__(self, body: bytes, status_code: int = 200, headers: RawHeaders = ()) -> None:
        self.status_code = status_code
        self.body = body
        self.background = None
        self.raw_headers = [*_JSON_HEADERS, (b"content-length", b"%d" % len(body)), *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


def reply(value: object, status_code: int = 200, headers: RawHeaders = ()) -> JsonReply:
    """``value`` as a JSON answer."""
    return JsonReply(to_json(value), status_code, headers)


def to_json(value: object) -> bytes:
    """JSON text of an answer. NaN and infinity cannot come out of it: orjson writes them as null."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


class JsonRoute(APIRoute):
    """FastAPI route whose endpoint takes the request and returns a response; its schemas are given.

    FastAPI calls the endpoint directly, without dependencies or validation of its own: the family's message models
    validate the body.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        method: str,
        request_schema: Mapping[str, Any] | None = None,
        body_required: bool = True,
        responses: dict[int | str, dict[str, Any]] | None = None,
        parameters: Sequence[Mapping[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        extra: dict[str, Any] = {}
        if request_schema is not None:
            content = {"application/json": {"schema": dict(request_schema)}}
            extra["requestBody"] = {"required": body_required, "content": content}
        if parameters:
            extra["parameters"] = [dict(parameter) for parameter in parameters]
        super().__init__(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            response_class=JsonReply,
            responses=responses or {},
            openapi_extra=extra or None,
            **kwargs,
        )

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint itself; FastAPI provides this method for custom handlers."""
        return self.endpoint


async def read_object(request: Request, limit: int, timeout_s: float) -> dict[str, Any]:
    """The request's body as a JSON object; an absent body is an empty object.

    Refuses other media types (415), more than ``limit`` bytes (413), bodies that take longer than ``timeout_s`` (408)
    and anything but one strict JSON object (422).
    """
    body = await read_body(request, limit, timeout_s)
    return parse_object(body) if body else {}


async def read_body(request: Request, limit: int, timeout_s: float, also: bytes | None = None) -> bytes:
    """Bytes of a request's body, declared as JSON or the media type ``also``; errors as in :func:`read_object`."""
    _check_head(request.scope, limit, also)
    return await _in_time(request, limit, timeout_s)


async def _in_time(request: Request, limit: int, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            return await _receive_all(request, limit)
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s") from error


def _check_head(scope: Scope, limit: int, also: bytes | None) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            _check_length(value, limit)
        elif name == b"content-type" and value != also:
            _check_media_type(value)


async def _receive_all(request: Request, limit: int) -> bytes:
    message = await request.receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        chunks, size = [body], len(body)
        while message.get("more_body", False) and size <= limit:
            message = await request.receive()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
        body = b"".join(chunks)
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    if len(body) > limit:
        raise _too_large(limit)
    return body


def parse_object(body: bytes, name: str = "body") -> dict[str, Any]:
    """Strict JSON object: UTF-8, no NaN or Infinity, no repeated keys, at most 64 levels deep.

    Raises InvalidJsonError, which calls the text by ``name``.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJsonError(f"the {name} is not strict JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidJsonError(f"the {name} must be a JSON object, not {_json_type(value)}")
    # Each key needs one colon: if there are no more colons than keys that arrived, no key was overwritten.
    if body.count(b":") != _count_keys(value, name):
        try:
            parse_json(body, InvalidJsonError)
        except InvalidJsonError as error:
            raise InvalidJsonError(f"the {name} is not strict JSON: {error}") from error
    return value


def _count_keys(value: Any, name: str, depth: int = 0) -> int:
    if depth > MAX_DEPTH:
        raise InvalidJsonError(f"the {name} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        total = len(value)
        for item in value.values():
            if isinstance(item, (dict, list)):
                total += _count_keys(item, name, depth + 1)
        return total
    return sum(_count_keys(item, name, depth + 1) for item in value if isinstance(item, (dict, list)))


def _check_length(value: bytes, limit: int) -> None:
    if value.isdigit() and int(value) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is longer than {limit:,} bytes")


def _check_media_type(value: bytes) -> None:
    if value == b"application/json":
        return
    essence = value.split(b";", 1)[0].strip().lower()
    if essence != b"application/json" and not (essence.startswith(b"application/") and essence.endswith(b"+json")):
        shown = value[:80].decode("latin-1")
        raise UnsupportedMediaTypeError(f"Content-Type {shown!r} is not accepted: the body must be application/json")


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
