"""Exceptions of this package. Each class has a stable ``code`` for programs and the HTTP status of its answer.

``InferenceGymError``
    ``InvalidActionError``      an action field is missing, of the wrong type or out of range (422)
    ``InvalidConfigError``      an episode or task setting is unknown or out of range (422)
    ``AgentError``              an agent from a package or of your own raised an exception (500)
    ``UnknownTaskError``        no task has this id (422)
    ``UnknownSessionError``     no session has this id (404)
        ``OtherReleaseError``       the session's episode was started on another release (410)
    ``NotResetError``           a step came before the first reset (409)
    ``EpisodeDoneError``        a step came after the end of the episode (400)
    ``StepConflictError``       another action was already accepted for this step (409)
    ``MalformedLogError``       an episode log does not have the documented form (422)
    ``ForgedLogError``          a log disagrees with the replay of its own actions (422)
    ``DataFormatError``         an input file is not in the format that it claims, or an output cannot be written (422)
    ``TableError``              the lookup table is missing, damaged or of another version (503)
    ``StoreError``              the session store cannot answer now (503)
    ``CapacityError``           the server has reached its limit of sessions (503)
    ``RemoteError``             another server refused a request or cannot be reached (502)
        ``ServerUnavailableError``  no usable answer after all retries (502)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr
from typing import ClassVar, Final


def short_repr(value: object, limit: int = 80) -> str:
    """Bounded repr for error messages: at most ``limit`` characters, fast for huge values too."""
    try:
        text = _REPR.repr(value)
    except ValueError:  # Python refuses to print an integer of more than 4,300 digits
        return f"<{type(value).__name__} of too many digits>"
    return short_text(text, limit)


def short_text(text: str, limit: int = 80) -> str:
    """Bounded text for error messages and logs: shortens a name from outside as :func:`short_repr` does a value.

    Control characters but newlines are escaped, since a terminal would obey them.
    """
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", shown)


_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


MAX_PATH_CHARS: Final = 200
"""Longest path of a field in an error."""
MAX_MESSAGE_CHARS: Final = 2_000
"""Longest message of an error: several times the longest message without quoted values."""


MISSING: Final = object()
"""Placeholder for the value of a missing field, in the functions below."""


class UnknownField(str):
    """Advice of an error about an unknown field: the known fields, and the one that was probably meant."""

    __slots__ = ()


def did_you_mean(name: object, known: Iterable[object], otherwise: str, cutoff: float = 0.6) -> str:
    """``otherwise``, a clause that lists what is known, after the known name that was probably meant, if any is."""
    near = get_close_matches(short_text(str(name)), [str(one) for one in known], 1, cutoff)
    return f"did you mean {near[0]}? {otherwise[0].upper()}{otherwise[1:]}" if near else otherwise


def not_allowed(field: str, value: object, allowed: str) -> str:
    """Message of an error about one field: its name, what was found, what is allowed."""
    path = short_text(field, MAX_PATH_CHARS)
    if isinstance(allowed, UnknownField):
        return f"unknown field {path}: {allowed}"
    if value is MISSING:
        return f"{path} is missing: it must be {allowed}"
    return f"{path}={short_repr(value)} is not allowed: {path} must be {allowed}"


_REPR: Final = Repr()
# Larger than any limit in use, and far smaller than the values that a client may send.
vars(_REPR).update(maxlist=40, maxtuple=40, maxdict=40, maxstring=200, maxother=200, maxlong=200, maxlevel=3)


class InferenceGymError(Exception):
    """Base of all exceptions of this package."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500

    def __str__(self) -> str:
        # Whatever a message quotes, a client cannot make answers or log lines as long as its request.
        return short_text(super().__str__(), MAX_MESSAGE_CHARS)


def _short_path(field: str | None) -> str | None:
    return None if field is None else short_text(field, MAX_PATH_CHARS)


class InvalidActionError(InferenceGymError, ValueError):
    """An action field is missing, of the wrong type or out of range. (HTTP 422)"""

    code = "invalid_action"
    http_status = 422

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = short_text(field, MAX_PATH_CHARS)
        self.value = None if value is MISSING else value
        self.allowed = allowed
        super().__init__(not_allowed(field, value, allowed))


class InvalidConfigError(InferenceGymError, ValueError):
    """A setting of an episode, a task or the server is unknown or out of range. (HTTP 422)

    ``field`` is the setting's name or path, None if several are at fault.
    """

    code = "invalid_config"
    http_status = 422

    def __init__(self, message: str, field: str | None = None) -> None:
        self.field = _short_path(field)
        super().__init__(message)


