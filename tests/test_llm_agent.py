"""The language-model agent against a local OpenAI-compatible endpoint and a real server, all over sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agents.policies.llm import ChatModel, Game, LlmAgent, LlmResult, LlmSettings, ServingGame, TrafficGame, objects_in
from inferencegym.cli.main import main
from inferencegym.errors import InvalidConfigError, RemoteError
from inferencegym.models import ServeAction
from tests.servers import RunningServer

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


@dataclass
class Endpoint:
    """A chat completions endpoint whose answers a test writes."""

    answer: Answer
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def endpoint(answer: Answer) -> Iterator[Endpoint]:
    stub = Endpoint(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/chat/completions"
            stub.asked.append(body)
            stub.keys.append(self.headers.get("authorization"))
            status, reply = stub.answer(body)
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def text(content: str, **usage: int) -> tuple[int, dict[str, Any]]:
    message = {"role": "assistant", "content": content}
    return 200, {"choices": [{"message": message}], **({"usage": usage} if usage else {})}


def call(arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    function = {"name": "act", "arguments": json.dumps(arguments)}
    message = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    return 200, {"choices": [{"message": message}], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}


def play(chosen: LlmSettings, game: Game) -> LlmResult:
    with closing(LlmAgent(chosen)) as agent, closing(game):
        return agent.run_episode(game, seed=3)


def settings(stub: Endpoint, **changes: Any) -> LlmSettings:
    return LlmSettings(stub.url, "stub", **changes)


KNOBS = {"kv_budget": 0.9, "batch_size": 256}


def test_a_model_with_tools_plays_a_serving_episode(server: RunningServer) -> None:
    with endpoint(lambda body: call(KNOBS)) as stub:
        result = play(settings(stub, every=50, api_key="secret"), ServingGame(server.url, 1))
    assert (result.steps, result.requests, result.used_tools, result.invalid_replies) == (200, 4, True, 0)
    assert (result.prompt_tokens, result.completion_tokens) == (400, 40)
    assert all(action == {**ServeAction.from_dict(KNOBS).to_dict()} for action in result.actions)
    assert 0.5 < result.score <= 1.0
    assert stub.keys == ["Bearer secret"] * 4
    function = stub.asked[0]["tools"][0]["function"]
    assert set(function["parameters"]["properties"]) == {"kv_budget", "batch_size"}


def test_an_endpoint_without_tools_is_asked_without_them_from_then_on(server: RunningServer) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "tools" in body:
            return 400, {"error": {"message": "tools are not supported"}}
        return text("I think a bigger batch helps.\n```json\n{'kv_budget': 0.9, 'batch_size': '256',}\n```")

    with endpoint(answer) as stub:
        result = play(settings(stub, every=100), ServingGame(server.url, 1))
    assert [("tools" in body) for body in stub.asked] == [True, False, False]
    assert (result.requests, result.used_tools) == (2, False)
    assert result.actions[-1]["batch_size"] == 256
    assert result.prompt_tokens > 100, "usage is estimated where the endpoint reports none"


def test_a_model_plays_traffic_and_sees_what_comes_next(server: RunningServer) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        seen = json.loads(body["messages"][-1]["content"])["observation"]
        return text("throttle_70" if seen["request_rate"] > 100 else '{"action": "allow_all"}')

    with endpoint(answer) as stub:
        result = play(settings(stub, tools="off"), TrafficGame(server.url, "task_easy"))
    assert result.steps == 30
    assert result.score == 1.0
    assert {action["action"] for action in result.actions} == {"allow_all", "throttle_70"}
    assert "server_capacity" in stub.asked[0]["messages"][0]["content"]


def test_a_useless_reply_is_sent_back_once_with_the_reason_and_then_the_knobs_stay(server: RunningServer) -> None:
    replies = iter(["what a lovely fleet", '{"batch_size": 4096}', '{"batch_size": 100}'])
    with endpoint(lambda body: text(next(replies, '{"batch_size": 9999}'))) as stub:
        result = play(settings(stub, tools="off", every=50), ServingGame(server.url, 1))
    said = [body["messages"][-1]["content"] for body in stub.asked]
    assert "batch_size" in said[1]
    assert [len(body["messages"]) for body in stub.asked[:2]] == [2, 4]
    # Asked at steps 0 (twice, in vain), 50 (good), 100 and 150 (twice each, in vain).
    assert result.invalid_replies == 6
    assert [result.actions[k]["batch_size"] for k in (0, 49, 50, 199)] == [32, 32, 100, 100]


@pytest.mark.parametrize(
    ("limit", "requests"),
    [({"max_requests": 3}, 3), ({"max_tokens": 250}, 3), ({"max_cost": 0.0002, "input_price": 1.0}, 2)],
)
def test_a_limit_ends_the_asking_and_not_the_episode(
    server: RunningServer, limit: dict[str, Any], requests: int
) -> None:
    with endpoint(lambda body: call(KNOBS)) as stub:
        result = play(settings(stub, every=20, **limit), ServingGame(server.url, 1))
    assert (result.steps, result.requests, result.stopped) == (200, requests, next(iter(limit)))
    assert result.score > 0.0


def test_history_is_bounded(server: RunningServer) -> None:
    with endpoint(lambda body: call(KNOBS)) as stub:
        play(settings(stub, every=20, history=2), ServingGame(server.url, 1))
    assert [len(body["messages"]) for body in stub.asked] == [2, 4, 6, 6, 6, 6, 6, 6, 6, 6]


def test_a_busy_endpoint_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferencegym.client.retries.FIRST_PAUSE_S", 0.0)
    answers = iter([(429, {"error": "busy"}), (503, {"error": "starting"}), text('{"batch_size": 8}')])
    with endpoint(lambda body: next(answers)) as stub:
        model = ChatModel(settings(stub, tools="off"))
        assert model.ask([{"role": "user", "content": "?"}], {}).candidates == [{"batch_size": 8}]
        model.close()


def test_an_endpoint_that_refuses_or_speaks_another_language_is_named() -> None:
    for answer in ((401, {"error": {"message": "bad key"}}), (200, {"hello": "world"})):
        with endpoint(lambda body, answer=answer: answer) as stub:
            model = ChatModel(settings(stub))
            with pytest.raises(RemoteError, match=r"bad key|not a chat completion"):
                model.ask([{"role": "user", "content": "?"}], {})
            model.close()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ('{"batch_size": 8}', {"batch_size": 8}),
        ('First {"a": 1}, no: {"batch_size": 8}.', {"batch_size": 8}),
        ('{"action": {"batch_size": 8}}', {"batch_size": 8}),
        ("{'prefill_disagg': True, 'batch_size': 8,}", {"prefill_disagg": True, "batch_size": 8}),
        ('```json\n{"batch_size":\n 8}\n```', {"batch_size": 8}),
        ('{"reason": "the {queue} grows", "batch_size": 8}', {"reason": "the {queue} grows", "batch_size": 8}),
    ],
)
def test_objects_are_found_in_what_models_write(reply: str, expected: dict[str, Any]) -> None:
    assert objects_in(reply)[0] == expected


def test_text_without_an_object_gives_none() -> None:
    assert objects_in("}{ no {} [1, 2] {broken") == []


def test_words_for_precision_and_numbers_in_quotes_are_understood(server: RunningServer) -> None:
    game = ServingGame(server.url, 3)
    game.close()
    action = game.read({"quant_tier": "int8", "prefill_disagg": "true", "kv_budget": "0.5", "thoughts": "..."})
    assert (action["quant_tier"], action["prefill_disagg"], action["kv_budget"]) == (1, True, 0.5)
    assert game.read({"batch_size": 64})["quant_tier"] == 1, "what an answer leaves out stays as it was"


def test_unknown_tasks_and_missing_settings_are_named(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        ServingGame(server.url, 9)
    assert refused.value.field == "task_id"
    with pytest.raises(InvalidConfigError) as refused:
        TrafficGame(server.url, "nothing")
    assert refused.value.field == "task_id"
    assert "task_easy" in str(refused.value)
    for name in ("INFERENCEGYM_LLM_URL", "OPENAI_BASE_URL", "INFERENCEGYM_LLM_MODEL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidConfigError) as refused:
        LlmSettings.from_environment()
    assert refused.value.field == "INFERENCEGYM_LLM_URL"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    with pytest.raises(InvalidConfigError) as refused:
        LlmSettings.from_environment()
    assert refused.value.field == "INFERENCEGYM_LLM_MODEL"
    with pytest.raises(InvalidConfigError) as refused:
        LlmAgent(LlmSettings.from_environment(model="m", every=0))
    assert refused.value.field == "every"


def test_the_command_plays_and_prints_the_result(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(lambda body: call({"action": "drop_aggressive"})) as stub:
        monkeypatch.setenv("INFERENCEGYM_LLM_URL", stub.url)
        monkeypatch.setenv("INFERENCEGYM_LLM_MODEL", "stub")
        assert main(["llm", "--server", server.url, "--family", "traffic", "--every", "10"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["steps"], told["requests"], told["score"]) == (30, 3, 1.0)
