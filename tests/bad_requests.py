"""Requests and frames that must be refused: exactly one thing is wrong with each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from inferencegym.batch_format import MEDIA_TYPE
from tests.reference import SERVING, TRAFFIC, BatchEpisodes, Episode, Kind

NO_NUMBERS: Final = ("NaN", "Infinity", "-1e999", "1" + "0" * 400, "9" * 5_000)
"""Numbers that JSON does not have, and integers too large for any field."""
WRONG: Final[Mapping[str, Sequence[str]]] = {
    "session_id": ("5", "[]", "{}", "true", '""', '"x y"', '"../x"', f'"{"0" * 32}"', f'"{"x" * 3_000}"', *NO_NUMBERS),
    "task_id": ("true", "[1]", "{}", "1.5", "7", "-1", '"nobody"', '"\\u0000"', *NO_NUMBERS),
    "seed": ("-1", "1.5", "true", '"42"', "[]", "9223372036854775808", *NO_NUMBERS),
    "step": ("0", "-1", "1.5", "true", '"1"', "[]", "2147483648", *NO_NUMBERS),
    "verify": ("1", '"true"', "[]", "null"),
    "config": ("[1]", "5", '"x"', "true", '{"colour": 1}', '{"alpha": NaN}', '{"alpha": 0.1, "alpha": 0.1}'),
    "episode_log": ("5", "{}", '"x"', "[1]", '[{"action": {}, "metrics": {}}]', "null"),
    "n": ("0", "-1", "1.5", "true", '"2"', "4097", *NO_NUMBERS),
    "seeds": ("[]", "[1, null]", "[-1]", "[1.5]", "{}", '"x"'),
    "autoreset": ("1", '"x"', "null"),
    "repeat": ("0", "-1", "true", '"2"', "262145", *NO_NUMBERS),
    "last": ("1", '"x"', "null"),
    "actions": ("null", "5", "[]", "{}", '"x"', "[[]]", "[[[1, 2]]]", '[["12345"]]', "[[[1, 2, 3, 4, NaN]]]"),
}
WRONG_CONFIGS: Final = {
    "serving": ('{"episode_length": 0}', '{"episode_length": 5001}', '{"episode_length": 2.5}', '{"alpha": 2}'),
    "traffic": ('{"server_capacity": 0}', '{"max_queue": "5"}', '{"episode_length": 5}', '{"traffic_scale": 1e3}'),
}
WRONG_ACTIONS: Final = {
    "serving": (
        *('{"batch_size": 0}', '{"batch_size": 513}', '{"batch_size": 1.5}', '{"batch_size": true}'),
        *('{"batch_size": "32"}', '{"batch_size": 1' + "0" * 400 + "}", '{"batch_size": 8, "batch_size": 8}'),
        *('{"kv_budget": 0.0999999}', '{"kv_budget": 1.0000001}', '{"kv_budget": NaN}', '{"kv_budget": null}'),
        *('{"spec_length": 3}', '{"quant_tier": 3}', '{"quant_tier": "FP8"}', '{"quant_tier": true}'),
        *('{"prefill_disagg": 2}', '{"colour": 1}'),
    ),
    "traffic": ('{"action": "allow_some"}', '{"action": null}', '{"action": "allow_all", "more": 1}', "{}"),
}
NO_OBJECTS: Final = (
    *(b"{", b"[]", b'"text"', b"5", b"null", b"{} {}", b"[" * 2_000, b'{"seed": 1, "seed": 1}', b"\xff\xfe{}"),
    *(b"\xef\xbb\xbf{}", "{}".encode("utf-16"), b'{"a": ' * 100 + b"1" + b"}" * 100, b'{"\\ud800": 1}', b"{'a': 1}"),
)
HERE: Final = "@here@"


@dataclass(frozen=True)
class BadRequest:
    """A request to be sent unchanged."""

    method: str
    path: str
    content: bytes = b""
    media_type: str = "application/json"


def good_action(kind: Kind) -> dict[str, Any]:
    return {"batch_size": 8} if kind is SERVING else {"action": "throttle_70"}


def bad_requests(episode: Episode, batch: BatchEpisodes | None) -> list[BadRequest]:
    """All bad requests about a session and a batch session."""
    kind, session = episode.kind, {"session_id": episode.session_id}
    other = TRAFFIC if kind is SERVING else SERVING
    step = {**session, "action": good_action(kind), "step": episode.taken + 1}
    log = {"task_id": episode.env.task_id, "episode_log": [], "seed": 1, "config": {}, "verify": True}
    bodies = {
        f"{kind.prefix}/reset": {"task_id": episode.env.task_id, "seed": 1, "config": {}, **session},
        f"{kind.prefix}/step": step,
        f"{kind.prefix}/grader": log,
    }
    if batch is not None:
        own = {"session_id": batch.session_id}
        actions = [[[1, 0, 8, 0, 0]] * len(batch.rows)]
        bodies |= {
            "/reset/batch": {"task_id": 1, "n": 2, "seed": 1, "seeds": None, "config": {}, "autoreset": False, **own},
            "/step/batch": {**own, "actions": actions, "repeat": 1, "last": True, "step": batch.taken + 1},
            "/close/batch": own,
        }
    found = [bad for path, body in bodies.items() for bad in _posts(kind, path, body)]
    found += [BadRequest("POST", f"{other.prefix}{path}", _text(session)) for path in ("/step", "/reset", "/grader")]
    found += [BadRequest("POST", f"{kind.prefix}/grader", _text({**session, "episode_log": []}))]
    found += [BadRequest("PUT", f"{kind.prefix}{path}", b"{}") for path in ("/step", "/reset", "/state", "/health")]
    found += [BadRequest("GET", f"{kind.prefix}/state?session_id={name}") for name in ("0" * 32, "x%20y", "%00", "%ff")]
    found += [BadRequest("POST", "/nowhere", b"{}"), BadRequest("GET", "/tasks?all=perhaps")]
    return found


def _posts(kind: Kind, path: str, body: Mapping[str, Any]) -> list[BadRequest]:
    contents = [*NO_OBJECTS, _text({**body, "sead": 1})]
    for name in body:
        raws = list(WRONG.get(name, ("5", '"x"', "[]", "true", *NO_NUMBERS)))
        raws += {"config": WRONG_CONFIGS, "action": WRONG_ACTIONS}.get(name, {}).get(kind.name, ())
        contents += [_text({**body, name: HERE}).replace(json.dumps(HERE).encode(), raw.encode()) for raw in raws]
    right = _text(body)
    found = [BadRequest("POST", path, content) for content in contents]
    # A repeated key is refused even if both values are equal.
    return [*found, BadRequest("POST", path, right[:-1] + b"," + right[1:])]


def bad_binary_requests(batch: BatchEpisodes, good: bytes) -> list[BadRequest]:
    """Bad forms of a binary request for /step/batch."""
    n_rows = len(batch.rows)
    contents = [
        *(b"", good[:39], good[:-1], good + b"\0", b"IGB2" + good[4:], b"{}"),
        good[:4] + b"\x03" + good[5:],  # bytes per number
        good[:6] + b"\xff" + good[7:],  # flags
        good[:8] + bytes(4) + good[12:],  # no steps
        good[:8] + b"\xff" * 4 + good[12:],  # more steps than bytes
        good[:12] + (n_rows + 1).to_bytes(4, "little") + good[16:],  # other episodes than the session's
        good[:16] + b"\xff" * 8 + good[24:],  # a step far ahead
        good[:24] + bytes(16) + good[40:],  # an unknown session
        good[:40] + b"\xff" * 8 + good[48:],  # NaN
    ]
    return [BadRequest("POST", "/step/batch", content, MEDIA_TYPE) for content in contents]


def bad_frames(kind: Kind) -> list[str | bytes]:
    """Frames for ``/ws`` that must be answered with an error, whatever the socket plays."""
    texts = ["", "{", "[]", "5", "null", "NaN", "[" * 2_000, '{"type": "state", "type": "state"}', "{}"]
    texts += [f'{{"type": {raw}}}' for raw in ('"fly"', "5", "null", "[]", '"step"', '"mcp"')]
    texts += [f'{{"type": "state", "more": {raw}}}' for raw in ("1", "{}")]
    texts += [f'{{"type": "step", "data": {raw}}}' for raw in ("5", "[]", "null", '"x"', *WRONG_ACTIONS[kind.name])]
    action = json.dumps(good_action(kind))[:-1]
    for raw in ("5", '"x"', '{"step": 0}', '{"step": "1"}', '{"step": 2147483648}', '{"step": 1e999}'):
        texts.append(f'{{"type": "step", "data": {action}, "metadata": {raw}}}}}')
    for name in ("task_id", "seed", "config"):
        texts += [f'{{"type": "reset", "data": {{"{name}": {raw}}}}}' for raw in WRONG[name]]
    for raw in ('"x y"', '"../x"', "5", "[]"):
        texts.append(f'{{"type": "reset", "data": {{"episode_id": {raw}}}}}')
    texts.append(f'{{"type": "reset", "data": {{"episode_id": "{"0" * 32}", "resume": true}}}}')
    for data in ('{"resume": true}', '{"split": "x"}', '{"index": -1}', '{"index": 99}', '{"info": 1}', '{"sead": 1}'):
        texts.append(f'{{"type": "reset", "data": {data}}}')
    return [*texts, b"{}", b'{"type": "state"}']


def _text(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()
