"""A policy on a running engine: observes its metrics each second and says what it would set, or sets it.

Arrivals, prompts and latencies come from the engine's own counters and histograms, so they are coarser than those that
:class:`live.env.EngineEnv` measures with its own traffic.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.protocol import Agent, FloatArray
from inferencegym.errors import InferenceGymError, InvalidConfigError, RemoteError, refusal
from inferencegym.models import FLEET_FIELDS, NAIVE_ACTION, OBSERVATION_FIELDS, REPLICAS, SCALING_FIELDS, ServeAction
from inferencegym.spaces.actions import action_mask, from_row, snap, to_row
from inferencegym.tasks import TaskSpec
from live.engines.engine import ACTION_KNOBS, Engine, Orders, Reading
from ops.played import PlayedLoad
from simulator.hardware.tables import ServingTables
from simulator.load.source import EMA_WEIGHT
from simulator.whatif import steady_requests

EXPECTED_S: Final = 20.0
"""Seconds of steady load that the discrete-event reference plays to predict the result of a setting."""
_AT: Final = {name: i for i, name in enumerate(OBSERVATION_FIELDS)}


def quantile_s(before: Mapping[float, float], after: Mapping[float, float], q: float) -> float | None:
    """Quantile of a histogram's new entries between two readings, linear within its bucket; None without entries.

    In the last bucket, which has no upper edge, it is the lower edge.
    """
    edges = sorted(after)
    counts = np.array([after[edge] - before.get(edge, 0.0) for edge in edges])
    if not edges or counts[-1] <= 0:
        return None
    i = int(np.searchsorted(counts, q * counts[-1]))
    low, below = (edges[i - 1], counts[i - 1]) if i else (0.0, 0.0)
    if not np.isfinite(edges[i]):
        return low
    return float(low + (edges[i] - low) * (q * counts[-1] - below) / max(counts[i] - below, 1e-12))


@dataclass
class EngineObserver:
    """Observation of an engine for policies, (21,), or (24,) if the task scales, from one reading per second.

    The engine is one of ``replicas`` replicas that share the traffic equally, so its arrivals and queue are multiplied
    by their number. A request counts as arrived when it waits, runs or has finished. A number that the engine does not
    report keeps its last value, at first that of an idle fleet. ``missing`` names these numbers.
    """

    task: TaskSpec
    replicas: int = 1
    row: FloatArray = field(init=False)
    missing: tuple[str, ...] = ("gpu_memory_used_gb", "cost_so_far")
    _last: Reading | None = None
    _last_s: float = 0.0

    def __post_init__(self) -> None:
        scaling = [] if self.task.fleet.max_replicas is None else [self.replicas, self.replicas, 0]
        self.row = np.array([0.0] * (len(OBSERVATION_FIELDS) + len(FLEET_FIELDS)) + scaling)
        self._set("arrival_rate", self.task.arrival_rate_rps)
        for k, each in enumerate(self.task.classes):
            self.row[_AT["priority_interactive"] + k] = each.share

    def observe(self, reading: Reading, now_s: float, knobs: ServeAction) -> FloatArray:
        """The observation after a reading at ``now_s``, with the knobs in force since the last one."""
        before, self._last = self._last, reading
        seconds, self._last_s = now_s - self._last_s, now_s
        self._set("queue_depth", self.replicas * reading.queue_requests)
        self._set("kv_cache_occupancy", reading.kv_occupancy)
        if before is not None:
            self._since(before, reading, max(seconds, 1e-3))
            self._set("timestep", self._get("timestep") + 1)
        fleet = self.row[len(OBSERVATION_FIELDS) :][: len(FLEET_FIELDS)]
        setting = to_row(knobs)
        fleet[-1] = fleet[-1] + 1 if (fleet[: len(setting)] == setting).all() else 1.0
        fleet[: len(setting)] = setting
        return self.row

    def _since(self, before: Reading, now: Reading, seconds: float) -> None:
        if now.finished_requests is not None and before.finished_requests is not None:
            held = now.queue_requests + now.running_requests - before.queue_requests - before.running_requests
            finished = now.finished_requests - before.finished_requests
            if now.finished_requests < before.finished_requests:
                raise RemoteError("the engine's counters decreased: the engine was restarted")
            rate = self.replicas * max(0.0, held + finished) / seconds
            self._set("arrival_rate", self._get("arrival_rate") + EMA_WEIGHT * (rate - self._get("arrival_rate")))
            if finished and now.prompt_tokens is not None and before.prompt_tokens is not None:
                self._set("mean_prompt_len", (now.prompt_tokens - before.prompt_tokens) / finished)
        for name, old, new in (
            ("ttft_p50", before.ttft_buckets, now.ttft_buckets),
            ("tpot_p50", before.tpot_buckets, now.tpot_buckets),
        ):
            if old is not None and new is not None and (median := quantile_s(old, new, 0.5)) is not None:
                self._set(name, 1e3 * median)
        if now.ttft_buckets is not None and before.ttft_buckets is not None:
            self._set("slo_violation_rate", late_share(before.ttft_buckets, now.ttft_buckets, self.task.slo_target_ms))
        drafted = (now.drafted_tokens or 0.0) - (before.drafted_tokens or 0.0)
        if drafted > 0:
            self._set("spec_accept_rate", ((now.accepted_tokens or 0.0) - (before.accepted_tokens or 0.0)) / drafted)

    def _get(self, name: str) -> float:
        return float(self.row[_AT[name]])

    def _set(self, name: str, value: float) -> None:
        bounds = OBSERVATION_FIELDS[name]
        self.row[_AT[name]] = min(max(value, bounds.low), bounds.high)

    def seen(self) -> dict[str, float]:
        """The observation by name."""
        names = (*OBSERVATION_FIELDS, *FLEET_FIELDS, *SCALING_FIELDS)
        return dict(zip(names, self.row.tolist(), strict=False))


def late_share(before: Mapping[float, float], after: Mapping[float, float], objective_ms: float) -> float:
    """Share of a histogram's new entries beyond an objective, which is rounded up to the next bucket edge."""
    edges = sorted(after)
    counts = [after[edge] - before.get(edge, 0.0) for edge in edges]
    if not edges or counts[-1] <= 0:
        return 0.0
    within = next(count for edge, count in zip(edges, counts, strict=True) if edge >= objective_ms / 1e3)
    return float(1.0 - within / counts[-1])


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice of a policy for one second: observation, current setting, wanted setting, expected result."""

    time_s: float
    observation: dict[str, float]
    in_force: dict[str, float]
    wanted: dict[str, float]
    expected: dict[str, float]

    def why(self) -> str:
        """The main observations of the policy, in one line."""
        o = self.observation
        return (
            f"{o['arrival_rate']:.2f} requests/s, {o['queue_depth']:.0f} waiting, KV {o['kv_cache_occupancy']:.0%}, "
            f"TTFT {o['ttft_p50']:.0f} ms, TPOT {o['tpot_p50']:.0f} ms, late {o['slo_violation_rate']:.0%}"
        )


class Adviser:
    """Asks a policy once a second what it would set on an engine, and sets nothing.

    ``tables`` are those of the engine, if it was measured (`inferencegym measure`): with them the discrete-event
    reference predicts the result of the wanted setting at the current rate and lengths. The engine is one of
    ``replicas`` replicas; policies of a task that scales also say how many replicas they want.
    """

    def __init__(
        self, engine: Engine, task: TaskSpec, agent: Agent, tables: ServingTables | None = None, replicas: int = 1
    ) -> None:
        most = task.fleet.max_replicas or REPLICAS.high
        if not 1 <= replicas <= most:
            raise refusal("replicas", replicas, f"1 to {most:g}")
        self._engine = engine
        self._fleet = task.fleet
        self._replicas = replicas
        self._agent = agent
        self._tables = tables
        self._mask = action_mask(task.active_actions)
        self._observer = EngineObserver(task, replicas)
        self._output_tokens = 0.0
        self._before: Reading | None = None
        agent.reset(1)

    def advise(self, now_s: float) -> Advice:
        """Read the engine and ask the policy. Raises :class:`RemoteError` if the engine gives no metrics."""
        reading = self._engine.read()
        in_force = dict(self._engine.in_force())
        known = {name: in_force[name] for name in ACTION_KNOBS if name in in_force}
        knobs = ServeAction.from_dict({**NAIVE_ACTION.to_dict(), **{n: _whole(n, v) for n, v in known.items()}})
        row = self._observer.observe(reading, now_s, knobs)
        wanted = from_row(snap(self._agent.act(row[None]), self._mask, self._fleet)[0])
        advice = {name: float(getattr(wanted, name)) for name in ACTION_KNOBS}
        if wanted.replicas is not None:
            advice["replicas"], in_force["replicas"] = float(wanted.replicas), float(self._replicas)
        return Advice(now_s, self._observer.seen(), in_force, advice, self._expected(wanted, reading))

    def _expected(self, wanted: ServeAction, reading: Reading) -> dict[str, float]:
        before, self._before = self._before, reading
        seen = self._observer.seen()
        if self._tables is None or before is None or seen["mean_prompt_len"] < 1 or seen["arrival_rate"] <= 0.05:
            return {}
        finished = (reading.finished_requests or 0.0) - (before.finished_requests or 0.0)
        if finished > 0 and reading.output_tokens is not None and before.output_tokens is not None:
            self._output_tokens = (reading.output_tokens - before.output_tokens) / finished
        if self._output_tokens < 1:
            return {}
        load = steady_requests(
            seen["arrival_rate"], None, seen["mean_prompt_len"], self._output_tokens, window_s=EXPECTED_S
        )
        if not len(load.arrival_s):
            return {}
        report = PlayedLoad(wanted, load, self._tables, "shared", wanted.replicas or self._replicas).report()
        if not report.completed:
            return {}  # all requests are longer than the engine's pool
        return {
            "ttft_p50_ms": report.ttft_p50_ms,
            "tpot_p50_ms": report.tpot_p50_ms,
            "output_tokens_per_s": report.output_tokens_per_s,
        }


def _whole(name: str, value: float) -> float | int:
    return value if name == "kv_budget" else int(value)


# ---------------------------------------------------------------- control


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a controller: range of each knob that it may set, and largest change per second.

    ``step`` is a share of a knob's range; a knob that is not named is never set.
    """

    ranges: Mapping[str, tuple[float, float]]
    step: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.step <= 1:
            raise refusal("step", self.step, "a share of the range above 0, at most 1")
        if not self.ranges:
            raise InvalidConfigError("a controller needs bounds for at least one knob, such as batch_size=8:64")
        for name, (low, high) in self.ranges.items():
            if name not in ACTION_KNOBS:
                raise refusal(f"bounds.{name}", (low, high), f"a range of one of {', '.join(ACTION_KNOBS)}")
            if not low <= high:
                raise refusal(f"bounds.{name}", (low, high), "a lower and a higher value")

    def next(self, in_force: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
        """Setting nearest to the wanted one that lies within the ranges and one step."""
        found = {}
        for name, (low, high) in self.ranges.items():
            most = self.step * (high - low)
            if name != "kv_budget":
                most = max(1.0, most)
            now = min(max(in_force[name], low), high)
            value = min(max(wanted[name], low, now - most), high, now + most)
            found[name] = value if name == "kv_budget" else float(round(value))
        return found


@dataclass
class Controller:
    """Sets an engine to what a policy wants, within bounds, and gives it back to its user's setting.

    Orders end ``dead_man_s`` after they were given unless the next ones come: where the engine sees to that itself
    (vLLM's scheduler class), it goes back even if this process is killed, and other controllers are refused with
    :class:`InvalidConfigError` until then. Control ends, and the engine is given back, when it gave no metrics for so
    long, or when more than half of the requests missed the objective for ``missed_s`` seconds. Every second is a line
    of ``audit``. With ``dry_run`` nothing is set.
    """

    engine: Engine
    adviser: Adviser
    bounds: Bounds
    audit: Path
    dead_man_s: float = 10.0
    missed_s: float = 30.0
    dry_run: bool = False
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        limits = self.engine.limits()
        for name, (low, high) in self.bounds.ranges.items():
            if name not in limits:
                raise refusal(
                    f"bounds.{name}", (low, high), f"left out: this engine changes {', '.join(limits) or 'none'}"
                )
            if low < limits[name][0] or high > limits[name][1]:
                allowed = f"within {limits[name][0]:g} to {limits[name][1]:g}, as the engine was started"
                raise refusal(f"bounds.{name}", (low, high), allowed)
        # All knobs: a controller that was killed may have set others.
        self._user = dict(self.engine.user_setting())
        self._metrics_at = self.clock()
        if not self.dry_run:
            self.engine.set(Orders(self._user, self._metrics_at + self.dead_man_s, self._user))
        self._missed_since: float | None = None
        self.stopped = ""

    @property
    def own(self) -> Mapping[str, float]:
        """The user's setting of the bounded knobs, which the engine goes back to."""
        return {name: self._user[name] for name in self.bounds.ranges}

    def second(self) -> Advice | None:
        """Ask and set once; None if the engine gave no metrics. ``stopped`` says why the control has ended."""
        now = self.clock()
        try:
            advice = self.adviser.advise(now)
        except InferenceGymError as error:
            self._note(now, {"no_metrics": str(error)})
            if now - self._metrics_at > self.dead_man_s:
                self.give_back(f"no metrics for {now - self._metrics_at:.0f} s: {error}")
            return None
        self._metrics_at = now
        late = advice.observation["slo_violation_rate"] > 0.5
        self._missed_since = (self._missed_since or now) if late else None
        if self._missed_since is not None and now - self._missed_since >= self.missed_s:
            self.give_back(f"the objective was missed for {self.missed_s:g} s")
            return advice
        setting = self.bounds.next(advice.in_force, advice.wanted)
        self._note(now, {"why": advice.why(), "wanted": advice.wanted, "set": setting})
        if not self.dry_run:
            self.engine.set(Orders({**self._user, **setting}, now + self.dead_man_s, self._user))
        return advice

    def give_back(self, reason: str) -> None:
        """Set the engine to its user's setting and end the control."""
        if not self.dry_run:
            self.engine.set(Orders(self._user))
        self.stopped = reason
        self._note(self.clock(), {"given_back": reason, "set": dict(self.own)})

    def _note(self, now: float, what: dict[str, Any]) -> None:
        with self.audit.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"time": now, "dry_run": self.dry_run, **what}) + "\n")
