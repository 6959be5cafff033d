"""Checks of the OpenAPI document that Schemathesis loads in addition to its own; see schemathesis.toml."""

from __future__ import annotations

from typing import Final

import schemathesis
from schemathesis import Case, CheckContext, Response

MAY_REFUSE: Final = frozenset({401, 403, 404, 409, 429})
"""Statuses that valid requests may get: missing credentials, unknown session, conflict, rate limit."""

BEYOND_SCHEMAS: Final = {
    "episode_done": ("/step",),  # the episode is over
    "forged_log": ("/grader",),  # the replay differs
    "data_format": ("/shadow", "/plan"),  # the format of a request log's text
    "invalid_batch": ("/step/batch",),  # the layout of binary arrays, rows of equal length
    "http_error": ("/task",),  # the number of tasks in a split
    "invalid_action": ("/play",),  # more replicas than the task has
    "malformed_log": ("/traffic/grader", "/grader"),  # the order of a log's steps
}
"""Error codes, with the ends of their paths, of rules that JSON Schema cannot express."""


@schemathesis.check
def valid_requests_are_accepted(ctx: CheckContext, response: Response, case: Case) -> None:
    """A request that fits the schema is accepted, unless it breaks a rule that JSON Schema cannot express."""
    positive = case.meta is not None and case.meta.generation.mode.is_positive
    if not positive or response.status_code < 400 or response.status_code in MAY_REFUSE or response.status_code >= 500:
        return
    detail = response.json()["detail"]
    if case.operation.path.endswith(BEYOND_SCHEMAS.get(detail["code"], ())):
        return
    if case.operation.path.endswith("/reset/batch") and "episodes of this length" in detail["message"]:
        return
    if "beta + gamma + delta must not exceed 1" in detail["message"]:
        return
    field = str(detail.get("field"))
    if field.endswith("hardware") or (field.startswith("config.") and 'with reward "' in detail["message"]):
        return  # a table that is not in the catalogue; weights beside a reward that has none
    if case.operation.path.endswith("/shadow") and field.startswith("policies"):
        return  # a policy is not stored for this task
    if case.operation.path.endswith(("/shadow", "/plan")) and detail.get("field") == "prices":
        return  # a card in use has no price
    if case.operation.path.endswith("/play") and detail.get("field") == "config.hold":
        return  # built-in policies act every second of the session's episode
    if case.operation.path.endswith("/plan") and detail.get("field") == "model":
        return  # the tables are of several models, or none is of this one
    if case.operation.path.endswith("/step/batch") and detail.get("field") == "repeat":
        return  # only a single step can be repeated
    raise AssertionError(f"a request that fits the schema was refused: {response.status_code} {detail}")
