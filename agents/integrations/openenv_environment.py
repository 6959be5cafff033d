"""OpenEnv environments in process: subclasses of OpenEnv's ``Environment`` that are made without arguments.

    from inferencegym.openenv_environment import InferenceGymEnvironment
    environment = InferenceGymEnvironment()
    environment.reset(seed=7, task_id=3)
    environment.step(InferenceGymAction(batch_size=128))
    for name, part in environment.rubric.named_rubrics():
        print(name, part.last_score)

For the parts of OpenEnv that take such a class: ``create_app``, collectors, a trainer in one process (extra
``openenv``). The server of this package does not use it: its episodes are sessions that outlive sockets and processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from env.families import FAMILIES
from env.family import TRAIN, EpisodeEnv, Family, Grade, outcome
from inferencegym.client.openenv_types import (
    InferenceGymObservation,
    InferenceGymState,
    TrafficControllerObservation,
    TrafficControllerState,
    without_gradio,
)
from inferencegym.errors import InvalidConfigError
from inferencegym.tasks import TaskId

with without_gradio():
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, EnvironmentMetadata
    from openenv.core.rubrics import Rubric


class PartRubric(Rubric):  # type: ignore[misc]
    """One part of a grade; ``last_score`` is its value for the episode so far."""

    value = 0.0

    def forward(self, action: Any, observation: Any) -> float:
        """The part's value."""
        return self.value


class GradeRubric(Rubric):  # type: ignore[misc]
    """Grade of the episode so far, in [0, 1], with the parts of its breakdown as children.

    ``last_score`` of the last step is the episode's score. The first step of an episode names the task's parts; those
    that it lacks and an earlier task had keep None.
    """

    def __init__(self, grade: Callable[[], Grade]) -> None:
        super().__init__()
        self._grade = grade

    def forward(self, action: Any, observation: Any) -> float:
        """The score, after giving every part its own."""
        grade = self._grade()
        parts = dict(self.named_children())
        for name, value in grade["breakdown"].items():
            if name not in parts:
                parts[name] = PartRubric()
                setattr(self, name, parts[name])
            parts[name].value = float(value)
            parts[name](action, observation)
        return float(grade["score"])

    def reset(self) -> None:
        """Forget the scores of the episode before."""
        for rubric in (self, *self.children()):
            rubric.last_score = None


class FamilyEnvironment(Environment):  # type: ignore[misc]
    """Base of both: one episode of a family at a time. Rewards are the environment's, ``rubric`` follows the grade."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    family: ClassVar[Family]
    observation_type: ClassVar[type[Any]]
    state_type: ClassVar[type[Any]]

    def __init__(self) -> None:
        self._episode: EpisodeEnv = self.family.make()
        self._before: Mapping[str, Any] | None = None
        self._with_info = False
        self._started = False
        super().__init__(rubric=GradeRubric(self._episode.grade))

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        *,
        task_id: TaskId | None = None,
        split: str | None = None,
        index: int | None = None,
        config: Mapping[str, Any] | None = None,
        info: bool = False,
    ) -> Any:
        """Start an episode of a task, named by ``task_id`` or by ``split`` and ``index`` of the Task API.

        ``config`` is that of POST /reset; with ``info`` observations carry the info of a step. Raises
        InvalidConfigError or UnknownTaskError, and the episode before goes on.
        """
        if split is not None or index is not None:
            if task_id is not None:
                raise InvalidConfigError("name the task by task_id, or by split and index, not by both", "task_id")
            task_id = self.family.task_at(split or TRAIN, index or 0).task_id
        self._episode.reset(seed=seed, task_id=task_id, config=config, session_id=episode_id)
        self._before, self._with_info, self._started = None, info, True
        self._reset_rubric()
        return self._observed(None, {})

    def step(self, action: Any, timeout_s: float | None = None) -> Any:
        """Play one step; the last one's metadata hold ``score``, ``breakdown`` and ``feedback``.

        Knobs that the action leaves out stay as they are. ``timeout_s`` is not used: a step waits for nothing. Raises
        NotResetError, EpisodeDoneError or InvalidActionError, and no time passes.
        """
        wanted = action.model_dump(exclude_unset=True, exclude={"metadata"}) if isinstance(action, Action) else action
        played, _, values = self.family.parse_action(wanted, self._before)
        _, reward, done = self._episode.play(self._episode.check(played))
        self._before = values
        ending = outcome(self._episode.info()) if done else {}
        observation = self._observed(reward, ending)
        self._apply_rubric(action, observation)
        return observation if self.transform is None else self.transform(observation)

    @property
    def state(self) -> Any:
        """State of the episode; before the first reset without an id."""
        if not self._started:
            return self.state_type()
        state = self._episode.state()
        return self.state_type(episode_id=state.pop("session_id"), **state)

    def get_metadata(self) -> EnvironmentMetadata:
        """Name, description, version, author and documentation."""
        return EnvironmentMetadata(**self.family.metadata())

    def list_splits(self) -> list[str]:
        """Splits of the Task API."""
        return list(self.family.splits())

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        """Tasks of a split; an unknown one has none."""
        return self.family.specs(split)

    def num_tasks(self, split: str) -> int:
        """Number of tasks of a split."""
        return len(self.list_tasks(split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """One task of a split, counted from 0. Raises IndexError."""
        tasks = self.list_tasks(split)
        if not 0 <= index < len(tasks):
            raise IndexError(f"index {index} names no task: {split!r} has {len(tasks)}")
        return tasks[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """Tasks of a split from ``start`` up to ``stop``, as a slice."""
        return self.list_tasks(split)[start:stop]

    def _observed(self, reward: float | None, ending: Mapping[str, Any]) -> Any:
        more = {"info": self._episode.info()} if self._with_info and reward is not None else {}
        return self.observation_type(
            **self._episode.observation_dict(),
            **more,
            reward=reward,
            done=self._episode.done,
            metadata=dict(ending),
        )


class InferenceGymEnvironment(FamilyEnvironment):
    """The serving fleet as an OpenEnv environment: five knobs a second, graded tasks."""

    family = FAMILIES["serving"]
    observation_type = InferenceGymObservation
    state_type = InferenceGymState


class TrafficControllerEnvironment(FamilyEnvironment):
    """The traffic controller as an OpenEnv environment: which share of the requests is let through."""

    family = FAMILIES["traffic"]
    observation_type = TrafficControllerObservation
    state_type = TrafficControllerState
