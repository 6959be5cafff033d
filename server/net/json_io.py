"""JSON over HTTP: strict request bodies within limits, and JSON answers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferencegym.messages import MAX_DEPTH, parse_json
from server.net.errors import BodyTimeoutError, BodyTooLargeError, InvalidJsonError, UnsupportedMediaTypeError

REQUEST_ID_KEY: Final = "inferencegym.request_id"
"""Key of the ASGI scope that holds the request's id."""

SESSION_KEY: Final = "inferencegym.session"
"""Key of the ASGI scope under which an endpoint leaves the session id for the log."""

MAX_VALUES: Final = 2_000
"""Most values (objects and arrays included) of a JSON text, unless its path has another limit: several times the need
of any request except logs and batches.
"""
BODY_READ_KEY: Final = "inferencegym.body_read"
"""Key of the ASGI scope that is there once the whole body has arrived."""
LARGE_JSON_BYTES: Final = 65_536
"""Longer texts are read on a thread, and counted in pieces of this size."""
SMALL_LOG_BYTES: Final = 32_768
"""Longer bodies of POST /grader are read and graded in another process."""
_ONE_AT_A_TIME: Final = ThreadPoolExecutor(1, thread_name_prefix="read-json")
"""Thread that parses long texts, one at a time, because orjson holds the interpreter for some milliseconds each."""


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Limits of a JSON text. They bound the time for which parsing it blocks the interpreter, and with it all clients.

    ``arrays`` counts objects too, which take orjson a third of a microsecond each, ten times as long as a number.
    ``texts`` counts those that differ, keys included: a key of its own in a large object takes as long.
    ``text_bytes`` is for each text or key, as it is written; None where the body's own limit is enough.
    """

    values: int = MAX_VALUES
    arrays: int = MAX_VALUES
    texts: int = MAX_VALUES
    text_bytes: int | None = LARGE_JSON_BYTES


SMALL: Final = JsonBounds()
"""Bounds of all bodies and frames but logs and batches."""

P = ParamSpec("P")
T = TypeVar("T")
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
    """JSON text of an answer. It never has NaN or infinity: orjson writes them as null."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


async def read_object(request: Request, limit: int, timeout_s: float, bounds: JsonBounds = SMALL) -> dict[str, Any]:
    """The request's body as a JSON object; an absent body is an empty object.

    Refuses other media types (415), more than ``limit`` bytes or what ``bounds`` allow (413), bodies that take longer
    than ``timeout_s`` (408) and anything but one strict JSON object (422).
    """
    return await parse_body(await read_body(request, limit, timeout_s, bounds))


async def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; an absent body is an empty object. Raises InvalidJsonError."""
    if len(body) > LARGE_JSON_BYTES:
        return await on_json_thread(parse_object, body)
    return parse_object(body) if body else {}


async def read_body(
    request: Request, limit: int, timeout_s: float, bounds: JsonBounds | None, also: bytes | None = None
) -> bytes:
    """Bytes of a request's body, declared as JSON or the media type ``also``; errors as in :func:`read_object`.

    Without ``bounds`` nothing is counted.
    """
    _check_head(request.scope, limit, also)
    if BODY_READ_KEY in request.scope:  # then nothing is waited for
        return await _receive_all(request, limit, bounds)
    try:
        async with asyncio.timeout(timeout_s):
            return await _receive_all(request, limit, bounds)
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {timeout_s:g} s") from error


async def on_json_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Result of ``work`` on a long text, run on the thread for long texts while the loop serves other requests."""
    return await asyncio.get_running_loop().run_in_executor(_ONE_AT_A_TIME, partial(work, *args, **kwargs))


def _check_head(scope: Scope, limit: int, also: bytes | None) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            _check_length(value, limit)
        elif name == b"content-type" and value != also:
            _check_media_type(value)


async def _receive_all(request: Request, limit: int, bounds: JsonBounds | None) -> bytes:
    pieces, size, count, more = list[bytes](), 0, None, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece, more = message.get("body", b""), message.get("more_body", False)
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        # Counted as it arrives, so that a body can be refused before the rest is sent. A body with fewer bytes than
        # the limit needs no counting.
        if bounds is not None and (more or size > MAX_VALUES):
            count = count or ValueCount()
            count.add(piece)
            count.must_not_exceed(bounds, "body")
    return b"".join(pieces)


# ---------------------------------------------------------------- reading


