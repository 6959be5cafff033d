"""Long JSON bodies: what holds too much is refused before it is read, and what is read does not hold up the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import socket
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.requests import Request
from starlette.testclient import TestClient

from inferencegym.client.openenv_types import ENV_NAME
from inferencegym.messages import MAX_DEPTH
from inferencegym.models import ServeActionMessage
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from server.api.batch import MAX_JSON_STEPS, MAX_RESET_VALUES, MAX_ROWS, MAX_STEP_VALUES, BatchResetRequest
from server.api.episodes import MAX_LOG_VALUES
from server.api.shadow import MAX_LOG_BRACKETS
from server.app import create_app
from server.net.errors import InvalidJsonError, InvalidRequestError
from server.net.json_io import LARGE_JSON_BYTES, MAX_VALUES, ValueCount, parse_object, read_object
from server.schemas import read_request
from server.settings import Settings
from tests.servers import RunningServer

MOST_VALUES = {
    "/reset": MAX_VALUES,
    "/step": MAX_VALUES,
    "/grader": MAX_LOG_VALUES,
    "/play": MAX_VALUES,
    "/shadow": MAX_VALUES,
    "/reset/batch": MAX_RESET_VALUES,
    "/step/batch": MAX_STEP_VALUES,
    "/mcp": MAX_VALUES,
    f"/{ENV_NAME}/task": MAX_VALUES,
    "/traffic/step": MAX_VALUES,
    "/traffic/grader": MAX_LOG_VALUES,
}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(store_url="memory://", access_log="off"))) as client:
        yield client


def sent(body: bytes, *, pieces: int = 1) -> Request:
    """A request whose body arrives in so many pieces."""
    size = -(-len(body) // pieces)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages[-1]["more_body"] = False
    waiting = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(waiting)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


# ---------------------------------------------------------------- counting

texts = st.text(st.sampled_from('a"\\,:[]{}\n é\U0001f600'))
values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """Values, with empty arrays and objects twice, and keys."""
    items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    inner = [counted(item) for item in items]
    empty = isinstance(value, (dict, list)) and not value
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + empty + sum(n for n, _ in inner), keys + sum(n for _, n in inner)


@given(value=values, cuts=st.lists(st.integers(0, 200)), ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_values_and_keys_are_counted_in_any_pieces_and_texts_are_left_out(
    value: Any, cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    count, at = ValueCount(), 0
    for cut in [*sorted(cuts), len(text)]:
        count.add(text[at:cut])
        at = max(at, cut)
    assert (count.values, count.keys) == counted(value)


# ---------------------------------------------------------------- refusing


@pytest.mark.parametrize(("path", "most"), MOST_VALUES.items())
def test_a_body_with_too_many_values_is_refused_before_its_rest_is_sent(
    server: RunningServer, path: str, most: int
) -> None:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    piece = b'{"a": [' + b"1," * (most + 1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + b"%x\r\n%b\r\n" % (len(piece), piece))
        with contextlib.closing(http.client.HTTPResponse(connection)) as answer:
            answer.begin()
            detail = json.loads(answer.read())["detail"]
    assert (answer.status, detail["code"]) == (413, "body_too_large")
    assert f"{most:,} values" in detail["message"]


def test_a_frame_with_too_many_values_is_refused_and_the_episode_goes_on(client: TestClient) -> None:
    with client.websocket_connect("/ws") as connection:
        for data, answered in (({}, "observation"), ({"a": [1] * MAX_VALUES}, "error"), ({}, "observation")):
            connection.send_json({"type": "reset", "data": data})
            answer = connection.receive_json()
            assert answer["type"] == answered, answer
            if answered == "error":
                assert "[inferencegym:body_too_large]" in answer["data"]["message"]


def test_the_longest_requests_that_paths_are_for_are_taken(client: TestClient) -> None:
    session_id = client.post("/reset").json()["session_id"]
    step = client.post("/step", json={"session_id": session_id}).json()
    log = {"task_id": 1, "episode_log": [step] * MAX_EPISODE_LENGTH}
    assert client.post("/grader", content=json.dumps(log, indent=1)).status_code == 200
    seeds = {"seeds": [*range(MAX_ROWS)], "config": {"episode_length": 10}}
    assert client.post("/reset/batch", json=seeds).status_code == 200
    batch = client.post("/reset/batch", json={"n": 1, "autoreset": True}).json()["session_id"]
    actions = [[[1.0, 0, 32, 0, 0]]] * MAX_JSON_STEPS
    assert client.post("/step/batch", json={"session_id": batch, "actions": actions, "last": True}).status_code == 200


def test_texts_may_hold_any_number_of_commas_and_brackets(client: TestClient) -> None:
    log = "arrival_s,prompt_tokens,output_tokens\n" + "1.5,100,100\n" * 10_000 + '"[,{:\\'
    refused = client.post("/shadow", json={"log": log, "policies": ["nobody"]})
    assert refused.json()["detail"]["field"] == "policies[0]"


def test_a_log_of_too_many_arrays_is_refused_before_pythons_parser_holds_up_everybody(client: TestClient) -> None:
    refused = client.post("/shadow", json={"log": "[" * (MAX_LOG_BRACKETS + 1), "name": "log.json"})
    assert (refused.status_code, refused.json()["detail"]["field"]) == (422, "log")


def test_a_text_of_64_levels_is_read_and_one_of_65_is_not() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"

    assert MAX_DEPTH == 64
    parse_object(nested(64))
    with pytest.raises(InvalidJsonError):
        parse_object(nested(65))


@pytest.mark.parametrize("length", [0, 2 * LARGE_JSON_BYTES])
def test_a_key_is_not_repeated_in_texts_of_any_length_and_colons_in_texts_are_none(length: int) -> None:
    filler = json.dumps("a\n: \\" * length)
    assert len(parse_object(f'{{"x": {filler}, "b": {{"x": "\\":"}}}}'.encode())) == 2
    with pytest.raises(InvalidJsonError):
        parse_object(f'{{"x": {filler}, "x": 1}}'.encode())


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize("pieces", [1, 10])
def test_the_loop_serves_others_while_a_long_body_is_read(pieces: int) -> None:
    body = json.dumps({"episode_log": [{"metrics": {"a": 1}}] * 20_000}).encode()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async def read() -> int:
        others = asyncio.create_task(tick())
        before = ticks
        await read_object(sent(body, pieces=pieces), len(body), 60, MAX_LOG_VALUES)
        others.cancel()
        return ticks - before

    assert asyncio.run(read()) > 0, "nobody else had a turn"


def test_the_collector_does_not_go_through_a_long_text_again_and_again_and_runs_afterwards() -> None:
    rounds = 0

    def count(phase: str, _info: dict[str, int]) -> None:
        nonlocal rounds
        rounds += phase == "start"

    body = b'{"a":[' + b",".join([b"[1]"] * 100_000) + b"]}"
    gc.collect()
    gc.callbacks.append(count)
    try:
        parse_object(body)
    finally:
        gc.callbacks.remove(count)
    # It would be one for each 700 arrays.
    assert rounds < 20
    assert gc.isenabled()
    with pytest.raises(InvalidJsonError):
        parse_object(body[:-1])
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("model", "right_size", "body"),
    [
        (ServeActionMessage, {"a": 1}, {f"k{i}": 1 for i in range(50_000)}),
        (BatchResetRequest, {"seeds": ["x"]}, {"seeds": ["x"] * MAX_ROWS}),
    ],
)
def test_one_mistake_is_described_however_many_there_are(
    model: type[BaseModel], right_size: dict[str, Any], body: dict[str, Any]
) -> None:
    def refuse(wrong: dict[str, Any]) -> int:
        tracemalloc.start()
        try:
            with pytest.raises(InvalidRequestError):
                read_request(model, wrong)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    refuse(right_size)  # what is made once and kept
    assert refuse(body) < 200_000
