"""Stored policies: paths and reader of the files of a task's solved policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import InvalidConfigError
from inferencegym.tasks import CALIBRATION_FILE, TaskId, TaskSpec

POLICY_DIR: Final = Path(__file__).resolve().parents[1] / "data" / "policies"
"""Policies of the tasks that ship."""


def policy_dir(task: TaskSpec) -> Path:
    """Folder of a task's solved policies: beside the agents, or beside the file of a task of one's own.

    As the constants of ``my_tasks.json`` lie in ``my_tasks.calibration.json``, its policies lie in
    ``my_tasks.policies``.
    """
    constants = Path(task.calibration_file)
    return POLICY_DIR if constants == CALIBRATION_FILE else constants.with_suffix("").with_suffix(".policies")


def policy_path(name: str, task_id: TaskId, directory: Path = POLICY_DIR) -> Path:
    """File of a solved policy (``best_static``, ``best_adaptive``) of a task."""
    return directory / f"{name}-task-{task_id}.json"


def read_policy(path: Path) -> dict[str, Any]:
    """A stored policy file; raises :class:`InvalidConfigError` if it is missing or no JSON."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        # Servers pass this on to clients, whom the way to the folder does not concern.
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfigError(
            f"{path.parent.name}/{path.name}: no stored policy ({reason}); run `inferencegym calibrate` on its task, "
            "or name the folder that holds it, as in best_adaptive:FOLDER"
        ) from error
    return data
