"""Routes of the server: FastAPI's, with bounded bodies and one form of errors, and a direct one for steps.

:class:`StepRoute` is documented by FastAPI, and :class:`Steps` calls its endpoint directly, since FastAPI's
routing and validation would lengthen every step.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, cast

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from inferencegym.errors import InferenceGymError
from inferencegym.messages import explain, refuse_many_unknown
from server.context import Context, Mount
from server.net.errors import InvalidRequestError
from server.net.json_io import MAX_BODY_BYTES, SMALL, JsonBounds, JsonReply, parse_body, read_body
from server.net.problems import problem_reply

Endpoint = Callable[..., Awaitable[Any]]
StepEndpoint = Callable[[Request], Awaitable[Response]]


class Route(APIRoute):
    """FastAPI route; ``statuses`` are those of its errors besides the usual ones.

    The route refuses a body that is longer than ``most_bytes`` or exceeds the ``bounds`` of its JSON. With
    ``most_bytes`` None it reads no body.
    ``elsewhere`` may answer a body in another way: with JSON, or None for those that the endpoint answers.
    ``types`` are annotations of the endpoint's parameters, or pairs of annotation and default, where families differ.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        summary: str,
        *,
        method: str = "GET",
        most_bytes: int | None = None,
        bounds: JsonBounds | None = SMALL,
        elsewhere: Callable[[bytes], Awaitable[bytes | None]] | None = None,
        types: Mapping[str, Any] | None = None,
        statuses: tuple[int, ...] = (),
        responses: Mapping[int | str, dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self._most_bytes, self._bounds, self._elsewhere = most_bytes, bounds, elsewhere
        errors: dict[int | str, Any] = {one: _ERRORS[one] for one in sorted({*_USUAL_STATUSES, *statuses})}
        super().__init__(
            path,
            endpoint if types is None else _typed(endpoint, types),
            name=endpoint.__name__,
            methods=[method],
            summary=summary,
            responses={**errors, **(responses or {})},
            strict_content_type=False,
            **kwargs,
        )

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, between reading within limits and errors of one form."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if self._most_bytes is not None:
                body = await read_body(request, self._most_bytes)
                if self._elsewhere is not None and (done := await self._elsewhere(body)) is not None:
                    return JsonReply(done)
                parsed = await parse_body(body, self._bounds)
                refuse_many_unknown(self._model_of("body"), parsed, InvalidRequestError)
                request = _ParsedRequest(request, parsed)
            try:
                response = await answer(request)
            except RequestValidationError as error:
                problems = error.errors()
                model = self._model_of(problems[0]["loc"][0])
                inner = [{**problem, "loc": problem["loc"][1:]} for problem in problems]
                raise explain(model, cast("list[ErrorDetails]", inner), InvalidRequestError) from None
            response.headers.setdefault("cache-control", "no-store")
            return response

        return handle

    def _model_of(self, place: object) -> type[BaseModel]:
        """The model that reads a request's body, or else its query."""
        field = self.body_field if place == "body" else self.dependant.query_params[0]
        assert field is not None
        return cast("type[BaseModel]", field.field_info.annotation)


class StepRoute(Route):
    """Route whose endpoint takes the request and returns the response itself; FastAPI only documents it."""

    def __init__(self, path: str, endpoint: StepEndpoint, summary: str, **kwargs: Any) -> None:
        super().__init__(path, endpoint, summary, method="POST", **kwargs)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)

        self.app = answer


class Routes(ABC):
    """A group of endpoints of one family at one prefix."""

    def __init__(self, context: Context, mount: Mount) -> None:
        self._context, self._settings = context, context.settings
        self._family, self._prefix = mount.family, mount.prefix
        self._tag = mount.family.name

    @abstractmethod
    def routes(self) -> list[Route]:
        """Routes of these endpoints, the most used first, since they are tried in order."""

    def _route(self, path: str, endpoint: Endpoint, summary: str, **more: Any) -> Route:
        return Route(self._prefix + path, endpoint, summary, tags=[self._tag], **more)

    def _post(self, path: str, endpoint: Endpoint, summary: str, **more: Any) -> Route:
        return self._route(path, endpoint, summary, method="POST", **{"most_bytes": MAX_BODY_BYTES, **more})

    def _step(self, path: str, endpoint: StepEndpoint, summary: str, **more: Any) -> Route:
        return StepRoute(self._prefix + path, endpoint, summary, tags=[self._tag], **more)


class Steps:
    """ASGI middleware that gives requests for a :class:`StepRoute` to it, without FastAPI's routing."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self.app = app
        self._steps = {route.path: route.app for route in routes if isinstance(route, StepRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        step = self._steps.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        try:
            await (step or self.app)(scope, receive, send)
        except InferenceGymError as error:
            # A step's error: FastAPI answers those of other routes itself, in the same form.
            await problem_reply(error, scope["path"])(scope, receive, send)


class _ParsedRequest(Request):
    """Request whose body is read and parsed."""

    def __init__(self, request: Request, parsed: dict[str, Any]) -> None:
        # Without a media type, which FastAPI would judge: what was parsed is JSON, whatever its sender calls it.
        headers = [one for one in request.scope["headers"] if one[0] != b"content-type"]
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._parsed = parsed

    async def body(self) -> bytes:
        """Any bytes, because FastAPI checks whether there are some. An absent body is an empty object."""
        return b"{}"

    async def json(self) -> dict[str, Any]:
        """The parsed body."""
        return self._parsed


def _typed(endpoint: Endpoint, types: Mapping[str, Any]) -> Endpoint:
    """The endpoint with these types in its signature, which FastAPI reads."""

    async def typed(**arguments: Any) -> Any:
        return await endpoint(**arguments)

    signature = inspect.signature(endpoint, eval_str=True)
    found = dict(signature.parameters)
    for name, kind in types.items():
        annotation, default = kind if isinstance(kind, tuple) else (kind, inspect.Parameter.empty)
        found[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
    by_name = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in found.values()]
    vars(typed)["__signature__"] = signature.replace(parameters=by_name)
    return typed


# ---------------------------------------------------------------- errors in the documents


class ProblemDetail(BaseModel):
    """What was wrong, what is allowed and what to do next."""

    message: str
    code: str
    next: str
    # These fields are optional; a factory keeps their default out of the schema.
    field: str = Field(default_factory=str)
    allowed: str = Field(default_factory=str)
    step: int = Field(
        default_factory=int, description="for a forged or malformed log: the first entry at fault, counted from 0"
    )
    line: int = Field(default_factory=int, description="for a request log: the line at fault, counted from 1")


class Problem(BaseModel):
    """Body of every error."""

    detail: ProblemDetail


_STATUS_TEXTS: Final = {
    400: "The request is not possible in the current state (for example, the episode is over)",
    401: "The API key is missing or wrong",
    403: "A page of another origin sent more than a read, or the Host header is not an allowed name",
    404: "There is no such session, or no such environment",
    408: "The body did not arrive in time",
    409: "Another action was already accepted for this step, or the session plays another task",
    410: "The session's episode was started on another release of the server",
    413: "The body is too large",
    422: "A field is missing, unknown or out of range",
    429: "Too many requests; see Retry-After",
    503: "The store or the table is not available, or the server is overloaded; see Retry-After",
}
_USUAL_STATUSES: Final = (401, 403, 408, 413, 422, 429, 503)
# A reference, not a model: FastAPI would make an unused validator for each status of each path.
_BODY: Final = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_ERRORS: Final = {status: {"description": text, "content": _BODY} for status, text in _STATUS_TEXTS.items()}
