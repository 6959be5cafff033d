"""Task files of both families: JSON, read key by key against declared rules.

A :class:`Rule` says what one value may be, :class:`Object` which keys there are. A mistake is an
:class:`InvalidConfigError` with the key, what was found and what is allowed; :func:`read_task_file` puts the file and
the task before it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from inferencegym.errors import InvalidConfigError, short_repr

# What Gymnasium takes, but for the colon, which ends the name of a module there.
_GYM_ID: Final = re.compile(r"[\w.-]+")


def refusal(key: str, value: object, allowed: str) -> InvalidConfigError:
    """The error for a value that is not ``allowed``; ``key`` is its path, empty for a whole entry."""
    found = short_repr(value)
    return InvalidConfigError(f"{f'{key}={found}' if key else found} is not allowed: it must be {allowed}")


# ---------------------------------------------------------------- rules


class Rule(ABC):
    """What one JSON value may be."""

    @abstractmethod
    def allowed(self) -> str:
        """What the value must be, in words that follow "it must be"."""

    @abstractmethod
    def read(self, key: str, value: object) -> Any:
        """The value in the form the program uses; raises :class:`InvalidConfigError` naming ``key``."""


@dataclass(frozen=True, slots=True)
class Number(Rule):
    """A number from ``low`` to ``high``, both included, so neither NaN nor infinite; an int where ``whole``."""

    low: float
    high: float
    whole: bool = False
    unit: str = ""

    def allowed(self) -> str:
        kind = "an integer" if self.whole else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}{f' ({self.unit})' if self.unit else ''}"

    def read(self, key: str, value: object) -> float:
        # JSON's true and false are ints to Python.
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise refusal(key, value, self.allowed())
        if not self.whole:
            return float(value)
        if value != int(value):
            raise refusal(key, value, self.allowed())
        return int(value)


@dataclass(frozen=True, slots=True)
class Typed(Rule):
    """Any value of one type, in ``words`` that say which."""

    kind: type
    words: str

    def allowed(self) -> str:
        return self.words

    def read(self, key: str, value: object) -> Any:
        if not isinstance(value, self.kind):
            raise refusal(key, value, self.allowed())
        return value


TEXT: Final = Typed(str, "text")
FLAG: Final = Typed(bool, "true or false")


@dataclass(frozen=True, slots=True)
class OneOf(Rule):
    """One of these names."""

    names: tuple[str, ...]

    def allowed(self) -> str:
        return f"one of {', '.join(self.names)}"

    def read(self, key: str, value: object) -> str:
        if not isinstance(value, str) or value not in self.names:
            raise refusal(key, value, self.allowed())
        return value


@dataclass(frozen=True, slots=True)
class ListOf(Rule):
    """A list of values that keep one rule: ``least`` to ``most`` of them, none twice where ``distinct``."""

    item: Rule
    least: int = 0
    most: int | None = None
    distinct: bool = False

    def allowed(self) -> str:
        if self.most is None:
            return f"a list, each entry {self.item.allowed()}"
        count = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"a list of {count}{' different ones' if self.distinct else ''}, each {self.item.allowed()}"

    def read(self, key: str, value: object) -> list[Any]:
        if not isinstance(value, (list, tuple)) or len(value) < self.least:
            raise refusal(key, value, self.allowed())
        if self.most is not None and len(value) > self.most:
            raise refusal(key, value, self.allowed())
        items = [self.item.read(f"{key}[{i}]", item) for i, item in enumerate(value)]
        if self.distinct and len(set(items)) < len(items):
            raise refusal(key, value, self.allowed())
        return items


@dataclass(frozen=True, slots=True)
class Shares(Rule):
    """So many shares of one whole."""

    count: int

    def allowed(self) -> str:
        return f"a list of {self.count} shares from 0 to 1 that sum to 1"

    def read(self, key: str, value: object) -> list[float]:
        if not isinstance(value, (list, tuple)) or len(value) != self.count:
            raise refusal(key, value, self.allowed())
        shares: list[float] = ListOf(Number(0, 1)).read(key, value)
        if abs(sum(shares) - 1) > 1e-9:
            raise refusal(key, value, self.allowed())
        return shares


@dataclass(frozen=True, slots=True)
class NumberPer(Rule):
    """A number for each of ``count`` things, or one (bare or in a list) for all; read as one for each."""

    item: Number
    count: int

    def allowed(self) -> str:
        return f"{self.item.allowed()}, or a list of {self.count} such numbers"

    def read(self, key: str, value: object) -> list[float]:
        if not isinstance(value, (list, tuple)):
            if isinstance(value, (int, float)):
                return [self.item.read(key, value)] * self.count
            raise refusal(key, value, self.allowed())
        if len(value) not in (1, self.count):
            raise refusal(key, value, self.allowed())
        numbers: list[float] = ListOf(self.item).read(key, value)
        return numbers * self.count if len(numbers) == 1 else numbers


REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class Key:
    """A key of an object: its rule, and its value where it is left out. With the default None it may be null."""

    rule: Rule
    default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class Object(Rule):
    """An object with these keys; ``others`` are refused, or passed over."""

    keys: Mapping[str, Key]
    others: bool = False

    def with_defaults(self, defaults: Mapping[str, Any]) -> Object:
        """The same object with other defaults for some of its keys."""
        return replace(self, keys={**self.keys, **{k: Key(self.keys[k].rule, v) for k, v in defaults.items()}})

    def allowed(self) -> str:
        return f"an object with the keys {', '.join(self.keys)}" if self.keys else "an empty object"

    def read(self, key: str, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise refusal(key, value, self.allowed())
        where = f"{key}: " if key else ""
        for name in value:
            if name not in self.keys and not self.others:
                raise InvalidConfigError(f"{where}unknown key {name!r}; allowed are {', '.join(self.keys) or 'none'}")
        found = {}
        for name, of in self.keys.items():
            item = value.get(name, of.default)
            if item is REQUIRED:
                raise InvalidConfigError(f"{where}missing key {name!r}: it must be {of.rule.allowed()}")
            unset = item is None and of.default is None
            found[name] = None if unset else of.rule.read(f"{key}.{name}" if key else name, item)
        return found


@dataclass(frozen=True, slots=True)
class Kinds(Rule):
    """An object whose ``kind`` says which other keys it has."""

    kinds: Mapping[str, Object]

    def allowed(self) -> str:
        return f"an object whose kind is {OneOf(tuple(self.kinds)).allowed()}"

    def read(self, key: str, value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping) or "kind" not in value:
            raise refusal(key, value, self.allowed())
        kind = OneOf(tuple(self.kinds)).read(f"{key}.kind", value["kind"])
        return {"kind": kind, **self.kinds[kind].read(key, {k: v for k, v in value.items() if k != "kind"})}


def check_order(values: Mapping[str, Any], low: str, high: str, where: str = "", strict: bool = False) -> None:
    """Raise :class:`InvalidConfigError` where the number at ``low`` exceeds that at ``high``, or equals it if strict.

    ``where`` is the path of the object that has these keys, with the dot after it.
    """
    if values[low] > values[high] or (strict and values[low] == values[high]):
        raise InvalidConfigError(
            f"{where}{low}={values[low]:g} is not allowed: it must be {'below' if strict else 'at most'} {high}, "
            f"which is {values[high]:g}"
        )


# ---------------------------------------------------------------- files


class NamedTask(Protocol):
    """What tasks of both families have."""

    @property
    def task_id(self) -> int | str: ...
    @property
    def gym_id(self) -> str: ...


Task = TypeVar("Task")
Named = TypeVar("Named", bound=NamedTask)


def read_task_file(path: Path, parse: Callable[[str, object], Task]) -> list[Task]:
    """The tasks of a file, each parsed from its id and entry; every error names the file, and where it lies in it."""
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text, object_pairs_hook=_without_repeats)["tasks"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidConfigError(
            f"{path}: not a task file ({error!r}); it must hold an object with the key 'tasks'"
        ) from error
    tasks = []
    for task_id, entry in entries:
        try:
            tasks.append(parse(task_id, entry))
        except InvalidConfigError as error:
            raise InvalidConfigError(f"{path}: task {task_id!r}: {error}") from error
    return tasks


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return found


def task_registry(paths: Iterable[Path], load: Callable[[Path], list[Named]]) -> dict[str, Named]:
    """The tasks of these files by their ids; raises :class:`InvalidConfigError` where two have one id."""
    registry: dict[str, Named] = {}
    by_gym_id: dict[str, Named] = {}
    for path in paths:
        for task in load(path):
            if str(task.task_id) in registry:
                raise InvalidConfigError(f"{path}: task id {task.task_id!r} is already taken; choose another")
            if task.gym_id in by_gym_id:
                raise InvalidConfigError(
                    f"{path}: task {str(task.task_id)!r}: gym_id={task.gym_id!r} is already that of task "
                    f"{str(by_gym_id[task.gym_id].task_id)!r}; give it another"
                )
            registry[str(task.task_id)] = by_gym_id[task.gym_id] = task
    return registry


def gym_id_of(task_id: str, given: str | None) -> str:
    """The name for Gymnasium that a task's entry gives, or one made of its id: ``LunchDesk`` of ``lunch-desk``."""
    gym_id = given or "".join(word.capitalize() for word in task_id.replace("_", "-").split("-"))
    if not _GYM_ID.fullmatch(gym_id):
        raise refusal("gym_id", gym_id, "made of letters, digits, _, . and - (left out, it is made of the task's id)")
    return gym_id
