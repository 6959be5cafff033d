"""Family record of the serving fleet, in which an action sets five knobs of a fleet of LLM servers each second."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import inferencegym
from env.family import Entry, EpisodeEnv, Family, Grade, GymFaces, HttpShape, TaskEntry
from env.inference_env import InferenceEnv
from env.serving.messages import (
    MetricsMessage,
    ObservationMessage,
    WorkloadMessage,
    log_entry_schema,
    step_info_schema,
)
from grader.grader import GraderModule
from grader.kinds import RULES as GRADE_RULES
from inferencegym.errors import InvalidConfigError
from inferencegym.messages import plain_schema
from inferencegym.models import ServeActionMessage
from inferencegym.task_files import ConfigOverrides
from inferencegym.tasks import (
    AT,
    Calibration,
    TaskId,
    TaskSpec,
    get_calibration,
    get_task,
    list_tasks,
    table_index,
    task_of,
)
from simulator.coverage import coverage
from simulator.hardware.catalogue import models, usual_name
from simulator.hardware.tables import ServingTables, default_table_path, load_tables

NAME: Final = "serving"

_NOT_PLAYED: Final = frozenset(
    {
        *("name", "gym_id", "difficulty", "description", "expected_baseline", "recorded", "calibration"),
        *("calibration_file", "hidden", "adaptive_gap", "measured_difficulty", "log"),
    }
)
"""Keys of a task that do not change its episodes."""


def tables() -> ServingTables:
    """The lookup table in use, read once per process and path."""
    return _tables(default_table_path())


@lru_cache(maxsize=4)
def _tables(path: Path) -> ServingTables:
    return load_tables(path)


def _make() -> EpisodeEnv:
    return InferenceEnv(tables=tables())


def _tasks() -> Sequence[TaskEntry]:
    found = list_tasks(include_recorded=True)
    return [TaskEntry(task.task_id, task.gym_id, describe_task(task), not task.listed) for task in found]


RULES: Final = (
    "Knobs that an action leaves out stay as they are; the first step of an episode starts from the defaults. Knobs "
    "that a task does not offer are forced to them.",
    "Changing quant_tier or prefill_disagg restarts the replicas one after the other. Each is away for restart_s + "
    "weights / load_gb_per_s seconds, and the requests that it ran are computed again.",
    "kv_budget is the share of the free memory that the KV pool takes. Requests that the pool cannot hold are "
    "preempted, lowest class and youngest first; they wait, and are computed again.",
    "A replica that needs more memory than its limit is out of memory for that second: it writes "
    "half as much, and violations count five times and as batch_size at least. Fewer slots or a smaller pool end it.",
    "A request violates its class's objective when its first token comes later than the objective's ttft_ms. Requests "
    "beyond the queue's limit are refused, which violates it too.",
    "Tasks with max_replicas have a sixth knob, replicas. A new replica loads for start_s + weights / load_gb_per_s "
    "seconds before it serves and is paid meanwhile; a removed one serves what it has and is paid until then.",
)
"""Rules for players, in addition to the descriptions of tasks, knobs and observations."""
HTTP_RULES: Final = (
    "A step lasts one second, or config.hold of them (1 to 60, set at reset). info.action_applied and info.fleet say "
    "what is in force, info.fleet.restarting_replicas how many are still to restart, info.metrics.oom whether memory "
    "ran out.",
    "The score is in [0, 1]: POST /grader gives it at any time, and the info of the last step. GET /baseline says what "
    "simple agents reach: a good score is above those of heuristic and random_search.",
)
"""Further rules for those who play by the HTTP endpoints."""


def _objectives(task: TaskSpec) -> list[dict[str, Any]]:
    """The classes of a task's requests, with their share of arrivals and their objective."""
    return [
        {"class": one.name, "share": one.share, "ttft_ms": one.slo_ms if math.isfinite(one.slo_ms) else None}
        for one in task.classes
    ]


def _floods(task: TaskSpec) -> dict[str, float] | None:
    """Times of a task's floods, in seconds; None without floods."""
    flood = task.burst
    if flood is None:
        return None
    return {
        "first_at_s": flood.offset_steps,
        "every_s": flood.interval_steps,
        "lasts_s": flood.duration_steps,
        "arrival_rate_rps": flood.rate_rps,
    }


def describe_task(task: TaskSpec) -> dict[str, Any]:
    """JSON description of a task for GET /tasks."""
    fleet = task.fleet
    scaling = {} if fleet.max_replicas is None else {"max_replicas": fleet.max_replicas, "start_s": fleet.start_s}
    return {
        "id": task.task_id,
        "name": task.name,
        "gym_id": task.gym_id,
        "difficulty": task.difficulty,
        "description": task.description,
        "active_actions": list(task.active_actions),
        "episode_length": task.episode_length,
        "slo_target_ms": task.slo_target_ms,
        "objectives": _objectives(task),
        "floods": _floods(task),
        "arrival_rate_rps": task.arrival_rate_rps,
        "memory_hard_limit_gb": task.memory_hard_limit_gb,
        "oom_above_gb": table_index()[task.hardware or next(iter(table_index()))]["memory_limit_gb"],
        "hardware": task.hardware or next(iter(table_index())),
        "n_replicas": task.fleet.n_replicas,
        "restart_s": task.fleet.restart_s,
        "load_gb_per_s": task.fleet.load_gb_per_s,
        "cost_budget": task.cost_budget,
        "reward_weights": asdict(task.reward),
        "grade": dict(task.grade),
        "score": GRADE_RULES[task.grade["kind"]].words(task, _constants_of(task)),
        "expected_baseline": None if task.expected_baseline is None else list(task.expected_baseline),
        "adaptive_gap": task.adaptive_gap,
        "measured_difficulty": task.measured_difficulty,
        "static": task.static,
        "recorded": task.recorded,
        **scaling,
    }


