"""Solver of a task: an exhaustive sweep of constant actions and a search over adaptive policies.

Both run whole episodes in the batch, many candidates on the same load at once. The adaptive search builds a
:class:`agents.policies.switching_policy.ModeParams` policy: it tries a library of simple gates with every knob setting
of a coarse grid in the other mode, polishes the settings knob by knob, and lets a cross-entropy search move everything
at once. Then it tries what it found behind other gates, with other choices of the knobs that need a restart, and
searches again. Fitted on :data:`agents.seeds.TRAINING_SEEDS`, chosen on :data:`agents.seeds.VALIDATION_SEEDS`.

A search finds the errors of the model that it searches. So the last ones are played in the discrete-event reference,
which follows every request, and the one that is best there is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from agents.episodes import EpisodeResults, run_episodes
from agents.policies.switching_policy import FEATURES, ActionsAgent, ModeAgent, ModeParams, Q
from agents.protocol import Agent, FloatArray
from agents.seeds import TRAINING_SEEDS, VALIDATION_SEEDS
from env.dynamics import DynamicsFactory, FluidFleet
from env.reference import ReferenceFleet
from inferencegym.models import ACTION_FIELDS, SPEC_LENGTHS
from inferencegym.spaces.actions import ACTION_HIGH, ACTION_LOW, FORCED, action_mask, snap
from inferencegym.tasks import Calibration, TaskSpec

GRID: Final[dict[str, tuple[float, ...]]] = {
    "kv_budget": (0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0),
    "spec_length": SPEC_LENGTHS,
    "batch_size": (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    "prefill_disagg": (0, 1),
    "quant_tier": (0, 1, 2),
}
"""The exhaustive sweep: 2,880 actions when all knobs are live."""

COARSE: Final[dict[str, tuple[float, ...]]] = {
    "kv_budget": (0.15, 0.35, 0.6, 0.9),
    "spec_length": (0, 1, 4),
    "batch_size": (16, 48, 96, 192, 448),
    "prefill_disagg": (0, 1),
    "quant_tier": (0, 1, 2),
}

ROWS_AT_ONCE: Final = 1536
"""Rows of a batch: enough to amortise numpy's cost per step, few enough to stay in the caches."""

STAGES: Final[tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]] = (
    {
        "kv_budget": (0.2, 0.5, 0.9),
        "spec_length": (0, 2),
        "batch_size": (16, 32, 448),
        "prefill_disagg": (0, 1),
        "quant_tier": (0, 1, 2),
    },
    {
        "kv_budget": (0.95,),
        "spec_length": (0,),
        "batch_size": (448,),
        "prefill_disagg": (0, 1),
        "quant_tier": (0, 1, 2),
    },
)
"""Settings for calm and for flood that are tried together, where floods are announced."""

STAGE_RAMP: Final = 0.1
"""Share of the way to the other setting that a step goes in these."""

RESTARTING: Final = [list(ACTION_FIELDS).index(name) for name in ("prefill_disagg", "quant_tier")]
"""Columns of the knobs whose change restarts replicas."""

BATCH_SIZE: Final = list(ACTION_FIELDS).index("batch_size")
"""Column of ``batch_size``."""

SMALL_FIELD: Final = 200
"""Policies that a race does not thin out after the first seed."""

SLOWEST_RAMP: Final = 0.04
"""A ramp takes 24 steps for the better part of the way at this share."""

BRACE_S: Final = 12.0
"""Seconds before a flood in which the solver tries settings of their own."""

GATE_GAIN: Final = 12.0
"""Weight of a simple gate's feature: so steep that nothing else decides."""

POLISH_ROUNDS: Final = 6

Objective = Callable[[EpisodeResults, Calibration], FloatArray]
"""Objective to maximise: values (B,) of finished episodes."""


def score(results: EpisodeResults, calibration: Calibration) -> FloatArray:
    """Objective: the grade, (B,)."""
    return results.scores(calibration)


def throughput(results: EpisodeResults, calibration: Calibration) -> FloatArray:
    """Objective: mean tokens per second, (B,)."""
    mean: FloatArray = results.metrics["tokens_per_sec"].mean(axis=0)
    return mean


class Progress(Protocol):
    """Callback that reports progress."""

    def __call__(self, what: str, share: float | None) -> None:
        """Report that ``what`` has begun and ``share`` of the work is done (None: no more than before)."""
        ...


