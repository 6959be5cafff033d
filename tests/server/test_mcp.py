"""MCP tools over real HTTP and WebSockets: OpenEnv's own client, FastMCP's, and plain JSON-RPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets.sync.client
from fastmcp import Client
from fastmcp.exceptions import ToolError

from env.inference_env import InferenceEnv, observation_dict
from inferencegym.client.openenv_types import without_gradio
from tests.servers import RunningServer, running_server

with without_gradio():
    from openenv.core.mcp_client import MCPToolClient

NAMES = ["begin", "observe", "set_knobs", "run", "grade"]
KNOBS = {"batch_size": 128, "quant_tier": "INT8"}
REFUSED = "unknown field batchsize: did you mean batch_size?"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def played() -> list[tuple[dict[str, Any], float]]:
    """Task 3, seed 5: one second with KNOBS, then 14 with a batch size of 64 and the rest as it was, played here."""
    env = InferenceEnv(task_id=3, seed=5)
    env.reset(config={"episode_length": 15})
    return [
        (observation_dict(seen), reward)
        for seen, reward, _, _ in [env.step(KNOBS), *(env.step({"batch_size": 64}) for _ in range(14))]
    ]


def check(played: list[tuple[dict[str, Any], float]], first: Any, second: Any, rest: Any, grade: Any) -> None:
    assert (first["observation"], first["reward"], first["done"]) == (*played[0], False)
    assert second["observation"] == played[1][0]
    assert second["action_applied"] == {**KNOBS, "batch_size": 64, "kv_budget": 1.0, "spec_length": 0,
                                        "prefill_disagg": False, "quant_tier": 1}  # fmt: skip
    assert rest["observation"] == played[-1][0]
    assert rest["reward"] == pytest.approx(sum(reward for _, reward in played[2:]))
    assert (rest["done"], rest["score"]) == (True, grade["score"])
    assert grade["steps"] == 15


BEGIN = {"task_id": 3, "seed": 5, "config": {"episode_length": 15}}


def test_openenvs_mcp_client_plays_an_episode_over_both_of_its_connections(
    server: RunningServer, played: list[tuple[dict[str, Any], float]]
) -> None:
    async def play() -> None:
        async with MCPToolClient(base_url=server.url) as env:
            tools = await env.list_tools()
            assert [tool.name for tool in tools] == NAMES
            assert all(tool.description and tool.input_schema["type"] == "object" for tool in tools)
            await env.reset(task_id=3, seed=5, config={"episode_length": 15})
            first = await env.call_tool("set_knobs", **KNOBS)
            with pytest.raises(RuntimeError, match="did you mean batch_size"):
                await env.call_tool("set_knobs", batchsize=3)
            with pytest.raises(RuntimeError, match="one of begin, observe"):
                await env.call_tool("fly")
            second = await env.call_tool("set_knobs", batch_size=64)
            rest = await env.call_tool("run", seconds=60)
            with pytest.raises(RuntimeError, match="begin starts the next one"):
                await env.call_tool("run", seconds=1)
            assert (await env.state()).step_count == 15
            check(played, first, second, rest, await env.call_tool("grade"))

    asyncio.run(play())


def test_fastmcps_client_plays_an_episode(server: RunningServer, played: list[tuple[dict[str, Any], float]]) -> None:
    async def play() -> None:
        async with Client(f"{server.url}/mcp") as client:
            await client.ping()
            assert [tool.name for tool in await client.list_tools()] == NAMES

            async def call(name: str, **arguments: Any) -> Any:
                return (await client.call_tool(name, arguments)).structured_content

            begun = await call("begin", **BEGIN)
            assert (begun["task_id"], begun["episode_length"], begun["observation"]["timestep"]) == (3, 15, 0)
            first = await call("set_knobs", **KNOBS)
            with pytest.raises(ToolError, match="did you mean batch_size"):
                await call("set_knobs", batchsize=3)
            second = await call("set_knobs", batch_size=64)
            assert (await call("observe"))["observation"] == second["observation"]
            rest = await call("run", seconds=60)
            check(played, first, second, rest, await call("grade"))

    asyncio.run(play())


def test_without_begin_the_first_tool_starts_an_episode_of_the_default_task(server: RunningServer) -> None:
    async def play() -> None:
        async with Client(f"{server.url}/mcp") as one, Client(f"{server.url}/traffic/mcp") as other:
            seen = (await one.call_tool("run", {"seconds": 2})).structured_content
            assert seen["observation"]["timestep"] == 2
            stepped = (await other.call_tool("set_knobs", {"action": "throttle_70"})).structured_content
            assert stepped["done"] is False
            with pytest.raises(ToolError, match="seconds must be an integer from 1 to 60"):
                await one.call_tool("run", {"seconds": 61})

    asyncio.run(play())


def test_run_says_how_many_seconds_it_played(server: RunningServer) -> None:
    async def play() -> None:
        async with Client(f"{server.url}/mcp") as client:
            await client.call_tool("begin", {"config": {"hold": 10}})
            played = (await client.call_tool("run", {"seconds": 15})).structured_content
            assert (played["seconds_played"], played["observation"]["timestep"]) == (20, 20)

    asyncio.run(play())


def test_refused_knobs_start_no_episode(server: RunningServer) -> None:
    called = rpc("tools/call", name="set_knobs", arguments={"batch_size": 0}, session_id="nobody-began-it")
    assert server.post("/mcp", called)["error"]["code"] == -32602
    assert server.client.get("/state", params={"session_id": "nobody-began-it"}).status_code == 404


def rpc(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": "one", "method": method, "params": params}


def test_a_session_outlives_its_connection_and_is_a_session_like_any_other(server: RunningServer) -> None:
    answer = server.client.post("/mcp", json=rpc("initialize", protocolVersion="2025-03-26"))
    assert answer.json()["result"]["protocolVersion"] == "2025-03-26"
    headers = {"Mcp-Session-Id": answer.headers["mcp-session-id"]}
    called = rpc("tools/call", name="run", arguments={"seconds": 3})
    assert server.client.post("/mcp", json=called, headers=headers).json()["result"]["isError"] is False
    state = server.get("/state", session_id=headers["Mcp-Session-Id"])
    assert (state["step_count"], state["task_id"]) == (3, 1)
    told = server.client.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=headers)
    assert (told.status_code, told.content) == (202, b"")
    assert server.client.get("/mcp").status_code == 405


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        ({"method": "tools/list"}, -32600, "jsonrpc is missing"),
        (rpc("resources/list"), -32601, "'resources/list'"),
        (rpc("tools/call", name="observe", arguments={}), -32602, "session_id is missing"),
        (rpc("tools/call", name="observe", session_id="a b"), -32602, "1 to 128 letters"),
        (rpc("tools/call", name="run", session_id="mcp-1"), -32602, "seconds is missing"),
        (rpc("tools/call", name="set_knobs", arguments={"batch_size": 0}, session_id="mcp-1"), -32602, "from 1 to 512"),
        (rpc("tools/call", name="begin", arguments={"task_id": 99}, session_id="mcp-1"), -32602, "99"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(server: RunningServer, request_: Any, code: int, said: str) -> None:
    error = server.post("/mcp", request_)["error"]
    assert (error["code"], said in error["message"]) == (code, True), error


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_tools_are_played_over_a_websocket(server: RunningServer, path: str) -> None:
    with websockets.sync.client.connect(server.url.replace("http", "ws", 1) + path, proxy=None) as socket:

        def ask(method: str, **params: Any) -> Any:
            request = rpc(method, **params)
            socket.send(json.dumps(request if path == "/mcp" else {"type": "mcp", "data": request}))
            answer = json.loads(socket.recv())
            return (answer if path == "/mcp" else answer["data"])["result"]

        assert [tool["name"] for tool in ask("tools/list")["tools"]] == NAMES
        begun = ask("tools/call", name="begin", arguments=BEGIN)["structuredContent"]
        run = ask("tools/call", name="run", arguments={"seconds": 4})["structuredContent"]
        assert run["observation"]["timestep"] == 4
        assert server.get("/state", session_id=begun["session_id"])["step_count"] == 4
        refused = ask("tools/call", name="set_knobs", arguments={"batchsize": 1})
        assert (refused["isError"], REFUSED in refused["content"][0]["text"]) == (True, True)
        if path == "/ws":
            socket.send(json.dumps({"type": "step", "data": {"batch_size": 8}}))
            assert json.loads(socket.recv())["data"]["observation"]["timestep"] == 5


@pytest.fixture
def small(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path, max_concurrent_envs="1", resets_per_minute="2", store_url="memory://") as server:
        yield server


def test_tools_have_the_limits_of_players(small: RunningServer) -> None:
    address = small.url.replace("http", "ws", 1)
    with (
        websockets.sync.client.connect(f"{address}/mcp", proxy=None),
        websockets.sync.client.connect(f"{address}/mcp", proxy=None) as second,
    ):
        assert json.loads(second.recv())["error"]["code"] == -32000
    answers = [small.post("/mcp", rpc("tools/call", name="begin", session_id=f"s{i}")) for i in range(3)]
    assert ["error" in answer for answer in answers] == [False, False, True]
