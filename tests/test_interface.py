"""The HTTP interface is the recorded one: a change of what clients rely on is seen before it is released."""

from __future__ import annotations

import copy

from starlette.testclient import TestClient

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
