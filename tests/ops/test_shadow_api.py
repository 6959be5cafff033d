"""POST /shadow: a visitor's request log, played under policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from inferencegym.tasks import get_task
from ops.log.reader import import_log
from ops.shadow import shadow
from server.api.request_log import MAX_LOG_BYTES
from server.api.web import PAGE_DIR
from tests.servers import RunningServer, running_server

EXAMPLE = PAGE_DIR / "data" / "azure-conversation.csv"
HEADER = "arrival_s,prompt_tokens,output_tokens\n"
FEW = HEADER + "".join(f"{0.5 * i},{200 + i},{50}\n" for i in range(40))


def test_the_report_is_the_one_of_the_library(server: RunningServer) -> None:
    policies = ["heuristic", "hill_climb"]
    answer = server.post("/shadow", {"log": EXAMPLE.read_text(), "policies": policies})
    report = shadow(import_log(EXAMPLE).log, policies).to_dict()
    assert {key: answer[key] for key in report} == report


def test_settings_are_exported_for_every_policy(server: RunningServer) -> None:
    answer = server.post("/shadow", {"log": FEW, "policies": ["heuristic"], "fixed": {"batch_size": 7}})
    assert set(answer["export"]) == {"fixed", "best_constant", "best_own_precision", "heuristic"}
    assert "max-num-seqs: 7" in answer["export"]["fixed"]["vllm"]
    assert "max-running-requests: 7" in answer["export"]["fixed"]["sglang"]


def test_fleet_objective_and_part_of_the_log_are_the_visitors_choice(server: RunningServer) -> None:
    body = {"log": FEW, "policies": ["naive"], "gpus": 3, "slo_ms": 123, "from_s": 5, "to_s": 10}
    answer = server.post("/shadow", body)
    assert (answer["n_gpus"], answer["slo_ms"], answer["log"]["requests"]) == (3, 123.0, 10)


def test_the_visitor_may_choose_an_fp8_kv_cache(server: RunningServer) -> None:
    body = {"log": FEW, "policies": ["naive"], "hardware": "l40s-llama-3.1-8b", "kv_cache_dtype": "fp8"}
    answer = server.post("/shadow", body)
    assert "kv-cache-dtype: fp8" in answer["export"]["fixed"]["vllm"]
    assert any("The KV cache is in FP8" in note for note in answer["notes"])


def test_a_task_lends_its_stored_policies(server: RunningServer) -> None:
    answer = server.post("/shadow", {"log": FEW, "task_id": 3, "policies": ["best_static", "best_adaptive"]})
    assert [outcome["policy"] for outcome in answer["outcomes"]] == [
        "fixed",
        "best_constant",
        "best_own_precision",
        "best_static",
        "best_adaptive",
    ]
    assert answer["n_gpus"] == get_task(3).fleet.n_replicas


def test_a_task_lends_its_hardware_unless_the_visitor_names_another(server: RunningServer) -> None:
    body = {"log": FEW, "task_id": "h100-chat-8b", "policies": ["naive"]}
    assert server.post("/shadow", body)["hardware"] == "h100_sxm"
    assert server.post("/shadow", {**body, "hardware": "a100-80gb"})["hardware"] == "a100-80gb"


@pytest.mark.parametrize(
    ("change", "code", "field", "shown"),
    [
        ({"log": ""}, "invalid_request", "log", "''"),
        ({"log": "hello"}, "data_format", None, "mine.csv: no column with a usual name"),
        ({"log": HEADER + "0,10,10\n-3,10,10\n"}, "data_format", "arrival_s", "mine.csv, line 3: arrival_s='-3'"),
        ({"log": HEADER + "0,10,10\n9000,10,10\n"}, "data_format", None, "(from_s, to_s)"),
        ({"log": "[1]", "name": "mine.json"}, "data_format", None, "mine.json: is not a JSON object"),
        ({"name": "mine.parquet"}, "invalid_request", "name", "'mine.parquet'"),
        ({"name": False}, "invalid_request", "name", "False"),
        ({"name": ""}, "invalid_request", "name", "''"),
        ({"to_s": 0}, "data_format", None, "mine.csv: no request between 0 and 0 s"),
        ({"from_s": 9, "to_s": 5}, "data_format", None, "mine.csv: no request between 9 and 5 s"),
        ({"policies": ["best_static"]}, "invalid_request", "policies[0]", "unless task_id names"),
        ({"policies": []}, "invalid_request", "policies", "[]"),
        ({"policies": ["heuristic", "heuristic"]}, "invalid_request", "policies", "['heuristic', 'heuristic']"),
        ({"policies": ["constant:{}"]}, "invalid_request", "policies[0]", "'constant:{}'"),
        ({"task_id": 99}, "unknown_task", None, "99"),
        ({"gpus": 0}, "invalid_request", "gpus", "0"),
        ({"prices": {"currency": "EUR"}}, "invalid_request", "prices.per_gpu_hour", "per_gpu_hour"),
        ({"slo_ms": "fast"}, "invalid_request", "slo_ms", "'fast'"),
        ({"fixed": {"batch_size": 0}}, "invalid_action", "batch_size", "0"),
        ({"extra": 1}, "invalid_request", "extra", "unknown field extra"),
    ],
)
def test_a_mistake_is_named_in_the_visitors_words(
    server: RunningServer, change: dict[str, Any], code: str, field: str | None, shown: str
) -> None:
    answer = server.client.post("/shadow", json={"log": FEW, "name": "mine.csv", **change})
    detail = answer.json()["detail"]
    assert (answer.status_code, detail["code"], detail.get("field")) == (422, code, field)
    assert shown in detail["message"]
    assert "/tmp" not in detail["message"]
    assert "--" not in detail["message"]


@pytest.mark.parametrize("policies", [{}, {"policies": ["best_static"]}])
def test_a_task_that_there_is_not_is_answered_with_those_that_there_are(
    server: RunningServer, policies: dict[str, Any]
) -> None:
    answer = server.client.post("/shadow", json={"log": FEW, "task_id": "azure-cnv", **policies})
    detail = answer.json()["detail"]
    assert (answer.status_code, detail["code"]) == (422, "unknown_task")
    for named in ("task_id='azure-cnv'", "1, 2, 3, 'sharegpt-served'"):
        assert named in detail["message"]


def test_reports_are_limited_in_size(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        assert httpx.post(server.url + "/shadow", json={"log": FEW + "x" * MAX_LOG_BYTES}).status_code == 413
        assert server.client.post("/shadow", json={"log": FEW}).status_code == 200


def test_steps_are_answered_while_a_report_is_made(server: RunningServer) -> None:
    begun = server.post("/reset", {"task_id": 1})
    body = {"log": EXAMPLE.read_text(), "policies": ["heuristic", "hill_climb", "random"]}
    with httpx.Client(base_url=server.url, timeout=30) as other:
        request = other.build_request("POST", "/shadow", json=body)
        waiting = other.send(request, stream=True)
        answered = server.post("/step", {"session_id": begun["session_id"], "action": {}})
        assert answered["info"]["timestep"] == 1
        assert waiting.status_code == 200
        waiting.close()
