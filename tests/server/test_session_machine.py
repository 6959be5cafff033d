"""Random histories of requests against a reference: a dictionary of episodes played in this process.

The server holds two environments in memory, so sessions are evicted and rebuilt all the time, which clients must not
notice. Whatever the history, every answer equals the reference's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from starlette.testclient import TestClient

from env.inference_env import InferenceEnv, observation_dict
from grader.grader import GraderModule
from inferencegym.models import ServeAction
from server.app import create_app
from server.sessions.manager import SessionManager
from server.settings import Settings

LIVE = 2
UNKNOWN = "0" * 32


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    """One server for all histories; each plays its own sessions."""
    # Histories abandon thousands of episodes, all from one address.
    most = {"live_sessions": LIVE, "max_sessions_per_client": 100_000}
    app = create_app(Settings(store_url="memory://", access_log="off", **most))
    # CPython 3.11 fails to parse a source ("recursion depth mismatch") if another thread parses one meanwhile, which a
    # collection in the middle of it allows. Hypothesis parses this file while the server starts.
    gc.disable()
    try:
        with TestClient(app) as client:
            Sessions.client, Sessions.sessions = client, app.state.context.sessions
            yield
    finally:
        gc.enable()


actions = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 512), "kv_budget": st.floats(0.1, 1.0)},
    optional={"quant_tier": st.sampled_from([0, 1, 2, "INT8"]), "spec_length": st.sampled_from([0, 2, 8])},
)


@dataclass
class Expected:
    """One session of the reference: its environment, and what every step was asked and answered."""

    env: InferenceEnv
    asked: list[dict[str, Any]] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        observation, reward, done, info = self.env.step(action)
        answer = {"observation": observation_dict(observation), "reward": reward, "done": done, "info": info}
        self.asked.append(self.completed(action, len(self.asked) + 1))
        self.answered.append(answer)
        return answer

    def same_action(self, number: int, action: dict[str, Any]) -> bool:
        return self.completed(action, number) == self.asked[number - 1]

    def completed(self, action: dict[str, Any], number: int) -> dict[str, Any]:
        """This action as the step of this number: knobs that it leaves out stay as they are."""
        before = self.asked[number - 2] if number > 1 else {}
        return ServeAction.from_dict({**before, **action}).to_dict()


class Sessions(RuleBasedStateMachine):
    """Resets, steps, retries, conflicts, states, grades and restarts, in any order."""

    names = Bundle("names")

    client: ClassVar[TestClient]
    sessions: ClassVar[SessionManager]

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Expected] = {}
        self.grader = GraderModule()

    # ------------------------------------------------------------ playing

    @rule(target=names, task=st.sampled_from([1, 2, 3]), seed=st.integers(0, 5), length=st.integers(1, 6))
    def reset(self, task: int, seed: int, length: int) -> str:
        answer = self.client.post("/reset", json=self.wish(task, seed, length))
        assert answer.status_code == 200
        begun = answer.json()
        self.known[begun["session_id"]] = self.begin(begun, task, seed, length)
        return str(begun["session_id"])

    @rule(name=names, task=st.sampled_from([1, 3]), seed=st.integers(0, 5), length=st.integers(1, 6))
    def restart(self, name: str, task: int, seed: int, length: int) -> None:
        begun = self.client.post("/reset", json={**self.wish(task, seed, length), "session_id": name}).json()
        assert begun["session_id"] == name
        self.known[name] = self.begin(begun, task, seed, length)

    @staticmethod
    def wish(task: int, seed: int, length: int) -> dict[str, Any]:
        return {"task_id": task, "seed": seed, "config": {"episode_length": length}}

    def begin(self, begun: dict[str, Any], task: int, seed: int, length: int) -> Expected:
        env = InferenceEnv(task_id=task, seed=seed)
        first = env.reset(config={"episode_length": length})
        assert begun["observation"] == observation_dict(first)
        return Expected(env)

    @rule(name=names, action=actions, numbered=st.booleans())
    def step(self, name: str, action: dict[str, Any], numbered: bool) -> None:
        expected = self.known[name]
        body: dict[str, Any] = {"session_id": name, "action": action}
        if numbered:
            body["step"] = len(expected.asked) + 1
        answer = self.client.post("/step", json=body)
        if expected.env.done:
            # Whether numbered or not, there is no next step: nothing changes.
            assert (answer.status_code, answer.json()["detail"]["code"]) == (400, "episode_done")
        else:
            assert answer.status_code == 200, answer.text
            assert answer.json() == expected.step(action)

    @rule(name=names, data=st.data())
    def retry(self, name: str, data: st.DataObject) -> None:
        expected = self.known[name]
        if expected.asked:
            number = data.draw(st.integers(1, len(expected.asked)))
            body = {"session_id": name, "step": number, "action": expected.asked[number - 1]}
            assert self.client.post("/step", json=body).json() == expected.answered[number - 1]

    @rule(name=names, action=actions, data=st.data())
    def retry_with_another_action(self, name: str, action: dict[str, Any], data: st.DataObject) -> None:
        expected = self.known[name]
        if not expected.asked:
            return
        number = data.draw(st.integers(1, len(expected.asked)))
        answer = self.client.post("/step", json={"session_id": name, "step": number, "action": action})
        if expected.same_action(number, action):
            assert answer.json() == expected.answered[number - 1]
        else:
            assert (answer.status_code, answer.json()["detail"]["code"]) == (409, "step_conflict")

    @rule(name=names, ahead=st.integers(2, 9), action=actions)
    def step_ahead(self, name: str, ahead: int, action: dict[str, Any]) -> None:
        number = len(self.known[name].asked) + ahead
        answer = self.client.post("/step", json={"session_id": name, "step": number, "action": action})
        assert (answer.status_code, answer.json()["detail"]["code"]) == (409, "step_conflict")

    @rule(name=names, field_name=st.sampled_from(["batch_size", "kv_budget", "colour"]))
    def step_with_a_wrong_action(self, name: str, field_name: str) -> None:
        answer = self.client.post("/step", json={"session_id": name, "action": {field_name: -1}})
        assert (answer.status_code, answer.json()["detail"]["field"]) == (422, field_name)

    # ------------------------------------------------------------ asking

    @rule(name=names)
    def state(self, name: str) -> None:
        seen = self.client.get("/state", params={"session_id": name}).json()
        env = self.known[name].env
        assert seen == {**env.state(), "session_id": name, "observation": env.observation_dict()}

    @rule(name=names)
    def grade(self, name: str) -> None:
        expected = self.known[name].env
        graded = self.client.post("/grader", json={"session_id": name}).json()
        wanted = self.grader.score(expected.task_id, expected.episode_log)
        told = {"verified": True, "own_config": False, "done": expected.done, "steps": len(expected.actions)}
        assert graded == {**wanted, **told}

    @rule(action=actions)
    def step_nobody(self, action: dict[str, Any]) -> None:
        assert self.client.post("/step", json={"session_id": UNKNOWN, "action": action}).status_code == 404

    @rule()
    def drop_everything_from_memory(self) -> None:
        """Evict sessions from memory by opening many later ones; only their records remain."""
        begun = [self.client.post("/reset").json()["session_id"] for _ in range(LIVE)]
        assert list(self.sessions.in_memory) == begun

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.sessions) <= LIVE
        assert self.sessions.steps_held == sum(len(live.actions) for live in self.sessions.in_memory.values())


Sessions.TestCase.settings = settings(max_examples=30, stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestRandomHistoriesGiveTheAnswersOfTheReference = Sessions.TestCase


@pytest.mark.slow
def test_many_more_random_histories_give_the_answers_of_the_reference() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    many = settings(max_examples=150, stateful_step_count=60, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Sessions, settings=many)  # type: ignore[no-untyped-call]
