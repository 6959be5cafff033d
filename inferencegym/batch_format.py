"""Binary format of ``POST /step/batch``: a header of 40 bytes, then arrays; little-endian, without padding.

A request is a header and the actions (K, N, 5), or (1, N, 5) with HOLD. Its header::

    offset  type      meaning
    0       4 bytes   the letters IGB1
    4       uint16    bytes per number, in the request and in its answer: 4 (float32) or 8 (float64)
    6       uint16    flags: 1 = HOLD, one action per episode for all K steps; 2 = LAST, only the last observations
    8       uint32    K, number of steps
    12      uint32    N, number of episodes in the session
    16      uint64    number of the first of these steps since the session's reset, from 1; 0 means the next step
    24      16 bytes  the session id, from its 32 hexadecimal digits

An answer is a header, the observations (K, N, W), or (1, N, W) with LAST, the rewards (K, N), and one
byte for each of the K steps: 1 where it ended the episodes. W is 14, or 21 where the session's reset asked for the
numbers of the fleets. Its header::

    0       4 bytes   the letters IGB1
    4       uint16    bytes per number
    6       uint16    flags of the request
    8       uint32    K
    12      uint32    N
    16      uint64    number of the first of these steps
    24      uint32    observations per episode, K or 1
    28      uint32    numbers per observation, W
    32      uint32    episodes that each row has finished since the session's reset
    36      uint32    steps left in the running episodes
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MEDIA_TYPE: Final = "application/octet-stream"
MAGIC: Final = b"IGB1"
REQUEST: Final = struct.Struct("<4sHHIIQ16s")
ANSWER: Final = struct.Struct("<4sHHIIQIIII")
HOLD: Final = 1
LAST: Final = 2
ACTION_SIZE: Final = 5
_TYPES: Final[dict[int, np.dtype[Any]]] = {4: np.dtype("<f4"), 8: np.dtype("<f8")}

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class BatchSteps:
    """Request: ``n_steps`` steps with ``actions`` (K, N, 5), or (1, N, 5) to hold them for all steps."""

    session_id: str
    actions: Array
    n_steps: int
    number: int | None = None
    last: bool = False


@dataclass(frozen=True, slots=True)
class BatchPlayed:
    """Results of the steps of one request.

    ``observations`` (K, N, W), or (1, N, W) for the last step alone; ``rewards`` (K, N); ``done`` (K,), True at steps
    that ended the episodes. ``number`` is the number of the first of these steps since the session's reset, from 1.
    """

    number: int
    observations: Array
    rewards: Array
    done: NDArray[np.bool_]
    episodes: int
    steps_left: int


def encode_request(steps: BatchSteps) -> bytes:
    """Encode a request; its numbers are float32 if the actions are, and float64 otherwise."""
    rows = np.ascontiguousarray(steps.actions, dtype=_little(steps.actions))
    flags = HOLD * (len(rows) != steps.n_steps) + LAST * steps.last
    head = REQUEST.pack(
        MAGIC,
        rows.itemsize,
        flags,
        steps.n_steps,
        rows.shape[1],
        steps.number or 0,
        bytes.fromhex(steps.session_id),
    )
    return head + rows.tobytes()


def decode_request(body: bytes) -> BatchSteps:
    """Decode a request; raises ValueError with the reason if it is malformed."""
    if len(body) < REQUEST.size:
        raise ValueError(f"the body has {len(body)} bytes, fewer than the {REQUEST.size} of its header")
    magic, size, flags, n_steps, n_rows, number, session = REQUEST.unpack_from(body)
    if magic != MAGIC:
        raise ValueError(f"the body begins with {magic!r} instead of {MAGIC!r}")
    if size not in _TYPES:
        raise ValueError(f"{size} bytes per number: it must be 4 (float32) or 8 (float64)")
    if flags & ~(HOLD | LAST):
        raise ValueError(f"flags {flags:#x}: they must be a sum of {HOLD} (hold) and {LAST} (last)")
    sent = 1 if flags & HOLD else n_steps
    wanted = REQUEST.size + sent * n_rows * ACTION_SIZE * size
    # Actions of autoscaling tasks may have a sixth number; the length of the body shows it.
    scales = len(body) == wanted + sent * n_rows * size and sent * n_rows > 0
    if len(body) != wanted and not scales:
        raise ValueError(
            f"the body has {len(body):,} bytes; {sent} x {n_rows} actions of {size}-byte numbers take {wanted:,}"
        )
    actions = np.frombuffer(body, _TYPES[size], offset=REQUEST.size).reshape(sent, n_rows, ACTION_SIZE + scales)
    return BatchSteps(session.hex(), actions, n_steps, number or None, bool(flags & LAST))


def encode_answer(played: BatchPlayed, flags: int) -> list[bytes | memoryview]:
    """Encode an answer, in parts; its arrays are float32 or float64. They are not copied: joining them takes long."""
    head = ANSWER.pack(
        MAGIC,
        played.rewards.itemsize,
        flags,
        *played.rewards.shape,
        played.number,
        len(played.observations),
        played.observations.shape[2],
        played.episodes,
        played.steps_left,
    )
    parts = (played.observations, played.rewards, played.done)
    return [head, *(np.ascontiguousarray(part).data.cast("B") for part in parts)]


def decode_answer(body: bytes) -> BatchPlayed:
    """Decode an answer; its arrays are views of ``body``. Raises ValueError if the bytes are not an answer."""
    if len(body) < ANSWER.size or body[:4] != MAGIC:
        raise ValueError("the answer is not in the binary format of POST /step/batch")
    _, size, _, n_steps, n_rows, number, n_observed, width, episodes, left = ANSWER.unpack_from(body)
    seen, kind = n_observed * n_rows * width, _TYPES[size]
    at = ANSWER.size + (seen + n_steps * n_rows) * size
    numbers = np.frombuffer(body, kind, count=seen + n_steps * n_rows, offset=ANSWER.size)
    done = np.frombuffer(body, np.uint8, count=n_steps, offset=at).astype(np.bool_)
    observations = numbers[:seen].reshape(n_observed, n_rows, width)
    return BatchPlayed(number, observations, numbers[seen:].reshape(n_steps, n_rows), done, episodes, left)


def flags_of(steps: BatchSteps) -> int:
    """Flags of a request."""
    return HOLD * (len(steps.actions) != steps.n_steps) + LAST * steps.last


def _little(array: Array) -> np.dtype[Any]:
    return _TYPES[4] if array.dtype.itemsize == 4 else _TYPES[8]
