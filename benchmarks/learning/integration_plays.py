"""The same play through one integration, with the packages of this environment: benchmarks/learning/integrations.py.

    python integration_plays.py by_llm http://localhost:7860

Ten answers, each of which sets one knob and holds for 20 seconds, are a whole episode of task 1. The last line that is
printed is JSON: the reward, and the texts that the model read before each answer.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

TASK_ID, SEED, HOLD_S, TURNS = 1, 7, 20, 10
KNOBS: Final = {"batch_size": 128}
ANSWER: Final = json.dumps(KNOBS)
Played = tuple[float, list[str]]


def room(name: str) -> Any:
    """A module of the wheel, which holds the rooms inside `inferencegym`, or of the clone, beside it."""
    return import_module(f"inferencegym.{name}" if find_spec("inferencegym.agents") else name)


@contextmanager
def scripted_model(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible endpoint that replies with ``answer(request)``: its address, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            message = {"role": "assistant", **answer(body)}
            prompt, reply = (len(json.dumps(part)) // 4 for part in (body["messages"], message))
            told = {"id": "1", "created": 0, "model": body["model"]}
            told["usage"] = {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
            if body.get("stream"):
                deltas = ({"delta": message, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"})
                chunks = [{**told, "object": "chat.completion.chunk", "choices": [{"index": 0, **d}]} for d in deltas]
                kind, sent = "text/event-stream", [*map(json.dumps, chunks), "[DONE]"]
                data = "".join(f"data: {event}\n\n" for event in sent).encode()
            else:
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                kind, data = "application/json", json.dumps({**told, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
        server.shutdown()


def by_llm(url: str) -> Played:
    """`inferencegym llm`, with a scripted endpoint."""
    settings = {"--server": url, "--task": TASK_ID, "--seed": SEED, "--every": HOLD_S, "--model": "scripted"}
    arguments = [str(word) for pair in settings.items() for word in pair]
    with scripted_model(lambda _: {"content": ANSWER}) as (model_url, asked):
        told = subprocess.run(
            [sys.executable, "-m", "inferencegym", "llm", *arguments],
            check=True, stdout=subprocess.PIPE, env={**os.environ, "INFERENCEGYM_LLM_URL": model_url},
        )  # fmt: skip
    return json.loads(told.stdout)["score"], [body["messages"][-1]["content"] for body in asked]


def by_mcp(url: str) -> Played:
    """FastMCP's client."""
    from fastmcp import Client

    async def play() -> Played:
        async with Client(f"{url}/mcp") as client:

            async def call(name: str, **arguments: Any) -> dict[str, Any]:
                return dict((await client.call_tool(name, arguments)).structured_content)

            told = [await call("begin", task_id=TASK_ID, seed=SEED, config={"hold": HOLD_S})]
            told += [await call("set_knobs", **KNOBS) for _ in range(TURNS)]
            return (await call("grade"))["score"], list(map(json.dumps, told[:-1]))

    return asyncio.run(play())


def by_harness(url: str) -> Played:
    """OpenEnv's harness."""
    from openenv.core.harness import HarnessRunLimits, MCPHarnessAdapter, ModelStepResult
    from openenv.core.llm_client import LLMResponse, ToolCall

    def model(*_: Any) -> ModelStepResult:
        call = ToolCall(id="1", name="set_knobs", args=KNOBS)
        return ModelStepResult(response=LLMResponse(content="", tool_calls=[call]))

    factory = room("agents.integrations.openenv_harness").FleetSessionFactory(url, hold=HOLD_S)
    with closing(factory.create({"task_id": TASK_ID}, seed=SEED)) as session:
        rollout = MCPHarnessAdapter().run_white_box(model, session, HarnessRunLimits(max_turns=60))
        seen = [json.dumps(entry.result.data) for entry in rollout.tool_trace]
        briefing = session.initial_messages()[0]["content"]
        return session.verify(rollout.messages).env_reward, [briefing, *seen[:-1]]


