"""Requests of the HTTP interface as pydantic models, and the JSON schemas of requests and answers for each family.

Bounds of actions, observations and settings come from the family's own models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field

from env.family import Family
from inferencegym.errors import MISSING
from inferencegym.messages import WHOLE, Allowed, Message, plain_schema, read
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from server.net.errors import InvalidRequestError

DEFAULT_SEED: Final = 42
MAX_SEED: Final = 2**63 - 1
MAX_STEP: Final = 2**31 - 1
SESSION_ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,128}$"

LEFT_OUT: Final = "fields left out stay as they are; the first step of an episode starts from the defaults"

Schema = dict[str, Any]
M = TypeVar("M", bound=BaseModel)

# ---------------------------------------------------------------- requests

# The bound is the power of two itself: a reader that takes numbers as doubles cannot tell 2^63 - 1 from it.
Seed = Annotated[int, Field(ge=0, lt=MAX_SEED + 1), WHOLE]
TaskName = Annotated[Annotated[int, WHOLE] | str, Allowed("a number or a name from GET /tasks")]
StepNumber = Annotated[int, Field(ge=1, le=MAX_STEP), WHOLE]
SessionId = Annotated[
    str,
    # An id of another form is simply unknown (404), so the pattern is only documentation.
    Field(min_length=1, json_schema_extra={"pattern": SESSION_ID_PATTERN}),
]


_LOG: Final = Allowed(f"an array of at most {MAX_EPISODE_LENGTH} log entries")


class ResetRequest(Message):
    """Body of POST /reset."""

    task_id: TaskName | None = None
    seed: Annotated[Seed | None, Field(description="of the episode's traffic")] = DEFAULT_SEED
    config: dict[str, Any] | None = None
    session_id: Annotated[SessionId | None, Field(description="restart this session")] = None


class StepRequest(Message):
    """Body of POST /step. The action is read by the environment's own model."""

    session_id: Annotated[SessionId, Allowed("the session_id that POST /reset returned")]
    action: Any = Field(default_factory=dict)
    step: Annotated[
        StepNumber | None,
        Field(description="number of this step, from 1: makes sending it again safe (same step, same answer)"),
    ] = None


class GradeRequest(Message):
    """Body of POST /grader: a session id, or a log with its task, and with its seed if it is to be verified."""

    task_id: TaskName | None = None
    episode_log: Annotated[list[Any], Field(max_length=MAX_EPISODE_LENGTH), _LOG] | None = None
    session_id: Annotated[SessionId | None, Field(description="grade this session's episode")] = None
    seed: Seed | None = None
    config: dict[str, Any] | None = None
    verify: Annotated[bool, Field(description="replay the log's actions and refuse a log that differs")] = False

    def check(self) -> None:
        """Raise InvalidRequestError if fields contradict each other."""
        if self.session_id is not None:
            if self.episode_log is not None:
                raise InvalidRequestError("episode_log", "an array", "left out when session_id is given")
            return
        if self.episode_log is None:
            raise InvalidRequestError("episode_log", MISSING, "an array of log entries, or session_id must be given")
        if self.task_id is None:
            raise InvalidRequestError("task_id", MISSING, "the id of the task that the log was played on")
        if self.verify and self.seed is None:
            raise InvalidRequestError("seed", MISSING, "the seed of the episode when verify is true")


class PlayRequest(Message):
    """Body of POST /play."""

    agent: Annotated[str, Allowed("the name of a policy from GET /policies")]
    task_id: TaskName | None = None
    seed: Seed | None = DEFAULT_SEED
    config: dict[str, Any] | None = None
    log: Annotated[bool, Field(description="add the episode log, as POST /grader takes it")] = False


def read_request(model: type[M], body: object, at: str = "") -> M:
    """The body of a request, or its part at the path ``at``. Raises InvalidRequestError naming the field at fault."""
    return read(model, body, InvalidRequestError, at)


# ---------------------------------------------------------------- schemas


def nullable(schema: Schema) -> Schema:
    """Schema that also allows null, which counts as left out."""
    return {"anyOf": [schema, {"type": "null"}]}


def present(schema: Schema) -> Schema:
    """Schema of a nullable field without null."""
    found: Schema = next(branch for branch in schema["anyOf"] if branch["type"] != "null")
    return found


def closed(required: Iterable[str], properties: Schema) -> Schema:
    """Schema of an object with these properties and no others."""
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def task_id_schema(family: Family) -> Schema:
    """Schema of task ids that a reset accepts; a number may be sent as text."""
    ids = [task.task_id for task in family.tasks()]
    return {"enum": [*ids, *(str(i) for i in ids if isinstance(i, int))], "description": "an id from /tasks"}


def reset_schema(family: Family) -> Schema:
    """Body of POST /reset."""
    schema = plain_schema(ResetRequest)
    schema["properties"]["task_id"] = {**nullable(task_id_schema(family)), "default": family.default_task}
    schema["properties"]["config"] = nullable(plain_schema(family.config_model))
    return schema


