"""Files of solved policies: a task's best constant action, and its best switching policy.

``inferencegym calibrate`` writes them; :func:`agents.search.calibration.policy_path` says where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from agents.policies.switching_policy import ModeParams
from inferencegym.errors import InvalidConfigError
from inferencegym.messages import Message, parse_json
from inferencegym.models import ServeAction
from inferencegym.task_registry import read_entry

Policy = TypeVar("Policy")


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


def read_switching_policy(path: Path) -> ModeParams:
    """A stored switching policy; raises :class:`InvalidConfigError` if there is none."""
    return _read(path, ModeParams.from_dict)


def _read(path: Path, parse: Callable[[Mapping[str, Any]], Policy]) -> Policy:
    try:
        return parse(parse_json(path.read_text(encoding="utf-8"), InvalidConfigError))
    except (OSError, ValueError) as error:
        # Servers pass this on to clients, whom the way to the folder does not concern.
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfigError(
            f"{path.parent.name}/{path.name}: no stored policy ({reason}); run `inferencegym calibrate` on its task, "
            "or name the folder that holds it, as in best_adaptive:FOLDER"
        ) from error
