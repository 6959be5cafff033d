"""Baselines that keep one setting, and their scores: the plan's (``naive``), an engine's defaults, random search."""

from __future__ import annotations

from typing import Any, Final

from agents.policies.constant import ConstantAgent
from agents.policies.stored import policy_dir, policy_path
from agents.registry import AGENTS, make_agent
from env.inference_env import InferenceEnv
from grader.grader import GraderModule
from inferencegym.models import NAIVE_ACTION, ServeAction
from inferencegym.tasks import TaskId, TaskSpec, list_tasks

BASELINE_ACTION: Final = NAIVE_ACTION
"""Setting of the agent ``naive`` (fixed-32): entire KV pool, no drafts, batch size 32, prefill on the same GPUs, FP16.

It is no engine's default: that is :func:`agents.policies.vllm_defaults.vllm_defaults`.
"""

BASELINE_SEED: Final = 0

BASELINES: Final = ("naive", "vllm_defaults", "random_search")
"""Agents that keep one setting and that others are compared with."""


def run_baseline(task_id: TaskId, seed: int = BASELINE_SEED, action: ServeAction = BASELINE_ACTION) -> dict[str, Any]:
    """Run one episode with one action: ``{"task_id", "score", "breakdown", "action_config"}``."""
    env = InferenceEnv(task_id=task_id, seed=seed)
    env.reset()
    while not env.done:
        env.play(env.check(action))
    grade = GraderModule().score(task_id, env.episode_log)
    return {
        "task_id": env.task_id,
        "score": grade["score"],
        "breakdown": grade["breakdown"],
        "action_config": action.to_dict(),
    }


def run_all_baselines() -> dict[str, Any]:
    """Scores of the baselines on every task that is not a recorded trace; deterministic.

    ``scores``, ``breakdown`` and ``action_config`` are the naive agent's, the first two keyed ``task1``, ``task2``,
    ...; ``expected_range`` is the range that the task's data declare for it. ``baselines`` has all of
    :data:`BASELINES` with their ``description``, and by task ``scores``, ``breakdown`` and
    ``action_config``; a task for which no random search is stored (one that was not calibrated) is left out there.
    """
    tasks = list_tasks()
    results = {name: _on_all(name, tasks) for name in BASELINES}
    naive = results["naive"]
    return {
        "scores": naive["scores"],
        "expected_range": {f"task{t.task_id}": list(t.expected_baseline) for t in tasks if t.expected_baseline},
        "breakdown": naive["breakdown"],
        "action_config": BASELINE_ACTION.to_dict(),
        "seed": BASELINE_SEED,
        "agent": "naive",
        "baselines": results,
    }


def _on_all(name: str, tasks: list[TaskSpec]) -> dict[str, Any]:
    played = {}
    for task in tasks:
        if name == "random_search" and not policy_path(name, task.task_id, policy_dir(task)).exists():
            continue
        agent = make_agent(name, task)
        assert isinstance(agent, ConstantAgent)
        played[f"task{task.task_id}"] = run_baseline(task.task_id, BASELINE_SEED, agent.action)
    columns = {"scores": "score", "breakdown": "breakdown", "action_config": "action_config"}
    by_task = {column: {key: result[field] for key, result in played.items()} for column, field in columns.items()}
    return {"description": AGENTS[name].description, **by_task}
