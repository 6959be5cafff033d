"""Language model as agent: any OpenAI-compatible endpoint controls either environment of a server over HTTP.

Where the model is comes from environment variables: ``INFERENCEGYM_LLM_URL`` (or ``OPENAI_BASE_URL``),
``INFERENCEGYM_LLM_KEY`` (or ``OPENAI_API_KEY``) and ``INFERENCEGYM_LLM_MODEL``. The model is told the rules and shown
what an agent sees; it answers with an action, through a tool call where the endpoint has tools, as JSON in its text
where it has none. A reply that holds no allowed action is sent back once with the reason; after that the knobs stay as
they are. Limits on requests, tokens and cost are kept: when one is reached, the last action is held to the end of the
episode, so that it has a score.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from agents.briefing import serving_briefing
from inferencegym.client.http import InferenceGymHTTP
from inferencegym.client.retries import Server
from inferencegym.errors import InvalidActionError, InvalidConfigError, RemoteError, refusal
from inferencegym.models import ACTION_FIELDS, NAIVE_ACTION, QuantTier, ServeAction
from inferencegym.tasks import TaskId
from inferencegym.traffic import ACCEPT_SHARES, ACTION_NAMES, STATE_FIELDS, parse_action

Action = dict[str, Any]
Message = dict[str, str]

TOOL_NAME: Final = "act"
NO_TOOLS_STATUSES: Final = (400, 404, 422, 501)
"""HTTP statuses after which a request with tools is tried without: the endpoint may not know them."""
CHARS_PER_TOKEN: Final = 4.0
"""Estimate for endpoints that do not report usage."""


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """Settings of the model: its endpoint, its prices (per million tokens), and the limits of one episode."""

    base_url: str
    model: str
    api_key: str | None = None
    tools: Literal["auto", "off"] = "auto"
    temperature: float = 0.0
    max_reply_tokens: int = 400
    history: int = 6
    """Earlier observations and answers that the model is shown."""
    every: int = 1
    """Steps between two requests to the model; its last action is held in between."""
    max_requests: int = 400
    max_tokens: int = 2_000_000
    max_cost: float = float("inf")
    input_price: float = 0.0
    output_price: float = 0.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise refusal("every", self.every, "at least 1")
        if not self.max_cost >= 0:
            raise refusal("max_cost", self.max_cost, "at least 0")
        for name, price in (("input_price", self.input_price), ("output_price", self.output_price)):
            if not 0 <= price < math.inf:
                raise refusal(name, price, "a finite number from 0")

    @classmethod
    def from_environment(cls, **changes: Any) -> LlmSettings:
        """Settings from environment variables; raises :class:`InvalidConfigError` naming one that is missing."""
        url = os.environ.get("INFERENCEGYM_LLM_URL") or os.environ.get("OPENAI_BASE_URL")
        key = os.environ.get("INFERENCEGYM_LLM_KEY") or os.environ.get("OPENAI_API_KEY")
        model = changes.pop("model", None) or os.environ.get("INFERENCEGYM_LLM_MODEL")
        if not url:
            raise InvalidConfigError(
                "set INFERENCEGYM_LLM_URL (such as http://localhost:8000/v1) to an OpenAI-compatible endpoint",
                "INFERENCEGYM_LLM_URL",
            )
        if not model:
            raise InvalidConfigError(
                "set INFERENCEGYM_LLM_MODEL to the name of a model at that endpoint", "INFERENCEGYM_LLM_MODEL"
            )
        return cls(base_url=url, model=model, api_key=key or None, **changes)


@dataclass(slots=True)
class LlmResult:
    """Result of an episode: score, actions, and the requests and tokens that the model took."""

    score: float = 0.0
    total_reward: float = 0.0
    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    invalid_replies: int = 0
    used_tools: bool = False
    stopped: str = ""
    """Limit that ended the requests to the model; empty if none did."""
    actions: list[Action] = field(default_factory=list)


# ---------------------------------------------------------------- the two environments


class Game(Protocol):
    """One episode of a family on a server, with its rules in words for a model."""

    rules: str
    schema: dict[str, Any]
    default: Action

    def reset(self, seed: int) -> dict[str, Any]:
        """Start an episode; the first observation."""
        ...

    def step(self, action: Action) -> tuple[dict[str, Any], float, bool]:
        """Take one step: observation, reward, done."""
        ...

    def read(self, answer: Mapping[str, Any]) -> Action:
        """An allowed action from an object of a reply; raises :class:`InvalidActionError`."""
        ...

    def score(self) -> float:
        """Grade of the finished episode, in [0, 1]."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def _unlisted(task_id: TaskId, url: str, listed: Sequence[Mapping[str, Any]]) -> InvalidConfigError:
    return InvalidConfigError(f"task {task_id!r} is not on {url}: it has {[task['id'] for task in listed]}", "task_id")


