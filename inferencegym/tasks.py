"""Tasks of the serving family: their traffic, fleet, knobs, reward and grade, as data.

A task is one entry of ``simulator/data/workload_configs.json`` or of a user's file of the same form (setting
``INFERENCEGYM_TASKS``: paths separated by ``:``), or of a plugin's (:mod:`inferencegym.plugins`). Nothing else in the
code names a task.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import InvalidConfigError, UnknownTaskError, did_you_mean, refusal, short_repr
from inferencegym.installation import room_folder
from inferencegym.messages import read
from inferencegym.models import PRIORITY_CLASSES
from inferencegym.plugins import plugins
from inferencegym.task_files import (
    CalibrationEntry,
    ConfigOverrides,
    RewardKind,
    RewardOverrides,
    TaskEntry,
    per_class,
)
from inferencegym.task_files import Day as DayEntry
from inferencegym.task_registry import gym_id_of, load_entries, read_entry, task_registry

TaskId = int | str

DATA_DIR: Final = room_folder("simulator") / "data"
CALIBRATION_FILE: Final = DATA_DIR / "calibration.json"
HARDWARE_CALIBRATION_FILE: Final = DATA_DIR / "hardware_calibration.json"
"""Constants of tasks on tables other than the default one."""
HARDWARE_TASKS: Final = "hardware_tasks.json"
"""File of the tasks that have hardware of their own."""
TABLE_INDEX_FILE: Final = DATA_DIR / "tables" / "index.json"
SCALING_TASKS: Final = "scaling_tasks.json"
"""File of the tasks whose actions set the number of replicas."""
TASKS_ENV: Final = "INFERENCEGYM_TASKS"
OWN_TASKS: Final = f"{TASKS_ENV}=FILE adds tasks of your own"
STATIC_BELOW: Final = 0.02
"""Adaptive gap below which a task is static: a constant does as well, so it asks for tuning and not for control."""
AT: Final = "@"
"""``ID@HARDWARE`` is the task ``ID`` on a table of the catalogue."""


@dataclass(frozen=True, slots=True)
class LengthDist:
    """A distribution of token counts.

    ``kind`` is ``uniform`` (low..high), ``lognormal`` (exp(Normal(mu, sigma)) clamped to low..high) or ``trace``
    (drawn in order from the task's recorded trace).
    """

    kind: str
    low: float = 1.0
    high: float = 8192.0
    mu: float = 0.0
    sigma: float = 1.0


@dataclass(frozen=True, slots=True)
class RequestClass:
    """One priority class of requests; shares are of all arrivals, in and outside bursts."""

    name: str
    share: float
    burst_share: float
    slo_ms: float
    """TTFT objective in ms; infinite where the class has none."""
    prompt: LengthDist
    output: LengthDist
    complexity_penalty: float = 0.0
    """Share by which the class's speculative acceptance lies below the task's base rate."""


@dataclass(frozen=True, slots=True)
class Burst:
    """A flood of ``rate_rps`` from ``offset_steps`` on, every ``interval_steps`` for ``duration_steps``."""

    rate_rps: float
    interval_steps: int
    duration_steps: int
    offset_steps: int

    def active(self, step: int) -> bool:
        """Whether the flood is on in this step."""
        return step >= self.offset_steps and (step - self.offset_steps) % self.interval_steps < self.duration_steps


@dataclass(frozen=True, slots=True)
class Day:
    """Load of a day in one episode: the forecast, and how the actual load deviates from it.

    ``relative_rates`` are evenly spaced over the episode, first and last second included, with a straight line between
    them; the task's rate is their mean. The actual load deviates by a slow factor whose logarithm has the standard
    deviation ``forecast_error``, and has ``surges`` of ``surge_multiplier`` times the load for ``surge_duration_steps``
    each, on average, which are not in the forecast.
    """

    relative_rates: tuple[float, ...]
    forecast_error: float = 0.0
    surges: float = 0.0
    surge_multiplier: float = 1.0
    surge_duration_steps: int = 1


Bounds = tuple[float, float]
"""Lowest and highest value that a seed draws."""


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """Load that every seed draws anew and that nobody announces; each number is drawn once per episode.

    The rate is the task's times ``level``, times waves (``exp(wave * sin)``, each ``wave_s`` long), times a slow
    log-normal factor (standard deviation of its logarithm: ``deviation``), and in surges times ``surge_multiplier``.
    ``surges`` is the mean number of surges in an episode of the task's length, ``surge_s`` the seconds of each. Shares
    of the classes are the task's, each times ``class_factor`` and scaled to sum to 1; surges draw shares of their own.
    ``level``, ``wave_s``, ``surge_multiplier`` and ``class_factor`` are drawn log-uniformly, the others uniformly.
    """

    level: Bounds
    wave: Bounds = (0.0, 0.0)
    wave_s: Bounds = (300.0, 300.0)
    deviation: Bounds = (0.0, 0.0)
    surges: Bounds = (0.0, 0.0)
    surge_multiplier: Bounds = (1.0, 1.0)
    surge_s: Bounds = (1.0, 1.0)
    class_factor: Bounds = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class AcceptanceStage:
    """Acceptance of drafts from a step on: the probability of each class that a draft is accepted if all before it are.

    Requests keep the acceptance with which they arrived.
    """

    from_step: int
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The serving fleet: identical replicas behind one queue.

    With ``max_replicas`` the fleet scales: it starts with ``n_replicas``, and actions may request any number from 1 to
    ``max_replicas``.
    """

    n_replicas: int = 1
    queue_limit: int = 512
    base_accept_rate: float = 0.65
    restart_s: float = 2.0
    """Seconds that a replica takes to restart, without loading its weights."""
    load_gb_per_s: float = 4.0
    """Weight loading bandwidth of a restarting or new replica, decimal GB/s."""
    start_s: float = 2.0
    """Seconds that a new replica takes to start, without loading its weights."""
    max_replicas: int | None = None


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """R = alpha*T - beta*L - gamma*V - delta*C, every term in [0, 1]."""

    alpha: float = 0.40
    beta: float = 0.25
    gamma: float = 0.25
    delta: float = 0.10


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """Settings of an episode: weights of the reward "plan", length in seconds, which reward is paid, seconds of a step.

    With ``hold`` above 1 a step plays that many seconds with one action, and the last step the rest.
    """

    weights: RewardWeights
    episode_length: int
    reward: RewardKind = "plan"
    hold: int = 1

    @property
    def n_steps(self) -> int:
        """Steps of a whole episode."""
        return -(-self.episode_length // self.hold)

    def to_dict(self) -> dict[str, Any]:
        """Flat JSON form with the keys that a reset accepts; the grade's reward has no weights."""
        weights = asdict(self.weights) if self.reward == "plan" else {}
        return {**weights, "episode_length": self.episode_length, "reward": self.reward, "hold": self.hold}


@dataclass(frozen=True, slots=True, eq=False)
class TaskSpec:
    """One task of the serving family, complete. Compared by identity: the registry holds one object per task."""

    task_id: TaskId
    name: str
    gym_id: str
    difficulty: str
    description: str
    active_actions: tuple[str, ...]
    classes: tuple[RequestClass, ...]
    arrival_rate_rps: float
    burst: Burst | None
    slo_target_ms: float
    fleet: Fleet
    reward: RewardWeights
    grade: Mapping[str, Any]
    memory_hard_limit_gb: float | None = None
    hardware: str | None = None
    """Table of the catalogue that the task is played on; None: the default table."""
    cost_budget: float = 5.0
    episode_length: int = 200
    expected_baseline: tuple[float, float] | None = None
    adaptive_gap: float | None = None
    """Gain of the best policy that observes over the best constant, as ``inferencegym quality`` reports it."""
    measured_difficulty: float | None = None
    """One minus the score of vLLM's defaults in the same report: 0 is a task that they solve, 1 one where they fail."""
    day: Day | None = None
    draft_acceptance: tuple[AcceptanceStage, ...] = ()
    """Acceptance of drafts by class and time, which replaces the measured one; empty: as measured."""
    random_load: RandomLoad | None = None
    trace: str | None = None
    """File of a recorded trace (packed, relative to the task file) that replaces drawn arrivals and lengths."""
    trace_speed: float = 1.0
    """How many times faster than recorded the requests of the trace arrive."""
    log: object | None = field(default=None, repr=False)
    """Requests in memory (the simulator's RequestLog) that replace drawn ones, played once: a user's own log."""
    recorded: bool = field(default=False)
    hidden: bool = False
    """Whether task lists leave it out by default, like the tasks of recorded traffic."""
    calibration: Measured | None = None
    """Constants in the task's own entry; those in ``calibration_file`` take precedence."""
    calibration_file: str = str(CALIBRATION_FILE)
    """File of the task's measured constants; for user tasks it lies next to the task file."""

    def __deepcopy__(self, _memo: object) -> TaskSpec:
        return self  # compared by identity, and nothing changes it

    @property
    def static(self) -> bool | None:
        """Whether a tuned constant does as well as policies that adapt; None where that was not measured."""
        return None if self.adaptive_gap is None else self.adaptive_gap < STATIC_BELOW

    @property
    def heading(self) -> str:
        """Heading of the task in tables: ``task 3``, ``task 2 (static)``, and ``task 1 (warm-up)`` for an easy one."""
        note = " (warm-up)" if self.difficulty == "easy" else " (static)" * bool(self.static)
        return f"task {self.task_id}{note}"

    @property
    def listed(self) -> bool:
        """Whether task lists include the task by default.

        False for ``hidden`` tasks, those of recorded traffic, and of those that ship, those on another table or that
        scale.
        """
        ships = Path(self.calibration_file).parent == DATA_DIR
        special = self.hardware is not None or self.fleet.max_replicas is not None
        return not (self.hidden or self.recorded or (ships and special))

    def config(self, overrides: Mapping[str, Any] | ConfigOverrides | None = None) -> EpisodeConfig:
        """The episode configuration with ``overrides`` applied; a value of None leaves the setting alone.

        Raises :class:`InvalidConfigError` naming the setting, its value and what is allowed.
        """
        return episode_config(self, overrides)


def episode_config(task: TaskSpec, overrides: Mapping[str, Any] | ConfigOverrides | None) -> EpisodeConfig:
    """The task's own settings with the overrides of a reset applied."""
    if overrides is None:
        return EpisodeConfig(task.reward, task.episode_length)
    wanted = _overrides(overrides)
    length = task.episode_length if wanted.episode_length is None else wanted.episode_length
    if wanted.reward in ("grade", "score"):
        for name in RewardOverrides.model_fields:
            if getattr(wanted, name) is not None:
                raise refusal(
                    f"config.{name}", getattr(wanted, name), f'left out with reward "{wanted.reward}", without weights'
                )
    return EpisodeConfig(_weights("config", task.reward, wanted), length, wanted.reward or "plan", wanted.hold or 1)


def with_settings(config: Mapping[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """A configuration with settings added that were given as separate arguments; None means not given.

    Raises :class:`InvalidConfigError` for a setting that is given both ways.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        if config is not None and config.get(name) is not None:
            raise refusal(name, value, "given once: as an argument, or in config")
    return {**(config or {}), **given}


def _overrides(given: Mapping[str, Any] | ConfigOverrides) -> ConfigOverrides:
    return read(ConfigOverrides, dict(given) if isinstance(given, Mapping) else given, refusal, "config")


def _weights(where: str, base: RewardWeights, overrides: RewardOverrides) -> RewardWeights:
    weights = replace(base, **overrides.model_dump(exclude_none=True, include=set(RewardOverrides.model_fields)))
    taken_off = weights.beta + weights.gamma + weights.delta
    if taken_off > 1.0 + 1e-12:
        raise InvalidConfigError(
            f"{where}: beta + gamma + delta must not exceed 1, so that rewards stay in [-1, 1]; "
            f"they sum to {taken_off:g}",
            where,
        )
    return weights


# ---------------------------------------------------------------- registry


def get_task(task_id: TaskId) -> TaskSpec:
    """The task with this id (an int, or a string such as ``"3"`` or ``"azure-conv"``).

    Raises :class:`UnknownTaskError` with the valid ids.
    """
    user_files, key = os.environ.get(TASKS_ENV, ""), _key(task_id)
    registry = _registry(user_files)
    own, at, hardware = key.partition(AT)
    if own not in registry:
        advice = did_you_mean(own, registry, f"valid ids are {', '.join(map(repr, _ids(registry)))}")
        raise UnknownTaskError(f"task_id={short_repr(task_id)} is not a task: {advice}. {OWN_TASKS}")
    return _task_on(user_files, own, hardware) if at else registry[own]


@cache
def table_index() -> dict[str, dict[str, Any]]:
    """Description of each table that ships, by name; the first is the default."""
    loaded: dict[str, dict[str, Any]] = json.loads(TABLE_INDEX_FILE.read_text(encoding="utf-8"))
    return loaded


def table_entry(name: str) -> dict[str, Any]:
    """Description of the table of this name; raises :class:`InvalidConfigError` listing the names."""
    if name not in table_index():
        raise InvalidConfigError(
            f"hardware={short_repr(name)} is not in the catalogue: choose one of {', '.join(table_index())}; others "
            "are built with `inferencegym build-table`",
            "hardware",
        )
    return table_index()[name]


def card_memory_gb(task: TaskSpec) -> float:
    """Memory limit in decimal GB of the card that a task is played on: of the default table's if it names none."""
    index = table_index()
    entry = index[task.hardware] if task.hardware is not None else next(iter(index.values()))
    return float(entry["memory_limit_gb"])


def task_of(task: TaskSpec, config: Mapping[str, Any] | ConfigOverrides | None) -> TaskSpec:
    """The task for a reset with this configuration: ``hardware`` makes it ``ID@HARDWARE``."""
    hardware = None if config is None else _overrides(config).hardware
    return task if hardware is None else get_task(f"{str(task.task_id).partition(AT)[0]}{AT}{hardware}")


@lru_cache(maxsize=256)
def _task_on(user_files: str, own: str, hardware: str) -> TaskSpec:
    """A task on another table, with constants of its own."""
    table_entry(hardware)  # refuses a name that is not in the catalogue
    task = _registry(user_files)[own]
    constants = Path(task.calibration_file)
    shipped = constants == CALIBRATION_FILE
    return replace(
        task,
        task_id=f"{own}{AT}{hardware}",
        gym_id=f"{task.gym_id}-{hardware}",
        name=f"{task.name} on {hardware}",
        hardware=hardware,
        expected_baseline=None,
        adaptive_gap=None,
        measured_difficulty=None,
        calibration=None,
        calibration_file=str(HARDWARE_CALIBRATION_FILE if shipped else constants),
    )


def list_tasks(include_recorded: bool = False) -> list[TaskSpec]:
    """All tasks in the order of their files; those that are not :attr:`TaskSpec.listed` only on request."""
    registry = _registry(os.environ.get(TASKS_ENV, ""))
    return [t for t in registry.values() if include_recorded or t.listed]


def load_task_file(path: str | Path) -> list[TaskSpec]:
    """Read a task file. Raises :class:`InvalidConfigError` naming file, task and key.

    Constants that ``inferencegym calibrate`` measures for tasks of ``my_tasks.json`` are in
    ``my_tasks.calibration.json`` beside it; those of the shipped tasks in ``calibration.json``.
    """
    path = Path(path)
    constants = path.with_suffix(".calibration.json")
    if path.parent == DATA_DIR:
        constants = HARDWARE_CALIBRATION_FILE if path.name == HARDWARE_TASKS else CALIBRATION_FILE

    def parse(task_id: str, raw: object) -> TaskSpec:
        return replace(parse_task(task_id, raw, base=path.parent), calibration_file=str(constants))

    return list(load_entries(path, "task file", parse).values())


def _ids(registry: Mapping[str, TaskSpec]) -> list[TaskId]:
    return [t.task_id for t in registry.values()]


def _key(task_id: object) -> str:
    return str(task_id) if isinstance(task_id, (int, str)) and not isinstance(task_id, bool) else ""


@lru_cache(maxsize=8)
def _registry(user_files: str) -> dict[str, TaskSpec]:
    shipped = ("workload_configs.json", "recorded_tasks.json", HARDWARE_TASKS, SCALING_TASKS)
    paths = [DATA_DIR / name for name in shipped if (DATA_DIR / name).exists()]
    of_plugins = {Path(plugin.load(Path, str)): plugin for plugin in plugins("tasks")}

    def load(path: Path) -> list[TaskSpec]:
        try:
            return load_task_file(path)
        except InvalidConfigError as error:
            if path in of_plugins:
                raise of_plugins[path].error(f"has a task file that is not valid: {error}") from error
            raise

    users = [Path(p) for p in user_files.split(os.pathsep) if p]
    return task_registry([*paths, *of_plugins, *users], load)


# ---------------------------------------------------------------- parsing


def parse_task(key: str, raw: object, base: Path = DATA_DIR) -> TaskSpec:
    """Build a :class:`TaskSpec` from one JSON entry; raises :class:`InvalidConfigError` naming the key at fault."""
    entry = read_entry(TaskEntry, raw)
    if entry.hardware is not None:
        table_entry(entry.hardware)  # refuses a name that is not in the catalogue
    return TaskSpec(
        task_id=int(key) if key.isdecimal() else key,
        name=entry.name,
        gym_id=gym_id_of(key, entry.gym_id),
        difficulty=entry.difficulty,
        description=entry.description,
        active_actions=tuple(entry.active_actions),
        classes=_classes(entry),
        arrival_rate_rps=entry.arrival_rate_rps,
        burst=_burst(entry),
        slo_target_ms=entry.slo_target_ms,
        fleet=Fleet(
            n_replicas=entry.n_replicas,
            queue_limit=entry.queue_limit,
            base_accept_rate=entry.base_accept_rate,
            restart_s=entry.restart_s,
            load_gb_per_s=entry.load_gb_per_s,
            start_s=entry.restart_s if entry.start_s is None else entry.start_s,
            max_replicas=entry.max_replicas,
        ),
        reward=_weights("reward", RewardWeights(), entry.reward),
        grade=entry.grade.model_dump(),
        memory_hard_limit_gb=entry.memory_hard_limit_gb,
        hardware=entry.hardware,
        cost_budget=entry.cost_budget_episode,
        episode_length=entry.episode_length,
        expected_baseline=entry.baseline_range(),
        adaptive_gap=entry.adaptive_gap,
        measured_difficulty=entry.measured_difficulty,
        day=None if entry.day is None else _day(entry.day),
        draft_acceptance=tuple(
            AcceptanceStage(stage.from_step, tuple(per_class(stage.rate))) for stage in entry.draft_acceptance or ()
        ),
        random_load=None if entry.random_load is None else RandomLoad(**entry.random_load.model_dump()),
        trace=_trace(entry.trace, base),
        trace_speed=entry.trace_speed,
        recorded=entry.recorded,
        hidden=entry.hidden,
        calibration=None if entry.calibration is None else _measured(entry.calibration),
    )


def _day(entry: DayEntry) -> Day:
    return Day(**{**entry.model_dump(), "relative_rates": tuple(entry.relative_rates)})


def _burst(entry: TaskEntry) -> Burst | None:
    if entry.burst_enabled is False:
        return None
    if entry.burst_period_steps is not None and entry.arrival_rate_burst is not None:  # two alternating rates
        period = entry.burst_period_steps
        return Burst(entry.arrival_rate_burst, 2 * period, period, _first_flood_step(entry, period))
    interval, duration, multiplier = entry.burst_interval_steps, entry.burst_duration_steps, entry.burst_multiplier
    if interval is None or duration is None or multiplier is None:
        return None
    # a multiple of the rate at intervals
    first = _first_flood_step(entry, interval - duration)
    return Burst(entry.arrival_rate_rps * multiplier, interval, duration, first)


def _first_flood_step(entry: TaskEntry, default: int) -> int:
    return default if entry.burst_offset_steps is None else entry.burst_offset_steps


def _classes(entry: TaskEntry) -> tuple[RequestClass, ...]:
    objectives_ms = [entry.slo_interactive_ms, entry.slo_batch_ms, entry.slo_best_effort_ms]
    if all(objective is None for objective in objectives_ms):
        objectives_ms = [entry.slo_target_ms] * len(PRIORITY_CLASSES)
    means = entry.mean_output_tokens()
    return tuple(
        RequestClass(
            name=name,
            share=entry.priority_mix[i],
            burst_share=(entry.burst_priority_mix or entry.priority_mix)[i],
            slo_ms=math.inf if (objective := objectives_ms[i]) is None else objective,
            prompt=_prompt(entry, i),
            output=_output_dist(means[i], entry.output_cv, entry.output_max_tokens),
            complexity_penalty=entry.complexity_penalty[i],
        )
        for i, name in enumerate(PRIORITY_CLASSES)
    )


def _prompt(entry: TaskEntry, class_index: int) -> LengthDist:
    if entry.prompt_len_dist == "trace":
        return LengthDist("trace")
    if entry.prompt_len_mu is not None and entry.prompt_len_sigma is not None and entry.prompt_len_dist == "lognormal":
        low, high = entry.prompt_len_clamp_min, entry.prompt_len_clamp_max
        return LengthDist("lognormal", low, high, entry.prompt_len_mu, entry.prompt_len_sigma)
    if entry.prompt_len_dist == "uniform":
        return LengthDist("uniform", entry.prompt_len_min, entry.prompt_len_max)
    if entry.class_prompt[class_index] == "short":
        return LengthDist("uniform", entry.short_prompt_min, entry.short_prompt_max)
    return LengthDist("uniform", entry.long_prompt_min, entry.long_prompt_max)


def _trace(name: str | None, base: Path) -> str | None:
    if name is None:
        return None
    allowed = "a packed trace, as `inferencegym import-trace` makes one"
    try:
        path = (base / name).resolve()
        if zipfile.is_zipfile(path):
            return str(path)
    except ValueError as error:  # not a valid file name
        raise refusal("trace", name, allowed) from error
    raise refusal("trace", name, f"{allowed}; there is none at {path}")


def _output_dist(mean: float, cv: float, high: float) -> LengthDist:
    """Log-normal with this mean and coefficient of variation (before the clamp to 1..high)."""
    sigma = math.sqrt(math.log1p(cv * cv))
    return LengthDist("lognormal", 1.0, high, math.log(mean) - 0.5 * sigma * sigma, sigma)


# ---------------------------------------------------------------- calibration


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured constants of one task, as ``inferencegym calibrate`` writes them.

    ``floor_tps`` is the throughput without batching (batch_size 1), ``optimal_tps`` the best throughput that the solver
    reached, ``max_throughput_tps`` normalises the reward, and ``price`` is the cost of a thousand tokens on one GPU at
    1,000 tokens/s. ``replica_knobs`` are the five knobs, in order, that the capacity plan gives a replica; None where
    the task does not scale, or was calibrated on another table than its own.
    """

    floor_tps: float
    optimal_tps: float
    max_throughput_tps: float
    price: float
    replica_knobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Constants as they are stored, with the :func:`fingerprint` of the task that they were measured for.

    The fingerprint is None in files of release 1.0, and where an engine was measured.
    """

    constants: Calibration
    fingerprint: str | None


UNCALIBRATED: Final = Calibration(0.0, 1.0, 1.0, 1.0)
"""Neutral constants, used while the real ones are measured."""


def get_calibration(task_id: TaskId) -> Calibration:
    """Measured constants of a task; raises :class:`InvalidConfigError` where the task has changed since.

    It also raises it for a task without constants, and for constants that do not suit the grade.

    They lie in ``simulator/data/calibration.json``, beside the task's own file, or in its entry (key ``calibration``).
    """
    key = _key(task_id)
    registry = _registry(os.environ.get(TASKS_ENV, ""))
    task = get_task(key) if key.partition(AT)[0] in registry else None
    path = Path(CALIBRATION_FILE if task is None else task.calibration_file)
    measured = _calibrations(str(path), path.stat().st_mtime_ns) if path.exists() else {}
    found = measured.get(key) or (None if task is None else task.calibration)
    command = f"run `inferencegym calibrate --task {task_id}`"
    if found is None:
        raise InvalidConfigError(f"task {task_id!r} is not calibrated: {command}")
    if task is not None and found.fingerprint not in (None, _registered_fingerprint(task)):
        raise InvalidConfigError(f"task {task_id!r} has changed since it was calibrated: {command}")
    constants = found.constants
    if task is not None and task.grade["kind"] == "throughput" and constants.optimal_tps <= constants.floor_tps:
        raise refusal(
            "calibration.optimal_tps",
            constants.optimal_tps,
            f"above floor_tps, which is {constants.floor_tps:g}: where batching gains nothing, grade something else "
            "than throughput, or offer more load",
        )
    return constants


def _measured(entry: CalibrationEntry) -> Measured:
    return Measured(Calibration(**entry.model_dump(exclude={"fingerprint"})), entry.fingerprint)


@lru_cache(maxsize=4)
def _calibrations(path: str, version: int) -> dict[str, Measured]:
    """Constants in a calibration file; ``version`` is its modification time, so that a changed file is read again."""
    try:
        return load_entries(
            Path(path), "calibration file", lambda _, entry: _measured(read_entry(CalibrationEntry, entry))
        )
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{error}; measure again with `inferencegym calibrate`") from error


_NOT_MEASURED: Final[dict[str, Any]] = {
    **dict.fromkeys(("task_id", "name", "gym_id", "difficulty", "description"), ""),
    **dict.fromkeys(("expected_baseline", "adaptive_gap", "measured_difficulty")),
    **dict.fromkeys(("trace", "log", "calibration", "calibration_file")),
    **dict.fromkeys(("recorded", "hidden"), False),
    "reward": RewardWeights(),
}
"""Fields of a task that its constants do not depend on; of the trace, the contents count."""


def fingerprint(task: TaskSpec) -> str:
    """Twelve hex digits that change with whatever a task's constants and policies are measured from."""
    played = _as_data(replace(task, **_NOT_MEASURED))
    trace = None if task.trace is None else hashlib.sha256(Path(task.trace).read_bytes()).hexdigest()
    text = json.dumps([played, trace], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# Registered tasks never change; others, which may hold a whole log, are not kept.
_registered_fingerprint = lru_cache(maxsize=1024)(fingerprint)


def _as_data(value: Any) -> Any:
    """A value as JSON without defaults, so that a new field with one leaves old fingerprints as they are."""
    if is_dataclass(value):
        return {f.name: _as_data(v) for f in fields(value) if (v := getattr(value, f.name)) != f.default}
    if isinstance(value, Mapping):
        return {name: _as_data(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_data(inner) for inner in value]
    # Processors differ in the last bit of a logarithm.
    return float(f"{value:.9g}") if isinstance(value, float) else value
