"""Naive baseline: an agent that keeps the default knob values, and its scores."""

from __future__ import annotations

from typing import Any, Final

from agents.policies.constant import ConstantAgent
from env.inference_env import InferenceEnv
from grader.grader import GraderModule
from inferencegym.models import NAIVE_ACTION
from inferencegym.tasks import TaskId, list_tasks

BASELINE_ACTION: Final = NAIVE_ACTION
"""Default knob values: whole KV pool, no speculation, batch size 32, prefill on the same GPU as decoding, FP16."""

BASELINE_SEED: Final = 0


class NaiveAgent(ConstantAgent):
    """Agent that takes :data:`BASELINE_ACTION` at every step."""

    def __init__(self) -> None:
        super().__init__(BASELINE_ACTION)


def run_baseline(task_id: TaskId, seed: int = BASELINE_SEED) -> dict[str, Any]:
    """Run one episode with the naive action: ``{"task_id", "score", "breakdown", "action_config"}``."""
    env = InferenceEnv(task_id=task_id, seed=seed)
    env.reset()
    while not env.done:
        env.step(BASELINE_ACTION)
    grade = GraderModule().score(task_id, env.episode_log)
    return {
        "task_id": env.task_id,
        "score": grade["score"],
        "breakdown": grade["breakdown"],
        "action_config": BASELINE_ACTION.to_dict(),
    }


def run_all_baselines() -> dict[str, Any]:
    """Scores of the naive agent on every task that is not a recorded trace; deterministic.

    ``scores`` and ``breakdown`` are keyed ``task1``, ``task2``, ...; ``expected_range`` is the range that the task's
    data declare for this agent.
    """
    tasks = list_tasks()
    results = {f"task{task.task_id}": run_baseline(task.task_id) for task in tasks}
    return {
        "scores": {key: result["score"] for key, result in results.items()},
        "expected_range": {f"task{t.task_id}": list(t.expected_baseline) for t in tasks if t.expected_baseline},
        "breakdown": {key: result["breakdown"] for key, result in results.items()},
        "action_config": BASELINE_ACTION.to_dict(),
        "seed": BASELINE_SEED,
    }