class ServingGame:
    """Episode of a serving task."""

    def __init__(self, url: str, task_id: TaskId = 1, api_key: str | None = None) -> None:
        self._client = InferenceGymHTTP(url, api_key=api_key)
        listed = self._client.get("/tasks?all=true")["tasks"]
        found = next((task for task in listed if str(task["id"]) == str(task_id)), None)
        if found is None:
            self.close()
            raise _unlisted(task_id, url, listed)
        self._task = found
        active = {name: ACTION_FIELDS[name] for name in found["active_actions"]}
        self.default: Action = NAIVE_ACTION.to_dict()
        self.schema = {"type": "object", "properties": {n: _json_schema(n) for n in active}, "required": list(active)}
        self.rules = serving_briefing(found, self._client.get("/info")["rules"])

    def reset(self, seed: int) -> dict[str, Any]:
        return _rounded(vars(self._client.reset(seed, self._task["id"])))

    def step(self, action: Action) -> tuple[dict[str, Any], float, bool]:
        observation, reward, done, _ = self._client.step(action)
        return _rounded(vars(observation)), reward, done

    def read(self, answer: Mapping[str, Any]) -> Action:
        known = {name: _plain(name, answer[name]) for name in self.schema["properties"] if name in answer}
        if not known:
            raise InvalidActionError("action", dict(answer), "an object with " + ", ".join(self.schema["properties"]))
        action = ServeAction.from_dict({**self.default, **known}).to_dict()
        # A knob that the next answer leaves out stays as it is.
        self.default = action
        return action

    def score(self) -> float:
        return float(self._client.grade()["score"])

    def close(self) -> None:
        self._client.close()


class TrafficGame:
    """Episode of a traffic task; ``prefix`` is empty where the server serves this environment at its root."""

    def __init__(
        self, url: str, task_id: str = "task_easy", api_key: str | None = None, prefix: str = "/traffic"
    ) -> None:
        self._server = Server(url, api_key)
        self._prefix = prefix
        listed = self._server.get(f"{prefix}/tasks")["tasks"]
        found = next((task for task in listed if task["id"] == task_id), None)
        if found is None:
            self.close()
            raise _unlisted(task_id, url, listed)
        self._task_id = task_id
        self._session_id = ""
        self._steps = 0
        self._score = 0.0
        self.default: Action = {"action": ACTION_NAMES[0]}
        self.schema = {
            "type": "object",
            "properties": {"action": {"type": "string", "enum": list(ACTION_NAMES)}},
            "required": ["action"],
        }
        self.rules = self._rules = "\n".join(
            (
                "You control admission to one server: each step you choose the share of requests to let in.",
                found["description"],
                f"Each step is one second of an episode of {found['episode_length']}.",
                "Actions: " + ", ".join(f"{name} lets {share:.0%} in" for name, share in ACCEPT_SHARES.items()) + ".",
                "Too much load at once crashes the server and ends the episode; load beyond capacity fills its queue.",
                "What you see:",
                *(f"- {f.name}: {f.description} ({f.unit})" for f in STATE_FIELDS.values()),
            )
        )

    def reset(self, seed: int) -> dict[str, Any]:
        answer = self._server.post(f"{self._prefix}/reset", {"task_id": self._task_id, "seed": seed})
        self._session_id, self._steps = answer["session_id"], 0
        self.rules = f"{self._rules}\nThe server: {answer['config']}."
        return dict(answer["state"])

    def step(self, action: Action) -> tuple[dict[str, Any], float, bool]:
        body = {"session_id": self._session_id, "action": action, "step": self._steps + 1}
        answer = self._server.post(f"{self._prefix}/step", body)
        self._steps += 1
        self._score = float(answer["info"].get("final_score", 0.0))
        return answer["state"], answer["reward"], answer["done"]

    def read(self, answer: Mapping[str, Any]) -> Action:
        name = answer.get("action")
        self.default = {"action": parse_action(name if isinstance(name, str) else answer).value}
        return self.default

    def score(self) -> float:
        return self._score

    def close(self) -> None:
        self._server.close()


