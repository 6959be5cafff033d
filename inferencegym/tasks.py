"""Tasks as data: what traffic comes, which fleet serves it, which knobs are live, how it is rewarded and graded.

A task is one entry of ``simulator/data/workload_configs.json`` or of a user's file of the same form (setting
``INFERENCEGYM_TASKS``: paths separated by ``:``). Nothing else in the code names a task.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import InvalidConfigError, UnknownTaskError
from inferencegym.models import ACTION_FIELDS, PRIORITY_CLASSES

TaskId = int | str

DATA_DIR: Final = Path(__file__).resolve().parent.parent / "simulator" / "data"
CALIBRATION_FILE: Final = DATA_DIR / "calibration.json"
TASKS_ENV: Final = "INFERENCEGYM_TASKS"
EPISODE_LENGTH: Final = 200
MAX_EPISODE_LENGTH: Final = 5_000


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
class Fleet:
    """The serving fleet: identical replicas behind one queue."""

    n_replicas: int = 1
    queue_limit: int = 512
    base_accept_rate: float = 0.65
    restart_s: float = 2.0
    """Seconds a replica needs to restart, beside loading its weights."""
    load_gb_per_s: float = 4.0
    """Weight loading bandwidth of a restarting replica, decimal GB/s."""


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """R = alpha*T - beta*L - gamma*V - delta*C, every term in [0, 1]."""

    alpha: float = 0.40
    beta: float = 0.25
    gamma: float = 0.25
    delta: float = 0.10


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """What a reset may override: the reward weights and the episode's length in steps."""

    weights: RewardWeights
    episode_length: int

    def to_dict(self) -> dict[str, float | int]:
        """Flat JSON form with the keys that a reset accepts."""
        w = self.weights
        return {
            "alpha": w.alpha,
            "beta": w.beta,
            "gamma": w.gamma,
            "delta": w.delta,
            "episode_length": self.episode_length,
        }


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
    cost_budget: float = 5.0
    episode_length: int = EPISODE_LENGTH
    expected_baseline: tuple[float, float] | None = None
    trace: str | None = None
    """File of a recorded trace (packed, relative to the task file) that replaces drawn arrivals and lengths."""
    recorded: bool = field(default=False)
    calibration: Calibration | None = None
    """Constants that the task's entry carries itself; those in ``calibration_file`` come first."""
    calibration_file: str = str(CALIBRATION_FILE)
    """Where the task's measured constants are kept: beside the task file, for tasks of one's own."""

    def config(self, overrides: Mapping[str, Any] | None = None) -> EpisodeConfig:
        """The episode configuration with ``overrides`` applied; raises :class:`InvalidConfigError`."""
        return episode_config(self, overrides)


def episode_config(task: TaskSpec, overrides: Mapping[str, Any] | None) -> EpisodeConfig:
    """Check and apply overrides: alpha, beta, gamma, delta in [0, 1] with beta+gamma+delta <= 1, episode_length."""
    values: dict[str, Any] = EpisodeConfig(task.reward, task.episode_length).to_dict()
    for key, value in (overrides or {}).items():
        if key not in values:
            raise InvalidConfigError(f"config.{key} is not a setting: allowed are {', '.join(values)}")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InvalidConfigError(f"config.{key}={value!r} is not allowed: it must be a finite number")
        values[key] = value
    length = values.pop("episode_length")
    if length != int(length) or not 1 <= length <= MAX_EPISODE_LENGTH:
        raise InvalidConfigError(
            f"config.episode_length={length!r} is not allowed: it must be an integer from 1 to {MAX_EPISODE_LENGTH}"
        )
    for key, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise InvalidConfigError(f"config.{key}={value!r} is not allowed: it must be a number from 0 to 1")
    weights = RewardWeights(**{k: float(v) for k, v in values.items()})
    if weights.beta + weights.gamma + weights.delta > 1.0 + 1e-12:
        raise InvalidConfigError("config: beta + gamma + delta must not exceed 1, so that rewards stay in [-1, 1]")
    return EpisodeConfig(weights, int(length))


# ---------------------------------------------------------------- registry


def get_task(task_id: TaskId) -> TaskSpec:
    """The task with this id (an int, or a string such as ``"3"`` or ``"azure-conv"``).

    Raises :class:`UnknownTaskError` with the valid ids.
    """
    registry = _registry(os.environ.get(TASKS_ENV, ""))
    key = _key(task_id)
    if key not in registry:
        raise UnknownTaskError(
            f"task_id={task_id!r} is not a task: valid ids are {', '.join(map(repr, _ids(registry)))}"
        )
    return registry[key]


def list_tasks(include_recorded: bool = False) -> list[TaskSpec]:
    """All tasks in the order of their files; recorded-trace tasks only when asked for."""
    registry = _registry(os.environ.get(TASKS_ENV, ""))
    return [t for t in registry.values() if include_recorded or not t.recorded]


