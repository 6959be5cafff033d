"""Grading of episode logs, and the process that a server starts for long logs and long replays.

``python -m server.api.grading PARENT`` answers requests (:func:`ops.worker.serve`), each named by one of
:data:`ANSWERS` and a family.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Final

from env.families import FAMILIES
from env.family import EpisodeRecord, Family, Grade
from env.verify import verify_log
from inferencegym.errors import InferenceGymError
from ops.worker import confine, error_parts, serve
from server.net.errors import InvalidRequestError
from server.net.json_io import SMALL_LOG_BYTES, parse_object, to_json
from server.schemas import GradeAnswer, GradeRequest, grade_request, read_request

LIMIT_S: Final = 60
"""Processor time of one request (s); reading and verifying the longest log takes a second."""


def grade_log(family: Family, wanted: GradeRequest) -> Grade:
    """Grade of a request's log, verified if it asks for that."""
    assert wanted.episode_log is not None
    assert wanted.task_id is not None
    own_config = family.is_own_config(wanted.task_id, wanted.config)
    task_id = family.played_id(wanted.task_id, wanted.config)
    entries = family.log_entries(wanted.episode_log)
    if not wanted.verify or not entries:
        return {**family.grade(task_id, entries), "verified": False, "own_config": own_config}
    assert wanted.seed is not None
    replayed = verify_log(family, task_id, wanted.seed, wanted.config, entries)
    return {**family.grade(task_id, replayed.episode_log), "verified": True, "own_config": own_config}


def grade_body(family: Family, body: bytes) -> bytes:
    """Grade of a body of POST /grader that holds a log."""
    wanted = read_request(grade_request(family), parse_object(body))
    if wanted.episode_log is None:
        raise InvalidRequestError("body", f"{len(body):,} bytes", f"at most {SMALL_LOG_BYTES:,} without a log")
    return GradeAnswer(**grade_log(family, wanted)).model_dump_json(exclude_unset=True).encode()


def last_step(family: Family, body: bytes) -> bytes:
    """What an episode's last step gave. The body has its session's id and its record's start and actions, in lines."""
    session_id, start, *actions = body.split(b"\n")
    env = family.replay(EpisodeRecord.from_start(start, actions), session_id.decode())
    return to_json([env.observation(), env.last_reward, env.done, env.info()])


ANSWERS: Final[Mapping[str, Callable[[Family, bytes], bytes]]] = {"grade": grade_body, "last_step": last_step}


def respond(what: str, family: Family, body: bytes) -> tuple[int, bytes]:
    """Returns 0 and the JSON answer, or 1 and the parts of an error as JSON."""
    try:
        return 0, ANSWERS[what](family, body)
    except (InferenceGymError, MemoryError) as error:
        return 1, to_json(error_parts(error))


def main() -> None:
    """Answer requests from standard input until it ends."""
    confine(int(sys.argv[1]))
    gc.freeze()
    # Else the collector examines the values of a long log again and again, which takes longer than parsing it.
    gc.set_threshold(1_000_000)

    def in_time(what: str, body: bytes) -> tuple[int, bytes]:
        # Ends the process; the server starts another one.
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        name, family = what.split()
        status, answer = respond(name, FAMILIES[family], body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return status, answer

    serve(in_time)


if __name__ == "__main__":
    main()
