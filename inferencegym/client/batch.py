"""Client for many episodes at once: arrays over ``POST /step/batch``, the fastest way to train on a server.

Needs httpx and numpy, but no simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from inferencegym.batch_format import MEDIA_TYPE, BatchPlayed, BatchSteps, decode_answer, encode_request
from inferencegym.client.answers import json_of
from inferencegym.client.http import DEFAULT_URL, caller_headers
from inferencegym.client.retries import Retries
from inferencegym.errors import InvalidActionError, NotResetError, ServerUnavailableError, UnknownSessionError

RETRY_ADVICE: Final = "Nothing is lost: call the same method again"
_BINARY: Final = {"content-type": MEDIA_TYPE}


class InferenceGymBatch:
    """N episodes of one task on a server, all at the same step.

    Steps carry their number, so a request whose answer was lost is sent again and played once. The server keeps the
    session in memory only: after a restart of the server steps raise
    :class:`~inferencegym.errors.UnknownSessionError`; the same seeds and actions give the same episodes again.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        client_id: str | None = None,
        retry_s: float | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._retries = Retries(retry_s, RETRY_ADVICE)
        self._client = httpx.Client(
            base_url=base_url,
            timeout=timeout_s,
            transport=transport,
            headers=caller_headers(api_key, client_id),
            # The session is in one process of the server; another connection may reach another process.
            limits=httpx.Limits(max_connections=1, keepalive_expiry=None),
        )
        self._opened: dict[str, Any] = {}
        self.n = 0
        self.episode_length = 0
        self.steps = 0

    @property
    def session_id(self) -> str | None:
        """Id of the session on the server; None before the first reset."""
        return self._opened.get("session_id")

    def reset(
        self,
        n: int | None = None,
        task_id: int | str = 1,
        *,
        seed: int | None = None,
        seeds: Sequence[int] | None = None,
        config: Mapping[str, Any] | None = None,
        autoreset: bool = False,
        fleet: bool = False,
    ) -> NDArray[np.float64]:
        """Start ``n`` episodes with the seeds ``seed``, ``seed + 1``, ..., or one per seed of ``seeds``.

        Returns the observations (N, 14). With ``fleet`` they have 21 columns, here and in every step; the last seven
        describe the fleets (:data:`inferencegym.models.FLEET_FIELDS`). With ``autoreset`` the step that ends
        the episodes shows the first observations of the next ones. The session of an earlier reset is reused if it fits
        and still exists, and closed otherwise.
        """
        wanted = {"n": n, "task_id": task_id, "seed": seed, "config": config, "autoreset": autoreset}
        body: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        if fleet:
            body["fleet"] = True
        if seeds is not None:
            body["seeds"] = [int(one) for one in seeds]
        count = len(seeds) if seeds is not None else n or 1
        shape = {"task_id": task_id, "config": config, "n": count}
        if self.session_id is not None and self._opened["shape"] != shape:
            self._end_session()
        answer = self._open(body)
        self._opened = {"session_id": answer["session_id"], "shape": shape}
        self.n, self.episode_length, self.steps = answer["n"], answer["episode_length"], 0
        return np.array(answer["observations"], dtype=np.float64)

    def step_many(
        self, actions: NDArray[Any], n_steps: int | None = None, *, last: bool = False, float64: bool = False
    ) -> BatchPlayed:
        """Take K steps with the actions (K, N, 5): kv_budget, spec_length, batch_size, prefill_disagg, quant_tier.

        Tasks that scale may have ``replicas`` as a sixth number. Actions (1, N, 5) are held for ``n_steps`` where that
        is given. Numbers out of range are clamped, and all are
        rounded to the nearest allowed value. ``last`` leaves out all observations but the last; ``float64`` sends and
        returns the server's own precision, which is otherwise rounded to float32.
        """
        if self.session_id is None:
            raise NotResetError("this client has no episodes yet: call reset()")
        rows = np.asarray(actions, dtype=np.float64 if float64 else np.float32)
        if rows.ndim != 3:
            raise InvalidActionError("actions", rows.shape, f"an array of shape (K, {self.n}, 5)")
        wanted = BatchSteps(self.session_id, rows, n_steps or len(rows), self.steps + 1, last)
        answer = self._retries.send(
            self._client, "POST", "/step/batch", content=encode_request(wanted), headers=_BINARY
        )
        if answer.status_code != 200:
            json_of(answer)
        try:
            played = decode_answer(answer.content)
        except ValueError as error:
            raise ServerUnavailableError(f"{answer.url}: {error}; is this an InferenceGym server?") from error
        self.steps = played.number - 1 + len(played.rewards)
        return played

    def step(self, actions: NDArray[Any], *, float64: bool = False) -> BatchPlayed:
        """Take one step with the actions (N, 5)."""
        return self.step_many(np.asarray(actions)[None], float64=float64)

    def close(self) -> None:
        """End the session on the server and close the connection."""
        if self.session_id is not None:
            self._end_session()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Reset the session of an earlier reset if the server still has it; open a new one otherwise."""
        if self.session_id is not None:
            try:
                return self._reset({**body, "session_id": self.session_id})
            except UnknownSessionError:
                self._opened = {}
        return self._reset(body)

    def _reset(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return json_of(self._retries.send(self._client, "POST", "/reset/batch", json=body))

    def _end_session(self) -> None:
        # Nothing is left to close on a server that cannot be reached or no longer has the session.
        try:
            self._client.post("/close/batch", json={"session_id": self.session_id})
        except httpx.TransportError:
            return
        finally:
            self._opened = {}