def load_task_file(path: str | Path) -> list[TaskSpec]:
    """Read a task file. Raises :class:`InvalidConfigError` naming file, task and key.

    Constants that ``inferencegym calibrate`` measures for tasks of ``my_tasks.json`` lie in
    ``my_tasks.calibration.json`` beside it; those of the tasks that ship, in ``calibration.json``.
    """
    path = Path(path)
    constants = CALIBRATION_FILE if path.parent == DATA_DIR else path.with_suffix(".calibration.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        entries = raw["tasks"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidConfigError(
            f"{path}: not a task file ({error}); it must hold an object with the key 'tasks'"
        ) from error
    tasks = []
    for key, entry in entries:
        try:
            tasks.append(replace(parse_task(key, entry, base=path.parent), calibration_file=str(constants)))
        except InvalidConfigError as error:
            raise InvalidConfigError(f"{path}: task {key!r}: {error}") from error
    return tasks


def _ids(registry: Mapping[str, TaskSpec]) -> list[TaskId]:
    return [t.task_id for t in registry.values()]


def _key(task_id: object) -> str:
    return str(task_id) if isinstance(task_id, (int, str)) and not isinstance(task_id, bool) else ""


@lru_cache(maxsize=8)
def _registry(user_files: str) -> dict[str, TaskSpec]:
    paths: list[Path] = [DATA_DIR / "workload_configs.json"]
    recorded = DATA_DIR / "recorded_tasks.json"
    if recorded.exists():
        paths.append(recorded)
    paths += [Path(p) for p in user_files.split(os.pathsep) if p]
    registry: dict[str, TaskSpec] = {}
    for path in paths:
        for task in load_task_file(path):
            if _key(task.task_id) in registry:
                raise InvalidConfigError(f"{path}: task id {task.task_id!r} is already taken; choose another")
            registry[_key(task.task_id)] = task
    return registry


# ---------------------------------------------------------------- parsing

_REQUIRED = object()

_KEYS: Final[dict[str, Any]] = {
    "name": _REQUIRED,
    "gym_id": None,
    "difficulty": "custom",
    "description": "",
    "arrival_rate_rps": _REQUIRED,
    "arrival_dist": "poisson",
    "arrival_rate_burst": None,
    "burst_enabled": None,
    "burst_period_steps": None,
    "burst_multiplier": None,
    "burst_interval_steps": None,
    "burst_duration_steps": None,
    "burst_offset_steps": None,
    "prompt_len_dist": _REQUIRED,
    "prompt_len_min": 1,
    "prompt_len_max": 8192,
    "prompt_len_mu": None,
    "prompt_len_sigma": None,
    "prompt_len_clamp_min": 1,
    "prompt_len_clamp_max": 8192,
    "short_request_frac": None,
    "short_prompt_min": 32,
    "short_prompt_max": 128,
    "long_prompt_min": 4096,
    "long_prompt_max": 8192,
    "class_prompt": None,
    "priority_mix": (1.0, 0.0, 0.0),
    "burst_priority_mix": None,
    "priority_routing": None,
    "complexity_penalty": (0.0, 0.0, 0.0),
    "slo_target_ms": _REQUIRED,
    "slo_interactive_ms": None,
    "slo_batch_ms": None,
    "slo_best_effort_ms": None,
    "cost_budget_episode": 5.0,
    "memory_hard_limit_gb": None,
    "active_actions": tuple(ACTION_FIELDS),
    "output_mean_tokens": _REQUIRED,
    "output_cv": 0.6,
    "output_max_tokens": 2048,
    "base_accept_rate": 0.65,
    "n_replicas": 1,
    "queue_limit": 512,
    "restart_s": 2.0,
    "load_gb_per_s": 4.0,
    "reward": {},
    "grade": {"kind": "four_term", "weights": [0.4, 0.3, 0.2, 0.1]},
    "episode_length": EPISODE_LENGTH,
    "expected_baseline": None,
    "trace": None,
    "recorded": False,
    "calibration": None,
}

_TRACE_DEFAULTS: Final[dict[str, Any]] = {
    "arrival_rate_rps": 1.0,
    "arrival_dist": "trace",
    "prompt_len_dist": "trace",
    "output_mean_tokens": [1.0],
    "difficulty": "recorded",
    "recorded": True,
}
"""What a recorded trace decides by itself."""


