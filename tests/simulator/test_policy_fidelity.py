"""Grades of whole policies in the fluid model are those in the discrete-event reference."""

from __future__ import annotations

import pytest

from agents.episodes import run_episodes
from agents.registry import make_agent
from agents.seeds import HELD_OUT_SEEDS
from benchmarks.fidelity.policies import canaries
from env.reference import ReferenceFleet
from inferencegym.tasks import get_task

SHIPPED = ("naive", "heuristic", "best_static", "best_adaptive", "ppo")


@pytest.mark.parametrize(
    ("task_id", "canary", "steps", "tolerance"),
    # The first flood of task 3 comes in second 30, and the backlog is gone half a minute later. Where prefill placement
    # goes back and forth the fluid model is too strict: docs/policy-fidelity.md says by how much.
    [
        (1, "KV dips", 60, 0.05),
        (1, "batch toggles", 60, 0.05),
        (3, "KV dips", 80, 0.05),
        (3, "prefill toggles", 80, 0.11),
    ],
)
def test_a_policy_that_changes_a_knob_back_and_forth_is_worth_what_it_is_in_the_reference(
    task_id: int, canary: str, steps: int, tolerance: float
) -> None:
    task, seeds = get_task(task_id), HELD_OUT_SEEDS[:5]
    make, config = canaries(task)[f"heuristic, {canary}"], task.config({"episode_length": steps})
    fluid = run_episodes(task, make(), seeds, config=config)
    reference = run_episodes(task, make(), seeds, config=config, dynamics=ReferenceFleet)
    assert fluid.scores().mean() == pytest.approx(reference.scores().mean(), abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("task_id", "tolerance"), [(1, 0.03), (2, 0.03), (3, 0.05)])
def test_every_shipped_agent_is_worth_what_it_is_in_the_reference(task_id: int, tolerance: float) -> None:
    task, seeds = get_task(task_id), HELD_OUT_SEEDS[:5]
    for name in SHIPPED:
        fluid = run_episodes(task, make_agent(name, task), seeds).scores().mean()
        reference = run_episodes(task, make_agent(name, task), seeds, dynamics=ReferenceFleet).scores().mean()
        assert fluid == pytest.approx(reference, abs=tolerance), name
