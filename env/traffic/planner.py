"""Exact optimum of a traffic task by dynamic programming, so that the regret of every agent is known.

The traffic of an episode is fixed, so the best sequence of actions can be planned before the first step. The plan is
found by dynamic programming over labels.

**State.** A crash depends only on the action and the step. Otherwise the future depends only on the queue, a whole
number. The final score depends on sums over the steps as well: the mean latency is a sum over the number of steps
taken, throughput is a sum over the incoming requests (the same for all plans that reach a step), and the share of steps
with a short queue is a count. So a label after ``t`` steps without a crash is (queue, count of short-queue steps where
the rule asks for it, the one sum that the rule wants to be large).

**Dominance.** Of two labels with the same step, queue and count, the one with the smaller sum is dropped. Any
continuation of it can follow the other one: it meets the same servers, adds the same terms, crashes at the same step or
not at all, and so ends with equal counts and a sum that is no smaller (adding the same number to two sums keeps their
order, in floating point too). The score never falls when that sum grows, as :class:`env.traffic.score.GradeRule`
promises, so nothing is lost. One label is kept for every reachable (queue, count): at most (max_queue + 1) * (t + 1) of
them, in practice far fewer.

**Ends.** An episode ends with the last step or with a crash; both kinds of end are scored with the task's own rule, and
the best one is taken. A crash can be worth it: the rule for spikes weighs steps survived against latency.

For the cumulative reward, a sum itself, the label is (queue, reward so far) and the same argument holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from env.traffic.env import TrafficBatch
from env.traffic.model import SHARES, FloatArray, IntArray, TrafficParams, allowed_rates, incoming_rates, step
from env.traffic.score import RULES, EpisodeTotals, final_score, step_reward
from env.traffic.tasks import TrafficConfig, TrafficTask
from inferencegym.traffic import ACTION_NAMES

Objective = Literal["score", "return"]
"""The objective: ``final_score`` or the sum of the rewards."""


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """A sequence of actions with its score and return."""

    actions: tuple[str, ...]
    final_score: float
    cumulative_reward: float


def plan_traffic(task: TrafficTask, config: TrafficConfig | None = None, objective: Objective = "score") -> TrafficPlan:
    """A best sequence of actions for a task and its settings; no other sequence has a larger ``objective``.

    Where the plan with the largest cumulative reward reaches the best score as well, it is the plan for both.
    """
    config = config or task.config
    richest = run_actions(task, _search(task, config, "return"), config)
    if objective == "return":
        return richest
    plan = run_actions(task, _search(task, config, "score"), config)
    return richest if richest.final_score == plan.final_score else plan


def run_actions(task: TrafficTask, actions: tuple[str, ...], config: TrafficConfig | None = None) -> TrafficPlan:
    """Run a whole sequence of action names; the plan with its score and return."""
    batch = TrafficBatch(task, 1, config)
    reward = 0.0
    for name in actions:
        reward += float(batch.step(np.array([ACTION_NAMES.index(name)])).reward[0])
    return TrafficPlan(actions, float(batch.final_score()[0]), reward)


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labels of a step, one per row: arrays ``(L,)``. ``before`` is the row of its predecessor in the previous step."""

    queue: IntArray
    totals: EpisodeTotals
    reward: FloatArray
    before: IntArray
    action: IntArray

    @classmethod
    def start(cls) -> _Labels:
        nothing = np.zeros(1, dtype=np.int64)
        return cls(nothing, EpisodeTotals.zeros(1), np.zeros(1), nothing, nothing)

    def rows(self, index: IntArray) -> _Labels:
        return _Labels(
            self.queue[index], self.totals.rows(index), self.reward[index], self.before[index], self.action[index]
        )


def _search(task: TrafficTask, config: TrafficConfig, objective: Objective) -> tuple[str, ...]:
    params = TrafficParams.from_config(config)
    incoming = incoming_rates(task.pattern, task.episode_length, config.traffic_scale)
    labels = _Labels.start()
    layers = [labels]
    best_value, best_layer, best_end = -np.inf, 0, labels
    for t in range(task.episode_length):
        children = _extend(task, params, float(incoming[t]), labels)
        crashed = children.totals.crashed
        labels = _undominated(task, objective, children.rows(np.flatnonzero(~crashed)))
        last = t + 1 == task.episode_length
        ends = [children.rows(np.flatnonzero(crashed)), *([labels] if last else [])]
        for end in ends:
            values = _values(task, objective, end)
            if values.size and values.max() > best_value:
                best_value, best_layer, best_end = float(values.max()), t, end.rows(np.array([values.argmax()]))
        layers.append(labels)
        if not labels.queue.size:  # every action crashes here
            break
    return _backtrack(layers, best_layer, best_end)


def _extend(task: TrafficTask, params: TrafficParams, incoming_rps: float, labels: _Labels) -> _Labels:
    """All four actions taken from every label, ``(4 L,)``."""
    n_labels, n_actions = labels.queue.size, SHARES.size
    before = np.repeat(np.arange(n_labels), n_actions)
    action = np.tile(np.arange(n_actions), n_labels)
    share, incoming = SHARES[action], np.full(before.size, incoming_rps)
    allowed = allowed_rates(incoming, share)
    server = step(params, labels.queue[before], allowed)
    return _Labels(
        queue=server.queue_requests,
        totals=labels.totals.rows(before).add(task.grade, server, allowed, incoming),
        reward=labels.reward[before] + step_reward(params, share, server),
        before=before,
        action=action,
    )


def _undominated(task: TrafficTask, objective: Objective, labels: _Labels) -> _Labels:
    """The best label of every (queue, count of short-queue steps)."""
    rule = RULES[task.grade.kind]
    counted = objective == "score" and rule.counts_short_queues
    count = labels.totals.short_queue_steps if counted else np.zeros_like(labels.queue)
    wanted = rule.criterion(labels.totals) if objective == "score" else labels.reward
    order = np.lexsort((-wanted, count, labels.queue))
    queue, count = labels.queue[order], count[order]
    first = np.ones(order.size, dtype=np.bool_)
    first[1:] = (queue[1:] != queue[:-1]) | (count[1:] != count[:-1])
    return labels.rows(order[first])


def _values(task: TrafficTask, objective: Objective, ends: _Labels) -> FloatArray:
    if objective == "return":
        return ends.reward
    return final_score(task.grade, ends.totals, task.episode_length)


def _backtrack(layers: list[_Labels], layer: int, end: _Labels) -> tuple[str, ...]:
    """Action names from the first step to ``end``, which came from a row of ``layers[layer]``."""
    names = [ACTION_NAMES[int(end.action[0])]]
    row = int(end.before[0])
    for labels in reversed(layers[1 : layer + 1]):
        names.append(ACTION_NAMES[int(labels.action[row])])
        row = int(labels.before[row])
    return tuple(reversed(names))
