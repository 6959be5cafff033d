"""Errors of requests that are refused before they reach an environment."""

from __future__ import annotations

from inferencegym.errors import InferenceGymError, InvalidConfigError, not_allowed


class InvalidRequestError(InvalidConfigError):
    """A field of the request is missing, unknown, of the wrong type or out of range. (HTTP 422)"""

    code = "invalid_request"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.allowed = allowed
        super().__init__(not_allowed(field, value, allowed), field)


class SessionConflictError(InferenceGymError, RuntimeError):
    """The session plays another task than the request names. (HTTP 409)"""

    code = "session_conflict"
    http_status = 409


class UnknownPolicyError(InferenceGymError, LookupError):
    """No stored policy of this name plays this task. (HTTP 404)"""

    code = "unknown_policy"
    http_status = 404


class InvalidJsonError(InferenceGymError, ValueError):
    """The body is not one JSON object, or not strict JSON. (HTTP 422)"""

    code = "invalid_json"
    http_status = 422


class BodyTooLargeError(InferenceGymError, ValueError):
    """The body is longer than this path's limit. (HTTP 413)"""

    code = "body_too_large"
    http_status = 413


class BodyTimeoutError(InferenceGymError, TimeoutError):
    """The body did not arrive in time. (HTTP 408)"""

    code = "body_timeout"
    http_status = 408


class ForeignOriginError(InferenceGymError, PermissionError):
    """A page of another origin wants to do more than read. (HTTP 403)"""

    code = "foreign_origin"
    http_status = 403


class UnknownHostError(InferenceGymError, PermissionError):
    """The Host header is not one of the allowed host names. (HTTP 403)"""

    code = "unknown_host"
    http_status = 403


class OverloadedError(InferenceGymError, RuntimeError):
    """The memory limit of running requests is reached. (HTTP 503)"""

    code = "overloaded"
    http_status = 503


class RateLimitedError(InferenceGymError, RuntimeError):
    """Too many requests; ``retry_after_s`` is the time until the next one is allowed, in seconds. (HTTP 429)"""

    code = "rate_limited"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)