def _json_schema(name: str) -> dict[str, Any]:
    f = ACTION_FIELDS[name]
    schema: dict[str, Any] = {"description": f"{f.description}; {f.allowed()}"}
    if name == "prefill_disagg":
        return {**schema, "type": "boolean"}
    if f.choices is not None:
        return {**schema, "type": "integer", "enum": list(f.choices)}
    return {**schema, "type": "integer" if name == "batch_size" else "number", "minimum": f.low, "maximum": f.high}


def _plain(name: str, value: object) -> object:
    """A value as a model may write it: ``"64"``, ``"true"``, ``"int8"``."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if name == "quant_tier" and text.upper() in QuantTier.__members__:
        return text.upper()
    try:
        return json.loads(text.lower())
    except ValueError:
        return value


def _rounded(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Four significant digits are enough for a reader, and cheaper."""
    return {
        name: [float(f"{x:.4g}") for x in value] if isinstance(value, list) else float(f"{value:.4g}")
        for name, value in observation.items()
    }


# ---------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a model: objects that may be the action, the best guess first, and the tokens used."""

    candidates: list[Mapping[str, Any]]
    text: str
    prompt_tokens: int
    completion_tokens: int


class ChatModel:
    """A chat completions endpoint, used with tools unless it refuses them."""

    def __init__(self, settings: LlmSettings) -> None:
        self._settings = settings
        self._server = Server(settings.base_url, settings.api_key, settings.timeout_s)
        self.tools = settings.tools == "auto"

    def ask(self, messages: list[Message], schema: Mapping[str, Any]) -> Reply:
        """One reply. Raises :class:`RemoteError` when the endpoint gives none."""
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": messages,
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_reply_tokens,
        }
        if not self.tools:
            return self._reply(body)
        function = {"name": TOOL_NAME, "description": "Set the action of the next step.", "parameters": dict(schema)}
        tools = {"tools": [{"type": "function", "function": function}]}
        try:
            return self._reply({**body, **tools})
        except RemoteError as error:
            if error.status not in NO_TOOLS_STATUSES:
                raise
            self.tools = False
            return self._reply(body)

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _reply(self, body: Mapping[str, Any]) -> Reply:
        answer = self._server.post("/chat/completions", body)
        try:
            message = answer["choices"][0]["message"]
            text = message.get("content") or ""
            calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RemoteError(f"{self._server.url}: the answer is not a chat completion ({error!r})") from error
        text = text if isinstance(text, str) else json.dumps(text)
        candidates = [found for call in calls for found in objects_in(call)]
        # A bare word is an answer too, where actions are words.
        candidates += objects_in(text) or [{"action": text.strip(" \n.`'\"")}]
        usage = answer.get("usage") or {}
        sent = sum(len(message["content"]) for message in body["messages"])
        got = len(text) + sum(len(str(call)) for call in calls)
        return Reply(
            candidates,
            text,
            int(usage.get("prompt_tokens") or sent / CHARS_PER_TOKEN),
            int(usage.get("completion_tokens") or got / CHARS_PER_TOKEN),
        )


def objects_in(text: object) -> list[Mapping[str, Any]]:
    """Every JSON object in a text, the last first: models reason before they answer.

    Text around it, code fences, single quotes, trailing commas and Python's ``True`` are forgiven. An object wrapped as
    ``{"action": {...}}`` is unwrapped.
    """
    if isinstance(text, Mapping):
        return [_unwrapped(text)]
    found = [_loaded(part) for part in _braced(str(text))]
    return [_unwrapped(one) for one in reversed(found) if isinstance(one, dict) and one]


