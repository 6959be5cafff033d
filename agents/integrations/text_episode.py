"""An episode on a server as a conversation: a briefing, then one answer with knobs for every few seconds.

For frameworks whose environments read what a model wrote (SkyRL and others). An answer is one JSON object of knobs;
what it leaves out stays. One that is no valid action is told to the model, and the fleet runs on as it is.
"""

from __future__ import annotations

import json
from typing import Any, Final

from agents.briefing import serving_briefing, tasks_and_rules
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.errors import InvalidActionError
from inferencegym.models import NAIVE_ACTION, ServeAction, ServeObservation

HOLD_S: Final = 20
"""Seconds for which an answer holds, unless told."""


class TextEpisode:
    """An episode of the serving fleet, played by texts.

    Rewards are shares of the whole episode: their sum over all answers is the score with ``reward="grade"``, the
    default, and seconds that are not played pay nothing.
    """

    def __init__(
        self, base_url: str, task_id: int | str = 1, seed: int | None = None, config: dict[str, Any] | None = None
    ) -> None:
        self._client = InferenceGymHTTP(base_url)
        wanted = {"reward": "grade", "hold": HOLD_S, **(config or {})}
        observation = self._client.reset(seed=seed, task_id=task_id, config=wanted)
        played = self._client.state()["config"]
        self._length: int = played["episode_length"]
        self._knobs = NAIVE_ACTION.to_dict()
        tasks, rules = tasks_and_rules(base_url)
        task = next(one for one in tasks if str(one["id"]) == str(task_id))
        self.briefing = (
            f"{serving_briefing(task, rules, played)}\n"
            "Answer each state with one JSON object that sets any of the knobs; what it leaves out stays as it is.\n"
            f"{state_text(observation, self._knobs)}"
        )
        """What the model is told before its first answer."""
        self.done, self.invalid_answers = False, 0
        self.score: float | None = None
        """The episode's, once it is over."""
        self._paid = 0.0

    def answer(self, text: str) -> tuple[str, float]:
        """Play the seconds of one step with an answer: what the model sees next, and its share of the reward."""
        self._knobs, problem = parse_answer(text, self._knobs)
        self.invalid_answers += bool(problem)
        observation, reward, self.done, info = self._client.step(self._knobs)
        if self.done:
            self.score = info["score"]
        self._paid += reward / self._length
        return problem + state_text(observation, self._knobs), reward / self._length

    def grade(self) -> float:
        """The score; of an episode that was left early, what its seconds paid: see :func:`grade_of`."""
        return grade_of(self.score, self._paid)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def grade_of(score: float | None, paid: float) -> float:
    """The score of an episode; of one that was left early (None), what its seconds paid, cut to the range of a score.

    So it never pays to stop: the seconds that were not played pay nothing, and debts are not carried into a batch in
    which whole episodes have none.
    """
    return min(max(paid, 0.0), 1.0) if score is None else score


def state_text(observation: ServeObservation, knobs: dict[str, Any]) -> str:
    """What the fleet shows, and the knobs in force."""
    return f"State: {json.dumps(rounded(vars(observation)))}\nKnobs: {json.dumps(knobs)}"


def rounded(value: Any) -> Any:
    """The value with floats to three digits, in lists and mappings too: more means nothing to a reader."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def parse_answer(answer: str, knobs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The knobs after an answer, and the message about it: empty when it was a valid action."""
    start, end = answer.find("{"), answer.rfind("}")
    try:
        chosen = json.loads(answer[start : end + 1])
        return ServeAction.from_dict({**knobs, **chosen}).to_dict(), ""
    except (ValueError, TypeError) as error:
        # InvalidActionError is a ValueError whose text names field and range.
        kind = "" if isinstance(error, InvalidActionError) else "not one JSON object: "
        return knobs, f"Your last answer was not used ({kind}{error}).\n"
