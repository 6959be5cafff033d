"""verifiers environment: a language model runs the serving fleet by texts, one turn a step, and is paid the grade.

    vf-eval inferencegym-fleet --env.taskset.base-url http://localhost:7860 --env.taskset.seeds 7 8 --model NAME

The taskset has one row for every task and seed. ``inferencegym-fleet`` is :mod:`.inferencegym_fleet`. See README.md in
this folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from agents.integrations.text_episode import HOLD_S, TextEpisode
from inferencegym.client.http import DEFAULT_URL

__all__ = ["FleetEnv", "FleetTaskset"]


class FleetData(vf.TaskData):  # type: ignore[misc]
    """One row: which episode is played, and on which server."""

    base_url: str
    task_id: int | str
    seed: int
    config: dict[str, Any]


class FleetTask(vf.Task[FleetData]):  # type: ignore[misc]
    """An episode to play; :class:`FleetEnv` plays and pays it."""


class FleetTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Which episodes there are: every task with every seed."""

    base_url: str = DEFAULT_URL
    tasks: list[int | str] = Field([1], min_length=1)
    seeds: list[int] = Field([0], min_length=1)
    hold: int = Field(HOLD_S, ge=1, le=60)
    """Seconds of a turn."""
    episode_length: int | None = None
    """Seconds of an episode; None: the task's own."""


class FleetTaskset(vf.Taskset[FleetTask, FleetTasksetConfig]):  # type: ignore[misc]
    """Rows of task and seed."""

    def load(self) -> Iterator[FleetTask]:
        """One row after the other; the server is asked for nothing before an episode starts."""
        chosen = self.config
        config: dict[str, Any] = {"hold": chosen.hold}
        if chosen.episode_length is not None:
            config["episode_length"] = chosen.episode_length
        for task_id, seed in product(chosen.tasks, chosen.seeds):
            row = FleetData(
                name=f"task {task_id}, seed {seed}",
                prompt=None,
                base_url=chosen.base_url,
                task_id=task_id,
                seed=seed,
                config=config,
            )
            yield FleetTask(row, chosen.task)


class FleetEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """Agent for models without tool calling; it runs in another process."""

    operator: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class FleetEnv(vf.Env[FleetEnvConfig]):  # type: ignore[misc]
    """The control flow: the fleet speaks, the model answers with knobs, and ``hold`` seconds pass."""

    async def run(self, task: FleetTask, agents: Any) -> None:
        """Play one episode. Each has a session of its own on the server, so that any number runs at once."""
        row = task.data
        episode = await asyncio.to_thread(TextEpisode, row.base_url, row.task_id, row.seed, row.config)
        try:
            async with agents.operator.interaction(task) as interaction:
                segment = await interaction.turn(episode.briefing)
                while not segment.terminated:
                    shown = await asyncio.to_thread(episode.answer, segment.last_reply)
                    if episode.done:
                        break
                    segment = await interaction.turn(shown)
            finished = episode.done
            score = await asyncio.to_thread(episode.pay)
        finally:
            episode.close()
        interaction.trace.record_reward("grade", score)
        interaction.trace.record_metrics({"invalid_answers": episode.invalid_answers, "finished": float(finished)})
