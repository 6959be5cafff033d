"""Task files and registries of tasks by id, for both families."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from inferencegym.errors import InvalidConfigError, refusal
from inferencegym.messages import M, Message, parse_json, read

MAX_EPISODE_LENGTH: Final = 5_000
"""Most steps of an episode, in both families."""

# Names that Gymnasium allows, without the colon, which ends the name of a module there.
_GYM_ID: Final = re.compile(r"[\w.-]+")

Entry = TypeVar("Entry")


def read_entry(model: type[M], entry: object) -> M:
    """Validate an entry of a file as a message; raises :class:`InvalidConfigError` naming the invalid key."""
    return read(model, entry, refusal, whole="")


# ---------------------------------------------------------------- files


class _File(Message):
    tasks: dict[str, Any]


def load_entries(path: Path, kind: str, parse: Callable[[str, object], Entry]) -> dict[str, Entry]:
    """The entries of a JSON file ``{"tasks": {ID: ENTRY}}``, each parsed from its id and its JSON.

    ``kind`` names the expected sort of file in error messages. Every error names the file and the task.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw = read_entry(_File, parse_json(text, InvalidConfigError, finite=False)).tasks
    except (OSError, UnicodeDecodeError, InvalidConfigError) as error:
        raise InvalidConfigError(
            f"{path}: not a {kind} ({error}); it must hold an object with the key 'tasks'"
        ) from error
    entries = {}
    for task_id, entry in raw.items():
        try:
            entries[task_id] = parse(task_id, entry)
        except InvalidConfigError as error:
            raise InvalidConfigError(f"{path}: task {task_id!r}: {error}", error.field) from error
    return entries


# ---------------------------------------------------------------- registries


class NamedTask(Protocol):
    """A task of either family: its id and its Gymnasium name."""

    @property
    def task_id(self) -> int | str: ...
    @property
    def gym_id(self) -> str: ...


Named = TypeVar("Named", bound=NamedTask)


def task_registry(paths: Iterable[Path], load: Callable[[Path], list[Named]]) -> dict[str, Named]:
    """The tasks of these files by their ids; raises :class:`InvalidConfigError` where two share an id."""
    registry: dict[str, Named] = {}
    by_gym_id: dict[str, Named] = {}
    held_by: dict[str, Path] = {}
    for path in paths:
        for task in load(path):
            if str(task.task_id) in registry:
                raise InvalidConfigError(
                    f"{path}: task id {task.task_id!r} is already taken by {held_by[str(task.task_id)]}; choose "
                    "another, or leave one of these files out"
                )
            if task.gym_id in by_gym_id:
                raise InvalidConfigError(
                    f"{path}: task {str(task.task_id)!r}: gym_id={task.gym_id!r} is already used by task "
                    f"{str(by_gym_id[task.gym_id].task_id)!r}; give it another"
                )
            registry[str(task.task_id)] = by_gym_id[task.gym_id] = task
            held_by[str(task.task_id)] = path
    return registry


def gym_id_of(task_id: str, given: str | None) -> str:
    """Gymnasium name of a task: the given one, or one made from its id (``lunch-desk`` gives ``LunchDesk``)."""
    gym_id = given or "".join(word.capitalize() for word in task_id.replace("_", "-").split("-"))
    if not _GYM_ID.fullmatch(gym_id):
        raise refusal("gym_id", gym_id, "made of letters, digits, _, . and - (left out, it is made of the task's id)")
    return gym_id
