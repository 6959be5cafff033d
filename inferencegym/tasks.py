"""Tasks as data: what traffic comes, which fleet serves it, which knobs are live, how it is rewarded and graded.

A task is one entry of ``simulator/data/workload_configs.json`` or of a user's file of the same form (setting
``INFERENCEGYM_TASKS``: paths separated by ``:``). Nothing else in the code names a task.
"""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import InvalidConfigError, UnknownTaskError
from inferencegym.installation import room_folder
from inferencegym.models import ACTION_FIELDS, PRIORITY_CLASSES
from inferencegym.task_files import (
    FLAG,
    TEXT,
    Key,
    Kinds,
    ListOf,
    Number,
    NumberPer,
    Object,
    OneOf,
    Shares,
    check_order,
    gym_id_of,
    read_task_file,
    refusal,
    task_registry,
)

TaskId = int | str

DATA_DIR: Final = room_folder("simulator") / "data"
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
        if value is not None:
            values[key] = _CONFIG_RULES[key].read(f"config.{key}", value)
    length = values.pop("episode_length")
    return EpisodeConfig(_weights("config", values), length)


def _weights(where: str, values: Mapping[str, float]) -> RewardWeights:
    weights = RewardWeights(**values)
    taken_off = weights.beta + weights.gamma + weights.delta
    if taken_off > 1.0 + 1e-12:
        raise InvalidConfigError(
            f"{where}: beta + gamma + delta must not exceed 1, so that rewards stay in [-1, 1]; "
            f"they sum to {taken_off:g}"
        )
    return weights


_EPISODE_LENGTH: Final = Number(1, MAX_EPISODE_LENGTH, whole=True)
_WEIGHT: Final = Number(0, 1)
_WEIGHT_KEYS: Final = {name: Key(_WEIGHT, default) for name, default in asdict(RewardWeights()).items()}
_CONFIG_RULES: Final[dict[str, Number]] = {**dict.fromkeys(_WEIGHT_KEYS, _WEIGHT), "episode_length": _EPISODE_LENGTH}


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

    def parse(task_id: str, entry: object) -> TaskSpec:
        return replace(parse_task(task_id, entry, base=path.parent), calibration_file=str(constants))

    return read_task_file(path, parse)


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
    return task_registry(paths, load_task_file)


# ---------------------------------------------------------------- parsing

_TOKENS: Final = Number(1, 1e5)
_OBJECTIVE_MS: Final = Number(1, 1e6)
_STEPS: Final = Number(1, 1e6, whole=True)
_CLASSES: Final = len(PRIORITY_CLASSES)

GRADE_KINDS: Final = Kinds(
    {
        "throughput": Object({}),
        "latency_memory": Object(
            {
                "ttft_target_ms": Key(_OBJECTIVE_MS),
                "memory_limit_gb": Key(Number(1, 1000)),
                "memory_slope_gb": Key(Number(0.01, 1000)),
            }
        ),
        "four_term": Object({"weights": Key(Shares(4))}),
    }
)
"""The grading rules of :mod:`grader` and their numbers, all of them required."""

_CALIBRATION: Final = Object(
    {
        "floor_tps": Key(Number(0, 1e12)),
        "optimal_tps": Key(Number(1e-12, 1e12)),
        "max_throughput_tps": Key(Number(1e-12, 1e12)),
        "price": Key(Number(1e-12, 1e12)),
    },
    others=True,  # They tell how the constants were measured.
)

