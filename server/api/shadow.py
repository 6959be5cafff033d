"""POST /shadow: comparison of built-in policies on a visitor's request log, with engine settings to try.

The log is not kept after the report. Reports are made one at a time, in a process of their own.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from agents.shadow.prices import PriceList
from env.family import Family
from inferencegym.messages import WHOLE, plain_schema
from inferencegym.tasks import table_index
from server.api.policies import available
from server.api.request_log import LogRequest, LogRoutes
from server.net.errors import InvalidRequestError
from server.net.json_io import JsonRoute
from server.schemas import Schema, TaskName, nullable, task_id_schema

DEFAULT_POLICIES: Final = ("heuristic", "hill_climb")
STORED_POLICIES: Final = frozenset({"ppo", "best_static", "best_adaptive", "random_search"})
"""Found for one task each, so that the request must say which; the others need nothing but the log."""
MAX_GPUS: Final = 64
MAX_SLO_MS: Final = 600_000.0

_PolicyName = Literal[
    "naive",
    "vllm_defaults",
    "random_search",
    "random",
    "hill_climb",
    "heuristic",
    "ppo",
    "best_static",
    "best_adaptive",
]


class ShadowRequest(LogRequest):
    """Body of POST /shadow."""

    policies: Annotated[list[_PolicyName], Field(min_length=1, json_schema_extra={"uniqueItems": True})] | None = None
    fixed: Annotated[
        dict[str, Any] | None,
        Field(description="your own setting, to compare with; missing knobs: the plan's baseline"),
    ] = None
    task_id: Annotated[TaskName | None, Field(description="lends its fleet, objectives and stored policies")] = None
    hardware: Annotated[
        Literal[*table_index()] | None,  # type: ignore[valid-type]
        Field(description="table of the catalogue to play on; else the task's, else the default"),
    ] = None
    gpus: Annotated[
        Annotated[int, Field(ge=1, le=MAX_GPUS), WHOLE] | None, Field(description="GPUs that every policy has")
    ] = None
    prices: Annotated[PriceList | None, Field(description="prices of a GPU's hour by card, for costs")] = None
    slo_ms: Annotated[Annotated[float, Field(ge=1, le=MAX_SLO_MS)] | None, Field(description="objective of TTFT")] = (
        None
    )

    @property
    def asked(self) -> list[str]:
        """Names of policies. Raises InvalidRequestError where one is named twice."""
        names: list[str] = [*(DEFAULT_POLICIES if self.policies is None else self.policies)]
        if len(set(names)) != len(names):
            raise InvalidRequestError("policies", names, "names that differ from each other")
        return names


class ShadowRoutes(LogRoutes):
    """/shadow of the serving fleet at one prefix."""

    def routes(self) -> list[JsonRoute]:
        schema = self._request_schema()
        return [self._route("/shadow", self.shadow, "Compare policies on your request log", schema, ShadowAnswer)]

    async def shadow(self, request: Request) -> Response:
        wanted = await self._read(request, ShadowRequest)
        policies = await asyncio.to_thread(_playable_policies, self._family, wanted)
        return await self._answer(request, "shadow", wanted, policies=policies)

    def _request_schema(self) -> Schema:
        schema = plain_schema(ShadowRequest)
        schema["properties"]["fixed"] = nullable(plain_schema(self._family.action_model))
        schema["properties"]["task_id"] = nullable(task_id_schema(self._family))
        return schema


def _playable_policies(family: Family, wanted: ShadowRequest) -> list[str]:
    if wanted.task_id is None:
        possible = [name for name in family.policies if name not in STORED_POLICIES]
        more = ", unless task_id names the task whose stored policy is meant"
    else:
        possible, more = available(family, wanted.task_id)[1], f" for task {wanted.task_id!r}"
    for name in wanted.asked:
        if name not in possible:
            raise InvalidRequestError("policies", name, f"one of {', '.join(possible)}{more}")
    return wanted.asked


class ShadowAnswer(BaseModel):
    """Answer of POST /shadow: the report, and configuration files of vLLM and SGLang for each policy."""

    log: dict[str, Any]
    read: dict[str, Any]
    n_gpus: int
    slo_ms: float
    hardware: str
    stated_error: float
    gain_over_best_constant: dict[str, float]
    cost: dict[str, float | None]
    outcomes: list[dict[str, Any]]
    autoscaling: list[dict[str, Any]]
    notes: list[str]
    best: str
    export: dict[str, dict[str, str]]
