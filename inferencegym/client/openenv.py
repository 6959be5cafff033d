"""OpenEnv clients of both environments, with reconnection: a lost connection loses no step (extra ``openenv``).

An episode belongs to a session on the server and not to the socket. After a loss these clients open another socket,
resume the episode and send the unanswered step again with its number; the server plays it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from inferencegym.client.http import caller_headers
from inferencegym.client.openenv_types import (
    InferenceGymAction,
    InferenceGymObservation,
    InferenceGymState,
    TrafficControllerAction,
    TrafficControllerObservation,
    TrafficControllerState,
    without_gradio,
)
from inferencegym.client.retries import RETRY_S
from inferencegym.errors import InvalidActionError
from inferencegym.messages import read
from inferencegym.models import ServeAction, ServeActionMessage
from inferencegym.traffic import TrafficAction, parse_action

# Imported after the types, whose module says what to install if OpenEnv, and with it websockets, is missing.
with without_gradio():
    from openenv.core import EnvClient
    from openenv.core.client_types import StepResult

    from inferencegym.client.openenv_reconnection import Episode, make_calls


def _dumped(action: InferenceGymAction | TrafficControllerAction) -> dict[str, Any]:
    # The server fills in missing knobs, because it knows the knobs in force.
    excluded = set() if action.metadata else {"metadata"}
    return dict(action.model_dump(exclude=excluded, exclude_unset=True))


class EpisodeClient(EnvClient):  # type: ignore[misc]
    """Base of both clients: sessions, numbered steps, reconnection and the errors of local use.

    ``reset`` takes ``task_id``, ``seed``, ``config``, ``episode_id`` (a random one is made if it is left out),
    ``info=True`` (every observation carries POST /step's info) and ``resume=True`` (continue ``episode_id``). Errors
    are the same as in local use (:mod:`inferencegym.errors`). All other arguments are those of OpenEnv's ``EnvClient``;
    ``headers`` has by default the API key in the environment variable INFERENCEGYM_API_KEY and the client's id in
    INFERENCEGYM_CLIENT_ID.
    """

    retry_s: float = RETRY_S
    """Seconds of further attempts where the server or its store does not answer; 0 makes the first failure an error.

    A server that has not noticed a lost socket still counts it, so a full server is tried again after a loss.
    """

    action_type: ClassVar[type[Any]]
    observation_type: ClassVar[type[Any]]
    state_type: ClassVar[type[Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"headers": caller_headers(), **kwargs})
        self.episode = Episode(self)
        """The episode and its connection, shared with the synchronous wrapper."""
        # Made now, as OpenEnv runs plain synchronous calls on the event loop of the first wrapper that it knows of.
        self._synchronous = SyncEpisodeClient(super().sync(), self.episode)

    @property
    def episode_id(self) -> str | None:
        """Id of the episode, which is the session id for GET /state and POST /grader; None before the first reset."""
        return self.episode.id

    def connect(self) -> Any:
        """Open the socket; to be awaited in asynchronous code."""
        return make_calls(self.episode.connect(super(), super().connect))

    def __enter__(self) -> Self:
        make_calls(self.episode.connect(super(), super().__enter__))
        return self

    def reset(self, **kwargs: Any) -> Any:
        """Start an episode; its first result, to be awaited in asynchronous code."""
        return make_calls(self.episode.reset(super(), kwargs))

    def step(self, action: Any, **kwargs: Any) -> Any:
        """Take one step; its result, to be awaited in asynchronous code."""
        return make_calls(self.episode.step(super(), action, kwargs))

    def state(self) -> Any:
        """State of the episode, to be awaited in asynchronous code."""
        return make_calls(self.episode.state(super()))

    def disconnect(self) -> Any:
        """Close the socket; the next call opens another and continues the episode."""
        self.episode.has_socket = False
        return super().disconnect()

    def close(self) -> Any:
        """Close the socket, and stop the container or process that the client was made with."""
        self.episode.has_socket = False
        return super().close()

    def sync(self) -> SyncEpisodeClient:
        """The same client for synchronous code."""
        return self._synchronous

    def numbered(self, action: Any, number: int) -> Any:
        """The action with the number of its step; sent again, it is not played twice."""
        return self.action_type(**{**self._step_payload(action), "metadata": {"step": number}})

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        seen = self.observation_type(**{**payload["observation"], "reward": reward, "done": done})
        return StepResult(observation=seen, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> Any:
        return self.state_type(**payload)


class SyncEpisodeClient:
    """Synchronous wrapper of a client, from its ``sync()``: OpenEnv's ``SyncEnvClient``, with reconnection."""

    def __init__(self, plain: Any, episode: Episode) -> None:
        self._plain = plain
        self._episode = episode

    def connect(self) -> SyncEpisodeClient:
        """Open the socket."""
        make_calls(self._episode.connect(self._plain, self._plain.connect))
        return self

    def reset(self, **kwargs: Any) -> Any:
        """Start an episode; its first result."""
        return make_calls(self._episode.reset(self._plain, kwargs))

    def step(self, action: Any, **kwargs: Any) -> Any:
        """Take one step; its result."""
        return make_calls(self._episode.step(self._plain, action, kwargs))

    def state(self) -> Any:
        """State of the episode."""
        return make_calls(self._episode.state(self._plain))

    def new_session(self) -> SyncEpisodeClient:
        """Another connected client of the same server, closed with this one."""
        plain = self._plain.new_session()
        return SyncEpisodeClient(plain, plain.async_client.episode)

    def disconnect(self) -> None:
        """Close the socket; the next call opens another and continues the episode."""
        self._episode.has_socket = False
        self._plain.disconnect()

    def close(self) -> None:
        """Close the sockets, and stop the container or process that the client was made with."""
        self._episode.has_socket = False
        self._plain.close()

    def __enter__(self) -> SyncEpisodeClient:
        return self.connect()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Other attributes are those of OpenEnv's wrapper, which passes on to the client."""
        return getattr(self._plain, name)


class InferenceGymEnv(EpisodeClient):
    """OpenEnv client of the serving fleet.

    >>> async with InferenceGymEnv(base_url="http://localhost:7860") as env:  # doctest: +SKIP
    ...     result = await env.reset(task_id=1, seed=7)
    ...     result = await env.step(InferenceGymAction(batch_size=128))

    Without an event loop: ``with InferenceGymEnv(base_url=...).sync() as env``. An action may also be a ``ServeAction``
    or a mapping.
    """

    action_type = InferenceGymAction
    observation_type = InferenceGymObservation
    state_type = InferenceGymState

    def _step_payload(self, action: InferenceGymAction | ServeAction | Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(action, ServeAction):
            return ServeAction.from_dict(action.to_dict()).to_dict()
        if isinstance(action, InferenceGymAction):
            return _dumped(action)
        return read(ServeActionMessage, action, InvalidActionError, whole="action").model_dump(exclude_unset=True)


class TrafficControllerEnv(EpisodeClient):
    """OpenEnv client of the traffic controller; ``base_url`` is the server's address with ``/traffic`` at its end.

    An action may also be a :class:`~inferencegym.traffic.TrafficAction`, its name or a mapping.
    """

    action_type = TrafficControllerAction
    observation_type = TrafficControllerObservation
    state_type = TrafficControllerState

    def _step_payload(
        self, action: TrafficControllerAction | TrafficAction | str | Mapping[str, Any]
    ) -> dict[str, Any]:
        if isinstance(action, TrafficControllerAction):
            return _dumped(action)
        return {"action": parse_action(action).value}