class ValueCount:
    """Counts the values and keys of a JSON text that comes in pieces, before anything is made of it.

    An empty array or object counts twice, and so does a text that is split between two pieces. Malformed JSON is
    counted correctly up to the error. 64 KB take a millisecond or two at most: all of it is searching and cutting of
    bytes.
    """

    def __init__(self) -> None:
        self.values = 1
        self.arrays = 0
        self.keys = 0
        self.texts = set[int]()
        """Hashes of the texts."""
        self.longest_text = 0
        """Bytes between the quotes of the longest text."""
        self._in_string = False
        self._text_so_far = 0
        """Bytes of an unfinished text in earlier pieces."""
        self._backslash = b""

    def add(self, piece: bytes) -> None:
        """Count the next piece."""
        for at in range(0, len(piece), LARGE_JSON_BYTES):
            self._add(piece[at : at + LARGE_JSON_BYTES])

    def _add(self, piece: bytes) -> None:
        # After removal of backslash pairs, a remaining one escapes the next byte; one at the end waits for the next
        # piece. Removed bytes are replaced by bytes that cannot occur in JSON, so that texts keep their lengths and
        # differ as before.
        text = (self._backslash + piece).replace(b"\\\\", b"\0\0")
        self._backslash = text[-1:] if text.endswith(b"\\") else b""
        parts = text.removesuffix(b"\\").replace(b'\\"', b"\1\1").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        texts = parts[1 - self._in_string :: 2]
        self._in_string ^= len(parts) % 2 == 0
        if texts:
            self.texts.update(map(hash, texts))
            first = self._text_so_far + len(texts[0])
            self.longest_text = max(self.longest_text, first, max(map(len, texts)))
            last = first if len(texts) == 1 else len(texts[-1])
            self._text_so_far = last if self._in_string else 0
        arrays = outside.count(b"[") + outside.count(b"{")
        # A value begins at each of these, except the first value of an array or object, which begins at its bracket.
        self.values += outside.count(b",") + arrays
        self.arrays += arrays
        self.keys += outside.count(b":")

    def must_not_exceed(self, bounds: JsonBounds, name: str) -> None:
        """Raise BodyTooLargeError if the text, which is called ``name``, holds too much."""
        for found, most, what in (
            (self.values, bounds.values, "values, arrays and objects included"),
            (self.arrays, bounds.arrays, "arrays and objects"),
            (len(self.texts), bounds.texts, "different texts and keys"),
        ):
            if found > most:
                raise BodyTooLargeError(f"the {name} holds more than {most:,} {what}")
        if bounds.text_bytes is not None and self.longest_text > bounds.text_bytes:
            raise BodyTooLargeError(f"the {name} holds a text or key of more than {bounds.text_bytes:,} bytes")


def count_values(text: bytes) -> ValueCount:
    """Values and keys of a whole JSON text."""
    count = ValueCount()
    count.add(text)
    return count


def parse_object(body: bytes, name: str = "body") -> dict[str, Any]:
    """Strict JSON object: UTF-8, no NaN or Infinity, no repeated keys, at most 64 levels deep.

    Raises InvalidJsonError, which calls the text by ``name``. Nothing here bounds the number of values.
    """
    try:
        value = _loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJsonError(f"the {name} is not strict JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidJsonError(f"the {name} must be a JSON object, not {_json_type(value)}")
    # Each key needs one colon: if there are no more colons than keys that arrived, no key was overwritten.
    keys = _count_keys(value, name)
    if body.count(b":") != keys and count_values(body).keys != keys:
        raise _repeated_key(body, name)
    return value


def _loads(body: bytes) -> Any:
    if len(body) <= LARGE_JSON_BYTES:
        return orjson.loads(body)
    # The garbage collector would examine all parsed values again and again, which takes three times as long as
    # parsing. It is paused only while orjson holds the interpreter anyway.
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        gc.enable()


def _repeated_key(body: bytes, name: str) -> InvalidJsonError:
    # Only a slower parser can name the key; it takes seconds for a long text.
    if len(body) <= LARGE_JSON_BYTES:
        try:
            parse_json(body, InvalidJsonError)
        except InvalidJsonError as error:
            return InvalidJsonError(f"the {name} is not strict JSON: {error}")
    return InvalidJsonError(f"the {name} is not strict JSON: a key is repeated in one object")


def _count_keys(value: Any, name: str, level: int = 1) -> int:
    if level > MAX_DEPTH:
        raise InvalidJsonError(f"the {name} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        total = len(value)
        for item in value.values():
            if isinstance(item, (dict, list)):
                total += _count_keys(item, name, level + 1)
        return total
    return sum(_count_keys(item, name, level + 1) for item in value if isinstance(item, (dict, list)))


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