_TASK: Final = Object(
    {
        "name": Key(TEXT),
        "gym_id": Key(TEXT, None),
        "difficulty": Key(TEXT, "custom"),
        "description": Key(TEXT, ""),
        "arrival_rate_rps": Key(Number(0.01, 2000)),
        "arrival_dist": Key(OneOf(("poisson", "poisson_bursty", "trace")), "poisson"),
        "arrival_rate_burst": Key(Number(0, 1e4), None),
        "burst_enabled": Key(FLAG, None),
        "burst_period_steps": Key(_STEPS, None),
        "burst_multiplier": Key(Number(0, 1000), None),
        "burst_interval_steps": Key(_STEPS, None),
        "burst_duration_steps": Key(_STEPS, None),
        "burst_offset_steps": Key(Number(0, 1e6, whole=True), None),
        "prompt_len_dist": Key(OneOf(("uniform", "lognormal", "bimodal", "trace"))),
        "prompt_len_min": Key(_TOKENS, 1),
        "prompt_len_max": Key(_TOKENS, 8192),
        "prompt_len_mu": Key(Number(0, 12), None),
        "prompt_len_sigma": Key(Number(0, 4), None),
        "prompt_len_clamp_min": Key(_TOKENS, 1),
        "prompt_len_clamp_max": Key(_TOKENS, 8192),
        "short_request_frac": Key(Number(0, 1), None),
        "short_prompt_min": Key(_TOKENS, 32),
        "short_prompt_max": Key(_TOKENS, 128),
        "long_prompt_min": Key(_TOKENS, 4096),
        "long_prompt_max": Key(_TOKENS, 8192),
        "class_prompt": Key(ListOf(OneOf(("short", "long")), _CLASSES, _CLASSES), ("short", "short", "long")),
        "priority_mix": Key(Shares(_CLASSES), (1, 0, 0)),
        "burst_priority_mix": Key(Shares(_CLASSES), None),
        "priority_routing": Key(FLAG, None),
        "complexity_penalty": Key(ListOf(Number(0, 1), _CLASSES, _CLASSES), (0, 0, 0)),
        "slo_target_ms": Key(_OBJECTIVE_MS),
        "slo_interactive_ms": Key(_OBJECTIVE_MS, None),
        "slo_batch_ms": Key(_OBJECTIVE_MS, None),
        "slo_best_effort_ms": Key(_OBJECTIVE_MS, None),
        "cost_budget_episode": Key(Number(1e-9, 1e9), 5),
        "memory_hard_limit_gb": Key(Number(1, 1000), None),
        "active_actions": Key(
            ListOf(OneOf(tuple(ACTION_FIELDS)), 1, len(ACTION_FIELDS), distinct=True), tuple(ACTION_FIELDS)
        ),
        "output_mean_tokens": Key(NumberPer(_TOKENS, _CLASSES)),
        "output_cv": Key(Number(0.01, 5), 0.6),
        "output_max_tokens": Key(_TOKENS, 2048),
        "base_accept_rate": Key(Number(0, 1), 0.65),
        "n_replicas": Key(Number(1, 4096, whole=True), 1),
        "queue_limit": Key(Number(1, 1e6, whole=True), 512),
        "restart_s": Key(Number(0, 3600), 2),
        "load_gb_per_s": Key(Number(0.01, 1000), 4),
        "reward": Key(Object(_WEIGHT_KEYS), {}),
        "grade": Key(GRADE_KINDS, {"kind": "four_term", "weights": (0.4, 0.3, 0.2, 0.1)}),
        "episode_length": Key(_EPISODE_LENGTH, EPISODE_LENGTH),
        "expected_baseline": Key(ListOf(Number(0, 1), 2, 2), None),
        "trace": Key(TEXT, None),
        "recorded": Key(FLAG, False),
        "calibration": Key(_CALIBRATION, None),
    }
)

_TRACE_TASK: Final = _TASK.with_defaults(
    {
        "arrival_rate_rps": 1.0,
        "arrival_dist": "trace",
        "prompt_len_dist": "trace",
        "output_mean_tokens": 1.0,
        "difficulty": "recorded",
        "recorded": True,
    }
)
"""A task whose recorded trace decides these by itself."""

_PROMPT_RANGES: Final = tuple(
    (f"{kind}_min", f"{kind}_max") for kind in ("prompt_len", "prompt_len_clamp", "short_prompt", "long_prompt")
)


def parse_task(key: str, entry: object, base: Path = DATA_DIR) -> TaskSpec:
    """Build a :class:`TaskSpec` from one JSON entry; raises :class:`InvalidConfigError` naming the key at fault."""
    recorded = isinstance(entry, Mapping) and entry.get("trace") is not None
    c = (_TRACE_TASK if recorded else _TASK).read("", entry)
    for low, high in _PROMPT_RANGES:
        check_order(c, low, high)
    return TaskSpec(
        task_id=int(key) if key.isdecimal() else key,
        name=c["name"],
        gym_id=gym_id_of(key, c["gym_id"]),
        difficulty=c["difficulty"],
        description=c["description"],
        active_actions=tuple(c["active_actions"]),
        classes=_classes(c),
        arrival_rate_rps=c["arrival_rate_rps"],
        burst=_burst(c),
        slo_target_ms=c["slo_target_ms"],
        fleet=Fleet(
            n_replicas=c["n_replicas"],
            queue_limit=c["queue_limit"],
            base_accept_rate=c["base_accept_rate"],
            restart_s=c["restart_s"],
            load_gb_per_s=c["load_gb_per_s"],
        ),
        reward=_weights("reward", c["reward"]),
        grade=c["grade"],
        memory_hard_limit_gb=c["memory_hard_limit_gb"],
        cost_budget=c["cost_budget_episode"],
        episode_length=c["episode_length"],
        expected_baseline=_baseline(c["expected_baseline"]),
        trace=_trace(c["trace"], base),
        recorded=c["recorded"],
        calibration=None if c["calibration"] is None else Calibration(**c["calibration"]),
    )


