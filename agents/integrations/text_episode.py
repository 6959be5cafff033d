"""Episodes of the serving fleet on a server, for language models: one rule of payment and one reader of answers.

Trainers and evaluations differ in how a model acts (texts, tools); :class:`FleetEpisode` is what they share.
:class:`TextEpisode` is the form for frameworks whose environments read what a model wrote (SkyRL, verifiers, Inspect).

An episode pays its score, once, at its end. One that the model left early is played to its end with the knobs in force
before it is paid, so that leaving pays exactly what carrying on with these knobs pays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from agents.answers import last_object, read_knobs
from agents.briefing import GIVEN, Interface, serving_briefing
from env.log import over_steps
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.errors import InvalidActionError, InvalidConfigError
from inferencegym.models import NAIVE_ACTION, ServeAction, ServeObservation

TEXT: Final = Interface(
    "Answer each state with one JSON object that sets any of the knobs; what it leaves out stays as it is. {steps} "
    "answers are left.",
    GIVEN,
)
HOLD_S: Final = 20
"""Seconds for which an answer holds, unless told."""


@lru_cache(maxsize=8)
def tasks_and_rules(base_url: str) -> tuple[Sequence[Mapping[str, Any]], Sequence[str]]:
    """Tasks and rules of a server, read once per process."""
    with InferenceGymHTTP(base_url) as client:
        return client.get("/tasks?all=true")["tasks"], client.get("/info")["rules"]


class FleetEpisode:
    """One episode on a server of its own session; ``config`` may name ``hold``, ``episode_length`` and more.

    ``interface`` is how the model plays it. Raises :class:`InvalidConfigError` for a task that is not on the server.
    """

    interface: Interface = TEXT

    def __init__(
        self, base_url: str, task_id: int | str = 1, seed: int | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        tasks, rules = tasks_and_rules(base_url)
        task = next((one for one in tasks if str(one["id"]) == str(task_id)), None)
        if task is None:
            raise InvalidConfigError(f"task_id={task_id!r} is unknown: GET /tasks?all=true lists them", "task_id")
        self.task = task
        """The entry of GET /tasks."""
        self._client = InferenceGymHTTP(base_url)
        self.seen: ServeObservation = self._client.reset(
            seed=seed, task_id=task["id"], config={**(config or {}), "reward": "grade"}
        )
        played = self._client.state()["config"]
        self.length: int = played["episode_length"]
        """Seconds of the whole episode."""
        self.knobs = NAIVE_ACTION.to_dict()
        """Knobs in force."""
        self.briefing = serving_briefing(task, rules, self.interface, played)
        self.done = False
        self.info: dict[str, Any] = {}
        """Details of the last step, as POST /step gives them."""
        self.score: float | None = None
        """The episode's score; None until it is over."""
        self.outcome: dict[str, Any] = {}
        """``score``, ``breakdown`` and ``feedback`` once it is over."""

    @property
    def session_id(self) -> str | None:
        """Id of the session on the server."""
        return self._client.session_id

    def set(self, knobs: Mapping[str, Any]) -> None:
        """Change knobs; those left out stay. Raises :class:`InvalidActionError`."""
        self.knobs = ServeAction.from_dict({**self.knobs, **knobs}).to_dict()

    def step(self) -> tuple[float, int]:
        """Play one step: its share of the score so far, and its seconds."""
        self.seen, reward, self.done, info = self._client.step(self.knobs)
        self.info = info
        if self.done:
            self.outcome = {name: info[name] for name in ("score", "breakdown", "feedback")}
            self.score = info["score"]
        return reward / self.length, info["seconds"]

    def pay(self) -> float:
        """The score. What the model has not played is played now, with the knobs in force."""
        while not self.done:
            self.step()
        assert self.score is not None
        return self.score

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class TextEpisode(FleetEpisode):
    """An episode that is played by texts: each answer sets knobs for one step.

    An answer is one JSON object of knobs (:func:`agents.answers.last_object`); what it leaves out stays. One that is no
    valid action is told to the model, and the fleet runs on as it is.
    """

    def __init__(
        self, base_url: str, task_id: int | str = 1, seed: int | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(base_url, task_id, seed, {"hold": HOLD_S, **(config or {})})
        self.briefing = f"{self.briefing}\n{state_text(self.seen, self.knobs)}"
        """Text for the model before its first answer."""
        self.invalid_answers = 0

    def answer(self, text: str) -> str:
        """Play one step with an answer; returns what the model sees next."""
        self.knobs, problem = parse_answer(text, self.knobs)
        self.invalid_answers += bool(problem)
        gained, seconds = self.step()
        given = f"These {seconds} seconds added {gained:.4f} to the score.\nThey gave: {given_text([self.info])}\n"
        return problem + given + state_text(self.seen, self.knobs)


def state_text(observation: ServeObservation, knobs: dict[str, Any]) -> str:
    """The observation and the knobs in force, as text."""
    return f"State: {json.dumps(rounded(vars(observation)))}\nKnobs: {json.dumps(knobs)}"


def given_text(infos: Sequence[Mapping[str, Any]]) -> str:
    """Metrics of steps in a row, put together, queue and misses by class, and the grade so far, as JSON."""
    return json.dumps(rounded(over_steps(infos)))


def rounded(value: Any) -> Any:
    """The value with floats to four significant digits, in lists and mappings too: more means nothing to a reader."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# ---------------------------------------------------------------- answers


def parse_answer(answer: str, knobs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The knobs after an answer, and the message about it: empty when it was a valid action."""
    chosen = last_object(answer)
    if chosen is None:
        return knobs, "Your last answer was not used (it holds no JSON object).\n"
    try:
        return read_knobs(chosen, knobs), ""
    except InvalidActionError as error:
        return knobs, f"Your last answer was not used ({error}).\n"
