"""SkyRL environment: a language model runs the serving fleet by texts, several turns an episode.

    import skyrl_gym
    skyrl_gym.register(id="inferencegym", entry_point="agents.integrations.skyrl:FleetEnv")

Rows of the data set name the task: ``{"prompt": [...], "env_class": "inferencegym", "task_id": 3, "seed": 7}``;
``config`` and ``base_url`` are further columns. See README.md in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from agents.integrations.text_episode import TextEpisode
from inferencegym.client.http import DEFAULT_URL

COLUMNS = ("task_id", "seed", "config")
"""Columns of a row that say which episode is played."""


class FleetEnv(BaseTextEnv):  # type: ignore[misc]
    """An episode of the serving fleet on a server, as SkyRL plays environments.

    ``env_config`` may name the server (``base_url``), and so may a row; ``extras`` are the row's columns. A turn is one
    step of ``config["hold"]`` seconds. The last turn pays the episode's score, the others nothing; an episode that ends
    at ``max_turns`` is paid for carrying on with its last knobs.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        extras = extras or {}
        named = dict(env_config) if env_config else {}
        self._url = str(extras.get("base_url") or named.get("base_url") or DEFAULT_URL)
        self._wanted = {name: extras[name] for name in COLUMNS if extras.get(name) is not None}
        self.max_turns = int(extras.get("max_turns") or 10**6)
        self._episode: TextEpisode | None = None

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Start the episode: the row's prompt, then the briefing."""
        self.close()
        self.turns = 0
        self._episode = TextEpisode(self._url, **self._wanted)
        return [*prompt, _message(self._episode.briefing)], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Play one turn with what the model wrote."""
        if self._episode is None:
            raise RuntimeError("no episode is being played: init first")
        self.turns += 1
        shown = self._episode.answer(action)
        done = self._episode.done or self.turns >= self.max_turns
        reward = self._episode.pay() if done else 0.0
        return BaseTextEnvStepOutput(
            observations=[] if done else [_message(shown)], reward=reward, done=done, metadata=self.get_metrics()
        )

    def get_metrics(self) -> dict[str, Any]:
        """Answers that were no valid action, and the score once the episode is over."""
        if self._episode is None:
            return {}
        told: dict[str, Any] = {"invalid_answers": self._episode.invalid_answers}
        return told if self._episode.score is None else {**told, "score": self._episode.score}

    def close(self) -> None:
        """Close the connection."""
        if self._episode is not None:
            self._episode.close()


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
