"""Expected answers of a server, computed in this process only with simulator, environments and graders.

An :class:`Episode` stands for one session, a :class:`BatchEpisodes` for one batch session. Both keep every expected
answer, so that it can be requested again. No code of the server is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from env.inference_env import InferenceEnv
from env.traffic.env import TrafficEnv
from env.traffic.grader import grade_traffic
from grader.grader import GraderModule
from inferencegym.models import ServeAction
from inferencegym.seeds import episode_seed
from inferencegym.spaces.actions import from_row, snap
from inferencegym.spaces.observations import to_array
from inferencegym.traffic import parse_action


@dataclass(frozen=True, repr=False)
class Kind:
    """An environment family as its clients meet it."""

    name: str
    prefix: str
    observation_key: str
    make: Callable[[], Any]
    complete: Callable[[Any, Any], Any]
    """An action, and that of the step before it (None: there is none) -> the action with what it leaves out filled in:
    two spellings of one action are equal then."""
    grade: Callable[[Any, Any], dict[str, Any]]

    def __repr__(self) -> str:
        return self.name.upper()

    def reset_answer(self, env: Any, session_id: str) -> dict[str, Any]:
        about = {"session_id": session_id, "task_id": env.task_id, "seed": env.seed, "config": env.config_dict()}
        about[self.observation_key] = env.observation_dict()
        if self is TRAFFIC:
            return {**about, "max_steps": env.episode_length}
        return {**about, "episode_length": env.episode_length, "reward": None, "done": False}

    def state(self, env: Any, session_id: str) -> dict[str, Any]:
        state = {**env.state(), "session_id": session_id}
        return state if self is TRAFFIC else {**state, "observation": env.observation_dict()}


SERVING: Final = Kind(
    "serving",
    "",
    "observation",
    InferenceEnv,
    lambda action, before: ServeAction.from_dict({**(before or {}), **action}).to_dict(),
    lambda task_id, log: GraderModule().score(task_id, log),
)
TRAFFIC: Final = Kind(
    "traffic", "/traffic", "state", TrafficEnv, lambda action, _before: parse_action(action).value, grade_traffic
)


def exactly(value: Any) -> str:
    """JSON text that distinguishes 1, 1.0 and true, and every float from its neighbours."""
    return json.dumps(value, sort_keys=True)


@dataclass
class Refused:
    """A request that has to be refused with this status and code."""

    status: int
    code: str


EPISODE_DONE: Final = Refused(400, "episode_done")
STEP_CONFLICT: Final = Refused(409, "step_conflict")


@dataclass(eq=False)
class Episode:
    """One session: its episode, and every answer and state so far."""

    kind: Kind
    session_id: str = ""
    resets: int = 0
    own_config: bool = True
    env: Any = None
    asked: list[Any] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    def reset(self, task_id: Any, seed: int | None, config: Mapping[str, Any] | None) -> None:
        self.env = self.kind.make()
        self.env.reset(seed=seed, task_id=task_id, config=config)
        self.resets += 1
        self.own_config = not config
        self.asked, self.answers, self.states = [], [], []
        self.states.append(self.kind.state(self.env, self.session_id))

    def named(self, session_id: str) -> None:
        """The session id from the server."""
        self.session_id = session_id
        self.states = [self.kind.state(self.env, session_id)]

    @property
    def taken(self) -> int:
        return len(self.asked)

    def completed(self, action: Any, number: int) -> Any:
        """This action as the step of this number."""
        return self.kind.complete(action, self.asked[number - 2] if number > 1 else None)

    def first(self) -> dict[str, Any]:
        """Answer of POST /reset."""
        return self.kind.reset_answer(self.env, self.session_id)

    def step(self, action: Any, number: int | None = None) -> dict[str, Any] | Refused:
        """Answer of POST /step."""
        if number is not None and number != self.taken + 1:
            if number <= self.taken and self.asked[number - 1] == self.completed(action, number):
                return self.answers[number - 1]
            return STEP_CONFLICT
        if self.env.done:
            return EPISODE_DONE
        _, reward, done, info = self.env.step(action)
        answer = {self.kind.observation_key: self.env.observation_dict(), "reward": reward, "done": done, "info": info}
        self.asked.append(self.completed(action, self.taken + 1))
        # Keep a copy: the environment goes on changing its own object.
        self.answers.append(json.loads(json.dumps(answer)))
        self.states.append(self.kind.state(self.env, self.session_id))
        return self.answers[-1]

    def state(self) -> dict[str, Any]:
        """Answer of GET /state."""
        return self.states[-1]

    def grade(self) -> dict[str, Any]:
        """Answer of POST /grader for the session."""
        told = {"verified": True, "own_config": self.own_config, "done": self.env.done, "steps": self.taken}
        return {**self.kind.grade(self.env.task_id, self.env.episode_log), **told}

    def grade_of_log(self, verified: bool) -> dict[str, Any]:
        """Answer of POST /grader for its log."""
        grade = self.kind.grade(self.env.task_id, self.env.episode_log)
        return {**grade, "verified": verified, "own_config": self.own_config}

    def log(self) -> list[dict[str, Any]]:
        return list(json.loads(json.dumps(self.env.episode_log)))

    # ------------------------------------------------------------ OpenEnv's frames

    def frame(self, answer: dict[str, Any] | None, with_info: bool) -> dict[str, Any]:
        """Observation frame of a step's answer, or of the first observation."""
        if answer is None:
            seen, reward, done = self.env.observation_dict(), None, False
        else:
            seen, reward, done = answer[self.kind.observation_key], answer["reward"], answer["done"]
            if with_info:
                seen = {**seen, "info": answer["info"]}
        data = {"observation": seen, "reward": reward, "done": done}
        if done and answer is not None:
            metadata = {name: answer["info"][name] for name in ("score", "breakdown", "feedback")}
            data = {**data, "metadata": metadata, "observation": {**seen, "metadata": metadata}}
        return {"type": "observation", "data": data}

    def state_frame(self) -> dict[str, Any]:
        state = self.env.state()
        state.pop("session_id")
        return {"type": "state", "data": {"episode_id": self.session_id, **state}}


