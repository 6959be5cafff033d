"""`inferencegym llm` against a local OpenAI-compatible endpoint and a real server, all over sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agents.evaluate import evaluate
from agents.integrations.llm import ChatModel, Episode, ServingText, TrafficText, Turn, play
from cli.main import main
from inferencegym.errors import InvalidConfigError, RemoteError
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


USAGE = {"prompt_tokens": 100, "completion_tokens": 10}


def text(content: str, finish: str = "stop", **message: str) -> tuple[int, dict[str, Any]]:
    said = {"role": "assistant", "content": content, **message}
    return 200, {"choices": [{"message": said, "finish_reason": finish}], "usage": USAGE}


def call(*arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    calls = [
        {"id": f"call-{i}", "type": "function", "function": {"name": "act", "arguments": json.dumps(each)}}
        for i, each in enumerate(arguments)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": USAGE}


def played(model: ChatModel, episode: Episode) -> list[Turn]:
    with closing(model), closing(episode):
        return list(play(model, episode))


KNOBS = {"kv_budget": 0.9, "batch_size": 256}


def test_a_model_with_tools_plays_ten_seconds_with_each_answer(server: RunningServer) -> None:
    with endpoint(lambda body: call(KNOBS)) as stub:
        episode = ServingText(server.url, 1, seed=3)
        turns = played(ChatModel(stub.url, "stub", "secret"), episode)
    assert (len(turns), episode.invalid_answers) == (20, 0)
    assert episode.score is not None
    assert 0.5 < episode.score <= 1.0
    assert stub.keys == ["Bearer secret"] * 20
    assert set(stub.asked[0]["tools"][0]["function"]["parameters"]["properties"]) == {"kv_budget", "batch_size"}
    assert "a step is 10 of them" in stub.asked[0]["messages"][0]["content"]
    assert turns[0].seen.startswith("These 10 seconds added 0.0")


def test_the_conversation_holds_calls_and_their_results_and_is_bounded(server: RunningServer) -> None:
    with endpoint(lambda body: call({"batch_size": 256}, {"kv_budget": 0.9})) as stub:
        played(ChatModel(stub.url, "stub"), ServingText(server.url, 1, every=20))
    assert [len(body["messages"]) for body in stub.asked] == [1, 3, 5, 7, 9, 11, 13, 13, 13, 13]
    _, said, result = stub.asked[1]["messages"]
    (only,) = said["tool_calls"]
    assert json.loads(only["function"]["arguments"]) == KNOBS
    assert (result["role"], result["tool_call_id"]) == ("tool", only["id"])
    assert '"batch_size": 256' in result["content"]


def test_an_endpoint_without_tools_is_asked_without_them_from_then_on(server: RunningServer) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "tools" in body:
            return 400, {"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice'}}
        return text("I think a bigger batch helps.\n```json\n{'kv_budget': 0.9, 'batch_size': '256',}\n```")

    with endpoint(answer) as stub:
        model, episode = ChatModel(stub.url, "stub"), ServingText(server.url, 1, every=50)
        played(model, episode)
    assert [("tools" in body) for body in stub.asked] == [True, False, False, False, False]
    assert not model.tools
    assert episode.knobs["batch_size"] == 256


def test_a_model_that_thinks_is_bounded_by_max_completion_tokens_and_asked_without_a_temperature() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "max_tokens" in body:
            return 400, {"error": {"message": "Unsupported parameter: use 'max_completion_tokens' instead."}}
        return text('{"batch_size": 8}', reasoning_content="Small is safe.")

    with endpoint(answer) as stub, closing(ChatModel(stub.url, "stub", max_tokens=900)) as model:
        for _ in range(2):
            reply = model.ask([{"role": "user", "content": "?"}], {})
    assert (reply.answer, reply.thoughts) == ('{"batch_size": 8}', "Small is safe.")
    assert [body.get("max_completion_tokens") for body in stub.asked] == [None, 900, 900]
    assert not any("temperature" in body for body in stub.asked)


def test_a_temperature_is_sent_where_one_is_asked_for() -> None:
    with endpoint(lambda body: text("{}")) as stub, closing(ChatModel(stub.url, "stub", temperature=0.0)) as model:
        model.ask([{"role": "user", "content": "?"}], {})
    assert stub.asked[0]["temperature"] == 0.0


def test_an_answer_that_was_cut_off_is_named_as_such(server: RunningServer) -> None:
    with endpoint(lambda body: text("<think>a bigger batch", "length")) as stub:
        episode = ServingText(server.url, 1, every=50)
        first, *_ = played(ChatModel(stub.url, "stub", max_tokens=5, tools=False), episode)
    assert first.reply.cut_off
    assert first.seen.startswith("Your last answer was cut off at 5 tokens.\nYour last answer was not used")
    assert episode.invalid_answers == 4


def test_a_model_plays_traffic_and_sees_what_comes_next(server: RunningServer) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        seen = json.loads(body["messages"][-1]["content"].rpartition("State: ")[2])
        return text("throttle_70" if seen["request_rate"] > 100 else '{"action": "allow_all"}')

    with endpoint(answer) as stub:
        episode = TrafficText(server.url, "task_easy", seed=3)
        turns = played(ChatModel(stub.url, "stub", tools=False), episode)
    assert (len(turns), episode.score, episode.invalid_answers) == (30, 1.0, 0)
    assert "server_capacity" in stub.asked[0]["messages"][0]["content"]


def test_an_answer_of_no_use_is_named_and_the_knobs_stay(server: RunningServer) -> None:
    replies = iter(["what a lovely fleet", '{"batch_size": 100}', '{"batch_size": 4096}', "{}"])
    with endpoint(lambda body: text(next(replies))) as stub:
        episode = ServingText(server.url, 1, every=50)
        turns = played(ChatModel(stub.url, "stub", tools=False), episode)
    assert [turn.seen.startswith("Your last answer was not used") for turn in turns] == [True, False, True, False]
    assert "batch_size=4096" in turns[2].seen
    assert (episode.invalid_answers, episode.knobs["batch_size"]) == (2, 100)


def test_a_busy_endpoint_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferencegym.client.retries.FIRST_PAUSE_S", 0.0)
    answers = iter([(429, {"error": "busy"}), (503, {"error": "starting"}), text('{"batch_size": 8}')])
    with endpoint(lambda body: next(answers)) as stub, closing(ChatModel(stub.url, "stub")) as model:
        assert model.ask([{"role": "user", "content": "?"}], {}).answer == '{"batch_size": 8}'


def test_an_endpoint_that_refuses_or_speaks_another_language_is_named() -> None:
    for answer in ((401, {"error": {"message": "bad key"}}), (200, {"hello": "world"})):
        with endpoint(lambda body, answer=answer: answer) as stub, closing(ChatModel(stub.url, "stub")) as model:
            with pytest.raises(RemoteError, match=r"bad key|not a chat completion"):
                model.ask([{"role": "user", "content": "?"}], {})
            assert len(stub.asked) == 1


def test_unknown_tasks_and_missing_settings_are_named(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        TrafficText(server.url, "nothing")
    assert refused.value.field == "task_id"
    assert "task_easy" in str(refused.value)
    for name in ("INFERENCEGYM_LLM_URL", "OPENAI_BASE_URL", "INFERENCEGYM_LLM_MODEL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidConfigError) as refused:
        ChatModel.from_environment()
    assert refused.value.field == "INFERENCEGYM_LLM_URL"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:1/v1")
    with pytest.raises(InvalidConfigError) as refused:
        ChatModel.from_environment()
    assert refused.value.field == "INFERENCEGYM_LLM_MODEL"


def test_the_command_prints_score_and_tokens_and_writes_a_transcript(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with endpoint(lambda body: call({"action": "drop_aggressive"})) as stub:
        monkeypatch.setenv("INFERENCEGYM_LLM_URL", stub.url)
        monkeypatch.setenv("INFERENCEGYM_LLM_MODEL", "stub")
        options = ["--family", "traffic", "--every", "10", "--transcript", str(tmp_path / "said.md")]
        assert main(["llm", "--server", server.url, *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["answers"], printed["score"]) == (3, 1.0)
    assert (printed["prompt_tokens"], printed["completion_tokens"]) == (300, 30)
    said = (tmp_path / "said.md").read_text(encoding="utf-8")
    headings = [line for line in said.splitlines() if line.startswith("#")]
    assert headings == ["# stub plays seed 42", "## Answer 1", "## Answer 2", "## Answer 3", "## Result"]
    assert said.count('    {"action": "drop_aggressive"}') == 3


def test_several_seeds_give_a_mean_score_with_its_interval(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with endpoint(lambda body: call({"batch_size": 256, "kv_budget": 0.9, "quant_tier": 1})) as stub:
        monkeypatch.setenv("INFERENCEGYM_LLM_URL", stub.url)
        options = ["--model", "stub", "--every", "50", "--transcript", str(tmp_path / "said.md")]
        assert main(["llm", "--server", server.url, "--task", "3", "--seeds", "2", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    constant = 'constant:{"batch_size": 256, "kv_budget": 0.9, "quant_tier": 1}'
    expected = evaluate(constant, 3, [10_000, 10_001])
    assert printed["scores"] == pytest.approx({"10000": expected.scores[0], "10001": expected.scores[1]}, abs=1e-12)
    assert printed["score"]["mean"] == pytest.approx(expected.scores.mean())
    assert printed["score"]["ci95_low"] < printed["score"]["mean"] < printed["score"]["ci95_high"]
    assert (printed["answers"], printed["prompt_tokens"]) == (8, 800)
    assert (tmp_path / "said.md").read_text(encoding="utf-8").count("# stub plays seed 1000") == 2


def test_the_command_says_that_answers_were_cut_off(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with endpoint(lambda body: text("Let me think", "length")) as stub:
        monkeypatch.setenv("INFERENCEGYM_LLM_URL", stub.url)
        assert main(["llm", "--server", server.url, "--model", "stub", "--every", "50", "--no-tools"]) == 0
    assert "4 of 4 answers were cut off: raise --max-tokens" in capsys.readouterr().err
