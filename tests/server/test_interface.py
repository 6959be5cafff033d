"""The HTTP interface equals the recorded one, so that changes that clients notice are seen before a release."""

from __future__ import annotations

import copy

from starlette.testclient import TestClient

from inferencegym.errors import InferenceGymError
from scripts import golden_interface as golden
from server.app import create_app
from server.settings import Settings


def test_the_http_interface_is_the_recorded_one() -> None:
    found = list(golden.differences(golden.recorded(), golden.current()))
    assert not found, "if this is meant, python -m scripts.golden_interface --write:\n" + "\n".join(found[:20])


def test_a_changed_bound_a_new_field_and_a_path_that_is_gone_are_named() -> None:
    recorded = golden.recorded()["/openapi.json"]
    changed = copy.deepcopy(recorded)
    seed = changed["/reset"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    seed["sed"] = {"type": "integer"}
    (one,) = (each for each in golden.differences(recorded, changed))
    assert one.startswith("/reset > post > requestBody > ")
    assert one.endswith(" > properties > sed: is new")
    del changed["/health"]
    assert "/health: is gone" in golden.differences(recorded, changed)
    (bound,) = golden.differences({"seed": {"minimum": 0}}, {"seed": {"minimum": 1}})
    assert bound == "seed > minimum: recorded 0, now 1"
    (length,) = golden.differences({"required": ["a"]}, {"required": ["a", "b"]})
    assert length == 'required: recorded ["a"], now ["a", "b"]'


def test_info_describes_every_field_of_what_is_sent_and_told() -> None:
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        info, traffic = client.get("/info").json(), client.get("/traffic/info").json()
    told = ("action", "observation", "config", "metrics", "workload")
    for schema in (*(info[name] for name in told), *(traffic[name] for name in ("action", "config"))):
        assert schema["properties"]
        for name, field in schema["properties"].items():
            assert field["description"], name


STATUS_OF_CODE = {
    "episode_done": 400,
    "unauthorized": 401,
    "foreign_origin": 403, "unknown_host": 403,
    "unknown_session": 404, "unknown_policy": 404,
    "body_timeout": 408,
    "not_reset": 409, "session_conflict": 409, "step_conflict": 409,
    "other_release": 410,
    "body_too_large": 413,
    "data_format": 422, "forged_log": 422, "invalid_action": 422, "invalid_batch": 422, "invalid_config": 422,
    "invalid_json": 422, "invalid_request": 422, "malformed_log": 422, "unknown_task": 422,
    "rate_limited": 429,
    "agent": 500, "error": 500,
    "remote": 502, "server_unavailable": 502,
    "capacity": 503, "job_lost": 503, "overloaded": 503, "store": 503, "table": 503,
}  # fmt: skip
"""docs/server.md, "Errors"; 502 is what a client says of another server."""


def test_every_error_has_the_documented_status() -> None:
    found: dict[str, set[int]] = {}
    classes: list[type[InferenceGymError]] = [InferenceGymError]
    while classes:
        error = classes.pop()
        classes += error.__subclasses__()
        if error.__module__.split(".")[0] in ("inferencegym", "server", "env"):
            found.setdefault(error.code, set()).add(error.http_status)
    # The traffic controller's plan has a status of its own for a task that it does not know.
    assert found.pop("unknown_task") == {422, 400}
    assert {code: statuses.pop() for code, statuses in found.items() if len(statuses) == 1} == {
        code: status for code, status in STATUS_OF_CODE.items() if code != "unknown_task"
    }
