"""JSON over HTTP: strict request bodies within limits, and JSON answers."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferencegym.messages import MAX_DEPTH
from server.net.errors import BodyTooLargeError, InvalidJsonError

SESSION_KEY: Final = "inferencegym.session"
"""Key of the ASGI scope for the session id in the log."""

MAX_BODY_BYTES: Final = 1_048_576
"""Longest body, unless its path has another limit."""

MAX_VALUES: Final = 2_000
"""Most values of a JSON text, arrays and objects included, unless its path has another limit."""
LARGE_JSON_BYTES: Final = 65_536
"""Longer texts are read on a thread, and counted in pieces of this size."""
SMALL_LOG_BYTES: Final = 32_768
"""Longer bodies of POST /grader are read and graded in another process."""
_ONE_AT_A_TIME: Final = ThreadPoolExecutor(1, thread_name_prefix="read-json")
"""Thread that parses long texts, one at a time, because orjson holds the interpreter for some milliseconds each."""


@dataclass(frozen=True, slots=True)
class JsonBounds:
    """Limits of a JSON text. They bound the time for which parsing it blocks the interpreter, and with it all clients.

    ``parts`` counts arrays, objects and keys, which take orjson a third of a microsecond each, ten times as long as a
    number.
    """

    values: int = MAX_VALUES
    parts: int = MAX_VALUES


SMALL: Final = JsonBounds()
"""Bounds of all bodies and frames but logs and batches, several times their need."""

P = ParamSpec("P")
T = TypeVar("T")
RawHeaders = Sequence[tuple[bytes, bytes]]
_IS_JSON: Final = (b"content-type", b"application/json")


class JsonReply(Response):
    """Response whose body is already JSON; its headers are built once, without Starlette's string handling."""

    media_type = "application/json"
    body: bytes

    def __init__(self, body: bytes, status_code: int = 200, headers: RawHeaders = ()) -> None:
        self.status_code = status_code
        self.body = body
        self.background = None
        self.raw_headers = [_IS_JSON, (b"content-length", b"%d" % len(body)), *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
        await send({"type": f"{kind}.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": f"{kind}.body", "body": self.body})


def reply(value: object, headers: RawHeaders = ()) -> JsonReply:
    """``value`` as a JSON answer."""
    return JsonReply(to_json(value), headers=headers)


def to_json(value: object) -> bytes:
    """JSON text of an answer. It never has NaN or infinity: orjson writes them as null."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def to_gzip(value: object) -> bytes:
    """Gzipped JSON text of an answer."""
    return gzip.compress(to_json(value), 5, mtime=0)


async def gzipped(request: Request, body: bytes) -> JsonReply:
    """A gzipped JSON answer, decompressed for clients that do not accept gzip."""
    vary = (b"vary", b"accept-encoding")
    accepted = request.headers.get("accept-encoding", "")
    if "gzip" in accepted and "gzip;q=0" not in accepted.replace(" ", ""):
        return JsonReply(body, headers=[(b"content-encoding", b"gzip"), vary])
    return JsonReply(await asyncio.to_thread(gzip.decompress, body), headers=[vary])


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """Bytes of a request's body, whatever its media type: `curl -d` declares JSON as a form.

    Refuses more than ``limit`` bytes (413).
    """
    sent = dict(request.scope["headers"]).get(b"content-length", b"")
    declared = int(sent) if sent.isdigit() else 0
    pieces: list[bytes] = []
    size, more = 0, declared <= limit
    # Starlette's stream takes longer.
    while more and size <= limit:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        more = message.get("more_body", False)
    if max(declared, size) > limit:
        raise BodyTooLargeError(f"the body is longer than {limit:,} bytes")
    return b"".join(pieces)


async def parse_body(body: bytes, bounds: JsonBounds | None = SMALL) -> dict[str, Any]:
    """The JSON object of a body; an absent body is an empty object. Raises as :func:`parse_object`."""
    if len(body) > LARGE_JSON_BYTES:
        return await on_json_thread(parse_object, body, bounds=bounds)
    return parse_object(body, bounds=bounds) if body else {}


async def on_json_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Result of ``work`` on a long text, run on the thread for long texts while the loop serves other requests."""
    return await asyncio.get_running_loop().run_in_executor(_ONE_AT_A_TIME, partial(work, *args, **kwargs))


# ---------------------------------------------------------------- reading


def counts(text: bytes, piece_bytes: int = LARGE_JSON_BYTES) -> Iterator[tuple[int, int, int]]:
    """Numbers of values, of arrays and objects, and of keys in a JSON text, after each piece, before anything is made.

    An empty array or object counts as two values. Malformed JSON is counted correctly up to the error. A piece takes a
    millisecond or two at most: all of it is searching and cutting of bytes.
    """
    values, arrays, keys, in_text, backslash = 1, 0, 0, False, b""
    for at in range(0, len(text), piece_bytes):
        # Without pairs of backslashes, one that is left escapes the next byte; one at the end waits for the next piece.
        piece = (backslash + text[at : at + piece_bytes]).replace(b"\\\\", b"")
        backslash = piece[-1:] if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(b"\\").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_text::2])
        in_text ^= len(parts) % 2 == 0
        begun = outside.count(b"[") + outside.count(b"{")
        # A value begins at each of these, except the first value of an array or object, which begins at its bracket.
        values += outside.count(b",") + begun
        arrays += begun
        keys += outside.count(b":")
        yield values, arrays, keys


def parse_object(body: bytes, name: str = "body", bounds: JsonBounds | None = None) -> dict[str, Any]:
    """Strict JSON object within ``bounds``: UTF-8, no NaN or Infinity, no repeated keys, at most 64 levels deep.

    Raises BodyTooLargeError and InvalidJsonError, which call the text by ``name``.
    """
    # Fewer bytes than allowed values need no counting.
    if bounds is not None and len(body) > MAX_VALUES:
        for values, arrays, keys in counts(body):
            if values > bounds.values:
                raise BodyTooLargeError(f"the {name} holds more than {bounds.values:,} values, arrays and objects")
            if arrays + keys > bounds.parts:
                raise BodyTooLargeError(f"the {name} holds more than {bounds.parts:,} arrays, objects and keys")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJsonError(f"the {name} is not strict JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidJsonError(f"the {name} must be a JSON object")
    # Each key needs one colon: if there are no more colons than keys that arrived, no key was overwritten.
    n_keys = _count_keys(value, name)
    if body.count(b":") != n_keys and [*counts(body)][-1][2] != n_keys:
        raise InvalidJsonError(f"the {name} is not strict JSON: a key is repeated in one object")
    return value


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
