"""The serving environment over a real engine: the same action, observation, reward, log and grade, in real seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

from env.batch import ServingBatch
from env.dynamics import RequestFleet
from env.inference_env import InferenceEnv
from inferencegym.errors import InvalidActionError, InvalidConfigError, NotResetError
from inferencegym.models import SPEC_LENGTHS, QuantTier, ServeAction, ServeObservation
from inferencegym.spaces.actions import from_row, to_row
from inferencegym.tasks import Calibration, EpisodeConfig, TaskId, TaskSpec
from live.driver import EngineRequest, RequestTiming
from live.engines.engine import ACTION_KNOBS, Engine, Load, Orders, Reading
from live.second import Judge, MemoryFacts
from simulator.hardware.tables import FloatArray, ServingTables
from simulator.kernel.serving import ServingParams
from simulator.load.source import LoadSource

DRAIN_S: Final = 60.0
"""Longest wait (s) for an engine to drop the requests of the previous episode."""

Restart = Callable[[ServeAction], None]
"""Function that restarts an engine with the precision and prefill placement of an action, and returns once it
answers."""


class EngineFleet(RequestFleet):
    """One real engine as the fleet of an episode; each second takes a real second."""

    def __init__(
        self,
        source: LoadSource,
        params: ServingParams,
        n_rows: int,
        n_steps: int,
        n_loads: int,
        record: int = 0,
        *,
        engine: Engine,
        memory: MemoryFacts | None,
    ) -> None:
        self._engine = engine
        self._judge = Judge(params.stats.slo_ms.tolist(), params.price, params.tables.cards_per_replica, memory)
        self.given = self._judge.given(engine.read())
        super().__init__(source, params, n_rows, n_steps, n_loads, record)
        self._load: Load | None = None
        self._set: dict[str, float] = {}
        self._reading = Reading(0.0, 0.0, 0.0)
        self._started = 0.0
        self.late_s = 0.0
        """Delay (s) with which the last second began: more than a few hundredths means that the policy is too slow."""

    def reset_rows(self, rows: Iterable[int]) -> None:
        """Drop running requests of the previous episode; the traffic of the new one starts with its first step."""
        self.close()
        super().reset_rows(rows)
        self._set = {}

    def close(self) -> None:
        """Cancel the requests under way, and wait until the engine has dropped them."""
        if self._load is None:
            return
        self._load.__exit__(None, None, None)
        self._load = None
        deadline = time.monotonic() + DRAIN_S
        while self._engine.seconds_pass and self._engine.read().running_requests and time.monotonic() < deadline:
            time.sleep(0.1)

    @property
    def timings(self) -> Sequence[RequestTiming]:
        """What happened to each request of the episode so far."""
        return () if self._load is None else self._load.timings

    def serve(self, rows: range) -> Sequence[Mapping[str, float]]:
        """Play one second on the engine."""
        start_s = float(self.state.rows["time"][0])
        if self._load is None:
            self._load = self._engine.load(self._requests())
        self._set_knobs()
        if start_s == 0.0:
            self._reading = self._engine.read()
            self._load.__enter__()
            self._started = time.monotonic()
        self.late_s = max(0.0, time.monotonic() - self._started - start_s) if self._engine.seconds_pass else 0.0
        self._load.advance(start_s + 1.0)
        before, self._reading = self._reading, self._engine.read()
        kv_budget = float(self.kv_budget[0])
        return [self._judge.second(self._load.timings, before, self._reading, start_s + 1.0, kv_budget)]

    def _requests(self) -> list[EngineRequest]:
        drawn = self.source.requests(int(self.seeds[0]), self.n_steps)
        acceptance = self.params.acceptance_of(drawn.arrival_s, drawn.class_index)
        rates = [None] * len(drawn.arrival_s) if acceptance is None else acceptance.tolist()
        columns = (drawn.arrival_s, drawn.prompt_tokens, drawn.output_tokens, drawn.class_index)
        return [
            EngineRequest(float(arrival_s), int(prompt), int(output), int(index), rate)
            for arrival_s, prompt, output, index, rate in zip(*columns, rates, strict=True)
        ]

    def _set_knobs(self) -> None:
        limits = self._engine.limits()
        asked = {
            "kv_budget": float(self.kv_budget[0]),
            "spec_length": float(SPEC_LENGTHS[self.spec_index[0]]),
            "batch_size": float(round(float(self.batch_size[0]))),
        }
        asked = {name: value for name, value in asked.items() if name in limits}
        if asked != self._set:
            self._engine.set(Orders(asked))
            self._set = asked


class EngineEnv(InferenceEnv):
    """Environment of a serving task on a real engine; a context manager.

    ``task`` is scaled to the engine (:mod:`live.scaling`), ``calibration`` measured on it, ``tables`` are the engine's
    own if it was measured. A step lasts one real second, or ``hold`` of them, and its action applies from the first.
    Values outside the engine's limits are set to the limit: ``info["action_applied"]`` has the values set and
    ``info["saturated"]`` the requested ones. A change of precision or prefill placement raises
    :class:`InvalidActionError`, unless ``restart`` carries it out.

    The log holds only measured values. Without ``memory`` the engine's memory is absent from log and observation, and a
    task that grades it is refused (:class:`InvalidConfigError`).

    Entries of the log carry ``"measured"``, the engine's name: they are graded like any others, but cannot be verified
    by replay.
    """

    def __init__(
        self,
        engine: Engine,
        task: TaskSpec,
        calibration: Calibration,
        *,
        seed: int = 42,
        config: Mapping[str, Any] | None = None,
        tables: ServingTables | None = None,
        memory: MemoryFacts | None = None,
        restart: Restart | None = None,
    ) -> None:
        super().__init__(None, task.task_id, seed, tables=tables, calibration=calibration)
        self.task, self.config = task, task.config(config)
        self._engine = engine
        self._calibrated = calibration
        self._memory = memory
        self._restart = restart
        self._stamp = {"measured": engine.name}
        self._saturated: dict[str, dict[str, float]] = {}
        self._configured: tuple[QuantTier, bool] = (QuantTier.FP16, False)

    def __getstate__(self) -> Any:
        raise TypeError("an episode on a real engine cannot be copied or pickled: keep its episode_log instead")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the traffic."""
        if self._fleet_of_batch is not None:
            self._fleet_of_batch.close()

    def reset(
        self,
        seed: int | None = None,
        task_id: TaskId | None = None,
        config: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> ServeObservation:
        """Start an episode; its traffic begins with the first step."""
        if task_id is not None and task_id != self.task.task_id:
            raise InvalidConfigError(
                f"task_id={task_id!r} cannot be changed: this is task {self.task.task_id!r}, scaled to an engine",
                "task_id",
            )
        self._saturated = {}
        return super().reset(seed, None, config, session_id)

    def make_batch(self, task: TaskSpec, config: EpisodeConfig) -> ServingBatch:
        """The batch, which holds one episode on the engine."""
        self.close()
        return ServingBatch(
            task,
            1,
            config,
            self._tables,
            self._calibrated,
            dynamics=partial(EngineFleet, engine=self._engine, memory=self._memory),
        )

    def advance(self, knobs: FloatArray) -> None:
        """Take one step; see :meth:`InferenceEnv.advance`."""
        batch, _ = self._running()
        asked = from_row(batch.snap(knobs)[0])
        possible = self._possible(asked)
        super().advance(to_row(possible)[None])
        self._saturated = {
            name: {"asked": wish, "applied": float(getattr(possible, name))}
            for name in ACTION_KNOBS
            if name in self.task.active_actions and (wish := float(getattr(asked, name))) != getattr(possible, name)
        }

    def info(self) -> dict[str, Any]:
        """Details of the last step: the usual ones, and ``measured``, ``saturated``, ``missing`` and ``late_s``.

        ``missing`` names the observation's fields that the engine does not report; they are 0.
        """
        info = super().info()
        assert self._batch is not None
        assert self._fleet_of_batch is not None
        own = {"measured": self._engine.name, "saturated": self._saturated, "missing": self._batch.missing}
        return {**info, **own, "late_s": self._fleet_of_batch.late_s}

    @property
    def timings(self) -> Sequence[RequestTiming]:
        """What happened to each request of the episode so far."""
        if self._fleet_of_batch is None:
            raise NotResetError("no requests before reset: call reset() first")
        return self._fleet_of_batch.timings

    @property
    def _fleet_of_batch(self) -> EngineFleet | None:
        return self._batch.fleet if self._batch is not None and isinstance(self._batch.fleet, EngineFleet) else None

    def _possible(self, action: ServeAction) -> ServeAction:
        """The nearest action within the engine's limits; restarts the engine if the action needs it."""
        limits = self._engine.limits()
        wanted = (
            action.quant_tier if "quant_tier" in self.task.active_actions else self._configured[0],
            action.prefill_disagg if "prefill_disagg" in self.task.active_actions else self._configured[1],
        )
        if wanted != self._configured:
            if self._restart is None:
                field = "quant_tier" if wanted[0] != self._configured[0] else "prefill_disagg"
                raise InvalidActionError(
                    field,
                    getattr(action, field),
                    f"{self._configured[0 if field == 'quant_tier' else 1]}, as the engine runs: only a restart "
                    "changes it, which EngineEnv(restart=...) does",
                )
            self._restart(action)
            self._configured = wanted
        changes: dict[str, Any] = {}
        for name in ACTION_KNOBS:
            low, high = limits.get(name, (None, None))
            if low is not None and high is not None:
                value = min(max(float(getattr(action, name)), low), high)
                changes[name] = value if name == "kv_budget" else int(value)
        drafts = changes.get("spec_length", 0)
        changes["spec_length"] = max(length for length in SPEC_LENGTHS if length <= drafts)
        return replace(action, **changes)
