"""POST /plan: the GPUs and settings that serve a visitor's request log within objectives.

The log is not kept after the answer. Plans are made one at a time, in a process of their own.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from agents.shadow.prices import PriceList
from inferencegym.messages import plain_schema
from inferencegym.tasks import table_index
from server.api.request_log import LogRequest, LogRoutes
from server.net.json_io import JsonRoute
from simulator.catalogue import hardware_names

_PRECISIONS: Final = tuple(dict.fromkeys(tier for entry in table_index().values() for tier in entry["tiers"]))
_OBJECTIVE: Final = "^(ttft|tpot)_(p50|p90|p95|p99|mean)=[1-9][0-9]{0,5}([.][0-9]{1,3})?$"


class PlanRequest(LogRequest):
    """Body of POST /plan."""

    objectives: Annotated[
        list[Annotated[str, Field(pattern=_OBJECTIVE)]],
        Field(min_length=1, max_length=10, description="bounds in ms, as ttft_p99=500 and tpot_p50=50"),
    ]
    share_met: Annotated[
        Annotated[float, Field(ge=0.5, le=0.9999)] | None,
        Field(description="share of first tokens within the objective; else what its percentile says"),
    ] = None
    model: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None,
        Field(description="model to serve, as llama-3.1-8b; needed where the hardware has tables of several"),
    ] = None
    hardware: Annotated[
        Annotated[list[Literal[*hardware_names()]], Field(min_length=1)] | None,  # type: ignore[valid-type]
        Field(description="tables or cards to plan with; else all"),
    ] = None
    precisions: Annotated[
        Annotated[list[Literal[*_PRECISIONS]], Field(min_length=1)] | None,  # type: ignore[valid-type]
        Field(description="precisions that may be used; else all that a table has"),
    ] = None
    drafts: Annotated[
        bool | None, Field(description="whether settings may draft tokens; they do unless told not to")
    ] = None
    prices: Annotated[
        PriceList | None, Field(description="prices of a GPU's hour by card; without, GPUs are counted")
    ] = None


class PlanRoutes(LogRoutes):
    """/plan of the serving fleet at one prefix."""

    def routes(self) -> list[JsonRoute]:
        schema = plain_schema(PlanRequest)
        return [self._route("/plan", self.plan, "GPUs and settings for your request log", schema, PlanAnswer)]

    async def plan(self, request: Request) -> Response:
        return await self._answer(request, "plan", await self._read(request, PlanRequest))


class PlanAnswer(BaseModel):
    """Answer of POST /plan: the cheapest plan of each card first, with what must be known of it."""

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
    notes: list[str]
    export: dict[str, str]