def _unwrapped(found: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("action", "arguments", "parameters"):
        if isinstance(found.get(key), Mapping):
            return _unwrapped(found[key])
    return found


def _braced(text: str) -> Iterator[str]:
    """Outermost stretches between matching braces."""
    depth, start = 0, 0
    for i, char in enumerate(text):
        if char == "{":
            if depth == 0:
                start = i
            depth += 1
        elif char == "}" and depth > 0:
            depth -= 1
            if depth == 0:
                yield text[start : i + 1]


_PYTHON_WORDS: Final = (("True", "true"), ("False", "false"), ("None", "null"))


def _loaded(part: str) -> object:
    try:
        return json.loads(part)
    except ValueError:
        fixed = re.sub(r",\s*([}\]])", r"\1", part.replace("'", '"'))
        for python, plain in _PYTHON_WORDS:
            fixed = re.sub(rf"\b{python}\b", plain, fixed)
    try:
        return json.loads(fixed)
    except ValueError:
        return None


# ---------------------------------------------------------------- the agent


class LlmAgent:
    """Agent that asks a model for actions, within the limits of its settings."""

    def __init__(self, settings: LlmSettings) -> None:
        self._settings = settings
        self._model = ChatModel(settings)

    def close(self) -> None:
        """Close the connection to the model."""
        self._model.close()

    def run_episode(self, game: Game, seed: int = 42) -> LlmResult:
        """Run one episode to its end."""
        result = LlmResult()
        seen = game.reset(seed)
        talk: list[Message] = []
        action, reward, done = game.default, 0.0, False
        while not done:
            if not result.stopped and result.steps % self._settings.every == 0:
                action = self._decide(game, seen, reward, talk, result) or action
            seen, reward, done = game.step(action)
            result.actions.append(action)
            result.steps += 1
            result.total_reward += reward
        result.score = game.score()
        result.used_tools = self._model.tools
        return result

    def _decide(
        self, game: Game, seen: dict[str, Any], reward: float, talk: list[Message], result: LlmResult
    ) -> Action | None:
        """The model's action, or None if it gave none that is allowed."""
        ask = json.dumps({"step": result.steps, "last_reward": round(reward, 4), "observation": seen})
        attempt: list[Message] = [{"role": "user", "content": ask}]
        for _ in range(2):
            if self._limit_reached(result):
                return None
            rules = (
                f"{game.rules}\nAnswer with one JSON object of this schema and nothing else: {json.dumps(game.schema)}"
            )
            reply = self._model.ask([{"role": "system", "content": rules}, *talk, *attempt], game.schema)
            self._account(reply, result)
            problem = "there was no JSON object in the reply"
            for candidate in reply.candidates:
                try:
                    action = game.read(candidate)
                except InvalidActionError as error:
                    problem = str(error)
                    continue
                talk += [attempt[0], {"role": "assistant", "content": json.dumps(action)}]
                del talk[: max(0, len(talk) - 2 * self._settings.history)]
                return action
            result.invalid_replies += 1
            attempt += [
                {"role": "assistant", "content": reply.text[:500] or "(no text)"},
                {"role": "user", "content": f"That could not be used: {problem}. Answer with one JSON object only."},
            ]
        return None

    def _account(self, reply: Reply, result: LlmResult) -> None:
        result.requests += 1
        result.prompt_tokens += reply.prompt_tokens
        result.completion_tokens += reply.completion_tokens
        prices = self._settings.input_price, self._settings.output_price
        result.cost += (reply.prompt_tokens * prices[0] + reply.completion_tokens * prices[1]) / 1e6

    def _limit_reached(self, result: LlmResult) -> bool:
        limits = {
            "max_requests": result.requests >= self._settings.max_requests,
            "max_tokens": result.prompt_tokens + result.completion_tokens >= self._settings.max_tokens,
            "max_cost": result.cost >= self._settings.max_cost,
        }
        result.stopped = next((name for name, reached in limits.items() if reached), "")
        return bool(result.stopped)
