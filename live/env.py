"""The serving environment over a real engine: the same action, observation, reward, log and grade, in real seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from env.batch import ServingBatch
from env.inference_env import InferenceEnv
from inferencegym.errors import InvalidActionError, InvalidConfigError, NotResetError
from inferencegym.models import SPEC_LENGTHS, QuantTier, ServeAction, ServeObservation
from inferencegym.tasks import Calibration, EpisodeConfig, TaskId, TaskSpec
from live.driver import EngineRequest, RequestTiming
from live.engines.engine import ACTION_KNOBS, Engine, Load, Orders, Reading
from live.second import Judge, MemoryFacts
from simulator.tables import FloatArray, ServingTables

DRAIN_S: Final = 60.0
"""Longest wait for an engine to drop the requests of the episode before."""

Restart = Callable[[ServeAction], None]
"""Restarts an engine with the precision and prefill placement of an action, and returns when it answers."""


class EngineBatch(ServingBatch):
    """One episode on a real engine. The fluid model steps along, for the statistics of the load that are observed."""

    def __init__(
        self,
        engine: Engine,
        task: TaskSpec,
        config: EpisodeConfig,
        tables: ServingTables | None,
        calibration: Calibration,
        memory: MemoryFacts,
    ) -> None:
        super().__init__(task, 1, config, tables, calibration)
        stats = self.load_source.stats
        self._engine = engine
        self._judge = Judge(stats.slo_ms.tolist(), calibration.price, self.tables.cards_per_replica, memory)
        self._load: Load | None = None
        self._set: dict[str, float] = {}
        self._reading = Reading(0.0, 0.0, 0.0)
        self._started = 0.0
        self._cost_so_far = 0.0
        self.late_s = 0.0
        """How late the last second began: more than a few hundredths means that the policy is too slow."""

    def reset(self, seeds: Sequence[int] | NDArray[np.int64], rows: Iterable[int] | None = None) -> FloatArray:
        """Drop what runs of the episode before; the traffic of the new one starts with its first step."""
        self.close()
        observation = super().reset(seeds, rows)
        self._set = {}
        self._cost_so_far = 0.0
        return observation

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

    def serve(self, lo: int, hi: int) -> None:
        """Play one second on the engine and write its metrics over those of the fluid model."""
        start_s = float(self.time[0])
        if self._load is None:
            self._load = self._engine.load(self._requests())
        self._set_knobs()
        if start_s == 0.0:
            self._reading = self._engine.read()
            self._load.__enter__()
            self._started = time.monotonic()
        self.late_s = max(0.0, time.monotonic() - self._started - start_s) if self._engine.seconds_pass else 0.0
        super().serve(lo, hi)
        self._load.advance(start_s + 1.0)
        before, self._reading = self._reading, self._engine.read()
        metrics = self._judge.second(
            self._load.timings, before, self._reading, start_s + 1.0, float(self.fleet.kv_budget[0])
        )
        for name, value in metrics.items():
            self.metric[name][0] = value
        self._cost_so_far += metrics["cost_per_1k"]
        self.fleet.state.rows["cost_so_far"][0] = self._cost_so_far

    def _requests(self) -> list[EngineRequest]:
        drawn = self.load_source.requests(int(self.seeds[0]), self.config.episode_length)
        columns = (drawn.arrival_s, drawn.prompt_tokens, drawn.output_tokens, drawn.class_index)
        return [
            EngineRequest(float(arrival_s), int(prompt), int(output), int(index))
            for arrival_s, prompt, output, index in zip(*columns, strict=True)
        ]

    def _set_knobs(self) -> None:
        fleet, limits = self.fleet, self._engine.limits()
        wanted = {
            "kv_budget": float(fleet.kv_budget[0]),
            "spec_length": float(SPEC_LENGTHS[fleet.spec_index[0]]),
            "batch_size": float(round(float(fleet.batch_size[0]))),
        }
        wanted = {name: value for name, value in wanted.items() if name in limits}
        if wanted != self._set:
            self._engine.set(Orders(wanted))
            self._set = wanted


class EngineEnv(InferenceEnv):
    """Environment of a serving task on a real engine; a context manager.

    ``task`` is scaled to the engine (:mod:`live.scaling`), ``calibration`` measured on it, ``tables`` those that the
    engine was measured to have, if it was. A step lasts a real second, or ``hold`` of them, and an action is in force
    from its first. What lies outside the engine's limits is set to the limit: ``info["action_applied"]`` has what was
    set and ``info["saturated"]`` what was asked. A change of precision or prefill placement raises
    :class:`InvalidActionError`, unless ``restart`` does it. ``memory`` gives what the engine does not report.

    Entries of the log carry ``"measured"``, the engine's name: they are graded as any others, and nobody can replay
    them.
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
        self._memory = memory or MemoryFacts()
        self._restart = restart
        self._saturated: dict[str, dict[str, float]] = {}
        self._running: tuple[QuantTier, bool] = (QuantTier.FP16, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the traffic."""
        if isinstance(self._batch, EngineBatch):
            self._batch.close()

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
        """The batch that steps: one episode on the engine."""
        self.close()
        return EngineBatch(self._engine, task, config, self._tables, self._calibrated, self._memory)

    def play(self, action: ServeAction | Mapping[str, Any]) -> tuple[ServeObservation, float, bool]:
        """Take one step; see :meth:`InferenceEnv.play`."""
        if isinstance(action, ServeAction):
            action.validate()
        else:
            action = ServeAction.from_dict(dict(action))
        possible = self._possible(action)
        played = len(self._episode_log)
        result = super().play(possible)
        self._saturated = {
            name: {"asked": asked, "applied": float(getattr(possible, name))}
            for name in ACTION_KNOBS
            if name in self.task.active_actions and (asked := float(getattr(action, name))) != getattr(possible, name)
        }
        for entry in self._episode_log[played:]:
            entry["measured"] = self._engine.name
        return result

    def info(self) -> dict[str, Any]:
        """Details of the last step; ``saturated``, ``measured`` and ``late_s`` beside those of the simulated fleet."""
        found = super().info()
        del found["support"]  # of a table's rows
        late_s = self._batch.late_s if isinstance(self._batch, EngineBatch) else 0.0
        return {**found, "measured": self._engine.name, "saturated": self._saturated, "late_s": late_s}

    @property
    def timings(self) -> Sequence[RequestTiming]:
        """What happened to each request of the episode so far."""
        if not isinstance(self._batch, EngineBatch):
            raise NotResetError("no requests before reset: call reset() first")
        return self._batch.timings

    def _possible(self, action: ServeAction) -> ServeAction:
        """The action that the engine can be set to: nearest within its limits, restarted where that is asked for."""
        limits = self._engine.limits()
        wanted = (
            action.quant_tier if "quant_tier" in self.task.active_actions else self._running[0],
            action.prefill_disagg if "prefill_disagg" in self.task.active_actions else self._running[1],
        )
        if wanted != self._running:
            if self._restart is None:
                field = "quant_tier" if wanted[0] != self._running[0] else "prefill_disagg"
                raise InvalidActionError(
                    field,
                    getattr(action, field),
                    f"{self._running[0 if field == 'quant_tier' else 1]}, as the engine runs: it changes by a restart "
                    "alone, which EngineEnv(restart=...) does",
                )
            self._restart(action)
            self._running = wanted
        changes: dict[str, Any] = {}
        for name in ACTION_KNOBS:
            low, high = limits.get(name, (None, None))
            if low is not None and high is not None:
                value = min(max(float(getattr(action, name)), low), high)
                changes[name] = value if name == "kv_budget" else int(value)
        drafts = changes.get("spec_length", 0)
        changes["spec_length"] = max(length for length in SPEC_LENGTHS if length <= drafts)
        return replace(action, **changes)
