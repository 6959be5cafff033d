"""The gate of sessions on a running engine, against a stand-in for vLLM and SGLang over real HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferencegym.errors import InvalidConfigError, RemoteError
from inferencegym.rollouts import OBSERVATION_FIELDS, Seen
from inferencegym.session_gate import SessionGate
from live.metrics import read_page
from live.session_gate import read_engine
from tests.live_stand_ins import StandIn

ROOT = Path(__file__).resolve().parents[2]
CONFIG = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="626",effective_attention_block_size="None"}'
VLLM = {
    CONFIG: 1.0,
    'vllm:num_requests_running{engine="0"}': 2.0,
    "vllm:num_requests_waiting": 1.0,
    "vllm:kv_cache_usage_perc": 0.25,
    "vllm:prefix_cache_queries_total": 5000.0,
    "vllm:prefix_cache_hits_total": 4000.0,
    "vllm:generation_tokens_total": 300.0,
    "vllm:num_preemptions_total": 1.0,
}
SGLANG = {
    "sglang:max_total_num_tokens": 10_000.0,
    "sglang:num_running_reqs": 2.0,
    "sglang:num_queue_reqs": 1.0,
    "sglang:token_usage": 0.25,
    "sglang:prompt_tokens_total": 5000.0,
    'sglang:cached_tokens_total{cache_source="device"}': 3500.0,
    'sglang:cached_tokens_total{cache_source="host"}': 500.0,
    "sglang:generation_tokens_total": 300.0,
    "sglang:num_retracted_requests_total": 1.0,
}


def complete(path: str, body: Any) -> tuple[int, Any]:
    return 200, {"usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 8}}


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with StandIn(dict(VLLM), complete) as server:
        yield server


class Caps:
    """A policy that returns a given cap, and records its observations."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.seen: Seen = {}

    def __call__(self, seen: Seen) -> int:
        self.seen = seen
        return self.cap


class Agents:
    """Sessions that take a turn of 1,000 tokens on request."""

    def __init__(self, gate: SessionGate, names: str) -> None:
        self.events: list[str] = []
        self._turns: dict[str, asyncio.Queue[bool]] = {name: asyncio.Queue() for name in names}
        self._answer = {name: asyncio.Event() for name in names}
        self._tasks = [asyncio.create_task(self._play(gate, name)) for name in names]

    async def _play(self, gate: SessionGate, name: str) -> None:
        async with gate.session(name):
            self.events.append(f"{name} starts")
            while await self._turns[name].get():
                async with gate.turn() as turn:
                    self.events.append(f"{name} turn")
                    await self._answer[name].wait()
                    turn.report(900, 100)

    async def turn(self, names: str, answered: bool = True) -> list[str]:
        """Request a turn of each session; returns the events until nothing changes any more."""
        for name in names:
            self._turns[name].put_nowait(True)
            if answered:
                self._answer[name].set()
        return await self.happened()

    async def happened(self) -> list[str]:
        for _ in range(50):
            await asyncio.sleep(0)
        found, self.events = self.events, []
        return found

    async def finish(self) -> None:
        for name, queue in self._turns.items():
            queue.put_nowait(False)
            self._answer[name].set()
        await asyncio.gather(*self._tasks)


def test_never_are_more_sessions_in_flight_than_the_cap(engine: StandIn) -> None:
    flying, most = 0, 0

    async def agent(gate: SessionGate, client: httpx.AsyncClient, name: str) -> None:
        nonlocal flying, most
        async with gate.session(name):
            flying += 1
            most = max(most, flying)
            for n_words in (3, 6):
                async with gate.turn() as turn:
                    answer = await client.post(f"{engine.url}/v1/completions", json={"prompt": ["word"] * n_words})
                    usage = answer.json()["usage"]
                    turn.report(usage["prompt_tokens"], usage["completion_tokens"])
            flying -= 1

    async def main() -> SessionGate:
        async with SessionGate(engine.url + "/v1", bounds=(3, 3)) as gate, httpx.AsyncClient() as client:
            await asyncio.gather(*(agent(gate, client, f"s{i}") for i in range(10)))
            return gate

    gate = asyncio.run(main())
    assert most == 3
    assert "inferencegym_gate_finished_total 10\n" in gate.metrics()
    assert len(engine.posted) == 20


def test_the_youngest_between_turns_is_paused_and_the_oldest_comes_back_before_new_ones_start(engine: StandIn) -> None:
    async def main() -> None:
        caps = Caps(4)
        gate = SessionGate(engine.url, caps, bounds=(1, 8))
        agents = Agents(gate, "abcde")
        assert await agents.happened() == ["a starts", "b starts", "c starts", "d starts"]
        assert await agents.turn("abcd") == ["a turn", "b turn", "c turn", "d turn"]
        caps.cap = 2
        await gate.second()
        assert await agents.turn("dca") == ["a turn"]
        assert "inferencegym_gate_sessions_paused 2\n" in gate.metrics()
        caps.cap = 3
        await gate.second()
        assert await agents.happened() == ["c turn"]
        caps.cap = 4
        await gate.second()
        assert await agents.happened() == ["d turn"]
        caps.cap = 5
        await gate.second()
        assert await agents.happened() == ["e starts"]
        await agents.finish()
        assert gate.finished == 5

    asyncio.run(main())