def parse_task(key: str, entry: Mapping[str, Any], base: Path = DATA_DIR) -> TaskSpec:
    """Build a :class:`TaskSpec` from one JSON entry; raises :class:`InvalidConfigError` naming the key at fault."""
    if not isinstance(entry, Mapping):
        raise InvalidConfigError("must be an object")
    unknown = sorted(set(entry) - set(_KEYS))
    if unknown:
        raise InvalidConfigError(f"unknown key {unknown[0]!r}; allowed are {', '.join(_KEYS)}")
    c = {**_KEYS, **(_TRACE_DEFAULTS if entry.get("trace") is not None else {}), **entry}
    missing = [k for k, v in c.items() if v is _REQUIRED]
    if missing:
        raise InvalidConfigError(f"missing key {missing[0]!r}")
    for name in c["active_actions"]:
        if name not in ACTION_FIELDS:
            raise InvalidConfigError(f"active_actions: {name!r} is not a knob; allowed are {', '.join(ACTION_FIELDS)}")
    task_id: TaskId = int(key) if key.isdigit() else key
    return TaskSpec(
        task_id=task_id,
        name=str(c["name"]),
        gym_id=str(c["gym_id"] or "".join(w.capitalize() for w in key.replace("_", "-").split("-"))),
        difficulty=str(c["difficulty"]),
        description=str(c["description"]),
        active_actions=tuple(c["active_actions"]),
        classes=_parse_classes(c),
        arrival_rate_rps=_number(c, "arrival_rate_rps", 0.01, 2000),
        burst=_parse_burst(c),
        slo_target_ms=_number(c, "slo_target_ms", 1, 1e6),
        fleet=Fleet(
            n_replicas=int(_number(c, "n_replicas", 1, 4096)),
            queue_limit=int(_number(c, "queue_limit", 1, 1e6)),
            base_accept_rate=_number(c, "base_accept_rate", 0, 1),
            restart_s=_number(c, "restart_s", 0, 3600),
            load_gb_per_s=_number(c, "load_gb_per_s", 0.01, 1000),
        ),
        reward=_parse_reward(c["reward"]),
        grade=dict(c["grade"]),
        memory_hard_limit_gb=None if c["memory_hard_limit_gb"] is None else _number(c, "memory_hard_limit_gb", 1, 1000),
        cost_budget=_number(c, "cost_budget_episode", 1e-9, 1e9),
        episode_length=int(_number(c, "episode_length", 1, MAX_EPISODE_LENGTH)),
        expected_baseline=None
        if c["expected_baseline"] is None
        else (c["expected_baseline"][0], c["expected_baseline"][1]),
        trace=None if c["trace"] is None else str((base / str(c["trace"])).resolve()),
        recorded=bool(c["recorded"]),
        calibration=None if c["calibration"] is None else _parse_calibration(c["calibration"]),
    )


