"""Player for any OpenAI-compatible endpoint: a language model plays one episode of a server (``inferencegym llm``).

The model is briefed, then answers each state with knobs that hold for some seconds: by a tool call where the endpoint
has tools, as JSON in its text where it has none. An answer that is no valid action is named in the next state, and the
episode runs on as it is. ``INFERENCEGYM_LLM_URL`` (or ``OPENAI_BASE_URL``), ``INFERENCEGYM_LLM_KEY`` (or
``OPENAI_API_KEY``) and ``INFERENCEGYM_LLM_MODEL`` say where the model is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

from agents.answers import last_object, spoken
from agents.briefing import GIVEN, Interface
from agents.integrations.text_episode import TextEpisode
from inferencegym.client.http import caller_headers
from inferencegym.client.retries import Server
from inferencegym.errors import InvalidActionError, InvalidConfigError, RemoteError
from inferencegym.models import ACTION_FIELDS
from inferencegym.tasks import TaskId
from inferencegym.traffic import ACCEPT_SHARES, ACTION_NAMES, STATE_FIELDS, parse_action

Message = dict[str, Any]

TOOL_NAME: Final = "act"
CALL_OR_TEXT: Final = Interface(
    f"Answer each state with the knobs to set, what is left out stays as it is: as a call of `{TOOL_NAME}` where you "
    "have it, else as one JSON object. {steps} answers are left.",
    GIVEN,
)
HISTORY: Final = 6
"""Earlier turns that the model is shown."""


# ---------------------------------------------------------------- the two environments


class Episode(Protocol):
    """One episode of a family on a server, played by texts."""

    briefing: str
    schema: dict[str, Any]
    """JSON schema of an answer."""
    invalid_answers: int

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        ...

    @property
    def score(self) -> float | None:
        """Grade in [0, 1] once the episode is over."""
        ...

    def answer(self, text: str) -> str:
        """Play some seconds with an answer; returns what the model sees next."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class ServingText(TextEpisode):
    """Episode of a serving task; an answer holds for ``every`` seconds."""

    interface = CALL_OR_TEXT

    def __init__(self, url: str, task_id: TaskId = 1, seed: int = 42, every: int = 10) -> None:
        super().__init__(url, task_id, seed, {"hold": every})
        self.schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: _json_schema(name) for name in self.task["active_actions"]},
        }
        if "max_replicas" in self.task:
            self.schema["properties"]["replicas"] = {
                "type": "integer",
                "minimum": 1,
                "maximum": self.task["max_replicas"],
            }


class TrafficText:
    """Episode of a traffic task; an answer holds for ``every`` seconds."""

    def __init__(self, url: str, task_id: str = "task_easy", seed: int = 42, every: int = 1) -> None:
        self._server = Server(url, caller_headers())
        listed = self._server.get("/traffic/tasks")["tasks"]
        task = next((task for task in listed if task["id"] == task_id), None)
        if task is None:
            self.close()
            known = [task["id"] for task in listed]
            raise InvalidConfigError(f"task {task_id!r} is not on {url}: it has {known}", "task_id")
        answer = self._server.post("/traffic/reset", {"task_id": task_id, "seed": seed})
        self._session_id, self._every, self._steps = answer["session_id"], every, 0
        self._action = ACTION_NAMES[0]
        self.done, self.score, self.invalid_answers = False, None, 0
        self.schema = {
            "type": "object",
            "properties": {"action": {"type": "string", "enum": list(ACTION_NAMES)}},
            "required": ["action"],
        }
        self.briefing = "\n".join(
            (
                "You control admission to one server: you choose the share of requests to let in.",
                task["description"],
                f"An episode lasts {task['episode_length']} seconds; a choice holds for {every} of them.",
                "Actions: " + ", ".join(f"{name} lets {share:.0%} in" for name, share in ACCEPT_SHARES.items()) + ".",
                "Too much load at once crashes the server and ends the episode; load beyond capacity fills its queue.",
                f"The server: {answer['config']}.",
                "What you see:",
                *(f"- {f.name}: {f.description} ({f.unit})" for f in STATE_FIELDS.values()),
                'Answer each state with one JSON object: {"action": NAME}.',
                f"State: {json.dumps(answer['state'])}",
            )
        )

    def answer(self, text: str) -> str:
        """Play the next seconds with an answer, which may be the bare name of an action."""
        found, problem = last_object(text), ""
        try:
            self._action = parse_action(found or spoken(text).strip(" \n.`'\"")).value
        except InvalidActionError as error:
            problem = f"Your last answer was not used ({error}).\n"
            self.invalid_answers += 1
        gained, played = 0.0, 0
        while played < self._every and not self.done:
            body = {"session_id": self._session_id, "action": {"action": self._action}, "step": self._steps + 1}
            step = self._server.post("/traffic/step", body)
            self._steps, played, gained = self._steps + 1, played + 1, gained + step["reward"]
            self.done, self.score = step["done"], step["info"].get("final_score")
        return f"{problem}These {played} seconds were rewarded {gained:.3f}.\nState: {json.dumps(step['state'])}"

    def close(self) -> None:
        """Close the connection."""
        self._server.close()


