"""The naive baseline's scores: computed once, on a thread, and kept."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson


class Baseline:
    """Single flight: callers that come while it is being computed wait for the same result."""

    def __init__(self) -> None:
        self._task: asyncio.Task[bytes] | None = None

    async def get(self) -> bytes:
        """The JSON answer of GET /baseline."""
        if self._task is None or (self._task.done() and (self._task.cancelled() or self._task.exception() is not None)):
            self._task = asyncio.create_task(asyncio.to_thread(_compute))
        # A client that goes away must not take the computation from the others.
        return await asyncio.shield(self._task)


def _compute() -> bytes:
    from agents.baseline import run_all_baselines

    result: dict[str, Any] = run_all_baselines()
    return orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
