"""Requests of the HTTP interface: read by hand for speed, described as JSON Schema for /info and the OpenAPI document.

Bounds of actions and observations come from :mod:`inferencegym.models`, those of episode settings from the tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from grader.episode import GRADED_METRICS
from inferencegym.models import (
    ACTION_FIELDS,
    NAIVE_ACTION,
    OBSERVATION_FIELDS,
    PHASES,
    Field,
    MetricsSnapshot,
    QuantTier,
    WorkloadState,
)
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from inferencegym.tasks import RewardWeights, TaskId, TaskSpec, list_tasks
from server.net.errors import InvalidRequestError

DEFAULT_TASK: Final = 1
DEFAULT_SEED: Final = 42
MAX_SEED: Final = 2**63 - 1
MAX_STEP: Final = 2**31 - 1
SESSION_ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,128}$"

Schema = dict[str, Any]

# ---------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """Body of POST /reset."""

    task_id: TaskId
    seed: int
    config: Mapping[str, Any] | None
    session_id: str | None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ResetRequest:
        refuse_unknown(body, ("task_id", "seed", "config", "session_id"))
        return cls(
            task_id=task_id_of(body.get("task_id"), DEFAULT_TASK),
            seed=integer_of("seed", body.get("seed"), 0, MAX_SEED, DEFAULT_SEED),
            config=object_of("config", body.get("config")),
            session_id=text_of("session_id", body.get("session_id")),
        )


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """Body of POST /grader: a log, or the session that holds it."""

    task_id: TaskId | None
    episode_log: list[Any] | None
    session_id: str | None
    seed: int | None
    config: Mapping[str, Any] | None
    verify: bool

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> GradeRequest:
        refuse_unknown(body, ("task_id", "episode_log", "session_id", "seed", "config", "verify"))
        log = body.get("episode_log")
        if log is not None and not isinstance(log, list):
            raise InvalidRequestError("episode_log", log, "an array of log entries")
        if log is not None and len(log) > MAX_EPISODE_LENGTH:
            raise InvalidRequestError(
                "episode_log", f"{len(log)} entries", f"at most {MAX_EPISODE_LENGTH} entries long"
            )
        verify = body.get("verify", False)
        if not isinstance(verify, bool):
            raise InvalidRequestError("verify", verify, "true or false")
        seed = body.get("seed")
        request = cls(
            task_id=None if body.get("task_id") is None else task_id_of(body["task_id"], DEFAULT_TASK),
            episode_log=log,
            session_id=text_of("session_id", body.get("session_id")),
            seed=None if seed is None else integer_of("seed", seed, 0, MAX_SEED, DEFAULT_SEED),
            config=object_of("config", body.get("config")),
            verify=verify,
        )
        request._check_together()
        return request

    def _check_together(self) -> None:
        if self.session_id is not None:
            if self.episode_log is not None:
                raise InvalidRequestError("episode_log", "an array", "left out when session_id is given")
            return
        if self.episode_log is None:
            raise InvalidRequestError("episode_log", None, "an array of log entries, or session_id must be given")
        if self.task_id is None:
            raise InvalidRequestError("task_id", None, "the id of the task that the log was played on")
        if self.verify and self.seed is None:
            raise InvalidRequestError("seed", None, "the seed of the episode when verify is true")


def parse_step(body: Mapping[str, Any]) -> tuple[str, Any, int | None]:
    """Session id, action and step number of a POST /step; the action itself is read by its environment family."""
    session_id = body.get("session_id")
    if not isinstance(session_id, str) or not session_id:
        raise InvalidRequestError("session_id", session_id, "the session_id that POST /reset returned")
    number = body.get("step")
    if number is not None:
        number = integer_of("step", number, 1, MAX_STEP, 1)
    if len(body) != 1 + ("action" in body) + ("step" in body):
        refuse_unknown(body, ("session_id", "action", "step"))
    return session_id, body.get("action", {}), number


def refuse_unknown(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise InvalidRequestError for a field that is not known."""
    for key in body:
        if key not in known:
            raise InvalidRequestError(key, body[key], "left out: the fields are " + ", ".join(known))


