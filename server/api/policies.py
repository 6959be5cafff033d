"""Policies that play for a visitor: GET /policies lists them, POST /play returns a whole episode of one of them.

An episode of 200 steps takes a few milliseconds, so it is played on a thread when it is asked for and kept for a while:
the same task, seed, settings and policy give the same episode for ever.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from env.inference_env import InferenceEnv
from grader.grader import GraderModule
from grader.traffic_grader import grade_traffic
from inferencegym.errors import InferenceGymError, InvalidConfigError
from inferencegym.tasks import TaskId, get_task, list_tasks
from inferencegym.traffic import ACTION_NAMES, DEFAULT_TASK_ID, STATE_FIELDS, get_traffic_task, list_traffic_tasks
from server import schemas
from server.api.serving import Context, documented
from server.families import served_tables
from server.net.errors import InvalidRequestError, UnknownPolicyError
from server.net.json_io import JsonReply, JsonRoute, read_object, reply
from server.schemas import Schema

PLAYABLE: Final[dict[str, str]] = {
    "naive": "An engine's defaults, left alone.",
    "random": "Every knob drawn anew each second.",
    "hill_climb": "Changes one knob at a time and keeps what helped; knows no model.",
    "heuristic": "Rules an operator would write: capacity planning, and a second setting for floods.",
    "ppo": "A small network trained with PPO.",
    "best_static": "The best constant setting that a search found for the task.",
    "best_adaptive": "The best switching policy that a search found for the task.",
}
"""Policies that anybody may have played here. Only these: others read files or call models somewhere else."""

PLAYABLE_TRAFFIC: Final[dict[str, str]] = {
    "allow_all": "Lets everything through.",
    "throttle_70": "Always lets 70 % through.",
    "throttle_40": "Always lets 40 % through.",
    "drop_aggressive": "Always lets 20 % through.",
    "random": "Any action at any time.",
    "adaptive": "Lets through as much as the server can stand.",
    "planner": "Perfect play, planned from the first step.",
}

AT_ONCE: Final = 2
"""Episodes being played at the same time; more wait, so that visitors' own steps stay quick."""
CACHED_BYTES: Final = 8_000_000

Answer = dict[str, Any]


