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
from collections.abc import Callable
from functools import partial
from typing import Any

from agents.briefing import GIVEN, Interface
from agents.integrations.text_episode import FleetEpisode, given_text, rounded
from inferencegym.client.http import DEFAULT_URL
from inferencegym.errors import InvalidActionError

MAX_SECONDS = 60
TOOLS = Interface(
    f"Set knobs with `set_knobs`, then let up to {MAX_SECONDS} seconds pass with `run`; `observe` looks and takes no "
    "time. {steps} steps are left; what you do not play is played with the knobs in force.",
    GIVEN,
)


class ToolEpisode(FleetEpisode):
    """Episode that is played with the tools of :class:`FleetTools`."""

    interface = TOOLS


class FleetTools:
    """A fleet that serves a language model; tools set its knobs and let time pass."""

    def __init__(self, base_url: str = DEFAULT_URL) -> None:
        self._base_url = base_url
        self._episode: FleetEpisode | None = None

    def reset(
        self,
        task_id: int | str = 1,
        seed: int | None = None,
        episode_length: int | None = None,
        hold: int = 1,
        **columns: Any,
    ) -> str:
        """Start an episode and describe it.

        Args:
            task_id: which task to play.
            seed: which traffic to meet; the default of the server if it is left out.
            episode_length: seconds to play; the task's own number if it is left out.
            hold: seconds for which a step holds its knobs.
            columns: the data set's other columns, which are not for the environment.

        Returns:
            Briefing for the model.
        """
        self._close()
        config = {"hold": hold} if episode_length is None else {"hold": hold, "episode_length": episode_length}
        self._episode = ToolEpisode(self._base_url, task_id, seed, config)
        return f"{self._episode.briefing}\nIt shows now: {self._describe()}"

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
        episode = self._playing()
        episode.set(given)
        return f"The knobs are now {json.dumps(episode.knobs)}."

    def run(self, seconds: int) -> str:
        """Let the fleet serve for some seconds with the knobs as they stand.

        Args:
            seconds: how long, from 1 to 60.

        Returns:
            What these seconds added to the score and gave, and what the fleet shows after them.
        """
        if seconds not in range(1, MAX_SECONDS + 1):
            raise InvalidActionError("seconds", seconds, f"an integer from 1 to {MAX_SECONDS}")
        episode = self._playing()
        gained, played, infos = 0.0, 0, []
        while played < seconds and (played == 0 or not episode.done):
            share, lasted = episode.step()
            gained += share
            played += lasted
            infos.append(episode.info)
        ending = " The episode is over." if episode.done else ""
        told = f"These {played} seconds added {gained:.4f} to the score. They gave: {given_text(infos)}"
        return f"{told} It shows now: {self._describe()}{ending}"

    def observe(self) -> str:
        """Look at the fleet without letting time pass.

        Returns:
            The fields that the fleet shows, as JSON.
        """
        self._playing()
        return self._describe()

    def get_reward(self) -> float:
        """The score of the episode. What the model has not played is played now, with its last knobs.

        Raises RuntimeError where no episode was started.
        """
        return self._playing().pay()

    @property
    def done(self) -> bool:
        """Whether the episode was played to its end."""
        return self._episode is not None and self._episode.done

    @property
    def score(self) -> float | None:
        """The score, once the episode is over."""
        return None if self._episode is None else self._episode.score

    def __del__(self) -> None:
        # Trainers drop environments without a word.
        self._close()

    def _close(self) -> None:
        if getattr(self, "_episode", None) is not None:
            self._episode.close()  # type: ignore[union-attr]

    def _describe(self) -> str:
        return json.dumps(rounded(vars(self._playing().seen)))

    def _playing(self) -> FleetEpisode:
        if self._episode is None:
            raise RuntimeError("no episode is being played: reset first")
        return self._episode


def fleet_tools_at(base_url: str) -> Callable[[], FleetTools]:
    """Factory of :class:`FleetTools` of a server. Not a method of the class, because every public method is a tool."""
    return partial(FleetTools, base_url)