def task_id_of(value: object, default: TaskId) -> TaskId:
    if value is None:
        return default
    value = _whole(value)
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InvalidRequestError("task_id", value, "a number or a name from GET /tasks")
    return value


def integer_of(name: str, value: object, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    value = _whole(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(name, value, f"an integer from {low} to {high}")
    return value


def _whole(value: object) -> object:
    """JSON has one kind of number: 42.0 is 42."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def object_of(name: str, value: object) -> Mapping[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise InvalidRequestError(name, value, "an object")
    return value


def text_of(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequestError(name, value, "a text of at least one character")
    return value


# ---------------------------------------------------------------- schemas


def field_schema(field: Field) -> Schema:
    """One number of an action or observation."""
    schema: Schema = {"description": f"{field.description} ({field.unit})"}
    whole = field.choices is not None or field.unit in ("requests", "steps", "tokens", "flag", "tier")
    schema["type"] = "integer" if whole else "number"
    if field.choices is not None:
        schema["enum"] = list(field.choices)
        return schema
    schema["minimum"] = field.low
    if math.isfinite(field.high):
        schema["maximum"] = field.high
    return schema


def action_schema() -> Schema:
    """The five knobs as /step takes them."""
    defaults = NAIVE_ACTION.to_dict()
    properties = {name: {**field_schema(f), "default": defaults[name]} for name, f in ACTION_FIELDS.items()}
    flag, tier = properties["prefill_disagg"], properties["quant_tier"]
    properties["prefill_disagg"] = {
        "description": flag["description"],
        "default": False,
        "anyOf": [{"type": "boolean"}, {"type": "integer", "enum": [0, 1]}],
    }
    properties["quant_tier"] = {
        "description": tier["description"],
        "default": 0,
        "anyOf": [
            {"type": "integer", "enum": [t.value for t in QuantTier]},
            {"type": "string", "enum": [t.name for t in QuantTier]},
        ],
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def observation_schema() -> Schema:
    """The twelve fields of the JSON observation."""
    # Means and moving averages of whole things are not whole.
    properties: Schema = {}
    for name, field in OBSERVATION_FIELDS.items():
        schema = field_schema(field)
        if name != "timestep":
            schema["type"] = "number"
        properties[name] = schema
    shares = [n for n in properties if n.startswith("priority_")]
    names = list(properties)
    at = names.index(shares[0])
    items = [properties.pop(n) for n in shares]
    distribution = {
        "type": "array",
        "items": {"type": "number", "minimum": 0, "maximum": 1},
        "minItems": len(items),
        "maxItems": len(items),
        "description": "shares of the last 50 steps' arrivals: interactive, batch, best effort",
    }
    ordered = [n for n in names if n not in shares]
    ordered.insert(at, "priority_distribution")
    complete = {n: distribution if n == "priority_distribution" else properties[n] for n in ordered}
    return {"type": "object", "properties": complete, "required": list(complete)}


def config_schema() -> Schema:
    """What /reset may override."""
    weights = {f.name: nullable({"type": "number", "minimum": 0, "maximum": 1}) for f in fields(RewardWeights)}
    length = nullable({"type": "integer", "minimum": 1, "maximum": MAX_EPISODE_LENGTH})
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {**weights, "episode_length": length},
        "description": "reward weights (beta + gamma + delta <= 1) and length; what is left out is the task's own",
    }


def _of(types: Mapping[str, str], cls: type) -> Schema:
    names = {"float": "number", "int": "integer", "bool": "boolean", "str": "string"}
    properties: Schema = {}
    for f in fields(cls):
        kind = str(f.type)
        properties[f.name] = (
            {"type": "array", "items": {"type": "number"}} if kind.startswith("list") else {"type": names[kind]}
        )
        properties[f.name].update({"description": types[f.name]} if f.name in types else {})
    return {"type": "object", "properties": properties, "required": [f.name for f in fields(cls)]}


def metrics_schema() -> Schema:
    """What one step of the fleet measured."""
    return _of(
        {
            "ttft_p50_ms": "median time from arrival to first output token, queueing included (ms)",
            "ttft_p99_ms": "99th percentile of the same (ms)",
            "tpot_ms": "time per output token of a running request (ms)",
            "tokens_per_sec": "output tokens per second of the whole fleet",
            "gpu_memory_gb": "memory in use on one replica (decimal GB)",
            "cost_per_1k": "normalised cost per 1,000 output tokens",
            "spec_accept_rate": "accepted draft tokens / drafted tokens",
        },
        MetricsSnapshot,
    )


def workload_schema() -> Schema:
    """The traffic of one step."""
    schema = _of({}, WorkloadState)
    schema["properties"]["phase"] = {"type": "string", "enum": list(PHASES)}
    return schema


# The bound is the power of two itself: a reader that takes numbers as doubles cannot tell 2^63 - 1 from it.
SEED_SCHEMA: Final[Schema] = {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_SEED + 1}
SESSION_ID_SCHEMA: Final[Schema] = {"type": "string", "pattern": SESSION_ID_PATTERN}


def task_id_schema() -> Schema:
    """Ids that a reset takes; a number may be sent as text."""
    ids: list[TaskId] = [task.task_id for task in list_tasks(include_recorded=True)]
    ids += [str(task_id) for task_id in ids if isinstance(task_id, int)]
    return {"enum": ids, "description": "an id from /tasks"}


def nullable(schema: Schema) -> Schema:
    """The schema's values, or null, which means: as if left out."""
    return {"anyOf": [schema, {"type": "null"}]}


def reset_schema() -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "task_id": {**nullable(task_id_schema()), "default": DEFAULT_TASK},
            "seed": {**nullable(SEED_SCHEMA), "default": DEFAULT_SEED},
            "config": nullable(config_schema()),
            "session_id": {**nullable(SESSION_ID_SCHEMA), "description": "restart this session"},
        },
    }