def by_trl(url: str) -> Played:
    """TRL's GRPOTrainer: one step with a tiny model that can say nothing but the two calls of an answer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tools, played = room("agents.integrations.trl").FleetTools, []

    def told(method: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> str:
            text = method(self, *arguments, **named)
            vars(self).setdefault("texts", []).append(text)
            return text

        return call

    class Recorded(tools):
        reset, set_knobs, run = map(told, (tools.reset, tools.set_knobs, tools.run))

        def get_reward(self) -> float:
            played.append((super().get_reward(), self.texts))
            return float(played[-1][0])

    calls = ({"name": "set_knobs", "arguments": KNOBS}, {"name": "run", "arguments": {"seconds": HOLD_S}})
    answer = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    weights, tokenizer, unsaid = room("agents.integrations.trl_grpo").tiny_model([answer])
    settings = GRPOConfig(
        output_dir="trl", max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=16_384,
        max_tool_calling_iterations=TURNS, save_strategy="no", report_to="none", bf16=False, use_cpu=True,
        generation_kwargs={"suppress_tokens": [*unsaid, tokenizer.eos_token_id], "max_new_tokens": 1},
    )  # fmt: skip
    row = {"prompt": [{"role": "user", "content": "Run the fleet."}], "task_id": TASK_ID, "seed": SEED}
    GRPOTrainer(
        model=weights, processing_class=tokenizer, args=settings, train_dataset=Dataset.from_list([row] * 2),
        environment_factory=functools.partial(Recorded, url),
    ).train()  # fmt: skip
    (reward, (briefing, *texts)), _ = played
    return reward, [briefing, *map("".join, zip(texts[:-2:2], texts[1:-2:2], strict=True))]


def by_verifiers(url: str) -> Played:
    """verifiers' own command, with a scripted endpoint."""
    settings = {
        "--env.taskset.base-url": url, "--env.taskset.tasks": TASK_ID, "--env.taskset.seeds": SEED,
        "--env.taskset.hold": HOLD_S, "--client.api-key-var": "NO_KEY", "--model": "scripted", "--output-dir": "vf",
    }  # fmt: skip
    arguments = [str(word) for pair in settings.items() for word in pair]
    with scripted_model(lambda _: {"content": ANSWER}) as (model_url, asked):
        command = [str(Path(sys.executable).with_name("vf-eval")), "inferencegym-fleet", *arguments]
        subprocess.run([*command, "--client.base-url", model_url, "--no-push", "--no-rich"], check=True, stdout=2)
    (stored,) = Path("vf").glob("*/traces.jsonl")
    (trace,) = json.loads(stored.read_text(encoding="utf-8"))["traces"]
    return trace["rewards"]["grade"]["score"], [body["messages"][-1]["content"] for body in asked]


def by_inspect(url: str) -> Played:
    """Inspect's eval, with a scripted endpoint: Inspect's own mock model downloads a tokenizer."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ChatMessageUser, get_model
    from inspect_ai.scorer import Score, mean, scorer
    from inspect_ai.solver import solver

    @scorer(metrics=[mean()])
    def paid() -> Any:
        async def read(state: Any, _target: Any) -> Score:
            return Score(value=state.metadata["score"])

        return read

    @solver
    def fleet() -> Any:
        module = room("agents.integrations.inspect_ai")
        return module.model_solver(url, lambda text: ChatMessageUser(content=text), HOLD_S)

    sample = Sample(input="Run the fleet.", metadata={"task_id": TASK_ID, "seed": SEED})
    task = Task(dataset=[sample], solver=fleet(), scorer=paid())
    with scripted_model(lambda _: {"content": ANSWER}) as (model_url, asked):
        model = get_model("openai-api/scripted/model", base_url=model_url, api_key="none")
        (log,) = eval(task, model=model, display="none", log_dir="inspect")
    return log.samples[0].scores["paid"].value, [body["messages"][-1]["content"] for body in asked]


def by_skyrl(url: str) -> Played:
    """SkyRL's registry."""
    import skyrl_gym

    module = room("agents.integrations.skyrl")
    skyrl_gym.register(id="inferencegym", entry_point=f"{module.__name__}:FleetEnv")
    row = {"task_id": TASK_ID, "seed": SEED, "config": {"hold": HOLD_S}, "base_url": url}
    env = skyrl_gym.make("inferencegym", env_config={}, extras=row)
    messages, _ = env.init([])
    texts, paid, done = [messages[-1]["content"]], 0.0, False
    while not done:
        output = env.step(ANSWER)
        paid, done = paid + output["reward"], output["done"]
        texts += [message["content"] for message in output["observations"]]
    return paid, texts


def by_nemo_gym(url: str) -> Played:
    """Gym's own server class, called as its agent does."""
    from unittest.mock import MagicMock

    from fastapi.testclient import TestClient
    from nemo_gym.server_utils import ServerClient

    module = room("agents.integrations.nemo_gym.app")
    row = next(room("agents.integrations.nemo_gym.rows").rows(url, [TASK_ID], [SEED]))
    config = module.FleetConfig(host="", port=1, entrypoint="app.py", name="fleet", base_url=url)
    server = module.FleetResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    client = TestClient(server.setup_webserver())
    client.post("/seed_session", json=row)
    texts = [row["responses_create_params"]["input"][0]["content"]]
    for _ in range(TURNS):
        calls = ("/set_knobs", KNOBS), ("/run", {"seconds": HOLD_S})
        texts.append("".join(client.post(path, json=body).json()["result"] for path, body in calls))
    response = {
        "id": "1", "created_at": 0, "model": "scripted", "object": "response", "output": [],
        "parallel_tool_calls": False, "tool_choice": "auto", "tools": [],
    }  # fmt: skip
    return client.post("/verify", json={**row, "response": response}).json()["reward"], texts[:-1]


if __name__ == "__main__":
    reward, texts = globals()[sys.argv[1]](sys.argv[2])
    print(json.dumps({"reward": reward, "texts": texts}))
