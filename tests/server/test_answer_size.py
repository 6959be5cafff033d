"""Answers to wrong requests are short, wherever the request has a long name or value; so are the log lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from env.inference_env import InferenceEnv
from server.app import create_app
from server.settings import Settings

MOST_BYTES = 8_000
"""More than any error that only states what is allowed. Requests below are up to a hundred times as long."""


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        yield client


@pytest.fixture(scope="module")
def requests(client: TestClient) -> dict[str, dict[str, Any]]:
    """A valid body with every field, for each path."""
    env = InferenceEnv()
    env.reset(seed=1, task_id=1, config={"episode_length": 1})
    env.step({})
    ids = {path: client.post(path).json()["session_id"] for path in ("/reset", "/traffic/reset", "/reset/batch")}
    action = {"kv_budget": 1.0, "spec_length": 0, "batch_size": 1, "prefill_disagg": False, "quant_tier": "INT8"}
    log = {"task_id": 1, "episode_log": env.episode_log, "seed": 1, "verify": True, "config": {"episode_length": 1}}
    return {
        "/reset": {"task_id": 1, "seed": 1, "config": {"alpha": 0.5}, "session_id": ids["/reset"]},
        "/step": {"session_id": ids["/reset"], "action": action, "step": 1},
        "/grader": log,
        "/play": {"agent": "naive", "task_id": 1, "seed": 1, "config": {"episode_length": 1}, "brief": True},
        "/shadow": {"log": "arrival_s\n1", "name": "log.csv", "policies": ["naive"], "fixed": action, "task_id": 1},
        "/plan": {"log": "arrival_s\n1", "objectives": ["ttft_p99=500"], "hardware": ["a100-40gb"], "share_met": 0.9},
        "/reset/batch": {"task_id": 1, "seeds": [1], "config": {"alpha": 0.5}, "session_id": ids["/reset/batch"]},
        "/step/batch": {"session_id": ids["/reset/batch"], "actions": [[[1, 0, 1, 0, 0]]], "repeat": 1, "step": 1},
        "/close/batch": {"session_id": "none"},
        "/mcp": {"jsonrpc": "2.0", "method": "tools/list", "params": {"a": [1]}, "id": "one"},
        "/inference_gym/task": {"split": "train", "index": 0},
        "/traffic/reset": {"task_id": "task_easy", "seed": 1, "config": {"server_capacity": 100.0}},
        "/traffic/step": {"session_id": ids["/traffic/reset"], "action": {"action": "allow_all"}, "step": 1},
        "/traffic/grader": {"task_id": "task_easy", "episode_log": [{"timestep": 1, "action": {}, "metrics": {}}]},
    }


JOBS = {"/plan", "/shadow"}
"""Paths that start a process for every body that they accept, which takes seconds."""

FRAMES: list[dict[str, Any]] = [
    {"type": "reset", "data": {"task_id": 1, "seed": 1, "config": {"alpha": 0.5}, "episode_id": "one", "info": True}},
    {"type": "reset", "data": {"split": "train", "index": 0}},
    {"type": "reset", "data": {"episode_id": "one", "resume": True}},
    {"type": "step", "data": {"batch_size": 1, "quant_tier": "INT8", "metadata": {"step": 1}}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "method": "tools/list", "id": "one"}},
]
long_texts = st.builds(
    lambda piece, count: piece * count,
    st.sampled_from(["k", "é", "\x01", '"', "\\", "\U0001f600", "a.", "'\n", "[0]", "\u2028"]),
    st.integers(1_000, 200_000),
)


def nodes(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside a JSON value, itself first."""
    yield at
    for key in value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0):
        yield from nodes(value[key], (*at, key))


