"""Requests and answers of the HTTP interface as pydantic models, and their versions for each family.

Bounds of actions, observations and settings come from the family's own models (:class:`Documented`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic.json_schema import SkipJsonSchema

from agents.families import players_of
from env.family import Family
from inferencegym.errors import MISSING
from inferencegym.messages import WHOLE, Allowed, FieldError, Message, plain_schema, read
from inferencegym.task_registry import MAX_EPISODE_LENGTH
from inferencegym.tasks import TaskId
from server.net.errors import InvalidRequestError

DEFAULT_SEED: Final = 42
MAX_SEED: Final = 2**63 - 1
MAX_STEP: Final = 2**31 - 1
SESSION_ID_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,128}$"

LEFT_OUT: Final = "fields left out stay as they are; the first step of an episode starts from the defaults"

Schema = dict[str, Any]
M = TypeVar("M", bound=BaseModel)

# ---------------------------------------------------------------- requests

# The bound is the power of two itself, because as doubles 2^63 - 1 and 2^63 are the same.
Seed = Annotated[int, Field(ge=0, lt=MAX_SEED + 1), WHOLE]
TaskName = Annotated[Annotated[int, WHOLE] | str, Allowed("a number or a name from GET /tasks")]
StepNumber = Annotated[int, Field(ge=1, le=MAX_STEP), WHOLE]
SessionId = Annotated[
    str,
    # An id of another form is unknown (404), so the pattern is only documentation.
    Field(min_length=1, json_schema_extra={"pattern": SESSION_ID_PATTERN}),
]


_LOG: Final = Allowed(f"an array of at most {MAX_EPISODE_LENGTH} log entries")


class EpisodeChoice(Message):
    """An episode to play; the environment checks ``config``."""

    task_id: TaskName | None = None
    seed: Annotated[Seed | None, Field(description="of the episode's traffic")] = DEFAULT_SEED
    config: dict[str, Any] | None = None


class ResetRequest(EpisodeChoice):
    """Body of POST /reset."""

    session_id: Annotated[SessionId | None, Field(description="restart this session")] = None


class StepRequest(Message):
    """Body of POST /step. The action is read by the environment's own model."""

    session_id: Annotated[SessionId, Allowed("the session_id that POST /reset returned")]
    action: Any = Field(default_factory=dict)
    step: Annotated[
        StepNumber | None,
        Field(description="number of this step, from 1: makes sending it again safe (same step, same answer)"),
    ] = None


def closed(required: list[str], properties: Schema) -> Schema:
    """Schema of an object with these properties and no others."""
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def present(schema: Schema) -> Schema:
    """Schema of a nullable field without null."""
    found: Schema = next(branch for branch in schema["anyOf"] if branch.get("type") != "null")
    return found


def _session_or_log(schema: Schema, model: Any) -> None:
    """Schema of a :class:`GradeRequest`: a session, a log, a log to verify, or the latest episode."""
    fields = schema["properties"]
    sent = {name: present(fields[name]) for name in ("task_id", "episode_log", "session_id", "seed")}
    absent: Schema = {"type": "null"}
    session = {**fields, "episode_log": absent, "session_id": sent["session_id"]}
    log = {**fields, "task_id": sent["task_id"], "episode_log": sent["episode_log"], "session_id": absent}
    no_verify = {"verify": {**fields["verify"], "enum": [False]}}
    verified = {**log, "verify": {"enum": [True]}, "seed": sent["seed"]}
    ways = [
        closed(["session_id"], session),
        closed(["task_id", "episode_log"], log | no_verify),
        closed(["task_id", "episode_log", "seed", "verify"], verified),
    ]
    if model.grades_latest:
        ways.append(closed([], fields | no_verify | {"episode_log": absent, "session_id": absent}))
    schema.clear()
    schema.update(type="object", oneOf=ways)