@dataclass(eq=False)
class BatchEpisodes:
    """N episodes in step with each other, each played alone."""

    task_id: Any
    seeds: list[int]
    length: int
    autoreset: bool
    session_id: str = ""

    def __post_init__(self) -> None:
        config = {"episode_length": self.length}
        self.rows = [InferenceEnv(task_id=self.task_id, seed=seed, config=config) for seed in self.seeds]
        self.restart(self.seeds, self.autoreset)

    def restart(self, seeds: list[int], autoreset: bool) -> None:
        self.seeds, self.autoreset = seeds, autoreset
        self.taken = self.episodes = 0
        self._reset_rows()

    def _reset_rows(self) -> None:
        for row, seed in zip(self.rows, self.seeds, strict=True):
            row.reset(seed=episode_seed(seed, self.episodes))

    @property
    def steps_left(self) -> int:
        return self.length - len(self.rows[0].actions)

    def observation(self) -> list[list[float]]:
        return [to_array(row.observation()).tolist() for row in self.rows]

    def first(self) -> dict[str, Any]:
        """Answer of POST /reset/batch."""
        return {
            "session_id": self.session_id,
            "task_id": self.rows[0].task_id,
            "n": len(self.rows),
            "episode_length": self.length,
            "config": self.rows[0].config_dict(),
            "autoreset": self.autoreset,
            "observations": self.observation(),
        }

    def step(self, actions: NDArray[Any], last: bool) -> dict[str, Any] | Refused:
        """Answer of POST /step/batch for actions (K, N, 5)."""
        if not self.autoreset and len(actions) > self.steps_left:
            return EPISODE_DONE
        observations, rewards, done = [], [], []
        for row_actions in actions:
            knobs = snap(np.asarray(row_actions, dtype=np.float64), np.ones(5, dtype=np.bool_))
            rewards.append([row.step(from_row(knob))[1] for row, knob in zip(self.rows, knobs, strict=True)])
            done.append(self.rows[0].done)
            ended = self.steps_left == 0
            self.episodes += ended
            if ended and self.autoreset:
                self._reset_rows()
            observations.append(self.observation())
        number, self.taken = self.taken + 1, self.taken + len(actions)
        return {
            "step": number,
            "observations": observations[-1:] if last else observations,
            "rewards": rewards,
            "done": done,
            "episodes": self.episodes,
            "steps_left": self.steps_left,
        }