class EpisodeCache:
    """Answers already given, compressed, the least used dropped first."""

    def __init__(self, limit_bytes: int = CACHED_BYTES) -> None:
        self._limit = limit_bytes
        self._size = 0
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def get(self, key: str, play: Callable[[], Answer]) -> bytes:
        """The gzipped JSON of ``play()``, played on a thread unless it is known."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        async with self._slots:
            answer = await asyncio.to_thread(compressed, play)
        if key not in self._answers:
            self._answers[key] = answer
            self._size += len(answer)
        while self._size > self._limit:
            self._size -= len(self._answers.popitem(last=False)[1])
        return answer


def compressed(play: Callable[[], Answer]) -> bytes:
    """The gzipped JSON of what ``play`` returns."""
    body = orjson.dumps(play(), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return gzip.compress(body, 5, mtime=0)


@dataclass(frozen=True, slots=True)
class PlayRequest:
    """Body of POST /play."""

    task_id: TaskId
    seed: int
    agent: str
    config: Mapping[str, Any]
    log: bool

    @classmethod
    def parse(cls, body: Mapping[str, Any], playable: Mapping[str, str], default_task: TaskId) -> PlayRequest:
        known = ("task_id", "seed", "agent", "config", "log")
        # What /reset takes is read as /reset reads it.
        episode = {key: body[key] for key in body if key not in ("agent", "log")}
        for key in episode:
            if key not in known:
                raise InvalidRequestError(key, body[key], "left out: the fields are " + ", ".join(known))
        if episode.get("task_id") is None:
            episode["task_id"] = default_task
        start = schemas.ResetRequest.parse(episode)
        agent = body.get("agent")
        if not isinstance(agent, str) or agent not in playable:
            raise InvalidRequestError("agent", agent, "one of " + ", ".join(playable))
        log = body.get("log", False)
        if not isinstance(log, bool):
            raise InvalidRequestError("log", log, "true or false")
        return cls(start.task_id, start.seed, agent, start.config or {}, log)

    def key(self, family: str) -> str:
        """Equal for requests that mean the same episode."""
        parts = (family, str(self.task_id), self.seed, self.agent, sorted(self.config.items()), self.log)
        return json.dumps(parts, default=str)


class PolicyRoutes:
    """/policies and /play of the serving environment, under ``prefix``."""

    def __init__(self, context: Context, prefix: str = "") -> None:
        self._settings = context.settings
        self._prefix = prefix
        self._cache = EpisodeCache()

    def routes(self) -> list[JsonRoute]:
        ids = {"type": "string", "enum": [str(task.task_id) for task in list_tasks(include_recorded=True)]}
        named = {"name": "task_id", "in": "query", "required": False, "schema": {**ids, "default": "1"}}
        return [
            JsonRoute(
                self._prefix + "/play",
                self.play,
                method="POST",
                summary="A whole episode of a policy of ours",
                request_schema=_play_schema(schemas.task_id_schema(), PLAYABLE, schemas.config_schema()),
                responses=documented(_played_schema(), 404, 429, 503),
            ),
            JsonRoute(
                self._prefix + "/policies",
                self.policies,
                method="GET",
                summary="Policies that /play knows",
                parameters=[named],
                responses=documented(_policies_schema()),
            ),
        ]

    async def play(self, request: Request) -> Response:
        body = await read_object(request, self._settings.max_body_bytes, self._settings.body_timeout_s)
        wanted = PlayRequest.parse(body, PLAYABLE, schemas.DEFAULT_TASK)
        task = get_task(wanted.task_id)
        task.config(wanted.config)
        return gzipped(request, await self._cache.get(wanted.key("serving"), partial(play_serving, wanted)))

    async def policies(self, request: Request) -> Response:
        named = request.query_params.get("task_id", str(schemas.DEFAULT_TASK))
        task = get_task(named)
        names = await asyncio.to_thread(available, task.task_id)
        return reply({"task_id": task.task_id, "policies": _described(names, PLAYABLE)})


class TrafficPolicyRoutes:
    """The same for the traffic controller, under ``prefix``."""

    def __init__(self, context: Context, prefix: str = "/traffic") -> None:
        self._settings = context.settings
        self._prefix = prefix
        self._cache = EpisodeCache()

    def routes(self) -> list[JsonRoute]:
        task_id: Schema = {"enum": [task.task_id for task in list_traffic_tasks()]}
        return [
            JsonRoute(
                self._prefix + "/play",
                self.play,
                method="POST",
                summary="A whole episode of a controller of ours",
                tags=["traffic"],
                request_schema=_play_schema(task_id, PLAYABLE_TRAFFIC, None),
                responses=documented(_played_schema(), 400, 429, 503),
            ),
            JsonRoute(
                self._prefix + "/policies",
                self.policies,
                method="GET",
                summary="Controllers that /play knows",
                tags=["traffic"],
                responses=documented(_policies_schema()),
            ),
        ]

    async def play(self, request: Request) -> Response:
        body = await read_object(request, self._settings.max_body_bytes, self._settings.body_timeout_s)
        if "config" in body:
            raise InvalidRequestError("config", body["config"], "left out: the task's own server is played")
        wanted = PlayRequest.parse(body, PLAYABLE_TRAFFIC, DEFAULT_TASK_ID)
        get_traffic_task(wanted.task_id)
        return gzipped(request, await self._cache.get(wanted.key("traffic"), partial(play_traffic, wanted)))

    async def policies(self, _request: Request) -> Response:
        return reply({"policies": _described(PLAYABLE_TRAFFIC, PLAYABLE_TRAFFIC)})


def gzipped(request: Request, body: bytes) -> JsonReply:
    """A compressed JSON answer, unpacked for a client that does not take it so."""
    vary = (b"vary", b"accept-encoding")
    accepted = request.headers.get("accept-encoding", "")
    if "gzip" in accepted and "gzip;q=0" not in accepted.replace(" ", ""):
        return JsonReply(body, headers=[(b"content-encoding", b"gzip"), vary])
    return JsonReply(gzip.decompress(body), headers=[vary])


# ---------------------------------------------------------------- playing


def play_serving(wanted: PlayRequest) -> Answer:
    """One episode of a serving task, as columns of one value per step; runs on a thread."""
    from agents.registry import make_agent
    from env.action import action_mask, from_row, snap
    from env.observation import to_array

    env = InferenceEnv(tables=served_tables())
    observation = env.reset(seed=wanted.seed, task_id=wanted.task_id, config=wanted.config)
    try:
        agent = make_agent(wanted.agent, env.task)
    except InvalidConfigError as error:
        raise UnknownPolicyError(f"there is no policy {wanted.agent!r} for task {env.task_id!r}: {error}") from error
    agent.reset(1)
    mask = action_mask(env.task.active_actions)
    seen, phases = [env.observation_dict()], []
    while not env.done:
        row = snap(agent.act(to_array(observation)[None, :]), mask)
        observation, _, _, info = env.step(from_row(row[0]))
        seen.append(env.observation_dict())
        phases.append(info["workload"]["phase"])
    grade = GraderModule().score(env.task_id, env.episode_log)
    return {
        **_episode(wanted, env.task_id, env.episode_log, seen),
        "config": env.config_dict(),
        "phase": phases,
        **grade,
    }


def play_traffic(wanted: PlayRequest) -> Answer:
    """One episode of a traffic task, as columns of one value per step; runs on a thread."""
    from agents.policies.traffic import TRAFFIC_AGENTS
    from env.traffic.env import TrafficEnv

    env = TrafficEnv()
    env.reset(seed=wanted.seed, task_id=str(wanted.task_id))
    agent = TRAFFIC_AGENTS[wanted.agent]()
    agent.reset(env.task, env.config, [wanted.seed])
    seen = [env.observation_dict()]
    while not env.done:
        flat = np.array([[float(seen[-1][name]) for name in STATE_FIELDS]])
        env.step(ACTION_NAMES[int(agent.act(flat)[0])])
        seen.append(env.observation_dict())
    grade = grade_traffic(env.task_id, env.episode_log)
    return {**_episode(wanted, env.task_id, env.episode_log, seen), "config": env.config_dict(), **grade}


def _episode(
    wanted: PlayRequest, task_id: TaskId, log: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]]
) -> Answer:
    episode: Answer = {
        "task_id": task_id,
        "seed": wanted.seed,
        "agent": wanted.agent,
        "steps": len(log),
        "observation": _columns(seen),
        "action": _columns([entry["action"] for entry in log]),
        "reward": [entry["reward"] for entry in log],
        "metrics": _columns([entry["metrics"] for entry in log]),
    }
    return {**episode, "episode_log": list(log)} if wanted.log else episode


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def available(task_id: TaskId) -> list[str]:
    """Policies that can play this task: a user's own task has no stored ones until it is calibrated.

    Raises :class:`UnknownTaskError`.
    """
    from agents.registry import AGENTS, make_agent

    task = get_task(task_id)
    found = []
    for name in PLAYABLE:
        if name not in AGENTS:
            continue
        try:
            make_agent(name, task)
        except InferenceGymError:
            continue
        found.append(name)
    return found


def _described(names: Sequence[str] | Mapping[str, str], texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "description": texts[name]} for name in names]


# ---------------------------------------------------------------- schemas


def _play_schema(task_id: Schema, playable: Mapping[str, str], config: Schema | None) -> Schema:
    properties: Schema = {
        "agent": {"type": "string", "enum": list(playable)},
        "task_id": schemas.nullable(task_id),
        "seed": schemas.nullable(schemas.SEED_SCHEMA),
        "log": {"type": "boolean", "default": False, "description": "add the episode log, as POST /grader takes it"},
    }
    if config is not None:
        properties["config"] = schemas.nullable(config)
    return {"type": "object", "additionalProperties": False, "required": ["agent"], "properties": properties}


def _played_schema() -> Schema:
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
            "score": {"type": "number", "minimum": 0, "maximum": 1},
        },
    }


def _policies_schema() -> Schema:
    text = {"type": "string"}
    policy = {"type": "object", "properties": {"name": text, "description": text}, "required": ["name", "description"]}
    return {
        "type": "object",
        "required": ["policies"],
        "properties": {"policies": {"type": "array", "items": policy}},
    }