def _number(c: Mapping[str, Any], key: str, low: float, high: float) -> float:
    value = c[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidConfigError(f"{key}={value!r} is not allowed: it must be a number from {low:g} to {high:g}")
    return float(value)


def _parse_reward(raw: Mapping[str, Any]) -> RewardWeights:
    unknown = set(raw) - {f.name for f in fields(RewardWeights)}
    if unknown:
        raise InvalidConfigError(f"reward: unknown key {sorted(unknown)[0]!r}")
    return replace(RewardWeights(), **{k: _number(raw, k, 0, 1) for k in raw})


def _parse_calibration(raw: object) -> Calibration:
    """Measured constants; keys beside them tell how they were measured and are not read."""
    if not isinstance(raw, Mapping):
        raise InvalidConfigError("calibration must be an object; `inferencegym import-trace` writes it")
    names = [f.name for f in fields(Calibration)]
    missing = [name for name in names if name not in raw]
    if missing:
        raise InvalidConfigError(f"calibration: missing key {missing[0]!r}")
    return Calibration(**{name: _number(raw, name, 0 if name == "floor_tps" else 1e-12, 1e12) for name in names})


def _parse_burst(c: Mapping[str, Any]) -> Burst | None:
    if c["burst_enabled"] is False:
        return None
    if c["burst_period_steps"] is not None:  # two rates in turn, each for one period
        period = int(_number(c, "burst_period_steps", 1, 1e6))
        offset = c["burst_offset_steps"]
        start = period if offset is None else int(_number(c, "burst_offset_steps", 0, 1e6))
        return Burst(_number(c, "arrival_rate_burst", 0, 1e4), 2 * period, period, start)
    if c["burst_interval_steps"] is not None:  # a multiple of the rate, now and then
        interval = int(_number(c, "burst_interval_steps", 1, 1e6))
        duration = int(_number(c, "burst_duration_steps", 1, interval))
        offset = c["burst_offset_steps"]
        start = interval - duration if offset is None else int(_number(c, "burst_offset_steps", 0, 1e6))
        rate = _number(c, "arrival_rate_rps", 0, 2000) * _number(c, "burst_multiplier", 0, 1000)
        return Burst(rate, interval, duration, start)
    return None


def _parse_classes(c: Mapping[str, Any]) -> tuple[RequestClass, ...]:
    mix = _shares(c, "priority_mix")
    burst_mix = mix if c["burst_priority_mix"] is None else _shares(c, "burst_priority_mix")
    outputs = list(c["output_mean_tokens"])
    if len(outputs) not in (1, len(PRIORITY_CLASSES)):
        raise InvalidConfigError("output_mean_tokens must hold one number, or one for each of the three classes")
    slos = [c["slo_interactive_ms"], c["slo_batch_ms"], c["slo_best_effort_ms"]]
    if all(s is None for s in slos):
        slos = [c["slo_target_ms"]] * len(PRIORITY_CLASSES)
    classes = []
    for i, name in enumerate(PRIORITY_CLASSES):
        mean = float(outputs[i if len(outputs) > 1 else 0])
        classes.append(
            RequestClass(
                name=name,
                share=mix[i],
                burst_share=burst_mix[i],
                slo_ms=math.inf if slos[i] is None else float(slos[i]),
                prompt=_parse_prompt(c, i),
                output=_output_dist(mean, _number(c, "output_cv", 0.01, 5), _number(c, "output_max_tokens", 1, 1e5)),
                complexity_penalty=float(c["complexity_penalty"][i]),
            )
        )
    return tuple(classes)


def _shares(c: Mapping[str, Any], key: str) -> list[float]:
    shares = [float(s) for s in c[key]]
    if len(shares) != len(PRIORITY_CLASSES) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise InvalidConfigError(f"{key}={c[key]!r} is not allowed: three shares >= 0 that sum to 1")
    return shares


def _parse_prompt(c: Mapping[str, Any], class_index: int) -> LengthDist:
    kind = c["prompt_len_dist"]
    if kind == "trace":
        return LengthDist("trace")
    if kind == "uniform":
        return LengthDist("uniform", _number(c, "prompt_len_min", 1, 1e5), _number(c, "prompt_len_max", 1, 1e5))
    if kind == "lognormal":
        low, high = _number(c, "prompt_len_clamp_min", 1, 1e5), _number(c, "prompt_len_clamp_max", 1, 1e5)
        return LengthDist(
            "lognormal", low, high, _number(c, "prompt_len_mu", 0, 12), _number(c, "prompt_len_sigma", 0, 4)
        )
    if kind == "bimodal":
        names = c["class_prompt"] or ("short", "short", "long")
        which = names[class_index]
        if which not in ("short", "long"):
            raise InvalidConfigError(f"class_prompt={names!r} is not allowed: each entry is 'short' or 'long'")
        return LengthDist(
            "uniform", _number(c, f"{which}_prompt_min", 1, 1e5), _number(c, f"{which}_prompt_max", 1, 1e5)
        )
    raise InvalidConfigError(
        f"prompt_len_dist={kind!r} is not allowed: one of 'uniform', 'lognormal', 'bimodal', 'trace'"
    )


def _output_dist(mean: float, cv: float, high: float) -> LengthDist:
    """Log-normal with this mean and coefficient of variation (before the clamp to 1..high)."""
    sigma = math.sqrt(math.log1p(cv * cv))
    return LengthDist("lognormal", 1.0, high, math.log(mean) - 0.5 * sigma * sigma, sigma)


# ---------------------------------------------------------------- calibration


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured constants of one task: what ``inferencegym calibrate`` found, nothing typed by hand.

    ``floor_tps`` is the throughput with no batching (batch_size 1), ``optimal_tps`` the best that the solver reached,
    ``max_throughput_tps`` normalises the reward and ``price`` is the cost of a thousand tokens on one GPU that writes a
    thousand per second.
    """

    floor_tps: float
    optimal_tps: float
    max_throughput_tps: float
    price: float


UNCALIBRATED: Final = Calibration(0.0, 1.0, 1.0, 1.0)
"""Neutral constants, for measuring the real ones."""


def get_calibration(task_id: TaskId) -> Calibration:
    """Measured constants of a task; raises :class:`InvalidConfigError` if there are none.

    They lie in ``simulator/data/calibration.json``, beside the task's own file, or in its entry (key ``calibration``).
    """
    key = _key(task_id)
    task = _registry(os.environ.get(TASKS_ENV, "")).get(key)
    path = Path(CALIBRATION_FILE if task is None else task.calibration_file)
    measured = _calibrations(str(path), path.stat().st_mtime_ns) if path.exists() else {}
    if key in measured:
        return measured[key]
    if task is not None and task.calibration is not None:
        return task.calibration
    raise InvalidConfigError(f"task {task_id!r} is not calibrated: run `inferencegym calibrate --task {task_id}`")


@lru_cache(maxsize=4)
def _calibrations(path: str, version: int) -> dict[str, Calibration]:
    """The constants of one state of a file."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        return {key: _parse_calibration(entry) for key, entry in raw["tasks"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfigError(
            f"{path}: not a calibration file ({error}); measure again with `inferencegym calibrate`"
        ) from error
