"""TRL adapter: the serving fleet as tools that a language model learns to use.

    factory = fleet_tools_at("http://localhost:7860")
    trainer = GRPOTrainer(..., environment_factory=factory, reward_funcs=[episode_return])

A trainer makes one object per rollout, calls ``reset`` with the columns of its data set, offers every public method as
a tool, described by its annotations and docstring, and reads the reward afterwards. A tool that raises tells the model
what it did wrong. Each object is a session of its own on the server, so rollouts of a batch do not meet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from inferencegym.client.http import DEFAULT_URL, InferenceGymHTTP
from inferencegym.errors import InvalidActionError
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION, ServeAction, ServeObservation

MAX_SECONDS = 60


class FleetTools:
    """A fleet that serves a language model; tools set its knobs and let time pass."""

    _base_url: ClassVar[str] = DEFAULT_URL

    def __init__(self) -> None:
        self._client: InferenceGymHTTP | None = None
        self._knobs = NAIVE_ACTION.to_dict()
        self._seen: ServeObservation | None = None
        self._seconds = 0
        self.total_reward = 0.0
        self.done = False

    def reset(
        self, task_id: int | str = 1, seed: int | None = None, episode_length: int | None = None, **columns: Any
    ) -> str:
        """Start an episode and describe it.

        Args:
            task_id: which task to play.
            seed: which traffic to meet; the default of the server if it is left out.
            episode_length: seconds to play; the task's own number if it is left out.
            columns: the data set's other columns, which are not for the environment.

        Returns:
            What the model is to know before its first turn.
        """
        if self._client is not None:
            self._client.close()
        self._client = InferenceGymHTTP(self._base_url)
        config = None if episode_length is None else {"episode_length": episode_length}
        self._seen = self._client.reset(seed=seed, task_id=task_id, config=config)
        self._knobs = NAIVE_ACTION.to_dict()
        self._seconds, self.total_reward, self.done = 0, 0.0, False
        knobs = "; ".join(f"{f.name}: {f.description}, {f.allowed()}" for f in ACTION_FIELDS.values())
        return f"You run a fleet that serves a language model. Its knobs: {knobs}. It shows: {self._describe()}"

    def set_knobs(
        self, kv_budget: float, spec_length: int, batch_size: int, prefill_disagg: bool, quant_tier: int
    ) -> str:
        """Set all five knobs of the fleet; they take effect when time passes.

        Args:
            kv_budget: share of the free GPU memory given to the KV cache, from 0.1 to 1.
            spec_length: draft tokens per verification step: 0 (off), 1, 2, 4 or 8.
            batch_size: most requests that run at once on one replica, from 1 to 512.
            prefill_disagg: whether prompts are processed on GPUs of their own, which cost extra.
            quant_tier: precision of the weights: 0 is FP16, 1 is INT8, 2 is INT4.

        Returns:
            The knobs as they now stand.
        """
        wanted = {
            "kv_budget": kv_budget,
            "spec_length": spec_length,
            "batch_size": batch_size,
            "prefill_disagg": prefill_disagg,
            "quant_tier": quant_tier,
        }
        self._knobs = ServeAction.from_dict(wanted).to_dict()
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
        gained = 0.0
        for _ in range(int(seconds)):
            self._seen, reward, self.done, _info = client.step(self._knobs)
            gained += reward
            self._seconds += 1
            if self.done:
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

    @property
    def mean_reward(self) -> float:
        """Mean reward per second played, in [-1, 1]; 0 before the first second."""
        return self.total_reward / self._seconds if self._seconds else 0.0

    def __del__(self) -> None:
        # Trainers drop environments without a word.
        if getattr(self, "_client", None) is not None:
            self._client.close()  # type: ignore[union-attr]

    def _describe(self) -> str:
        assert self._seen is not None
        return json.dumps({name: _short(value) for name, value in vars(self._seen).items()})

    def _playing(self) -> InferenceGymHTTP:
        if self._client is None:
            # As reset() of a client would say it, before there is one.
            raise RuntimeError("no episode is being played: reset first")
        return self._client


def fleet_tools_at(base_url: str) -> type[FleetTools]:
    """:class:`FleetTools` of another server. Not a method of the class, because every public method is a tool."""
    return type(FleetTools.__name__, (FleetTools,), {"_base_url": base_url})


def episode_return(environments: Sequence[FleetTools], **_: Any) -> list[float]:
    """A reward function for TRL: the mean reward per second of every rollout."""
    return [environment.mean_reward for environment in environments]


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value