@st.composite
def spoiled(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with a long text somewhere: as another key of an object, or in the place of any value."""
    whole = {"root": deepcopy(value)}
    *path, last = draw(st.sampled_from([("root", *at) for at in nodes(value)]))
    parent: Any = whole
    for part in path:
        parent = parent[part]
    long = draw(long_texts)
    kind = draw(st.sampled_from(["key", "value", "array", "object"]))
    if kind == "key" and isinstance(parent[last], dict):
        parent[last][long] = 1
    else:
        parent[last] = {"array": [long], "object": {long: {long: long}}}.get(kind, long)
    return whole["root"]


@settings(max_examples=250)
@given(data=st.data())
def test_an_error_is_short_whatever_body_was_sent(
    client: TestClient, requests: dict[str, dict[str, Any]], data: st.DataObject
) -> None:
    assert_short(client, requests, data.draw(st.sampled_from(sorted(requests.keys() - JOBS))), data)


@pytest.mark.slow
@settings(max_examples=45)
@given(data=st.data())
def test_an_error_of_a_job_is_short_whatever_body_was_sent(
    client: TestClient, requests: dict[str, dict[str, Any]], data: st.DataObject
) -> None:
    assert_short(client, requests, data.draw(st.sampled_from(sorted(JOBS))), data)


def assert_short(client: TestClient, requests: dict[str, dict[str, Any]], path: str, data: st.DataObject) -> None:
    """Send a spoiled body to a path; its answer must be short, unless the body is accepted."""
    answer = client.post(path, json=data.draw(spoiled(requests[path])))
    if answer.status_code != 200 or "error" in answer.json():
        assert len(answer.content) <= MOST_BYTES, answer.text[:MOST_BYTES]


@settings(max_examples=100)
@given(data=st.data())
def test_an_error_frame_is_short_whatever_frame_was_sent(client: TestClient, data: st.DataObject) -> None:
    frames = [data.draw(spoiled(frame)) for frame in FRAMES]
    with client.websocket_connect("/ws") as socket:
        for frame in frames:
            socket.send_text(json.dumps(frame))
            answer = socket.receive_text()
            assert len(answer.encode()) <= MOST_BYTES, answer[:MOST_BYTES]


@pytest.mark.parametrize("char", ["k", "%01", "%22", "%C3%A9", "%F0%9F%98%80", "."])
def test_an_error_is_short_whatever_path_query_or_header_was_sent(client: TestClient, char: str) -> None:
    long = char * (60_000 // len(char))
    answers = [
        client.get(f"/state?session_id={long}"),
        client.get(f"/tasks?all={long}"),
        client.get(f"/policies?task_id={long}"),
        client.get(f"/traffic/policies?task_id={long}"),
        client.get(f"/tasks/{long}"),
        client.post(f"/{long}/task", json={"split": "train", "index": 0}),
        client.post("/traffic/step", json={"action": "allow_all"}, headers={"Cookie": f"inferencegym_traffic={long}"}),
        client.get("/state", headers={"X-Client-Id": long}),
        client.get("/nowhere", headers={"X-Request-Id": long}),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500, answer.text[:MOST_BYTES]
        head = sum(len(name) + len(value) for name, value in answer.headers.raw)
        assert len(answer.content) + head <= MOST_BYTES, answer.text[:MOST_BYTES]


def test_a_line_of_the_log_is_short_whatever_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    app = create_app(Settings(store_url="memory://"))
    long = "k" * 20_000

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError(long)

    with TestClient(app, raise_server_exceptions=False) as client:
        client.get(f"/{long}", headers={"X-Request-Id": long})
        client.post("/step", json={"session_id": long})
        client.get("/broken")
    lines = [line for line in capsys.readouterr().err.splitlines() if '"event":"request"' in line]
    assert [json.loads(line)["status"] for line in lines] == [404, 404, 500]
    assert "broken" in json.loads(lines[2])["traceback"], "what the line says is still there"
    assert max(map(len, lines)) < 2 * MOST_BYTES


def test_a_log_of_errors_has_every_refused_request_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with TestClient(create_app(Settings(store_url="memory://", access_log="errors"))) as client:
        session_id = client.post("/reset", json={"config": {"episode_length": 1}}).json()["session_id"]
        answers = [client.post("/step", json={"session_id": session_id}) for _ in range(2)]
        answers += [client.get("/health"), client.get("/nowhere")]
    assert [answer.status_code for answer in answers] == [200, 400, 200, 404]
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if '"event":"request"' in line]
    assert [line["status"] for line in lines] == [400, 404]