def _constants_of(task: TaskSpec) -> Calibration | None:
    """The task's calibration; None for a user's task that is not calibrated yet."""
    try:
        return get_calibration(task.task_id)
    except InvalidConfigError:
        return None


def _grade(task_id: TaskId, entries: Sequence[Entry]) -> Grade:
    return GraderModule().score(task_id, entries)


def _constants(task_id: TaskId) -> Mapping[str, Any]:
    """A task's definition and measured constants, without descriptions. InvalidConfigError if not calibrated."""
    task = get_task(task_id)
    trace = None if task.trace is None else _file_sha256(task.trace, Path(task.trace).stat().st_mtime_ns)
    rules = {**asdict(task), "trace": trace, "measured": asdict(get_calibration(task_id))}
    if task.hardware is None:
        del rules["hardware"]  # the table in use has a checksum of its own beside these constants
    else:
        rules["hardware"] = table_index()[task.hardware]["sha256"]
    for drawn in ("day", "random_load"):
        if rules[drawn] is None:
            del rules[drawn]
    if task.trace_speed == 1.0:
        del rules["trace_speed"]
    if task.fleet.max_replicas is None:  # nothing of the episode depends on what a new replica would take
        del rules["fleet"]["max_replicas"], rules["fleet"]["start_s"]
    return {name: value for name, value in rules.items() if name not in _NOT_PLAYED}


@lru_cache(maxsize=16)
def _file_sha256(path: str, version: int) -> str:
    """SHA-256 of a file; ``version``, its modification time, makes a changed file be read again."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _check_config(task_id: TaskId, config: Mapping[str, Any] | None) -> object:
    # The kind of reward and the hold do not change the score of the same seconds.
    task = task_of(get_task(task_id), config)
    return task.task_id, replace(task.config(config), reward="plan", hold=1)


def _hold(task_id: TaskId, config: Mapping[str, Any] | None) -> int:
    return get_task(task_id).config(config).hold


def _info() -> Mapping[str, Any]:
    table = tables()
    tasks = list_tasks(include_recorded=True)
    return {
        "rules": list(RULES),
        "http_rules": list(HTTP_RULES),
        "metrics": plain_schema(MetricsMessage),
        "workload": plain_schema(WorkloadMessage),
        "reward": {
            "formula": "alpha*throughput - beta*latency - gamma*slo_violations - delta*cost, every term in [0, 1]",
            "range": [-1.0, 1.0],
            "grade": 'config.reward "grade" pays a share of the score, unclipped: the mean is the score; no bounds',
            "score": 'config.reward "score" pays what the step adds to the score: the sum is the score',
            "weights": {str(task.task_id): asdict(task.reward) for task in tasks},
        },
        "calibration": {
            str(task.task_id): None if (found := _constants_of(task)) is None else asdict(found) for task in tasks
        },
        # Only source and support of the times, not the times themselves.
        "data": {name: value for name, value in table.meta.items() if not name.startswith("iteration_")},
        "tiers": {str(i): name for i, name in enumerate(table.tiers)},
        "weights_gb": dict(table.meta["weights_gb"]),
        "coverage": coverage(table),
        "hardware": {name: _hardware(entry) for name, entry in table_index().items()},
        "models": list(models()),
    }


def _hardware(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A table of the catalogue as GET /info lists it."""
    kept = ("card", "cards_per_replica", "engine", "tiers", "memory_limit_gb")
    return {"model": usual_name(str(entry["model"])), **{name: entry[name] for name in kept}}


def _manifest() -> Path:
    package = Path(inferencegym.__file__).parent
    # In a clone it lies at the root; the build copies it into the package.
    places = (package.parent / "openenv.yaml", package / "openenv.yaml")
    return next((place for place in places if place.exists()), places[-1])


def learner_defaults(task_id: TaskId) -> dict[str, Any]:
    """Arguments of a task's id of version 2; docs/learning.md says what each of them does for a learner."""
    scales = get_task(task_id).fleet.max_replicas is not None
    action, reward, hold = ("replicas", "scaled", 5) if scales else ("discrete", "bounded", 20)
    return {"observation": "full", "action": action, "reward": reward, "hold": hold}


FAMILY: Final = Family(
    name=NAME,
    title="InferenceGym",
    description="Control an LLM serving fleet under live traffic: KV budget, speculative length, batch size, prefill "
    "disaggregation and precision, once a second.",
    env_name="inference_gym",
    make=_make,
    action_model=ServeActionMessage,
    observation_model=ObservationMessage,
    config_model=ConfigOverrides,
    log_entry_schema=log_entry_schema(),
    tasks=_tasks,
    default_task=1,
    grade=_grade,
    constants=_constants,
    check_config=_check_config,
    hold=_hold,
    played_id=lambda task_id, config: task_of(get_task(task_id), config).task_id,
    listed_id=lambda task_id: str(task_id).partition(AT)[0],
    table_sha256=lambda: tables().sha256,
    arrivals=InferenceEnv.arrivals,
    score_so_far=lambda env: float(env.info()["grade_so_far"]["score"]),
    gym=GymFaces("env.gym:InferenceGymEnv", "env.vector:VectorInferenceEnv", learner_defaults),
    http=HttpShape(step_info=step_info_schema()),
    info=_info,
    manifest=_manifest(),
    about=Path(__file__).with_name("about.md"),
)
