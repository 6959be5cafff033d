"""What the HTTP interface refuses, and how it says so; in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from inferencegym.models import ACTION_FIELDS
from server.api.episodes import MAX_LOG_BYTES
from server.api.openapi import inlined_paths
from server.app import create_app
from server.net.json_io import MAX_BODY_BYTES
from server.settings import Settings

JSON = {"content-type": "application/json"}


def client_of(**settings: Any) -> TestClient:
    return TestClient(create_app(Settings(store_url="memory://", access_log="off", **settings)))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of() as running:
        yield running


@pytest.fixture
def session_id(client: TestClient) -> str:
    return str(client.post("/reset").json()["session_id"])


def detail_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    detail: dict[str, Any] = answer.json()["detail"]
    assert {"message", "code", "next"} <= set(detail)
    return detail


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_budget", 0.09),
        ("kv_budget", 1.01),
        ("kv_budget", "1.0"),
        ("kv_budget", None),
        ("spec_length", 3),
        ("spec_length", -1),
        ("batch_size", 0),
        ("batch_size", 513),
        ("batch_size", 1.5),
        ("batch_size", True),
        ("prefill_disagg", 2),
        ("prefill_disagg", "yes"),
        ("quant_tier", 3),
        ("quant_tier", "fp16"),
        ("quant_tier", [0]),
    ],
)
def test_an_action_out_of_range_is_422_naming_field_and_range(
    client: TestClient, session_id: str, field: str, value: Any
) -> None:
    detail = detail_of(client.post("/step", json={"session_id": session_id, "action": {field: value}}), 422)
    assert detail["code"] == "invalid_action"
    assert detail["field"] == field
    assert detail["allowed"]
    assert client.get("/state", params={"session_id": session_id}).json()["step_count"] == 0


def test_an_unknown_action_field_is_422_with_the_known_ones(client: TestClient, session_id: str) -> None:
    answer = client.post("/step", json={"session_id": session_id, "action": {"batchsize": 3}})
    detail = detail_of(answer, 422)
    assert detail["field"] == "batchsize"
    assert all(name in detail["message"] for name in ACTION_FIELDS)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_422(client: TestClient, session_id: str, number: str) -> None:
    body = f'{{"session_id": "{session_id}", "action": {{"kv_budget": {number}}}}}'
    answer = client.post("/step", content=body, headers=JSON)
    assert detail_of(answer, 422)["code"] in ("invalid_json", "invalid_action")
    log = f'{{"task_id": 1, "episode_log": [{{"action": {{}}, "metrics": {{"tokens_per_sec": {number}}}}}]}}'
    assert client.post("/grader", content=log, headers=JSON).status_code == 422
    reset = f'{{"config": {{"alpha": {number}}}}}'
    assert client.post("/reset", content=reset, headers=JSON).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b'{"a": 1} {"b": 2}',
        b"[" * 2000,
        b'{"task_id": 1, "task_id": 2}',
        b'{"config": {"alpha": 0.1, "alpha": 0.2}}',
        b'{"a": ' * 100 + b"1" + b"}" * 100,
    ],
)
def test_a_body_that_is_not_one_strict_json_object_is_422(client: TestClient, body: bytes) -> None:
    for path in ("/reset", "/step", "/grader"):
        detail = detail_of(client.post(path, content=body, headers=JSON), 422)
        assert detail["code"] in ("invalid_json", "invalid_request")


def test_colons_within_texts_are_not_taken_for_repeated_keys(client: TestClient) -> None:
    answer = client.post("/reset", content=b'{"session_id": "a:b:c"}', headers=JSON)
    assert detail_of(answer, 404)["code"] == "unknown_session"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "42"}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"task_id": True}, "task_id"),
        ({"task_id": [1]}, "task_id"),
        ({"config": [1]}, "config"),
        ({"session_id": ""}, "session_id"),
        ({"session_id": 5}, "session_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"session_id": "../etc"}, "session_id"),
        ({"sead": 1}, "sead"),
    ],
)
def test_a_reset_with_a_wrong_field_is_422_naming_it(client: TestClient, body: dict[str, Any], field: str) -> None:
    assert detail_of(client.post("/reset", json=body), 422)["field"] == field


@pytest.mark.parametrize(
    "config",
    [{"alpha": 2}, {"alpha": "a"}, {"episode_length": 0}, {"episode_length": 5001}, {"episode_length": 2.5}, {"x": 1}],
)
def test_a_config_out_of_range_is_422_naming_the_setting(client: TestClient, config: dict[str, Any]) -> None:
    detail = detail_of(client.post("/reset", json={"config": config}), 422)
    assert (detail["code"], detail["field"]) == ("invalid_config", f"config.{next(iter(config))}")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "session_id"),
        ({"session_id": None}, "session_id"),
        ({"session_id": "a", "step": 0}, "step"),
        ({"session_id": "a", "step": "1"}, "step"),
        ({"session_id": "a", "steps": 1}, "steps"),
        ({"session_id": "a", "action": {}, "extra": 1}, "extra"),
    ],
)
def test_a_step_with_a_wrong_field_is_422_naming_it(client: TestClient, body: dict[str, Any], field: str) -> None:
    assert detail_of(client.post("/step", json=body), 422)["field"] == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "episode_log"),
        ({"episode_log": []}, "task_id"),
        ({"task_id": 1, "episode_log": {}}, "episode_log"),
        ({"task_id": 1, "episode_log": [], "verify": 1}, "verify"),
        ({"task_id": 1, "episode_log": [], "verify": True}, "seed"),
        ({"session_id": "a", "episode_log": []}, "episode_log"),
        ({"task_id": 1, "episode_log": [], "seed": "x"}, "seed"),
    ],
)
def test_a_grading_request_with_a_wrong_field_is_422_naming_it(
    client: TestClient, body: dict[str, Any], field: str
) -> None:
    assert detail_of(client.post("/grader", json=body), 422)["field"] == field


def test_a_malformed_log_is_422_naming_step_and_field(client: TestClient) -> None:
    good = {"action": {}, "metrics": {}}
    detail = detail_of(client.post("/grader", json={"task_id": 1, "episode_log": [good]}), 422)
    assert (detail["code"], detail["step"]) == ("malformed_log", 0)
    assert detail_of(client.post("/grader", json={"task_id": 7, "episode_log": []}), 422)["code"] == "unknown_task"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_as_long_as_the_limit_is_taken_and_one_byte_more_is_not(declared: bool) -> None:
    log = b'{"task_id": 1, "episode_log": []}'
    with client_of() as client:
        for path, body, limit in (("/reset", b"{}", MAX_BODY_BYTES), ("/grader", log, MAX_LOG_BYTES)):
            for length, status in ((limit, 200), (limit + 1, 413)):
                whole = body.ljust(length)
                content = whole if declared else iter([whole[:1000], whole[1000:]])
                assert client.post(path, content=content, headers=JSON).status_code == status


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "application/x+json", ""])
def test_json_by_any_name_is_taken(client: TestClient, media_type: str) -> None:
    assert client.post("/reset", content=b"{}", headers={"content-type": media_type}).status_code == 200
    assert detail_of(client.post("/reset", content=b"a=1", headers={"content-type": media_type}), 422)["next"]


def test_unknown_paths_and_methods_are_answered_in_the_same_form(client: TestClient) -> None:
    assert detail_of(client.get("/nowhere"), 404)["code"] == "not_found"
    assert detail_of(client.get("/step"), 405)["code"] == "method_not_allowed"
    assert client.get("/step").headers["allow"] == "POST"
    assert detail_of(client.get("/tasks", params={"all": "maybe"}), 422)["field"] == "all"


def test_the_openapi_document_has_the_knobs_of_a_fixed_configuration_and_no_page(client: TestClient) -> None:
    paths = inlined_paths(client.get("/openapi.json").json())
    body = paths["/shadow"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"kv_budget", "batch_size", "spec_length"} <= set(json.dumps(body["properties"]["fixed"]).split('"'))
    assert "/docs" not in paths


def test_the_openapi_document_describes_bodies_and_answers(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["info"]["version"] == "1.0.0"
    paths = inlined_paths(document)
    step = paths["/step"]["post"]
    body = step["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["session_id"]
    assert body["properties"]["action"]["properties"]["kv_budget"]["maximum"] == 1.0
    assert {"200", "400", "404", "409", "413", "422", "429", "503"} <= set(step["responses"])
    assert not paths["/reset"]["post"]["requestBody"].get("required")
    for path in ("/health", "/tasks", "/reset", "/step", "/state", "/grader", "/baseline", "/info", "/openenv.yaml"):
        assert path in paths


@pytest.mark.parametrize("at", ["", "/traffic"])
def test_seeds_are_described_as_integers_of_63_bits_and_a_log_is_verified_with_one_only(
    client: TestClient, at: str
) -> None:
    paths = inlined_paths(client.get("/openapi.json").json())
    whole = {"type": "integer", "minimum": 0, "exclusiveMaximum": 9_223_372_036_854_775_808}
    either = [whole, {"type": "null"}]

    def seeds(content: Any) -> list[Any]:
        schema = content["content"]["application/json"]["schema"]
        return [one["properties"]["seed"] for one in schema.get("oneOf", [schema])]

    reset, grader = paths[f"{at}/reset"]["post"], paths[f"{at}/grader"]["post"]
    assert seeds(reset["requestBody"])[0]["anyOf"] == either
    assert seeds(reset["responses"]["200"]) == [whole]
    # Of a session, of a log, of a log to verify, and of the caller's latest episode, which /traffic grades too
    latest = [{"anyOf": either}] if at == "/traffic" else []
    assert seeds(grader["requestBody"]) == [{"anyOf": either}, {"anyOf": either}, whole, *latest]


# ---------------------------------------------------------------- who may ask, how often


def test_an_api_key_guards_everything_but_what_probes_ask() -> None:
    with client_of(api_key="correct horse") as client:
        assert [client.get(path).status_code for path in ("/health", "/metadata")] == [200, 200]
        for path in ("/tasks", "/openapi.json", "/docs", "/nowhere"):
            assert detail_of(client.get(path), 401)["code"] == "unauthorized"
        assert client.get("/tasks", headers={"X-API-Key": "correct horse battery"}).status_code == 401
        assert client.get("/tasks", headers={"X-API-Key": "correct horse"}).status_code == 200
        assert client.get("/tasks", headers={"Authorization": "Bearer correct horse"}).status_code == 200
        assert client.get("/tasks", headers={"Authorization": "Basic correct horse"}).status_code == 401
        assert client.get("/tasks").headers["www-authenticate"] == 'Bearer, Basic realm="InferenceGym"'
        assert client.get("/tasks", auth=("anybody", "correct horse")).status_code == 200
        assert client.get("/tasks", auth=("correct horse", "")).status_code == 401


def test_while_keys_change_the_old_one_and_the_new_one_are_good() -> None:
    with client_of(api_key="battery staple, correct horse") as client:
        for key, status in (("battery staple", 200), ("correct horse", 200), ("battery staple, correct horse", 401)):
            assert client.get("/tasks", headers={"X-API-Key": key}).status_code == status


def test_resets_are_limited_per_client_and_say_when_to_come_back() -> None:
    with client_of(resets_per_minute=3) as client:
        codes = [client.post("/reset").status_code for _ in range(4)]
        assert codes == [200, 200, 200, 429]
        refused = client.post("/reset")
        assert detail_of(refused, 429)["code"] == "rate_limited"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        session_id = client.get("/state")
        assert session_id.status_code == 200, "other paths go on"


def test_one_client_cannot_fill_the_store_under_any_name_and_is_told_what_to_do() -> None:
    with client_of(max_sessions_per_client=3) as client:
        for name in ("one", "two", "three"):
            assert client.post("/reset", headers={"X-Client-Id": name}).status_code == 200
        for path in ("/reset", "/traffic/reset"):
            assert client.post(path).status_code == (429 if path == "/reset" else 200), "each environment has its own"
        refused = client.post("/reset", headers={"X-Client-Id": "four"})
        said = detail_of(refused, 429)
        assert said["code"] == "rate_limited"
        assert refused.headers["retry-after"] == "60"
        with client.websocket_connect("/ws") as socket:
            socket.send_json({"type": "reset", "data": {}})
            assert "rate_limited" in socket.receive_json()["data"]["message"]


def test_the_forwarded_address_counts_only_behind_a_trusted_proxy() -> None:
    def codes(client: TestClient) -> list[int]:
        return [client.post("/reset", headers={"X-Forwarded-For": f"9.9.9.{i}"}).status_code for i in range(3)]

    with client_of(resets_per_minute=2) as direct:
        assert codes(direct) == [200, 200, 429], "anybody can write this header"
    settings = Settings(store_url="memory://", access_log="off", resets_per_minute=2, trusted_proxies="10.0.0.0/8")
    with TestClient(create_app(settings), client=("10.1.2.3", 5000)) as proxied:
        assert codes(proxied) == [200, 200, 200]
        spoofed = [
            proxied.post("/reset", headers={"X-Forwarded-For": f"1.1.1.{i}, 8.8.8.8, 10.9.9.9"}).status_code
            for i in range(3)
        ]
        assert spoofed == [200, 200, 429], "the last hop that is not ours is the client"


def test_answers_carry_a_request_id_and_say_that_their_type_is_no_guess(client: TestClient) -> None:
    answer = client.get("/health", headers={"X-Request-Id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    assert client.get("/health", headers={"X-Request-Id": "no spaces"}).headers["x-request-id"] != "no spaces"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "server" not in answer.headers


FOREIGN = [
    {"Origin": "https://example.com"},
    {"Origin": "null"},
    {"Origin": "http://testserver:8080"},
    {"Origin": "http://testserver", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://testserver:8080", "Sec-Fetch-Site": "same-site"},
]
OWN = [
    {"Origin": "http://testserver"},
    {"Origin": "https://our.name", "X-Forwarded-Host": "our.name"},
    {"Origin": "https://our.name", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {},
]


@pytest.mark.parametrize("cors", ["read", "off"])
@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_of_other_origins_may_not_play(cors: str, origin: dict[str, str]) -> None:
    with client_of(cors=cors) as client:
        session_id = client.post("/reset").json()["session_id"]
        read = client.get("/tasks", headers=origin)
        assert read.headers.get("access-control-allow-origin") == ("*" if cors == "read" else None)
        assert "access-control-allow-credentials" not in read.headers
        # As a page can send it without asking before: without a content type.
        for path in ("/reset", "/step", "/traffic/reset", "/reset/batch", "/mcp"):
            answer = client.post(path, content=json.dumps({"session_id": session_id}), headers=origin)
            assert detail_of(answer, 403)["code"] == "foreign_origin"
            assert "INFERENCEGYM_CORS=all" in detail_of(answer, 403)["next"]
        for path in ("/ws", "/traffic/ws"):
            with pytest.raises(WebSocketDisconnect), client.websocket_connect(path, headers=origin):
                pass
        assert client.get(f"/state?session_id={session_id}").json()["step_count"] == 0


@pytest.mark.parametrize("origin", OWN)
def test_its_own_page_and_programs_may_play(client: TestClient, origin: dict[str, str]) -> None:
    session_id = client.post("/reset", headers=origin).json()["session_id"]
    assert client.post("/step", json={"session_id": session_id}, headers=origin).status_code == 200
    with client.websocket_connect("/ws", headers=origin) as socket:
        socket.send_json({"type": "reset", "data": {}})
        assert socket.receive_json()["type"] == "observation"


def test_pages_of_all_origins_play_where_the_operator_says_so(client: TestClient) -> None:
    origin = FOREIGN[0]
    preflight = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert client.options("/step", headers=preflight).status_code == 400
    with client_of(cors="all") as open_client:
        assert open_client.options("/step", headers=preflight).status_code == 200
        assert open_client.post("/reset", headers=origin).headers["access-control-allow-origin"] == "*"
        with open_client.websocket_connect("/ws", headers=origin) as socket:
            socket.send_json({"type": "reset", "data": {}})
            assert socket.receive_json()["type"] == "observation"


@pytest.mark.parametrize(
    ("path", "body", "status", "next_path"),
    [
        ("/step", {"session_id": "x"}, 404, "POST /reset "),
        ("/traffic/step", {"session_id": "x", "action": "allow_all"}, 404, "POST /traffic/reset "),
        ("/traffic/reset", {"task_id": "x"}, 400, "GET /traffic/tasks "),
        ("/traffic/grader", {"task_id": "task_easy", "episode_log": [1]}, 422, "GET /openapi.json "),
        ("/step/batch", {"session_id": "x", "actions": [[[1, 0, 8, 0, 0]]]}, 404, "POST /reset/batch "),
        ("/reset/batch", {"task_id": "x"}, 422, "GET /tasks "),
    ],
)
def test_what_to_do_next_names_paths_of_the_environment_that_was_asked(
    client: TestClient, path: str, body: dict[str, Any], status: int, next_path: str
) -> None:
    detail = detail_of(client.post(path, json=body), status)
    assert next_path in detail["next"]
    method, named = next_path.split()
    assert client.request(method, named).status_code != 404


def test_the_task_api_says_what_is_wrong_in_a_sentence(client: TestClient) -> None:
    for body, wanted in (
        ({"split": "train", "index": -1}, "unknown field index: the fields are split"),
        ({}, "split is missing: it must be a text"),
        ({"split": 5}, "split must be a text"),
    ):
        assert wanted in detail_of(client.post("/inference_gym/tasks", json=body), 422)["message"]


def test_an_empty_session_id_tells_no_more_than_none(client: TestClient) -> None:
    for prefix in ("", "/traffic"):
        session_id = client.post(f"{prefix}/reset").json()["session_id"]
        client.cookies.clear()
        for query in ("", "?session_id="):
            answer = client.get(f"{prefix}/state{query}")
            assert answer.status_code == 200
            assert session_id not in answer.text
        assert session_id in client.get(f"{prefix}/state?session_id={session_id}").text


def test_each_environment_knows_its_own_sessions_only(client: TestClient) -> None:
    serving = client.post("/reset").json()["session_id"]
    traffic = client.post("/traffic/reset").json()["session_id"]
    for prefix, other in (("", traffic), ("/traffic", serving)):
        assert detail_of(client.get(f"{prefix}/state?session_id={other}"), 404)["code"] == "unknown_session"
        answer = client.post(f"{prefix}/reset", json={"session_id": other})
        assert detail_of(answer, 404)["code"] == "unknown_session"
    for prefix, own in (("", serving), ("/traffic", traffic)):
        assert client.get(f"{prefix}/state?session_id={own}").status_code == 200


def test_the_word_in_health_can_be_set() -> None:
    with client_of(health_status="ok") as client:
        assert client.get("/health").json()["status"] == "ok"


def test_requests_are_logged_as_json_with_request_and_session(capfd: pytest.CaptureFixture[str]) -> None:
    with TestClient(create_app(Settings(store_url="memory://"))) as client:
        session_id = client.post("/reset").json()["session_id"]
        client.post("/step", json={"session_id": session_id}, headers={"X-Request-Id": "find-me"})
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    step = next(line for line in lines if line.get("request_id") == "find-me")
    assert (step["method"], step["path"], step["status"]) == ("POST", "/step", 200)
    assert step["ms"] > 0
    assert step["client"] == "testclient", "the peer's address, which Starlette's client calls so"
    assert session_id.startswith(step["session"])
    assert step["session"] != session_id, "the whole id would let a reader of the log play"