def step_schema() -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["session_id"],
        "properties": {
            "session_id": SESSION_ID_SCHEMA,
            "action": {**action_schema(), "description": "fields left out take the naive defaults"},
            "step": {
                **nullable({"type": "integer", "minimum": 1, "maximum": MAX_STEP}),
                "description": "number of this step, from 1: makes sending it again safe (same step, same answer)",
            },
        },
    }


def log_entry_schema() -> Schema:
    """One entry of an episode log: what grading reads of it. Verifying wants every field that the step gave."""
    measured = {name: {"type": "number", "minimum": 0, "maximum": high} for name, high in GRADED_METRICS.items()}
    metrics = {
        "type": "object",
        "required": list(measured),
        "properties": measured,
        "description": "what the step measured; see /info",
    }
    action = {**action_schema(), "description": "the action as applied"}
    return {
        "type": "object",
        "required": ["action", "metrics"],
        "properties": {
            # Scores do not depend on these two: they count when a log is verified.
            "timestep": {"description": "number of the step, from 1"},
            "action": action,
            "reward": {"description": "reward of the step"},
            "metrics": metrics,
        },
    }


def step_as_log_entry_schema() -> Schema:
    """An answer of /step, which is read as a log entry too."""
    entry = log_entry_schema()["properties"]
    info = {
        "type": "object",
        "required": ["metrics", "action_applied"],
        "properties": {"metrics": entry["metrics"], "action_applied": entry["action"]},
    }
    # With metrics beside it, it is read as an entry.
    return {"type": "object", "required": ["info"], "properties": {"info": info, "metrics": {"not": {}}}}


