"""TRL adapter: the serving fleet as tools that a language model learns to use.

    trainer = GRPOTrainer(..., environment_factory=fleet_tools_at("http://localhost:7860"))

A trainer makes one object per rollout, calls ``reset`` with the columns of its data set, offers every public method
but ``get_reward`` as a tool, described by its annotations and docstring, and asks ``get_reward`` afterwards. A tool
that raises tells the model what it did wrong. Each object is a session of its own on the server, so rollouts of a batch
do not meet. What ``fleet_tools_at`` returns can be pickled, as AsyncGRPOTrainer demands.
:mod:`agents.integrations.trl_grpo` is a whole script.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from agents.briefing import serving_briefing, tasks_and_rules
from agents.integrations.text_episode import rounded
from inferencegym.client.http import DEFAULT_URL, InferenceGymHTTP
from inferencegym.errors import InvalidActionError
from inferencegym.models import NAIVE_ACTION, ServeAction, ServeObservation

MAX_SECONDS = 60


class FleetTools:
    """A fleet that serves a language model; tools set its knobs and let time pass."""

    def __init__(self, base_url: str = DEFAULT_URL) -> None:
        self._base_url = base_url
        self._client: InferenceGymHTTP | None = None
        self._knobs = NAIVE_ACTION.to_dict()
        self._seen: ServeObservation | None = None
        self._length = 1
        self.total_reward = 0.0
        self.done = False
        self.score: float | None = None

    def reset(
        self,
        task_id: int | str = 1,
        seed: int | None = None,
        episode_length: int | None = None,
        reward: Literal["grade", "plan"] = "grade",
        hold: int = 1,
        **columns: Any,
    ) -> str:
        """Start an episode and describe it.

        Args:
            task_id: which task to play.
            seed: which traffic to meet; the default of the server if it is left out.
            episode_length: seconds to play; the task's own number if it is left out.
            reward: what a second pays: "grade", its share of the score, or "plan", the plan's formula.
            hold: seconds for which a step holds its knobs.
            columns: the data set's other columns, which are not for the environment.

        Returns:
            What the model is to know before its first turn.
        """
        if self._client is not None:
            self._client.close()
        self._client = InferenceGymHTTP(self._base_url)
        config: dict[str, Any] = {"reward": reward, "hold": hold}
        if episode_length is not None:
            config["episode_length"] = episode_length
        self._seen = self._client.reset(seed=seed, task_id=task_id, config=config)
        played = self._client.state()["config"]
        self._knobs = NAIVE_ACTION.to_dict()
        self._length, self.total_reward, self.done = played["episode_length"], 0.0, False
        self.score = None
        tasks, rules = tasks_and_rules(self._base_url)
        task = next(one for one in tasks if str(one["id"]) == str(task_id))
        briefing = serving_briefing(task, rules, played)
        how = f"Set knobs with set_knobs, then let up to {MAX_SECONDS} seconds pass with run; observe looks."
        return f"{briefing}\n{how} Seconds that are not played pay nothing.\nIt shows now: {self._describe()}"

    def set_knobs(
        self,
        kv_budget: float | None = None,
        spec_length: int | None = None,
        batch_size: int | None = None,
        prefill_disagg: bool | None = None,
        quant_tier: int | None = None,
        replicas: int | None = None,
    ) -> str:
        """Set knobs of the fleet; they take effect when time passes, and those left out stay as they are.

        Args:
            kv_budget: share of the free GPU memory given to the KV cache, from 0.1 to 1.
            spec_length: draft tokens per verification step: 0 (off), 1, 2, 4 or 8.
            batch_size: most requests that run at once on one replica, from 1 to 512.
            prefill_disagg: whether prompts are processed on GPUs of their own, which cost extra.
            quant_tier: precision of the weights: 0 is FP16, 1 is INT8, 2 is INT4.
            replicas: how many replicas to have, in tasks that scale; others ignore it.

        Returns:
            The knobs as they now stand.
        """
        wanted = {
            "kv_budget": kv_budget,
            "spec_length": spec_length,
            "batch_size": batch_size,
            "prefill_disagg": prefill_disagg,
            "quant_tier": quant_tier,
            "replicas": replicas,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        self._knobs = ServeAction.from_dict({**self._knobs, **given}).to_dict()
        return f"The knobs are now {json.dumps(self._knobs)}."

    def run(self, seconds: int) -> str:
        """Let the fleet serve for some seconds with the knobs as they stand.

        Args:
            seconds: how long, from 1 to 60.

        Returns:
            The reward of these seconds and what the fleet shows after them.
        """
        if seconds not in range(1, MAX_SECONDS + 1):
            raise InvalidActionError("seconds", seconds, f"an integer from 1 to {MAX_SECONDS}")
        client = self._playing()
        gained, played = 0.0, 0
        while played < seconds:
            self._seen, reward, self.done, info = client.step(self._knobs)
            gained += reward
            played += info["seconds"]
            if self.done:
                self.score = info["score"]
                break
        self.total_reward += gained
        ending = " The episode is over." if self.done else ""
        return f"Reward {gained:.3f}. {self._describe()}{ending}"

    def observe(self) -> str:
        """Look at the fleet without letting time pass.

        Returns:
            The fields that the fleet shows, as JSON.
        """
        self._playing()
        return self._describe()

    def get_reward(self) -> float:
        """Rewards so far over the seconds of the whole episode; of a whole one with reward "grade", its score.

        Seconds that were not played pay nothing, so that it does not pay to stop before a flood.
        """
        return self.total_reward / self._length

    def __del__(self) -> None:
        # Trainers drop environments without a word.
        if getattr(self, "_client", None) is not None:
            self._client.close()  # type: ignore[union-attr]

    def _describe(self) -> str:
        assert self._seen is not None
        return json.dumps({name: rounded(value) for name, value in vars(self._seen).items()})

    def _playing(self) -> InferenceGymHTTP:
        if self._client is None:
            # As reset() of a client would say it, before there is one.
            raise RuntimeError("no episode is being played: reset first")
        return self._client


def fleet_tools_at(base_url: str) -> Callable[[], FleetTools]:
    """Factory of :class:`FleetTools` of a server. Not a method of the class, because every public method is a tool."""
    return partial(FleetTools, base_url)


def episode_return(environments: Sequence[FleetTools], **_: Any) -> list[float]:
    """A reward function for trainers that ask none of ``get_reward``: what it says of every rollout."""
    return [environment.get_reward() for environment in environments]