def _json_schema(name: str) -> dict[str, Any]:
    f = ACTION_FIELDS[name]
    schema: dict[str, Any] = {"description": f"{f.description}; {f.allowed()}"}
    if name == "prefill_disagg":
        return {**schema, "type": "boolean"}
    if f.choices is not None:
        return {**schema, "type": "integer", "enum": list(f.choices)}
    return {**schema, "type": "integer" if name == "batch_size" else "number", "minimum": f.low, "maximum": f.high}


# ---------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of a model: what it did, as text, and what it thought before, where the endpoint tells."""

    answer: str
    thoughts: str
    call_id: str | None
    """Id of the tool call that ``answer`` holds the arguments of; None for a text."""
    cut_off: bool
    """True if the reply ended at the limit on its tokens."""
    prompt_tokens: int
    completion_tokens: int

    def turn(self, seen: str) -> tuple[Message, Message]:
        """The reply and what followed, as messages of the conversation."""
        if self.call_id is None:
            said = spoken(self.answer).strip() or "(no answer)"
            return {"role": "assistant", "content": said}, {"role": "user", "content": seen}
        call = {"id": self.call_id, "type": "function", "function": {"name": TOOL_NAME, "arguments": self.answer}}
        return (
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": self.call_id, "content": seen},
        )


class ChatModel:
    """Chat completions of a model at an endpoint.

    ``max_tokens`` bounds a reply, thinking included; without ``temperature`` the endpoint's own counts. Tools, and the
    old name of the bound, are given up where the endpoint refuses them.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        max_tokens: int = 4096,
        temperature: float | None = None,
        tools: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._server = Server(base_url, headers, timeout_s)
        self.name = model
        self._settings: dict[str, Any] = {"model": model}
        if temperature is not None:
            self._settings["temperature"] = temperature
        self.max_tokens = max_tokens
        self._bound = "max_tokens"
        self.tools = tools

    @classmethod
    def from_environment(cls, model: str | None = None, **settings: Any) -> ChatModel:
        """The model that environment variables name; raises :class:`InvalidConfigError` naming one that is missing."""
        url = os.environ.get("INFERENCEGYM_LLM_URL") or os.environ.get("OPENAI_BASE_URL")
        key = os.environ.get("INFERENCEGYM_LLM_KEY") or os.environ.get("OPENAI_API_KEY")
        model = model or os.environ.get("INFERENCEGYM_LLM_MODEL")
        if not url:
            raise InvalidConfigError(
                "set INFERENCEGYM_LLM_URL (such as http://localhost:8000/v1) to an OpenAI-compatible endpoint",
                "INFERENCEGYM_LLM_URL",
            )
        if not model:
            raise InvalidConfigError(
                "set INFERENCEGYM_LLM_MODEL to the name of a model at that endpoint", "INFERENCEGYM_LLM_MODEL"
            )
        return cls(url, model, key or None, **settings)

    def ask(self, messages: list[Message], schema: Mapping[str, Any]) -> Reply:
        """One reply. Raises :class:`RemoteError` when the endpoint gives none."""
        body = {**self._settings, self._bound: self.max_tokens, "messages": messages}
        if self.tools:
            told = "Set what the next seconds are played with; what is left out stays as it is."
            function = {"name": TOOL_NAME, "description": told, "parameters": dict(schema)}
            body["tools"] = [{"type": "function", "function": function}]
        try:
            return self._reply(self._server.post("/chat/completions", body))
        except RemoteError as error:
            if not self._does_without(str(error)):
                raise
        return self.ask(messages, schema)

    def close(self) -> None:
        """Close the connection."""
        self._server.close()

    def _does_without(self, refusal: str) -> bool:
        """Give up what the endpoint refused, if there is something to give up."""
        # Models of OpenAI that think know the bound by its new name only, many other endpoints by its old one.
        if "max_completion_tokens" in refusal and self._bound == "max_tokens":
            self._bound = "max_completion_tokens"
        elif "tool" in refusal.lower() and self.tools:
            self.tools = False
        else:
            return False
        return True

    def _reply(self, answer: Mapping[str, Any]) -> Reply:
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            calls = [(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RemoteError(f"{self._server.url}: the answer is not a chat completion ({error!r})") from error
        called = [found for _, arguments in calls if (found := last_object(arguments)) is not None]
        usage = answer.get("usage") or {}
        return Reply(
            # Several calls of one reply set knobs together.
            json.dumps(dict(chain.from_iterable(map(dict.items, called)))) if called else message.get("content") or "",
            message.get("reasoning_content") or message.get("reasoning") or "",
            calls[0][0] if called else None,
            choice.get("finish_reason") == "length",
            usage.get("prompt_tokens", 0),
            usage.get("completion_tokens", 0),
        )


# ---------------------------------------------------------------- the play


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply, and what the model saw after it."""

    reply: Reply
    seen: str


def play(model: ChatModel, episode: Episode) -> Iterator[Turn]:
    """Play an episode to its end, turn by turn."""
    briefing: Message = {"role": "user", "content": episode.briefing}
    turns: list[tuple[Message, Message]] = []
    while not episode.done:
        reply = model.ask([briefing, *chain.from_iterable(turns[-HISTORY:])], episode.schema)
        seen = episode.answer(reply.answer)
        if reply.cut_off:
            seen = f"Your last answer was cut off at {model.max_tokens} tokens.\n{seen}"
        turns.append(reply.turn(seen))
        yield Turn(reply, seen)