def silent(what: str, share: float | None) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Budget of a search: grids, seeds, and sizes of its stages."""

    grid: dict[str, tuple[float, ...]] = field(default_factory=lambda: dict(GRID))
    coarse: dict[str, tuple[float, ...]] = field(default_factory=lambda: dict(COARSE))
    stages: tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]] = STAGES
    seeds: Sequence[int] = TRAINING_SEEDS[:12]
    quick_seeds: Sequence[int] = TRAINING_SEEDS[:3]
    validation: Sequence[int] = VALIDATION_SEEDS
    finalists: int = 6
    """Policies that play in the reference; with 1 the fluid model decides alone."""
    reference_seeds: Sequence[int] = VALIDATION_SEEDS[:6]
    gates_kept: int = 3
    population: int = 128
    generations: int = 30


QUICK: Final = Budget(
    grid=dict(COARSE),
    quick_seeds=TRAINING_SEEDS[:2],
    seeds=TRAINING_SEEDS[:4],
    validation=VALIDATION_SEEDS[:8],
    finalists=2,
    reference_seeds=VALIDATION_SEEDS[:2],
    gates_kept=1,
    population=96,
    generations=10,
)
"""For tests and first looks: a coarse sweep and a short search."""


class Solver:
    """Searches one task under one objective.

    ``frozen`` holds knobs at a value in every candidate (name to value), to measure the score without that knob.
    """

    def __init__(
        self,
        task: TaskSpec,
        calibration: Calibration,
        *,
        objective: Objective = score,
        budget: Budget | None = None,
        frozen: dict[str, float] | None = None,
        progress: Progress = silent,
    ) -> None:
        self.task = task
        self.calibration = calibration
        self.budget = budget or Budget()
        self._objective = objective
        self._frozen = frozen or {}
        self._progress = progress
        self._best = -np.inf
        self._mask = action_mask(task.active_actions)

    def _report(self, what: str, share: float | None = None) -> None:
        self._progress(f"{what}, best {self._best:.4g} in training" if self._best > -np.inf else what, share)

    # ------------------------------------------------------------ evaluation

    def values_of_actions(self, actions: FloatArray, seeds: Sequence[int]) -> FloatArray:
        """Mean objective of constant actions (N, 5) over the seeds, (N,)."""
        return self._values(len(actions), seeds, lambda part: ActionsAgent(actions[part], len(seeds)))

    def values_of_policies(
        self, params: ModeParams, seeds: Sequence[int], dynamics: DynamicsFactory = FluidFleet
    ) -> FloatArray:
        """Mean objective of mode policies (P) over the seeds, (P,); ``dynamics`` serves the requests."""

        def agent(part: slice) -> Agent:
            return ModeAgent(params.select(part), self.task, len(seeds))

        return self._values(len(params), seeds, agent, dynamics)

    def _values(
        self,
        n: int,
        seeds: Sequence[int],
        agent: Callable[[slice], Agent],
        dynamics: DynamicsFactory = FluidFleet,
    ) -> FloatArray:
        at_once = max(1, ROWS_AT_ONCE // len(seeds))
        values = np.empty(n)
        for start in range(0, n, at_once):
            part = slice(start, min(n, start + at_once))
            rows = (part.stop - start) * len(seeds)
            results = run_episodes(
                self.task, agent(part), seeds, n_rows=rows, calibration=self.calibration, dynamics=dynamics
            )
            values[part] = self._objective(results, self.calibration).reshape(-1, len(seeds)).mean(axis=1)
        return values

    def race(self, params: ModeParams, finalists: int, seeds: Sequence[int] | None = None) -> FloatArray:
        """Mean objective of the mode policies (P) that lead, (P,); -inf for those that fell behind.

        The same load tells good policies from bad ones early: all run on the first seed, the better ones of them on the
        other quick seeds, and ``finalists`` on the rest of ``seeds`` (by default the training seeds). Where few start,
        all run on all quick seeds.
        """
        quick = list(self.budget.quick_seeds)
        rest = [s for s in (self.budget.seeds if seeds is None else seeds) if s not in quick]
        rounds = [quick, rest] if len(params) <= SMALL_FIELD else [quick[:1], quick[1:], rest]
        rounds = [part for part in rounds if part]
        finalists = min(finalists, len(params))
        shrink = (finalists / len(params)) ** (1.0 / max(1, len(rounds) - 1))
        field = np.arange(len(params))
        total, n_seeds = np.zeros(len(params)), 0
        for i, part in enumerate(rounds):
            kept = max(finalists, round(len(params) * shrink**i))
            field = field[np.argsort(-total[field], kind="stable")[:kept]]
            total[field] += len(part) * self.values_of_policies(params.select(field), part)
            n_seeds += len(part)
        values = np.full(len(params), -np.inf)
        values[field] = total[field] / n_seeds
        return values

    # ------------------------------------------------------------ constant actions

    def grid(self, points: dict[str, tuple[float, ...]]) -> FloatArray:
        """All combinations of these points (N, 5); knobs that are not live or frozen have one value."""
        axes: list[tuple[float, ...]] = []
        for i, name in enumerate(ACTION_FIELDS):
            if name in self._frozen:
                axes.append((self._frozen[name],))
            else:
                axes.append(points[name] if self._mask[i] else (float(FORCED[i]),))
        return np.array(list(itertools.product(*axes)), dtype=np.float64)

    def best_static(self) -> tuple[FloatArray, float]:
        """The best constant action (5,) and its value on the training seeds.

        A race of the whole grid, of which 48 run on all seeds; then the best one is moved off the grid knob by knob,
        and plays against the best ones of the grid in the reference.
        """
        budget = self.budget
        self._report("constants", 0.0)
        actions = self.grid(budget.grid)
        values = self.race(constant_policies(actions), 48)
        best = int(np.argmax(values))
        self._best = float(values[best])
        self._report("constants, off the grid", 0.05)
        policy = constant_policy(actions[best])
        polished, _ = self.polish(policy, float(values[best]))
        runners_up = np.argsort(-values, kind="stable")[: self.budget.finalists - 1]
        chosen = self._best_in_reference([polished, *(constant_policy(actions[i]) for i in runners_up)])
        return snap(chosen.settings[0], self._mask)[0], self._training_value(chosen)

    # ------------------------------------------------------------ adaptive policies

    def best_adaptive(self, static: FloatArray) -> tuple[ModeParams, float]:
        """The best policy found and its value on the validation seeds, never below the best constant action's."""
        candidates = [constant_policy(static)]
        starts = self._two_modes(static)
        for i, start in enumerate(starts):
            # Searches from different gates end on different hills: all are climbed.
            self._report(f"adaptive policies, start {i + 1} of {len(starts)}", 0.3 + 0.5 * i / len(starts))
            two = self._settle(start)
            three, _ = self._settle_modes(self._third_mode(two), self._training_value(two))
            candidates += [two, three, *self._cross_entropy(max(two, three, key=self._training_value))]
        best = max(candidates, key=self._training_value)
        for i, other in enumerate(self._regated(best, 2)):
            self._report("adaptive policies, other gates", 0.8 + 0.05 * i)
            candidates += self._cross_entropy(other)
        self._report("adaptive policies, calm and flood together", 0.9)
        for staged in self.staged_starts():
            candidates += self._cross_entropy(staged)
        candidates += self._cross_entropy(max(candidates, key=self._training_value))
        self._report("validation", 0.97)
        return self._chosen(candidates)

    def refine(self, start: ModeParams) -> tuple[ModeParams, float]:
        """Improve a policy by local search; returns it with its value on the validation seeds.

        Frozen knobs are set in the start as well, so that the value is that of a policy without them.
        """
        settings = start.settings.copy()
        for name, value in self._frozen.items():
            settings[..., list(ACTION_FIELDS).index(name)] = value
        start = start.with_settings(settings)
        settled = max((self._settle(start), *self._regated(start, 1)), key=self._training_value)
        candidates = [start, settled, *self._cross_entropy(settled)]
        staged = self.staged_starts()
        if staged:
            candidates += self._cross_entropy(max(staged, key=self._training_value))
        return self._chosen(candidates)

    def validated(self, params: ModeParams) -> float:
        """Mean objective of a policy on the validation seeds."""
        return self._value(params, self.budget.validation)

    def _chosen(self, candidates: Sequence[ModeParams]) -> tuple[ModeParams, float]:
        """The best candidate in the reference of those that lead here, and its value on the validation seeds.

        They lead over training and validation seeds together, and none is worse on the validation seeds than the first
        candidate, which plays in the reference as well. Of policies that are alike on the validation seeds the training
        seeds tell the better one, and those that only fit the training seeds show on the others. The best one is
        polished first.
        """
        n_training, n_validation = len(self.budget.seeds), len(self.budget.validation)

        def judged(params: ModeParams) -> tuple[float, float]:
            value = self.validated(params)
            return n_training * self._training_value(params) + n_validation * value, value

        found = [(*judged(params), params) for params in candidates]
        least = found[0][1]
        allowed = sorted((each for each in found if each[1] >= least), key=lambda each: -each[0])
        best = allowed[0]
        polished, _ = self.polish(best[2], self._training_value(best[2]))
        last = (*judged(polished), polished)
        if last[0] > best[0] and last[1] >= least:
            allowed.insert(0, last)
        leading = [params for *_, params in allowed[: self.budget.finalists]]
        if self.budget.finalists > 1 and not any(params is candidates[0] for params in leading):
            leading.append(candidates[0])
        chosen = self._best_in_reference(leading)
        return chosen, self.validated(chosen)

    def _best_in_reference(self, policies: Sequence[ModeParams]) -> ModeParams:
        """The policy with the highest mean objective in the discrete-event reference; of equal ones the first."""
        if len(policies) == 1:
            return policies[0]
        self._report(f"{len(policies)} policies in the reference")
        values = [self._value(params, self.budget.reference_seeds, ReferenceFleet) for params in policies]
        return policies[int(np.argmax(values))]

    def _training_value(self, params: ModeParams) -> float:
        return self._value(params, self.budget.seeds)

    def _value(self, params: ModeParams, seeds: Sequence[int], dynamics: DynamicsFactory = FluidFleet) -> float:
        return float(self.values_of_policies(params, seeds, dynamics)[0])

    def _two_modes(self, static: FloatArray) -> list[ModeParams]:
        """Best pairs of the static action and a second setting, in either order behind each gate of the library."""
        self._report("adaptive policies, gates", 0.1)
        settings = self.grid(self.budget.coarse)
        gates = gate_library(self.task)
        # What is best all the time may be best in the flood or in the calm: try the other setting for each.
        both = np.broadcast_to(static, settings.shape)
        pairs = crossed(np.concatenate([both, settings]), np.concatenate([settings, both]), gates)
        values = self.race(pairs, 16 * len(gates), self.budget.quick_seeds)
        best: dict[tuple[int, bool], int] = {}
        for i in np.argsort(-values, kind="stable").tolist():
            best.setdefault((i % len(gates), i < len(pairs) // 2), i)
        return [pairs.pick(i) for i in list(best.values())[: self.budget.gates_kept]]

    def _regated(self, params: ModeParams, kept: int) -> list[ModeParams]:
        """The policy's first two modes behind other simple gates, with other calm settings of what needs a restart.

        A restart pays only if it is over when the flood comes, and another placement or precision wants another pool:
        knobs and gate have to change together. Returns the best policy of each of the ``kept`` best such settings,
        with a mode for draining and polished.
        """
        calm, flood = params.settings[0, 0], params.settings[0, min(1, params.n_modes - 1)]
        points = {name: tuple(map(float, field.choices or ())) for name, field in ACTION_FIELDS.items()}
        points["kv_budget"] = (float(calm[0]), *self.budget.coarse["kv_budget"])
        points["batch_size"] = (float(calm[BATCH_SIZE]),)
        settings = self.grid(points)
        tried = crossed(settings, np.broadcast_to(flood, settings.shape), gate_library(self.task))
        tried = replace(tried, stay=np.full(len(tried), params.stay[0]), ramp=np.full(len(tried), params.ramp[0]))
        # Each way to place and to quantise the calm is a race of its own: what it is worth shows after polishing.
        winners = self._winners(tried, tried.settings[:, 0, RESTARTING], 64, self.budget.quick_seeds)
        winners.sort(key=lambda pair: -pair[0])
        chosen = [params for _, params in winners[:kept]]
        if self.task.burst is not None:
            chosen = [self._drain_mode(p) for p in chosen]
        return [self.polish(p, self._training_value(p))[0] for p in chosen]

    def staged_starts(self) -> list[ModeParams]:
        """Starts with calm, flood and gate chosen together, one for each way to hold requests back in calm.

        What a small batch in calm is worth shows only with another setting in the flood, and a search that moves one
        setting at a time from the best constant action does not find it. The seconds before a flood get a setting of
        their own. None for tasks without announced floods.
        """
        burst = self.task.burst
        if burst is None:
            return []
        calm, flood = (self.grid(points) for points in self.budget.stages)
        windows = itertools.product((0.0, 3.0, 8.0), (15.0, 30.0))
        gates = [window_gate(-a, burst.duration_steps + b, burst.interval_steps) for a, b in windows]
        tried = crossed(np.repeat(calm, len(flood), axis=0), np.tile(flood, (len(calm), 1)), gates)
        tried = replace(tried, ramp=np.full(len(tried), STAGE_RAMP))
        winners = self._winners(tried, tried.settings[:, 0, [BATCH_SIZE]], 48)
        starts = [self._brace_mode(params) for _, params in winners]
        return [self._settle(start) for start in starts]

    def _winners(
        self, params: ModeParams, ways: FloatArray, finalists: int, seeds: Sequence[int] | None = None
    ) -> list[tuple[float, ModeParams]]:
        """Race the policies (P) in groups that agree in ``ways`` (P, W); the value and the winner of each group."""
        found = []
        for way in np.unique(ways, axis=0):
            entrants = params.select(np.flatnonzero((ways == way).all(axis=1)))
            values = self.race(entrants, finalists, seeds)
            found.append((float(values.max()), entrants.pick(int(values.argmax()))))
        return found

    def _drain_mode(self, params: ModeParams) -> ModeParams:
        """Add a mode around a policy's floods, mainly after them: the flood's batch and pool on the calm's replicas."""
        settings = params.settings[:, :2].copy()
        drain = settings[:, 1:].copy()
        drain[..., RESTARTING] = settings[:, :1, RESTARTING]
        gate = np.zeros((1, 1, Q))
        if self.task.burst is not None:
            burst = self.task.burst
            gate[0, 0] = window_gate(0.0, burst.duration_steps + 45.0, burst.interval_steps, gain=6.0)
        return ModeParams(
            np.concatenate([settings, drain], axis=1),
            np.concatenate([params.gate[:, :2], gate], axis=1),
            params.stay.copy(),
            params.ramp.copy(),
        )

    def _brace_mode(self, params: ModeParams) -> ModeParams:
        """Add a mode just before a policy's floods, which starts out with the flood's settings.

        What works off the pool before a flood, or starts replicas again in time for it, is no good in calm.
        """
        burst = self.task.burst
        assert burst is not None
        gate = np.zeros((1, 1, Q))
        gate[0, 0] = window_gate(-BRACE_S, 1.0, burst.interval_steps)
        return ModeParams(
            np.concatenate([params.settings[:, :2], params.settings[:, 1:2]], axis=1),
            np.concatenate([params.gate[:, :2], gate], axis=1),
            params.stay.copy(),
            params.ramp.copy(),
        )

    def _settle(self, params: ModeParams) -> ModeParams:
        """Sweep the settings of each mode in turn with the others held, then polish."""
        settled, _ = self._settle_modes(params, self._value(params, self.budget.seeds))
        return settled

    def _settle_modes(self, params: ModeParams, value: float) -> tuple[ModeParams, float]:
        settings = self.grid(self.budget.coarse)
        for _ in range(2):
            before = value
            for mode in range(params.n_modes):
                tried = replace_mode(params, mode, settings)
                values = self.race(tried, 16)
                best = int(np.argmax(values))
                if values[best] > value:
                    params, value = tried.pick(best), float(values[best])
            params, value = self.polish(params, value)
            if value - before < 1e-3 * abs(before):
                break
        return params, value

    def polish(self, params: ModeParams, value: float) -> tuple[ModeParams, float]:
        """Move one knob of one mode at a time to its neighbours for as long as it pays."""
        scale = 1.0
        for _ in range(POLISH_ROUNDS):
            tried = self._neighbours(params, scale)
            values = self.race(tried, 20)
            best = int(np.argmax(values))
            if values[best] > value + 1e-9:
                params, value = tried.pick(best), float(values[best])
            else:
                scale *= 0.5
        return params, value

    def _neighbours(self, params: ModeParams, scale: float) -> ModeParams:
        found = []
        for mode in range(params.n_modes):
            setting = snap(params.settings[:, mode], self._mask)[0]
            for i, name in enumerate(ACTION_FIELDS):
                if not self._mask[i] or name in self._frozen:
                    continue
                for value in neighbours(name, float(setting[i]), scale):
                    moved = params.settings[0].copy()
                    moved[mode, i] = value
                    found.append(moved)
        ramps = np.clip(params.ramp[0] * np.array([0.5**scale, 2.0**scale]), SLOWEST_RAMP, 1.0)
        found += [params.settings[0]] * len(ramps)
        moved_on = params.with_settings(np.array(found))
        ramp = moved_on.ramp.copy()
        ramp[-len(ramps) :] = ramps
        return replace(moved_on, ramp=ramp)

    def _third_mode(self, params: ModeParams) -> ModeParams:
        """Add a mode that comes on with a long queue; it starts out with the settings of the second."""
        gate = np.zeros((1, 1, Q))
        gate[0, 0, FEATURES.index("queue_depth")] = GATE_GAIN
        gate[0, 0, FEATURES.index("one")] = -GATE_GAIN * 0.8
        return ModeParams(
            np.concatenate([params.settings, params.settings[:, -1:]], axis=1),
            np.concatenate([params.gate, gate], axis=1),
            params.stay.copy(),
            params.ramp.copy(),
        )

    # ------------------------------------------------------------ cross-entropy search

    def _cross_entropy(self, start: ModeParams) -> list[ModeParams]:
        """Move gates, settings and hysteresis together: sample, keep the best tenth, fit a normal to them, repeat.

        Returns the best policy found, polished, and the best tenth of the last round: policies that score alike on the
        training seeds may differ on others.
        """
        budget = self.budget
        rng = np.random.default_rng(20_260_101)
        mean = self._encode(start)
        deviation = self._initial_deviation(start)
        elite_size = max(8, budget.population // 10)
        best, best_value = start, self._value(start, budget.seeds)
        elite: list[ModeParams] = []
        for _ in range(budget.generations):
            self._best = max(self._best, best_value)
            self._report("adaptive policies, cross-entropy")
            drawn = mean + deviation * rng.standard_normal((budget.population, len(mean)))
            drawn[0] = mean
            drawn[1] = self._encode(best)
            params = self._decode(drawn, start.n_modes)
            values = self.race(params, 3 * elite_size)
            order = np.argsort(-values, kind="stable")[:elite_size]
            elite = [params.pick(int(i)) for i in order]
            mean = 0.3 * mean + 0.7 * drawn[order].mean(axis=0)
            deviation = 0.3 * deviation + 0.7 * drawn[order].std(axis=0)
            if values[order[0]] > best_value:
                best, best_value = params.pick(int(order[0])), float(values[order[0]])
        best, _ = self.polish(best, best_value)
        return [best, *elite]

    def _encode(self, params: ModeParams) -> FloatArray:
        settings = params.settings[0].copy()
        settings[:, 1] = np.searchsorted(SPEC_LENGTHS, settings[:, 1])
        settings[:, 2] = np.log2(np.maximum(settings[:, 2], 1.0))
        return np.concatenate([settings.ravel(), params.gate[0, 1:].ravel(), params.stay, np.log2(params.ramp)])

    def _initial_deviation(self, params: ModeParams) -> FloatArray:
        settings = np.tile([0.1, 0.5, 0.5, 0.3, 0.4], (params.n_modes, 1))
        settings[:, ~self._mask] = 0.0
        for name in self._frozen:
            settings[:, list(ACTION_FIELDS).index(name)] = 0.0
        return np.concatenate([settings.ravel(), np.full((params.n_modes - 1) * Q, 1.0), [0.3, 0.5]])

    def _decode(self, vectors: FloatArray, n_modes: int) -> ModeParams:
        n = len(vectors)
        settings = vectors[:, : 5 * n_modes].reshape(n, n_modes, 5).copy()
        index = np.clip(np.rint(settings[..., 1]), 0, len(SPEC_LENGTHS) - 1).astype(np.int64)
        settings[..., 1] = np.array(SPEC_LENGTHS, dtype=np.float64)[index]
        settings[..., 2] = 2.0 ** np.clip(settings[..., 2], 0.0, 9.0)
        flat = np.clip(settings.reshape(-1, 5), ACTION_LOW, ACTION_HIGH)
        settings = snap(flat, self._mask).reshape(n, n_modes, 5)
        gate = np.zeros((n, n_modes, Q))
        gate[:, 1:] = vectors[:, 5 * n_modes : -2].reshape(n, n_modes - 1, Q)
        ramp = np.clip(2.0 ** vectors[:, -1], SLOWEST_RAMP, 1.0)
        return ModeParams(settings, gate, np.maximum(vectors[:, -2], 0.0), ramp)


def constant_policy(action: FloatArray) -> ModeParams:
    """A policy of one mode."""
    return constant_policies(action.reshape(1, 5))


def constant_policies(actions: FloatArray) -> ModeParams:
    """Policies of one mode each, from actions (P, 5)."""
    n = len(actions)
    return ModeParams(actions[:, None].copy(), np.zeros((n, 1, Q)), np.zeros(n))


def pair_policies(calm: FloatArray, flood: FloatArray, gate: FloatArray) -> ModeParams:
    """Policies in ``calm`` until ``gate`` switches to ``flood``: settings (N, 5) or (5,), gates (N, Q) or (Q,)."""
    both = np.stack(np.broadcast_arrays(calm, flood), axis=1)
    n = len(both)
    gates = np.zeros((n, 2, Q))
    gates[:, 1] = gate
    return ModeParams(both, gates, np.full(n, 0.1))


def crossed(calm: FloatArray, flood: FloatArray, gates: Sequence[FloatArray]) -> ModeParams:
    """Every pair of settings (N, 5) behind each of G gates: policy ``n * G + g``."""
    each = len(gates)
    return pair_policies(np.repeat(calm, each, axis=0), np.repeat(flood, each, axis=0), np.tile(gates, (len(calm), 1)))


def replace_mode(params: ModeParams, mode: int, settings: FloatArray) -> ModeParams:
    """The policy with one mode's knobs replaced by each of ``settings`` (N, 5)."""
    changed = np.repeat(params.settings, len(settings), axis=0)
    changed[:, mode] = settings
    return params.with_settings(changed)


def gate_library(task: TaskSpec) -> list[FloatArray]:
    """Simple gates (Q,) for a second mode: a high arrival rate, a long queue, or the steps of the announced floods."""
    flood = 3.0 if task.burst is None else task.burst.rate_rps / task.arrival_rate_rps
    rates = [1.0 + x * (flood - 1.0) for x in (0.08, 0.25, 0.6)]
    library = [threshold_gate("arrival_rate", np.log1p(r * task.arrival_rate_rps) / np.log1p(1000.0)) for r in rates]
    library += [threshold_gate("queue_depth", np.log1p(q) / np.log1p(512.0)) for q in (8.0, 64.0)]
    if task.burst is not None:
        for lead, lag in itertools.product((0, 3, 8, 20), (0, 5, 15, 30)):
            library.append(window_gate(-lead, task.burst.duration_steps + lag, task.burst.interval_steps))
    return library


def threshold_gate(feature: str, level: float) -> FloatArray:
    """On while a feature is above ``level``."""
    gate = np.zeros(Q)
    gate[FEATURES.index(feature)] = GATE_GAIN
    gate[FEATURES.index("one")] = -GATE_GAIN * level
    return gate


def window_gate(start: float, stop: float, period: float, gain: float = GATE_GAIN) -> FloatArray:
    """On in the steps start <= t - offset < stop of every flood period."""
    half = np.pi * min(stop - start, period) / period
    centre = np.pi * (start + stop - 1.0) / period
    gate = np.zeros(Q)
    gate[FEATURES.index("phase_sin")] = gain * np.sin(centre)
    gate[FEATURES.index("phase_cos")] = gain * np.cos(centre)
    gate[FEATURES.index("one")] = -gain * np.cos(half)
    return gate


def neighbours(name: str, value: float, scale: float) -> list[float]:
    """Values next to this one: the other choices of a discrete knob, smaller and larger ones of the others."""
    bounds = ACTION_FIELDS[name]
    if bounds.choices is not None:
        return [float(c) for c in bounds.choices if c != value]
    if name == "kv_budget":
        near = [value + step * scale for step in (-0.2, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.2)]
    else:
        near = [value * factor**scale for factor in (0.5, 0.7, 0.85, 0.95, 1.05, 1.18, 1.4, 2.0)]
    return [min(bounds.high, max(bounds.low, v)) for v in near]
