"""Checks of the OpenAPI document that Schemathesis loads beside its own; see schemathesis.toml."""

from __future__ import annotations

from typing import Final

import schemathesis
from schemathesis import Case, CheckContext, Response

MAY_REFUSE: Final = frozenset({401, 403, 404, 409, 429})
"""No credentials, no such session, a race, too often: right requests may meet these."""

NO_SCHEMA_CAN_TELL: Final = {
    "episode_done": ("/step",),  # whether an episode is over
    "forged_log": ("/grader",),  # what a replay gives
    "data_format": ("/shadow",),  # what a request log's text looks like
    "invalid_batch": ("/step/batch",),  # how arrays lie in bytes, and that rows are equally long
    "http_error": ("/task",),  # how many tasks a split has
    "malformed_log": ("/traffic/grader", "/grader"),  # that the steps of a log follow one another
}


@schemathesis.check
def accepted_unless_no_schema_can_tell(ctx: CheckContext, response: Response, case: Case) -> None:
    """A request that fits the schema is accepted, unless it breaks a rule that JSON Schema has no words for."""
    positive = case.meta is not None and case.meta.generation.mode.is_positive
    if not positive or response.status_code < 400 or response.status_code in MAY_REFUSE or response.status_code >= 500:
        return
    detail = response.json()["detail"]
    if case.operation.path.endswith(NO_SCHEMA_CAN_TELL.get(detail["code"], ())):
        return
    if case.operation.path.endswith("/reset/batch") and "episodes of this length" in detail["message"]:
        return
    if "beta + gamma + delta must not exceed 1" in detail["message"]:
        return
    if case.operation.path.endswith("/shadow") and detail.get("field") == "policies":
        return  # which policies are stored for which task
    if case.operation.path.endswith("/step/batch") and detail.get("field") == "repeat":
        return  # repeated is only a single step
    raise AssertionError(f"a request that fits the schema was refused: {response.status_code} {detail}")
