"""The tables of the benchmarks are what their stored results say."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from benchmarks.learning import curves, plain_learners
from benchmarks.report import RESULTS, stored
from benchmarks.speed import neighbours


def markdown_of(module: str, result: Any) -> Any:
    return import_module(f"benchmarks.{module}").markdown(result)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("fidelity.engine", "engine_fidelity"),
        ("fidelity.fluid", "fidelity"),
        ("fidelity.hardware", "hardware_fidelity"),
        ("fidelity.open_suite", "open_fidelity"),
        ("fidelity.planned", "planned_engine"),
        ("learning.card_split", "card_split"),
        ("learning.grpo", "grpo"),
        ("learning.integrations", "integrations"),
        ("learning.transfer", "transfer"),
        ("live.drafts", "live_drafts"),
        ("live.drafts", "live_drafts_clients"),
        ("live.drafts", "live_drafts_gpu"),
        ("live.policies", "live_policies"),
        ("live.real_text", "live_real_text"),
        ("live.rollouts_engine", "rollouts_engine"),
        ("live.rollouts_policies", "rollouts_policies"),
        ("policies.autoscalers", "autoscalers"),
        ("policies.ceilings", "ceilings"),
        ("policies.rollouts", "rollouts"),
        ("policies.tasks", "tasks"),
        ("speed.interfaces", "performance"),
        ("speed.openenv_server", "openenv"),
        ("speed.ray_workers", "ray"),
    ],
)
def test_a_published_table_is_what_the_stored_results_say(module: str, name: str) -> None:
    assert markdown_of(module, stored(name)) == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_published_tables_of_other_signatures_are_what_the_stored_results_say() -> None:
    texts = {
        "learning": curves.report(stored("learning")["tasks"]),
        "neighbours": neighbours.markdown(stored("neighbours"))[0],
        "plain_learners": plain_learners.report(stored("plain_learners")),
        "policy_fidelity": markdown_of("fidelity.policies", stored("policy_fidelity")["tasks"]),
    }
    assert texts == {name: (RESULTS / f"{name}.md").read_text(encoding="utf-8") for name in texts}