def step_schema(family: Family) -> Schema:
    """Body of POST /step."""
    schema = plain_schema(StepRequest)
    action = {**plain_schema(family.action_model), "description": LEFT_OUT}
    if family.short_action is not None:
        action = action["properties"][family.short_action]
    schema["properties"]["action"] = action
    if family.http.session_is_optional:
        named = schema["properties"]["session_id"]
        schema["properties"]["session_id"] = {**nullable(named), "description": "without it, the latest episode"}
        schema["required"] = []
    if family.action_model.model_json_schema().get("required"):
        schema["required"] = [*schema["required"], "action"]
    return schema


def grade_schema(family: Family) -> Schema:
    """Body of POST /grader: one of a session, a log, and a log to verify."""
    properties = plain_schema(GradeRequest)["properties"]
    seed, task = present(properties["seed"]), task_id_schema(family)
    log = {"type": "array", "items": dict(family.log_entry_schema), "maxItems": MAX_EPISODE_LENGTH}
    absent: Schema = {"type": "null"}
    config = nullable(plain_schema(family.config_model))
    verify = properties["verify"]
    unverified = {**verify, "enum": [False]}
    sent = {"task_id": task, "episode_log": log, "session_id": absent, "config": config}
    return {
        "type": "object",
        "oneOf": [
            closed(
                ("session_id",),
                {
                    "session_id": {
                        **present(properties["session_id"]),
                        "description": properties["session_id"]["description"],
                    },
                    "episode_log": absent,
                    "task_id": nullable(task),
                    "seed": nullable(seed),
                    "verify": verify,
                    "config": config,
                },
            ),
            closed(("task_id", "episode_log"), {**sent, "seed": nullable(seed), "verify": unverified}),
            closed(("task_id", "episode_log", "seed", "verify"), {**sent, "seed": seed, "verify": {"enum": [True]}}),
        ],
    }


def grade_answer_schema() -> Schema:
    """Answer of POST /grader."""
    told: Mapping[str, Schema] = {
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "verified": {"type": "boolean", "description": "the server played these steps itself"},
        "own_config": {
            "type": "boolean",
            "description": "the configuration (as sent, where nothing is verified) is the task's own: scores compare",
        },
    }
    more: Mapping[str, Schema] = {
        "done": {"type": "boolean", "description": "of a session: its episode has ended"},
        "steps": {"type": "integer", "description": "of a session: steps that count"},
    }
    return {"type": "object", "required": list(told), "properties": {**told, **more}}


def play_schema(family: Family) -> Schema:
    """Body of POST /play."""
    schema = plain_schema(PlayRequest)
    schema["properties"]["agent"] = {"type": "string", "enum": list(family.policies)}
    schema["properties"]["task_id"] = {**nullable(task_id_schema(family)), "default": family.default_task}
    schema["properties"]["config"] = nullable(plain_schema(family.config_model))
    return schema


def reset_answer_schema(family: Family) -> Schema:
    """Answer of POST /reset."""
    kinds: Mapping[str, Schema] = {
        "session_id": {"type": "string"},
        "task_id": task_id_schema(family),
        "seed": present(plain_schema(GradeRequest)["properties"]["seed"]),
        "episode_length": {"type": "integer"},
        "max_steps": {"type": "integer"},
        "config": {"type": "object"},
        "reward": {"type": "null"},
        "done": {"type": "boolean"},
    }
    names = ("session_id", "task_id", "seed", *family.http.reset_fields)
    properties = {name: kinds[name] for name in names}
    properties[family.http.observation_key] = plain_schema(family.observation_model)
    return {"type": "object", "required": list(properties), "properties": properties}


def step_answer_schema(family: Family) -> Schema:
    """Answer of POST /step."""
    low, high = family.reward_range
    bounds = {"minimum": low, "maximum": high}
    properties = {
        family.http.observation_key: plain_schema(family.observation_model),
        "reward": {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}},
        "done": {"type": "boolean"},
        "info": {"type": "object", **family.http.step_info},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def played_schema() -> Schema:
    """Answer of POST /play."""
    columns = {"type": "object", "additionalProperties": {"type": "array"}}
    return {
        "type": "object",
        "required": ["task_id", "seed", "agent", "steps", "observation", "action", "reward", "metrics", "score"],
        "properties": {
            "task_id": {"type": ["integer", "string"]},
            "seed": {"type": "integer"},
            "agent": {"type": "string"},
            "steps": {"type": "integer"},
            "observation": {**columns, "description": "one value before the first step, then one after each"},
            "action": {**columns, "description": "one value per step"},
            "reward": {"type": "array", "items": {"type": "number"}},
            "metrics": {**columns, "description": "one value per step"},
            "arrivals": {
                "type": "array",
                "items": {"type": "number"},
                "description": "requests that arrived in each second, where observations have an average alone",
            },
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        },
    }


def policies_schema() -> Schema:
    """Answer of GET /policies."""
    text = {"type": "string"}
    policy = {"type": "object", "properties": {"name": text, "description": text}, "required": ["name", "description"]}
    return {"type": "object", "required": ["policies"], "properties": {"policies": {"type": "array", "items": policy}}}
