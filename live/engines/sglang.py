"""SGLang as an engine that can be set while it runs, through its own HTTP endpoints.

``POST /set_internal_state`` takes ``{"server_args": {...}}`` and answers ``{"updated": bool, "server_args": {...}}``
per data-parallel rank: ``pp_max_micro_batch_size`` bounds the running requests. Nothing returns an SGLang to its user's
setting when a controller is killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inferencegym.errors import InvalidConfigError, RemoteError
from live.driver import EngineApi
from live.engines.engine import HttpEngine, Knobs, Orders, Reading, within
from live.engines.histogram import buckets

BATCH: Final = "pp_max_micro_batch_size"


class SglangEngine(HttpEngine):
    """An SGLang server, started with ``--enable-metrics``."""

    name = "sglang"

    def __init__(self, api: EngineApi) -> None:
        super().__init__(api)
        self.read()
        info = self.info()
        self._most = int(info.get("max_running_requests") or self._state(info).get("max_running_requests") or 0)
        if self._most < 1:
            raise InvalidConfigError(
                f"{api.url} does not say how many requests it runs at most: start SGLang with --max-running-requests"
            )
        self._batch = float(self._state(info).get(BATCH) or info.get(BATCH) or self._most)

    def info(self) -> dict[str, Any]:
        """The engine's own description: its arguments and the state of its schedulers."""
        return self.api.get_json("/server_info")

    def limits(self) -> Mapping[str, tuple[float, float]]:
        return {"batch_size": (1.0, float(self._most))}

    def in_force(self) -> Knobs:
        return {"batch_size": self._batch}

    def user_setting(self) -> Knobs:
        return self.in_force()

    def read(self) -> Reading:
        page = self.api.metrics()
        return Reading(
            queue_requests=page.total("sglang:num_queue_reqs"),
            running_requests=page.total("sglang:num_running_reqs"),
            kv_occupancy=page.highest("sglang:token_usage"),
            finished_requests=page.total("sglang:num_requests_total"),
            prompt_tokens=page.total("sglang:prompt_tokens_total"),
            output_tokens=page.total("sglang:generation_tokens_total"),
            ttft_buckets=buckets(page, "sglang:time_to_first_token_seconds"),
            tpot_buckets=buckets(page, "sglang:inter_token_latency_seconds"),
        )

    def set(self, orders: Orders) -> None:
        wanted = within(orders.knobs, self.limits())
        if "batch_size" not in wanted:
            return
        size = int(wanted["batch_size"])
        answer = self.api.post_json("/set_internal_state", {"server_args": {BATCH: size}})
        ranks = answer if isinstance(answer, list) else [answer]
        if not ranks or not all(rank.get("updated") for rank in ranks):
            raise RemoteError(f"SGLang did not take {BATCH}={size}: it answers {ranks}; its log says why")
        self._batch = float(size)

    @staticmethod
    def _state(info: Mapping[str, Any]) -> Mapping[str, Any]:
        states = info.get("internal_states") or [{}]
        state: Mapping[str, Any] = states[0]
        return state
