"""NeMo Gym resources server: episodes on a server of the fleet, played with three tools and paid the grade.

Rows of the data set (``rows.py`` writes them) name task and seed. See README.md in this folder.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import ConfigDict, Field, ValidationError

from agents.integrations.nemo_gym.rows import ARGUMENTS
from agents.integrations.trl import FleetTools
from inferencegym.client.http import DEFAULT_URL
from inferencegym.errors import InferenceGymError


class FleetConfig(BaseResourcesServerConfig):  # type: ignore[misc]
    """Configuration: which server plays the episodes."""

    base_url: str = DEFAULT_URL


class FleetSeedRequest(BaseSeedSessionRequest):  # type: ignore[misc]
    """A row: which episode is played; its other columns are not for the environment."""

    model_config = ConfigDict(extra="ignore")

    task_id: int | str
    seed: int
    episode_length: int | None = None


class FleetVerifyRequest(BaseVerifyRequest):  # type: ignore[misc]
    """A row with what the model did."""

    model_config = ConfigDict(extra="allow")


class FleetVerifyResponse(BaseVerifyResponse):  # type: ignore[misc]
    """The reward and whether the episode was played to its end."""

    model_config = ConfigDict(extra="allow")

    finished: bool


class FleetResourcesServer(SimpleResourcesServer):  # type: ignore[misc]
    """One episode for each of Gym's sessions, until it is verified."""

    config: FleetConfig
    episodes: dict[str, Any] = Field(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        """Gym's own routes and one for every tool."""
        app: FastAPI = super().setup_webserver()
        for name in ARGUMENTS:
            app.post(f"/{name}")(self._endpoint(name))
        return app

    # Gym awaits none of these itself, and the client waits for its server: FastAPI runs them on threads.
    def seed_session(self, request: Request, body: FleetSeedRequest) -> BaseSeedSessionResponse:
        """Start the episode of a row."""
        episode = FleetTools(self.config.base_url)
        episode.reset(body.task_id, body.seed, body.episode_length)
        self.episodes[request.session[SESSION_ID_KEY]] = episode
        return BaseSeedSessionResponse()

    def verify(self, request: Request, body: FleetVerifyRequest) -> FleetVerifyResponse:
        """Pay the grade; the session has no episode afterwards. One without an episode is paid nothing."""
        episode = self.episodes.pop(request.session[SESSION_ID_KEY], None)
        finished = episode is not None and episode.done
        reward = 0.0 if episode is None else episode.get_reward()
        return FleetVerifyResponse(**body.model_dump(), reward=reward, finished=finished)

    def _endpoint(self, name: str) -> Any:
        def call(request: Request, body: dict[str, Any] | None = None) -> dict[str, str]:
            episode = self.episodes.get(request.session[SESSION_ID_KEY])
            if episode is None:
                return {"error": "no episode is being played: POST /seed_session starts one"}
            try:
                given = ARGUMENTS[name].model_validate(body or {}).model_dump(exclude_unset=True)
                return {"result": getattr(episode, name)(**given)}
            # The agent hands the answer to the model as it is, whatever its status.
            except ValidationError as error:
                reasons = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
                return {"error": "; ".join(reasons)}
            except InferenceGymError as error:
                return {"error": str(error)}

        return call


if __name__ == "__main__":
    FleetResourcesServer.run_webserver()