def refusal(field: str, value: object, allowed: str) -> InvalidConfigError:
    """The error for a value that is not ``allowed``; ``field`` is its path, empty for a whole entry."""
    if value is MISSING or isinstance(allowed, UnknownField):
        return InvalidConfigError(not_allowed(field, value, allowed), field)
    found = short_repr(value)
    named = f"{field}={found}" if field else found
    return InvalidConfigError(f"{named} is not allowed: it must be {allowed}", field or None)


class AgentError(InferenceGymError, RuntimeError):
    """An agent raised an exception of its own: when it was made, or in one of its methods. (HTTP 500)"""

    code = "agent"
    http_status = 500


class UnknownTaskError(InferenceGymError, LookupError):
    """No task has this id. (HTTP 422)"""

    code = "unknown_task"
    http_status = 422


class UnknownSessionError(InferenceGymError, LookupError):
    """No session has this id: reset to get one. (HTTP 404)"""

    code = "unknown_session"
    http_status = 404


class OtherReleaseError(UnknownSessionError):
    """The session's episode was started on another release, which may play it differently: reset. (HTTP 410)"""

    code = "other_release"
    http_status = 410


class NotResetError(InferenceGymError, RuntimeError):
    """A step came before the first reset. (HTTP 409)"""

    code = "not_reset"
    http_status = 409


class EpisodeDoneError(InferenceGymError, RuntimeError):
    """A step came after the end of the episode: reset to start the next one. (HTTP 400)"""

    code = "episode_done"
    http_status = 400


class StepConflictError(InferenceGymError, RuntimeError):
    """Another action was already accepted for this step number. (HTTP 409)"""

    code = "step_conflict"
    http_status = 409


class _AtStep(ValueError):
    """Part of an error that names a step of a log, counted from 0, and a field."""

    def __init__(self, message: str, step: int | None = None, field: str | None = None) -> None:
        self.step = step
        self.field = _short_path(field)
        super().__init__(message)


class MalformedLogError(InferenceGymError, _AtStep):
    """An episode log does not have the documented form; the message names step and field. (HTTP 422)

    ``step`` counts entries from 0, ``field`` is a path such as ``metrics.tokens_per_sec``; both are None if the whole
    log is at fault, only ``field`` if a whole entry is.
    """

    code = "malformed_log"
    http_status = 422


class ForgedLogError(InferenceGymError, _AtStep):
    """A log disagrees with the replay of its own actions; the message names the first step that differs. (HTTP 422)

    ``step`` counts entries from 0, ``field`` is a path such as ``metrics.tokens_per_sec``; both are None where the
    disagreement concerns the log as a whole.
    """

    code = "forged_log"
    http_status = 422


class DataFormatError(InferenceGymError, ValueError):
    """An input file is not in the format that it claims, or an output file cannot be written. (HTTP 422)

    ``line`` counts lines from 1, ``field`` is the column or the path of the value at fault; both are None where the
    file as a whole is at fault.
    """

    code = "data_format"
    http_status = 422

    def __init__(self, message: str, line: int | None = None, field: str | None = None) -> None:
        self.line = line
        self.field = _short_path(field)
        super().__init__(message)


class TableError(InferenceGymError, RuntimeError):
    """The lookup table is missing, damaged or of another version. (HTTP 503)"""

    code = "table"
    http_status = 503


class StoreError(InferenceGymError, RuntimeError):
    """The session store cannot answer now; nothing was changed. (HTTP 503)"""

    code = "store"
    http_status = 503


class CapacityError(InferenceGymError, RuntimeError):
    """The server has reached its limit of sessions; try again later. (HTTP 503)"""

    code = "capacity"
    http_status = 503


class UnauthorizedError(InferenceGymError, PermissionError):
    """The API key is missing or wrong. (HTTP 401)"""

    code = "unauthorized"
    http_status = 401


class RemoteError(InferenceGymError, RuntimeError):
    """Another server refused a request or cannot be reached. (HTTP 502)

    ``status`` is the HTTP status of its answer, None without an answer.
    """

    code = "remote"
    http_status = 502

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


class ServerUnavailableError(RemoteError, ConnectionError):
    """The server gave no usable answer after all retries; nothing is lost on it. (HTTP 502)"""

    code = "server_unavailable"
