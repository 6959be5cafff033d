"""Stored policies: paths and readers of the files of a task's solved and trained policies.

``inferencegym calibrate`` writes a task's best constant action and its best switching policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from agents.policies.autoscalers import StoredAutoscaler
from agents.policies.switching_policy import ModeParams
from inferencegym.errors import InvalidConfigError
from inferencegym.messages import Message, parse_json
from inferencegym.models import ServeAction
from inferencegym.task_registry import read_entry
from inferencegym.tasks import CALIBRATION_FILE, HARDWARE_CALIBRATION_FILE, TaskId, TaskSpec

Policy = TypeVar("Policy")

POLICY_DIR: Final = Path(__file__).resolve().parents[1] / "data" / "policies"
"""Policies of the tasks that ship."""


def policy_dir(task: TaskSpec) -> Path:
    """Folder of a task's solved policies: in the agents package, or for a user's task beside its file.

    As the constants of ``my_tasks.json`` lie in ``my_tasks.calibration.json``, its policies lie in
    ``my_tasks.policies``.
    """
    constants = Path(task.calibration_file)
    return (
        POLICY_DIR
        if constants in (CALIBRATION_FILE, HARDWARE_CALIBRATION_FILE)
        else constants.with_suffix("").with_suffix(".policies")
    )


def policy_path(name: str, task_id: TaskId, directory: Path = POLICY_DIR) -> Path:
    """File of a solved policy (``best_static``, ``best_adaptive``, ``random_search``) of a task."""
    return directory / f"{name}-task-{task_id}.json"


class StoredAction(Message):
    """JSON form of a constant policy; all but the action says how it was found."""

    kind: Literal["constant"]
    action: dict[str, Any]
    training_score: float | None = None
    task: str | None = None
    table_sha256: str | None = None


def read_constant_policy(path: Path) -> ServeAction:
    """The action of a stored constant policy; raises :class:`InvalidConfigError` if there is none."""
    return _read(path, lambda data: ServeAction.from_dict(read_entry(StoredAction, data).action))


def read_autoscaler(path: Path) -> StoredAutoscaler:
    """A stored autoscaler; raises :class:`InvalidConfigError` if there is none."""
    return _read(path, lambda data: read_entry(StoredAutoscaler, data))


def read_switching_policy(path: Path) -> ModeParams:
    """A stored switching policy; raises :class:`InvalidConfigError` if there is none."""
    return _read(path, ModeParams.from_dict)


def _read(path: Path, parse: Callable[[Mapping[str, Any]], Policy]) -> Policy:
    try:
        return parse(parse_json(path.read_text(encoding="utf-8"), InvalidConfigError))
    except (OSError, ValueError) as error:
        # Servers send this message to clients, so it does not contain the whole path.
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfigError(
            f"{path.parent.name}/{path.name}: no stored policy ({reason}); run `inferencegym calibrate` on its task, "
            "or name the folder that holds it, as in best_adaptive:FOLDER",
            getattr(error, "field", None),
        ) from error