def _burst(c: Mapping[str, Any]) -> Burst | None:
    alternating = ("burst_period_steps", "arrival_rate_burst")
    occasional = ("burst_interval_steps", "burst_duration_steps", "burst_multiplier")
    given = [key for key in (*alternating, *occasional) if c[key] is not None]
    if c["burst_enabled"] is False:
        return None
    if set(given) == set(alternating):  # two rates in turn, each for one period
        period, rate_rps = c["burst_period_steps"], c["arrival_rate_burst"]
        return Burst(rate_rps, 2 * period, period, _first(c, period))
    if set(given) == set(occasional):  # a multiple of the rate, now and then
        check_order(c, "burst_duration_steps", "burst_interval_steps")
        interval, duration = c["burst_interval_steps"], c["burst_duration_steps"]
        return Burst(c["arrival_rate_rps"] * c["burst_multiplier"], interval, duration, _first(c, interval - duration))
    if given or c["burst_enabled"] or c["burst_offset_steps"] is not None:
        raise InvalidConfigError(
            f"floods need either {' and '.join(alternating)} or {', '.join(occasional)}: "
            f"this task has {', '.join(given) or 'none of them'}"
        )
    return None


def _first(c: Mapping[str, Any], default: int) -> int:
    """The step at which the first flood starts."""
    offset: int | None = c["burst_offset_steps"]
    return default if offset is None else offset


def _classes(c: Mapping[str, Any]) -> tuple[RequestClass, ...]:
    objectives_ms = [c[f"slo_{name}_ms"] for name in PRIORITY_CLASSES]
    if objectives_ms == [None] * _CLASSES:
        objectives_ms = [c["slo_target_ms"]] * _CLASSES
    longest = {**c, "output_mean_tokens": max(c["output_mean_tokens"])}
    check_order(longest, "output_mean_tokens", "output_max_tokens")
    return tuple(
        RequestClass(
            name=name,
            share=c["priority_mix"][i],
            burst_share=(c["burst_priority_mix"] or c["priority_mix"])[i],
            slo_ms=math.inf if objectives_ms[i] is None else objectives_ms[i],
            prompt=_prompt(c, i),
            output=_output_dist(c["output_mean_tokens"][i], c["output_cv"], c["output_max_tokens"]),
            complexity_penalty=c["complexity_penalty"][i],
        )
        for i, name in enumerate(PRIORITY_CLASSES)
    )


def _prompt(c: Mapping[str, Any], class_index: int) -> LengthDist:
    kind = c["prompt_len_dist"]
    if kind == "trace":
        if c["trace"] is None:
            raise InvalidConfigError("missing key 'trace': prompt_len_dist='trace' takes the prompts from it")
        return LengthDist("trace")
    if kind == "lognormal":
        for key in ("prompt_len_mu", "prompt_len_sigma"):
            if c[key] is None:
                raise InvalidConfigError(f"missing key {key!r}: prompt_len_dist='lognormal' needs it")
        low, high = c["prompt_len_clamp_min"], c["prompt_len_clamp_max"]
        return LengthDist("lognormal", low, high, c["prompt_len_mu"], c["prompt_len_sigma"])
    prefix = "prompt_len" if kind == "uniform" else f"{c['class_prompt'][class_index]}_prompt"
    return LengthDist("uniform", c[f"{prefix}_min"], c[f"{prefix}_max"])


def _baseline(bounds: list[float] | None) -> tuple[float, float] | None:
    if bounds is None:
        return None
    low, high = bounds
    if low > high:
        raise refusal("expected_baseline", bounds, "the lowest and the highest score, in this order")
    return low, high


def _trace(name: str | None, base: Path) -> str | None:
    if name is None:
        return None
    allowed = "a packed trace, as `inferencegym import-trace` makes one"
    try:
        path = (base / name).resolve()
        if zipfile.is_zipfile(path):
            return str(path)
    except ValueError as error:  # no name that a file can have
        raise refusal("trace", name, allowed) from error
    raise refusal("trace", name, f"{allowed}; there is none at {path}")


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
        return {key: Calibration(**_CALIBRATION.read(key, entry)) for key, entry in raw["tasks"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfigError(
            f"{path}: not a calibration file ({error}); measure again with `inferencegym calibrate`"
        ) from error
