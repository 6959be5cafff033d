"""POST /plan: the GPUs and settings that serve a visitor's request log within objectives.

The log is not kept after the answer. A plan is made in a process of its own (:mod:`server.net.jobs`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from inferencegym.messages import WHOLE
from inferencegym.tasks import table_index
from ops.prices import PriceList
from server.api.request_log import LogRequest, LogRoutes
from server.api.route import Route
from simulator.hardware.catalogue import hardware_names

_PRECISIONS: Final = tuple(dict.fromkeys(tier for entry in table_index().values() for tier in entry["tiers"]))
_OBJECTIVE: Final = "^(ttft|tpot)_(p50|p90|p95|p99|mean)=[1-9][0-9]{0,5}([.][0-9]{1,3})?$"


class PlanRequest(LogRequest):
    """Body of POST /plan."""

    objectives: Annotated[
        list[Annotated[str, Field(pattern=_OBJECTIVE)]],
        Field(min_length=1, max_length=10, description="bounds in ms, such as ttft_p99=500 and tpot_p50=50"),
    ]
    share_met: Annotated[
        Annotated[float, Field(ge=0.5, le=0.9999)] | None,
        Field(description="share of first tokens within the objective; by default that of its percentile"),
    ] = None
    model: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None,
        Field(description="model to serve, such as llama-3.1-8b; required if the hardware has tables of several"),
    ] = None
    hardware: Annotated[
        Annotated[list[Literal[*hardware_names()]], Field(min_length=1)] | None,  # type: ignore[valid-type]
        Field(description="tables or cards to plan with; by default all"),
    ] = None
    precisions: Annotated[
        Annotated[list[Literal[*_PRECISIONS]], Field(min_length=1)] | None,  # type: ignore[valid-type]
        Field(description="precisions that may be used; by default all of a table"),
    ] = None
    drafts: Annotated[
        bool | None, Field(description="whether settings may draft tokens, with a draft model (default false)")
    ] = None
    replicas_min: Annotated[
        Annotated[int, Field(ge=1, le=256), WHOLE] | None, Field(description="fewest replicas of a plan (default 1)")
    ] = None
    prices: Annotated[
        PriceList | None, Field(description="prices per GPU hour by card; without them, plans are ordered by GPUs")
    ] = None


class PlanRoutes(LogRoutes):
    """/plan of the serving fleet at one prefix."""

    def routes(self) -> list[Route]:
        return [self._log("/plan", self.plan, "GPUs and settings for your request log", PlanAnswer)]

    async def plan(self, request: Request, body: PlanRequest) -> Response:
        return await self._answer(request, "plan", body)


class PlanAnswer(BaseModel):
    """Answer of POST /plan: the cheapest plan of each card first, with notes."""

    log: dict[str, Any]
    read: dict[str, Any]
    model: str
    objectives: list[str]
    share_met: float
    plans: list[dict[str, Any]]
    front: list[dict[str, Any]]
    tried: list[dict[str, Any]]
    growth: list[dict[str, Any]]
    adaptive: list[dict[str, Any]]
    adapting_saves_gpus: int
    autoscaling: list[dict[str, Any]]
    refused: dict[str, str]
    notes: list[str]
    export: dict[str, str]
