"""POST /plan: the GPUs and settings that serve a visitor's request log within objectives."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from inferencegym.messages import WHOLE, Allowed
from inferencegym.models import Router
from inferencegym.tasks import table_index
from ops.objectives import QUANTITIES, STATISTICS
from ops.prices import PriceList
from server.api.request_log import LogRequest, LogRoutes
from server.api.route import Route
from simulator.hardware.catalogue import hardware_names, tables_meant, tables_named

_PRECISIONS: Final = tuple(dict.fromkeys(tier for entry in table_index().values() for tier in entry["tiers"]))
_OBJECTIVE: Final = f"^({'|'.join(QUANTITIES)})_({'|'.join(STATISTICS)})=[1-9][0-9]{{0,5}}([.][0-9]{{1,3}})?$"
_BOUND: Final = Allowed(f"a bound in ms, from 1 to 999,999, on one of {', '.join(QUANTITIES)}, such as ttft_p99=500")


def _tables_of_spellings(hardware: object) -> object:
    """The tables that names of cards mean; unknown names and other values are left for pydantic to refuse."""
    if not isinstance(hardware, list):
        return hardware
    return [table for name in hardware for table in (isinstance(name, str) and tables_meant(name)) or (name,)]


class PlanRequest(LogRequest):
    """Body of POST /plan."""

    objectives: Annotated[
        list[Annotated[str, Field(pattern=_OBJECTIVE), _BOUND]],
        Field(
            min_length=1, max_length=10, description="bounds in ms, such as ttft_p99=500, tpot_p50=50 and e2e_p99=20000"
        ),
    ]
    share_met: Annotated[
        Annotated[float, Field(ge=0.5, le=0.9999)] | None,
        Field(
            description="share of requests whose first token must be in time (default: 0.99 for ttft_p99, and so on)"
        ),
    ] = None
    windows_met: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        Field(description="share of five-minute windows that must meet the objectives; by default the whole log must"),
    ] = None
    model: Annotated[
        Annotated[str, Field(min_length=1, max_length=200)] | None,
        Field(description="model to serve, such as llama-3.1-8b (default: the log's, or the only one of the hardware)"),
    ] = None
    hardware: Annotated[
        Annotated[list[Literal[*hardware_names()]], Field(min_length=1)] | None,  # type: ignore[valid-type]
        BeforeValidator(_tables_of_spellings),
        Field(description="tables or cards to plan with; by default all"),
    ] = None
    precisions: Annotated[
        Annotated[list[Literal[*_PRECISIONS]], Field(min_length=1)] | None,  # type: ignore[valid-type]
        Field(description="precisions that may be used; by default all of a table"),
    ] = None
    disagg: Annotated[bool | None, Field(description="whether prefill may have GPUs of its own (default true)")] = None
    replicas_min: Annotated[
        Annotated[int, Field(ge=1, le=256), WHOLE] | None, Field(description="minimum number of replicas (default 1)")
    ] = None
    router: Annotated[
        Router | None,
        Field(description="shared (default): one queue for all replicas; others: a router with a queue per replica"),
    ] = None
    prices: Annotated[
        PriceList | None, Field(description="prices per GPU hour by card; without them, plans are ordered by GPUs")
    ] = None

    def check(self) -> None:
        super().check()
        if self.model is not None:
            tables_named(self.hardware, self.model)


class PlanRoutes(LogRoutes):
    """/plan of the serving fleet at one prefix."""

    def routes(self) -> list[Route]:
        return [self._log("/plan", self.plan, "GPUs and settings for your request log", PlanAnswer)]

    async def plan(self, request: Request, body: PlanRequest) -> Response:
        return await self._answer(request, "plan", body)


class PlanAnswer(BaseModel):
    """Answer of POST /plan: the recommended fleet in words and figures, the plans of each card, and notes.

    ``export`` has configuration files of the recommended fleet, ``export_likely`` those of the first of ``plans``.
    """

    log: dict[str, Any]
    read: dict[str, Any]
    model: str
    objectives: list[str]
    share_met: float
    windows_met: float | None
    answer: list[str]
    recommended: dict[str, Any] | None
    plans: list[dict[str, Any]]
    certain: list[dict[str, Any]]
    front: list[dict[str, Any]]
    tried: list[dict[str, Any]]
    growth: list[dict[str, Any]]
    adaptive: list[dict[str, Any]]
    adapting_saves_gpus: int
    autoscaling: list[dict[str, Any]]
    refused: dict[str, str]
    undecided: str | None
    notes: list[str]
    export: dict[str, str]
    export_likely: dict[str, str]