def grade_schema(
    task_id: Schema | None = None, config: Schema | None = None, log_entry: Schema | None = None
) -> Schema:
    """A session, or a log with its task; a log to verify with its seed too."""
    items = log_entry or {"anyOf": [log_entry_schema(), step_as_log_entry_schema()]}
    log = {"type": "array", "items": items, "maxItems": MAX_EPISODE_LENGTH}
    absent: Schema = {"type": "null"}
    seed, task = SEED_SCHEMA, task_id or task_id_schema()
    shared = {"config": nullable(config or config_schema())}
    named = {"session_id": {**SESSION_ID_SCHEMA, "description": "grade this session's episode"}}
    verify = {"type": "boolean", "description": "replay the log's actions and refuse a log that differs"}
    unverified = {**verify, "enum": [False], "default": False}
    sent = {"task_id": task, "episode_log": log, "session_id": absent, **shared}
    return {
        "type": "object",
        "oneOf": [
            closed(
                ("session_id",),
                {
                    **named,
                    "episode_log": absent,
                    "task_id": nullable(task),
                    "seed": nullable(seed),
                    "verify": verify,
                    **shared,
                },
            ),
            closed(("task_id", "episode_log"), {**sent, "seed": nullable(seed), "verify": unverified}),
            closed(("task_id", "episode_log", "seed", "verify"), {**sent, "seed": seed, "verify": {"enum": [True]}}),
        ],
    }


def closed(required: Iterable[str], properties: Schema) -> Schema:
    """An object with these properties and no others."""
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def detail_schema() -> Schema:
    """Every error's body."""
    text = {"type": "string"}
    properties: Schema = {"message": text, "code": text, "field": text, "allowed": text, "next": text}
    properties["step"] = {"type": "integer", "description": "of a forged log: the first step that differs, from 0"}
    detail = {"type": "object", "properties": properties, "required": ["message", "code", "next"]}
    return {"type": "object", "properties": {"detail": detail}, "required": ["detail"]}


def reset_answer_schema() -> Schema:
    return {
        "type": "object",
        "required": ["session_id", "task_id", "seed", "observation", "episode_length", "config", "reward", "done"],
        "properties": {
            "session_id": {"type": "string"},
            "task_id": task_id_schema(),
            "seed": SEED_SCHEMA,
            "observation": observation_schema(),
            "episode_length": {"type": "integer"},
            "config": {"type": "object"},
            "reward": {"type": "null"},
            "done": {"type": "boolean"},
        },
    }


def step_answer_schema() -> Schema:
    info = {
        "type": "object",
        "required": ["timestep", "metrics", "workload", "action_applied"],
        "properties": {
            "timestep": {"type": "integer"},
            "metrics": metrics_schema(),
            "workload": workload_schema(),
            "action_applied": {"type": "object", "description": "the action with the task's masks applied"},
        },
    }
    properties = {
        "observation": observation_schema(),
        "reward": {"type": "number", "minimum": -1, "maximum": 1},
        "done": {"type": "boolean"},
        "info": info,
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def task_description(task: TaskSpec) -> dict[str, Any]:
    """A task as /tasks lists it."""
    return {
        "id": task.task_id,
        "name": task.name,
        "gym_id": task.gym_id,
        "difficulty": task.difficulty,
        "description": task.description,
        "active_actions": list(task.active_actions),
        "episode_length": task.episode_length,
        "slo_target_ms": task.slo_target_ms,
        "arrival_rate_rps": task.arrival_rate_rps,
        "memory_hard_limit_gb": task.memory_hard_limit_gb,
        "n_replicas": task.fleet.n_replicas,
        "cost_budget": task.cost_budget,
        "reward_weights": asdict(task.reward),
        "grade": dict(task.grade),
        "expected_baseline": None if task.expected_baseline is None else list(task.expected_baseline),
        "recorded": task.recorded,
    }