class GradeRequest(Message):
    """Body of POST /grader: a session id, or a log with its task, and with its seed if it is to be verified."""

    grades_latest: ClassVar[bool] = False
    """Whether an empty request grades the caller's latest episode."""
    model_config = ConfigDict(json_schema_extra=_session_or_log)

    task_id: TaskName | None = None
    episode_log: Annotated[list[Any], Field(max_length=MAX_EPISODE_LENGTH), _LOG] | None = None
    session_id: Annotated[SessionId | None, Field(description="grade this session's episode")] = None
    seed: Seed | None = None
    config: dict[str, Any] | None = None
    verify: Annotated[bool, Field(description="replay the log's actions and refuse a log that differs")] = False

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.session_id is not None:
            if self.episode_log is not None:
                raise FieldError("episode_log", "an array", "left out when session_id is given")
        elif self.episode_log is not None:
            if self.task_id is None:
                raise FieldError("task_id", MISSING, "the id of the task that the log was played on")
            if self.verify and self.seed is None:
                raise FieldError("seed", MISSING, "the seed of the episode when verify is true")
        elif self.verify or not self.grades_latest:  # only a log is verified
            raise FieldError("episode_log", MISSING, "an array of log entries, or session_id must be given")
        return self


class PlayRequest(EpisodeChoice):
    """Body of POST /play."""

    agent: Annotated[str, Allowed("the name of a policy from GET /policies")]
    actions: list[Any] = Field([], max_length=MAX_EPISODE_LENGTH, description="played first; the agent plays the rest")
    log: Annotated[bool, Field(description="add the episode log, as POST /grader takes it")] = False
    brief: Annotated[bool, Field(description="leave out observation, metrics, reward and arrivals")] = False


def read_request(model: type[M], body: object, at: str = "") -> M:
    """The body of a request, or its part at the path ``at``. Raises InvalidRequestError naming the field at fault."""
    return read(model, body, InvalidRequestError, at)


class LatestGradeRequest(GradeRequest):
    """Body of POST /grader where the session is optional."""

    grades_latest = True


# ---------------------------------------------------------------- answers


Absent = SkipJsonSchema[None]
"""Marker of a field that an answer leaves out."""


class GradeAnswer(BaseModel):
    """Answer of POST /grader; a family adds its own fields, and the grade of a log has no ``done`` and ``steps``."""

    model_config = ConfigDict(extra="allow")

    score: Annotated[float, Field(ge=0, le=1)]
    verified: Annotated[bool, Field(description="the server played these steps itself")]
    own_config: Annotated[
        bool,
        Field(description="the configuration (as sent, if not verified) is the task's own, so scores are comparable"),
    ]
    done: bool | Absent = Field(default=None, description="for a session: its episode has ended")
    steps: int | Absent = Field(default=None, description="for a session: number of graded steps")


class HealthAnswer(BaseModel):
    """Answer of GET /health; the traffic controller answers ``{"status": "ok"}``, as its specification requires."""

    status: str
    active_sessions: int | Absent = Field(default=None, description="environments in memory")
    uptime_s: float | Absent = None
    version: str | Absent = None
    store: str | Absent = Field(default=None, description="kind of the session store")
    store_damage: str | Absent = Field(default=None, description="damaged parts of the store, which were set aside")
    table_sha256: str | None = Field(default=None, description="digest of the lookup table")
    store_error: str | Absent = Field(default=None, description="with status 503: the error of the store")


class TasksAnswer(BaseModel):
    """Answer of GET /tasks."""

    tasks: list[Mapping[str, Any]]
    more: str | Absent = Field(default=None, description="path that lists the other tasks")


class PlayAnswer(BaseModel):
    """Answer of POST /play: an episode with one value per step."""

    model_config = ConfigDict(extra="allow")

    task_id: int | str
    seed: int
    agent: str
    steps: int
    observation: dict[str, list[Any]] | Absent = Field(
        default=None, description="one value before the first step, then one after each"
    )
    action: dict[str, list[Any]]
    reward: list[float] | Absent = None
    metrics: dict[str, list[Any]] | Absent = None
    arrivals: list[float] | Absent = Field(
        default=None, description="requests that arrived in each second, because observations have only an average"
    )
    score_so_far: Annotated[
        list[float], Field(default_factory=list, description="score of the seconds so far, after each step")
    ]
    score: Annotated[float, Field(ge=0, le=1)]


class Policy(BaseModel):
    """A built-in policy."""

    name: str
    description: str
    stored: Annotated[bool, Field(description="searched or trained for this task: it cannot play other traffic")]


class PoliciesAnswer(BaseModel):
    """Answer of GET /policies: the policies that can play a task."""

    task_id: int | str
    policies: list[Policy]


# ---------------------------------------------------------------- one family


@dataclass(frozen=True)
class Documented:
    """Annotation of a value that the environment validates itself: the OpenAPI document shows this schema."""

    schema: Callable[[], Schema]

    def __get_pydantic_json_schema__(self, _core_schema: Any, _handler: Any) -> Schema:
        """The schema, made together with the document."""
        return self.schema()