def test_a_turn_under_way_is_answered_and_its_session_paused_after_it(engine: StandIn) -> None:
    async def main() -> None:
        caps = Caps(4)
        gate = SessionGate(engine.url, caps, bounds=(1, 8))
        agents = Agents(gate, "ab")
        await agents.turn("a")
        assert await agents.turn("b", answered=False) == ["b turn"]
        caps.cap = 1
        await gate.second()
        assert gate.metrics().count("sessions_paused 1\n") == 1  # a, which is between turns; b is under way
        assert await agents.turn("ab") == ["b turn"]
        await agents.finish()

    asyncio.run(main())


def test_the_observation_has_every_field_and_counters_by_the_second(engine: StandIn) -> None:
    async def main() -> None:
        caps = Caps(4)
        gate = SessionGate(engine.url, caps, bounds=(1, 8), shared_tokens=400)
        agents = Agents(gate, "abcde")
        await agents.turn("ab")
        await gate.second()
        engine.series["vllm:prefix_cache_queries_total"] += 700
        engine.series["vllm:prefix_cache_hits_total"] += 600
        engine.series["vllm:generation_tokens_total"] += 50
        await gate.second()
        assert set(caps.seen) == set(OBSERVATION_FIELDS)
        expected = {
            "sessions_in_flight": 4,
            "sessions_waiting": 1,
            "prefix_queried_tokens": 700,
            "prefix_hit_tokens": 600,
            "computed_tokens": 100,
            "generated_tokens": 50,
            "kv_pool_tokens": 10_000,
            "context_mean_tokens": 1000,
            "context_share": 0.28,  # two that reported and two assumed to be like them; the shared 400 tokens once
        }
        assert {name: caps.seen[name] for name in expected} == pytest.approx(expected)
        await agents.finish()

    asyncio.run(main())


def test_fit_lets_in_what_half_of_the_free_pool_holds_and_ppo_stays_within_bounds(engine: StandIn) -> None:
    async def main(policy: str, high: int) -> int:
        gate = SessionGate(engine.url, policy, bounds=(1, high))
        agents = Agents(gate, "abcd")
        await agents.happened()
        await gate.second()
        assert gate.cap == 4  # no turn has been reported: the contexts are unknown
        await agents.turn("abcd")
        await gate.second()
        await agents.finish()
        return gate.cap

    # 4,000 of 10,000 tokens are in use and 90% may be: half of 5,000 more are two sessions of 1,000.
    assert asyncio.run(main("fit", 8)) == 6
    assert asyncio.run(main("fit", 5)) == 5
    assert 1 <= asyncio.run(main("ppo", 8)) <= 8


def test_where_metrics_stop_the_lower_bound_is_in_force_until_they_are_back(engine: StandIn, tmp_path: Path) -> None:
    now_s = [0.0]
    audit = tmp_path / "audit.jsonl"

    async def main() -> None:
        gate = SessionGate(engine.url, Caps(7), bounds=(2, 8), audit=audit, clock=lambda: now_s[0])
        for down, at_s, cap, fallback in ((0, 1, 7, 0), (1, 2, 7, 0), (1, 5.9, 7, 0), (1, 6, 2, 1), (0, 7, 7, 0)):
            engine.down, now_s[0] = bool(down), at_s
            await gate.second()
            assert gate.cap == cap
            assert f"inferencegym_gate_fallback {fallback}\n" in gate.metrics()

    asyncio.run(main())
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["cap"] for line in lines] == [7, 7, 7, 2, 7]
    assert lines[3]["reason"].startswith("no metrics for 5.0 s, fallback to the lower bound: ")
    assert set(lines[4]["observation"]) == set(OBSERVATION_FIELDS)


def test_an_error_of_the_policy_reaches_the_loop(engine: StandIn) -> None:
    def broken(seen: Seen) -> int:
        raise ZeroDivisionError("in the policy")

    async def main() -> None:
        async with SessionGate(engine.url, broken, bounds=(1, 8)) as gate:
            while True:
                async with gate.session("s"), gate.turn(prompt_tokens=100):
                    await asyncio.sleep(0.01)

    with pytest.raises(ZeroDivisionError, match="in the policy"):
        asyncio.run(main())


def test_vllm_and_sglang_say_the_same_by_other_names() -> None:
    pages = [read_page("".join(f"{name} {value}\n" for name, value in series.items())) for series in (VLLM, SGLANG)]
    assert read_engine(pages[0]) == read_engine(pages[1])
    assert read_engine(pages[0])["kv_pool_tokens"] == 10_000
    assert read_engine(pages[0], kv_pool_tokens=500)["kv_pool_tokens"] == 500


def test_a_page_of_another_engine_or_without_a_pool_is_refused() -> None:
    with pytest.raises(RemoteError, match="no series vllm:"):
        read_engine(read_page("other:requests 3\n"), kv_pool_tokens=500)
    with pytest.raises(RemoteError, match="give kv_pool_tokens"):
        read_engine(read_page("vllm:num_requests_running 3\n"))


@pytest.mark.parametrize("bounds", [(0, 4), (5, 4), (1, 513), (1.5, 3)])
def test_bad_bounds_are_refused(bounds: Any) -> None:
    with pytest.raises(InvalidConfigError, match="from 1 to 512"):
        SessionGate("http://localhost:1", bounds=bounds)


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    for policy in ("aimd", tmp_path / "none.npz"):
        with pytest.raises(InvalidConfigError, match="it must be fit, ppo"):
            SessionGate("http://localhost:1", policy, bounds=(1, 8))


def test_the_gate_needs_no_simulator() -> None:
    program = (
        "import sys; import inferencegym.session_gate; "
        "heavy = ('simulator', 'env', 'pyarrow', 'scipy', 'orjson', 'prometheus_client'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
