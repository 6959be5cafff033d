"""OpenEnv harness: the serving fleet as a session with one tool, for trainers and collectors that drive whole episodes.

    factory = FleetSessionFactory("http://localhost:7860", hold=20)
    MCPHarnessAdapter().run_white_box(model_step, factory.create(task={"task_id": 3}, seed=7))

A call of the tool ``set_knobs`` is a step: so many seconds with those knobs. See README.md in this folder (extra
``openenv``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agents.briefing import GIVEN, Interface, serving_briefing
from agents.integrations.text_episode import HOLD_S, rounded, tasks_and_rules
from env.log import over_steps
from inferencegym.client.http import DEFAULT_URL
from inferencegym.client.openenv import InferenceGymEnv
from inferencegym.client.openenv_types import without_gradio
from inferencegym.errors import InferenceGymError, InvalidConfigError
from inferencegym.messages import plain_schema
from inferencegym.models import ServeActionMessage

with without_gradio():
    from openenv.core.env_server.mcp_types import Tool
    from openenv.core.harness import ResourceSessionFactory, StepEnvSessionAdapter, ToolResult, VerifyResult

TOOL: Final = Tool(
    name="set_knobs",
    description="Set knobs of the fleet and let it serve for one step; knobs that are left out stay as they are.",
    input_schema=plain_schema(ServeActionMessage),
)

CALLS: Final = Interface(
    "A call of `set_knobs` plays one step with the knobs that it sets. {steps} calls are left; what you do not play is "
    "played with the knobs in force.",
    (*GIVEN, "reward", "done"),
)


class FleetSession(StepEnvSessionAdapter):  # type: ignore[misc]
    """One episode; a call that is refused is told to the model, and no time passes.

    ``verify`` pays the score. What the model has not played is played then, with its last knobs.
    """

    def __init__(self, fleet: Any, **settings: Any) -> None:
        super().__init__(fleet, **settings)
        self.fleet = fleet
        self.steps = 0
        self.score: float | None = None

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Play a step; see :data:`TOOL`."""
        try:
            result = super().call_tool(name, arguments)
        except InferenceGymError as error:
            return ToolResult(error=str(error))
        self.steps += 1
        self.score = result.data.get("score")
        return result

    def verify(self, transcript: list[Any], final_state: Any = None) -> VerifyResult:
        """Reward of the episode: its score. ``done`` tells whether the model played it to its end."""
        finished = self.score is not None
        while self.score is None:
            self.score = self.fleet.step({}).observation.metadata.get("score")
        return VerifyResult(env_reward=self.score, done=finished, metrics={"steps": self.steps, "score": self.score})


class FleetSessionFactory(ResourceSessionFactory[FleetSession]):  # type: ignore[misc]
    """Makes a session of its own for every rollout.

    ``hold`` are the seconds of a step, ``episode_length`` those of an episode (None: the task's own). A task may name
    other ones under ``config``.
    """

    def __init__(self, base_url: str = DEFAULT_URL, *, hold: int = HOLD_S, episode_length: int | None = None) -> None:
        self._base_url = base_url
        self._config: dict[str, Any] = {"hold": hold, "reward": "grade"}
        if episode_length is not None:
            self._config["episode_length"] = episode_length

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> FleetSession:
        """Start the episode of a task: its id, or a row with ``task_id`` and perhaps ``config``."""
        row: Mapping[str, Any] = task if isinstance(task, Mapping) else {"task_id": task}
        config = {**self._config, **row.get("config", {})}
        tasks, rules = tasks_and_rules(self._base_url)
        entry = next((one for one in tasks if str(one["id"]) == str(row.get("task_id"))), None)
        if entry is None:
            raise InvalidConfigError(f"task_id={row.get('task_id')!r} is unknown: GET /tasks?all=true lists them")
        return FleetSession(
            InferenceGymEnv(base_url=self._base_url).sync(),
            task=entry,
            seed=seed,
            episode_id=episode_id,
            tool_specs=[TOOL],
            action_builder=lambda _, knobs: knobs,
            initial_messages_builder=lambda first, chosen: [
                {
                    "role": "user",
                    "content": f"{serving_briefing(chosen, rules, CALLS, config)}\n"
                    f"It shows now: {_shown(first.observation)}",
                }
            ],
            tool_result_builder=_result,
            reset_kwargs={"task_id": entry["id"], "config": config, "info": True},
        )


def _shown(observation: Any) -> dict[str, Any]:
    seen: dict[str, Any] = rounded(observation.model_dump(exclude={"metadata", "info", "done", "reward"}))
    return seen


def _result(_name: str, _knobs: dict[str, Any], result: Any, _state: Any) -> ToolResult:
    ending = {name: value for name, value in result.observation.metadata.items() if name in ("score", "feedback")}
    seen = result.observation
    given = rounded(over_steps([seen.info]))
    data = {"observation": _shown(seen), **given, "reward": result.reward, "done": result.done, **ending}
    return ToolResult(data=data, done=bool(result.done), metadata={"reward": result.reward})