def task_id_schema(family: Family) -> Schema:
    """Schema of task ids that a reset accepts; a number may be sent as text."""
    ids = [task.task_id for task in family.tasks()]
    return {"enum": [*ids, *(str(i) for i in ids if isinstance(i, int))], "description": "an id from /tasks"}


def family_model(family: Family, base: type[M], default_task: TaskId | None = None, **fields: Any) -> type[M]:
    """``base`` for one family: ``task_id`` and ``config`` show its tasks and settings, ``fields`` are its own."""
    task = Annotated[TaskName, Documented(partial(task_id_schema, family))]
    settings = Annotated[dict[str, Any], Documented(partial(plain_schema, family.config_model))]
    own = {"task_id": (task | None, default_task), "config": (settings | None, None)}
    named = {name: field for name, field in own.items() if name in base.model_fields}
    return create_model(f"{family.name.capitalize()}{base.__name__}", __base__=base, **{**named, **fields})


@cache
def reset_request(family: Family) -> type[ResetRequest]:
    """Body of POST /reset."""
    return family_model(family, ResetRequest, family.default_task)


def _action_schema(family: Family) -> Schema:
    schema: Schema = {**plain_schema(family.action_model), "description": LEFT_OUT}
    return schema if family.short_action is None else schema["properties"][family.short_action]


@cache
def step_request(family: Family) -> type[StepRequest]:
    """Body of POST /step."""
    required = any(field.is_required() for field in family.action_model.model_fields.values())
    default: Any = ... if required else Field(default_factory=dict)
    fields: dict[str, Any] = {"action": (Annotated[Any, Documented(partial(_action_schema, family))], default)}
    if family.http.session_is_optional:
        fields["session_id"] = (Annotated[SessionId | None, Field(description="without it, the latest episode")], None)
    return family_model(family, StepRequest, **fields)


@cache
def grade_request(family: Family) -> type[GradeRequest]:
    """Body of POST /grader."""
    schema: Schema = {"type": "array", "items": dict(family.log_entry_schema), "maxItems": MAX_EPISODE_LENGTH}
    entries = Annotated[list[Any], Field(max_length=MAX_EPISODE_LENGTH), _LOG, Documented(lambda: schema)]
    base = LatestGradeRequest if family.http.session_is_optional else GradeRequest
    return family_model(family, base, episode_log=(entries | None, None))


def policy_schema(family: Family) -> Schema:
    """Name of one of a family's built-in policies."""
    return {"type": "string", "enum": list(players_of(family).policies())}


@cache
def play_request(family: Family) -> type[PlayRequest]:
    """Body of POST /play."""
    agent = Annotated[str, Documented(partial(policy_schema, family))]
    action = Annotated[Any, Documented(partial(_action_schema, family))]
    actions = (list[action], PlayRequest.model_fields["actions"])
    return family_model(family, PlayRequest, family.default_task, agent=(agent, ...), actions=actions)


@cache
def reset_answer(family: Family) -> type[BaseModel]:
    """Answer of POST /reset."""
    kinds: Mapping[str, Any] = {
        "session_id": str,
        "task_id": Annotated[int | str, Documented(partial(task_id_schema, family))],
        "seed": Seed,
        "episode_length": int,
        "max_steps": int,
        "config": dict[str, Any],
        "reward": None,
        "done": bool,
    }
    fields = {name: kinds[name] for name in ("session_id", "task_id", "seed", *family.http.reset_fields)}
    fields[family.http.observation_key] = family.observation_model
    return _answer(family, "ResetAnswer", fields)


@cache
def step_answer(family: Family) -> type[BaseModel]:
    """Answer of POST /step."""
    low, high = family.reward_range
    info = Documented(lambda: {"type": "object", **family.http.step_info})
    fields = {
        family.http.observation_key: family.observation_model,
        "reward": Annotated[float, Field(ge=low, le=high)],
        "done": bool,
        "info": Annotated[dict[str, Any], info],
    }
    return _answer(family, "StepAnswer", fields)


def _answer(family: Family, name: str, fields: Mapping[str, Any]) -> type[BaseModel]:
    kinds: dict[str, Any] = {key: (kind, ...) for key, kind in fields.items()}
    return create_model(f"{family.name.capitalize()}{name}", **kinds)
