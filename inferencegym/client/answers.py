"""Decoding of a server's HTTP answers: their JSON, or the exception that the local environment would have raised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx

from inferencegym import errors
from inferencegym.errors import (
    InferenceGymError,
    InvalidActionError,
    InvalidConfigError,
    RemoteError,
    ServerUnavailableError,
)


class ServerError(RemoteError):
    """The server answered with an error for which this package has no class.

    ``code`` is the server's error code, ``status`` the HTTP status.
    """

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message, status)
        self.code = code  # type: ignore[misc]  # sent by the server, so it differs between errors of this class


def json_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a successful answer; raise the exception of any other (see :func:`error_of`)."""
    try:
        body = answer.json()
    except ValueError as error:
        raise ServerUnavailableError(
            f"{answer.url} answered {answer.status_code} and no JSON: is this the address of an InferenceGym server?"
        ) from error
    if answer.status_code == 200 and isinstance(body, dict):
        return body
    detail = body.get("detail") if isinstance(body, dict) else None
    if not isinstance(detail, dict) or "code" not in detail:
        raise ServerError(f"{answer.url} answered {answer.status_code}: {body}", "http_error", answer.status_code)
    message = f"{detail.get('message')}; {detail.get('next')}"
    raise error_of(detail["code"], message, answer.status_code, detail)


def error_of(code: str, message: str, http_status: int = 400, detail: Mapping[str, Any] | None = None) -> Exception:
    """Exception for an error ``code`` of a server: the class that local use raises, or else :class:`ServerError`."""
    detail = detail or {}
    if code == InvalidActionError.code:
        error = InvalidActionError(str(detail.get("field", "action")), None, str(detail.get("allowed", "")))
        error.args = (message,)
        return error
    found = _CLASSES.get(code)
    if found is not None:
        return _with_place(found(message), detail)
    if http_status == InvalidConfigError.http_status:
        return _with_place(InvalidConfigError(message), detail)
    return ServerError(message, code, http_status)


def _with_place(error: InferenceGymError, detail: Mapping[str, Any]) -> InferenceGymError:
    """The error with the step and the field that the server names."""
    for name in ("step", "field"):
        if name in detail and hasattr(error, name):
            setattr(error, name, detail[name])
    return error


_CLASSES: Final[dict[str, type[InferenceGymError]]] = {
    found.code: found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, InferenceGymError) and found is not InvalidActionError
}
