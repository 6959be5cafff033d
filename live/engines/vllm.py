"""vLLM as an engine that can be set while it runs: its metrics, and the scheduler class that follows a control file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inferencegym.errors import InvalidConfigError
from live.driver import EngineApi
from live.engines.engine import HttpEngine, Knobs, Orders, Reading, within
from live.engines.histogram import buckets
from live.engines.order_file import OrderFile
from live.engines.vllm_server import PLUGIN

PROTOCOL: Final = 2
"""Version of the control file's form, which the scheduler class states."""


class VllmEngine(HttpEngine):
    """A vLLM server. Without ``control_file`` it is observed only.

    The control file is that of the scheduler class in ``live/engines/vllm_plugin``, so the engine runs on this machine
    or shares the file's folder. Raises :class:`RemoteError` where the address is no vLLM, and
    :class:`InvalidConfigError` where the scheduler class does not follow the file.
    """

    name = "vllm"

    def __init__(self, api: EngineApi, control_file: Path | None = None) -> None:
        super().__init__(api)
        self._file = control_file
        self._orders = None if control_file is None else OrderFile(control_file)
        self.read()
        if control_file is not None:
            self._state()

    def limits(self) -> Mapping[str, tuple[float, float]]:
        if self._file is None:
            return {}
        found = {name: (float(low), float(high)) for name, (low, high) in self._state()["limits"].items()}
        if found["spec_length"][1] == 0:
            del found["spec_length"]  # started without drafting
        return found

    def in_force(self) -> Knobs:
        return {} if self._file is None else {name: float(v) for name, v in self._state()["in_force"].items()}

    def user_setting(self) -> Knobs:
        if self._orders is None:
            return {}
        state = self._state()
        # An idle engine has not read the file yet.
        unread = {} if state["file_version"] == self._orders.version() else self._orders.user_setting()
        known = {**state["user"], **unread}
        return {name: min(max(float(known[name]), low), high) for name, (low, high) in self.limits().items()}

    def errors(self) -> int:
        """Errors that the scheduler class has counted since the engine's start: of its files, and its own."""
        return int(self._state()["errors"])

    def kv_blocks(self) -> tuple[int, int]:
        """Blocks of the KV pool, and tokens of a block."""
        state = self._state()
        return int(state["kv_blocks"]), int(state["block_tokens"])

    def read(self) -> Reading:
        page = self.api.metrics()
        drafts = "vllm:spec_decode_num_draft_tokens_total" in page.samples
        return Reading(
            queue_requests=page.total("vllm:num_requests_waiting"),
            running_requests=page.total("vllm:num_requests_running"),
            kv_occupancy=page.highest("vllm:kv_cache_usage_perc"),
            finished_requests=page.total("vllm:request_success_total"),
            prompt_tokens=page.total("vllm:request_prompt_tokens_sum"),
            output_tokens=page.total("vllm:generation_tokens_total"),
            preemptions=page.total("vllm:num_preemptions_total"),
            drafted_tokens=page.total("vllm:spec_decode_num_draft_tokens_total") if drafts else None,
            accepted_tokens=page.total("vllm:spec_decode_num_accepted_tokens_total") if drafts else None,
            iterations=page.total("vllm:iteration_tokens_total_count"),
            ttft_buckets=buckets(page, "vllm:time_to_first_token_seconds"),
            tpot_buckets=buckets(page, "vllm:request_time_per_output_token_seconds"),
        )

    def set(self, orders: Orders) -> None:
        if self._orders is None:
            raise InvalidConfigError(
                "this vLLM can only be observed: name its control file, and start it with the scheduler class in "
                f"PYTHONPATH={PLUGIN} (docs/live.md)"
            )
        limits = self.limits()
        self._orders.write(Orders(within(orders.knobs, limits), orders.until, within(orders.then or {}, limits)))

    def _state(self) -> dict[str, Any]:
        path = Path(f"{self._file}.state")
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidConfigError(
                f"no engine writes {path}: start vLLM with PYTHONPATH={PLUGIN}, INFERENCEGYM_CONTROL_FILE={self._file} "
                "and --scheduler-cls inferencegym_scheduler.LiveAsyncScheduler"
            ) from error
        if state.get("protocol") != PROTOCOL:
            raise InvalidConfigError(
                f"{path} was written by another version of the scheduler class: restart vLLM with the one in {PLUGIN}"
            )
        return state
