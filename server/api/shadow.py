"""POST /shadow: comparison of built-in policies on a visitor's request log, with engine settings to try."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from agents.families import players_of
from env.family import Family
from inferencegym.messages import WHOLE, plain_schema
from inferencegym.tasks import table_index
from ops.prices import PriceList
from server.api.policies import available
from server.api.request_log import LogRequest, LogRoutes
from server.api.route import Route
from server.net.errors import InvalidRequestError
from server.schemas import Documented, TaskName, family_model, policy_schema

DEFAULT_POLICIES: Final = ("heuristic", "hill_climb")
MAX_GPUS: Final = 64


class ShadowRequest(LogRequest):
    """Body of POST /shadow."""

    policies: list[str] | None = None
    fixed: Annotated[
        dict[str, Any] | None,
        Field(description="your own setting, to compare with; knobs left out are vLLM's defaults"),
    ] = None
    task_id: Annotated[TaskName | None, Field(description="task with the fleet, objectives and policies to use")] = None
    hardware: Annotated[
        Literal[*table_index()] | None,  # type: ignore[valid-type]
        Field(description="table of the catalogue to play on; by default the task's, or the default table"),
    ] = None
    gpus: Annotated[
        Annotated[int, Field(ge=1, le=MAX_GPUS), WHOLE] | None, Field(description="number of GPUs for every policy")
    ] = None
    prices: Annotated[PriceList | None, Field(description="prices per GPU hour by card, for costs")] = None
    slo_ms: Annotated[Annotated[float, Field(ge=1, le=600_000)] | None, Field(description="objective of TTFT")] = None


class ShadowRoutes(LogRoutes):
    """/shadow of the serving fleet at one prefix."""

    def routes(self) -> list[Route]:
        knobs = Annotated[dict[str, Any], Documented(partial(plain_schema, self._family.action_model))]
        policies = Annotated[list[str], Field(min_length=1), Documented(self._policies_schema)]
        body = family_model(self._family, ShadowRequest, policies=(policies | None, None), fixed=(knobs | None, None))
        summary = "Compare policies on your request log"
        return [self._log("/shadow", self.shadow, summary, ShadowAnswer, types={"body": body})]

    def _policies_schema(self) -> dict[str, Any]:
        return {"type": "array", "items": policy_schema(self._family), "minItems": 1, "uniqueItems": True}

    async def shadow(self, request: Request, body: ShadowRequest) -> Response:
        policies = await asyncio.to_thread(_playable_policies, self._family, body)
        return await self._answer(request, "shadow", body, policies=policies)


def _playable_policies(family: Family, wanted: ShadowRequest) -> list[str]:
    names = [*(DEFAULT_POLICIES if wanted.policies is None else wanted.policies)]
    if len(set(names)) != len(names):
        raise InvalidRequestError("policies", names, "names that differ from each other")
    if wanted.task_id is None:
        stored = players_of(family).stored()
        possible = [name for name in available(family, family.default_task)[1] if name not in stored]
        more = ", unless task_id names the task of the stored policy"
    else:
        possible, more = available(family, wanted.task_id)[1], f" for task {wanted.task_id!r}"
    for at, name in enumerate(names):
        if name not in possible:
            raise InvalidRequestError(f"policies[{at}]", name, f"one of {', '.join(possible)}{more}")
    return names


class ShadowAnswer(BaseModel):
    """Answer of POST /shadow: the report, and configuration files of vLLM and SGLang for each policy."""

    log: dict[str, Any]
    read: dict[str, Any]
    n_gpus: int
    slo_ms: float
    objectives: list[str]
    hardware: str
    gain_over_best_constant: dict[str, float]
    cost: dict[str, float | None]
    outcomes: list[dict[str, Any]]
    autoscaling: list[dict[str, Any]]
    notes: list[str]
    answer: list[str]
    best: str
    undecided: str | None
    refused: str
    short: str
    export: dict[str, dict[str, str]]
