"""Golden episodes: the numbers of every task stay what they are; see ``scripts/golden_episodes.py``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from env.traffic.tasks import list_traffic_tasks
from inferencegym.tasks import list_tasks
from scripts import golden_episodes as golden

EPISODES = golden.load()
SHOWN = 12
"""Differences of one episode that a failure lists; later ones mostly follow from the first."""


def name_of(episode: golden.Episode) -> str:
    words = [episode["family"], str(episode["task_id"]), str(episode["seed"])]
    return "-".join([*words, "own-config"] if episode["config"] else words)


def rows_of(family: str, *tasks: Any) -> list[golden.Row]:
    chosen = [e for e in EPISODES if e["family"] == family and (not tasks or e["task_id"] in tasks)]
    return [row for episode in chosen for row in golden.unpack(episode["columns"])]


def steps_with(family: str, condition: Callable[[golden.Row], bool], *tasks: Any) -> int:
    return sum(condition(row) for row in rows_of(family, *tasks))


@pytest.mark.parametrize("episode", EPISODES, ids=name_of)
def test_an_episode_gives_its_golden_numbers(episode: golden.Episode) -> None:
    found = list(islice(golden.differences(episode), SHOWN))
    assert not found, "\n".join(
        ["golden numbers changed:", *found, "if that is meant: python -m scripts.golden_episodes --write"]
    )


def test_every_task_has_golden_episodes_of_two_seeds() -> None:
    serving = {("serving", task.task_id) for task in list_tasks(include_recorded=True)}
    traffic = {("traffic", task.task_id) for task in list_traffic_tasks()}
    by_task: dict[tuple[str, Any], set[int]] = defaultdict(set)
    for episode in EPISODES:
        by_task[episode["family"], episode["task_id"]].add(episode["seed"])
    assert set(by_task) >= serving | traffic
    assert all(len(seeds) >= 2 for seeds in by_task.values())


def test_golden_fleets_overflow_their_queue_run_out_of_memory_and_preempt() -> None:
    for task_id in (1, 2, 3):
        assert steps_with("serving", lambda row: row["fleet.rejected"] > 0, task_id) >= 30
    for field in ("fleet.oom", "fleet.eviction_events", "fleet.spec_accept_rate"):
        assert steps_with("serving", lambda row, field=field: row[field] > 0) >= 50
    assert steps_with("serving", lambda row: row["info.metrics.oom"], 3) > 0


def test_golden_fleets_restart_for_precision_and_for_prefill_placement() -> None:
    for knob in ("quant_tier", "prefill_disagg"):
        name = f"info.action_applied.{knob}"
        rows = rows_of("serving", 3, "azure-conv", "azure-code", "mooncake")
        restarts = sum(b["info.timestep"] > 1 and a[name] != b[name] for a, b in pairwise(rows))
        assert restarts >= 20


def test_golden_fleets_of_tasks_that_scale_change_their_size() -> None:
    for task_id in ("autoscale", "autoscale-azure"):
        replicas = [row["info.action_applied.replicas"] for row in rows_of("serving", task_id)]
        assert sum(a < b for a, b in pairwise(replicas)) >= 5
        assert sum(a > b for a, b in pairwise(replicas)) >= 5


def test_golden_episodes_meet_the_floods_of_the_bursty_tasks() -> None:
    for task_id in (2, 3, "azure-code"):
        assert steps_with("serving", lambda row: row["workload.is_burst"], task_id) >= 25


def test_golden_servers_of_the_traffic_controller_crash_fill_their_queue_and_survive() -> None:
    full = golden.TRAFFIC_CONFIG["max_queue"]
    assert steps_with("traffic", lambda row: row["metrics.crashed"]) >= 1
    assert steps_with("traffic", lambda row: row["state.queue_length"] == full) >= 5
    assert steps_with("traffic", lambda row: row["done"] and not row["metrics.crashed"]) >= 3


def test_the_golden_file_has_a_reason() -> None:
    changes = golden.CHANGES_FILE.read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^- `([0-9a-f]{16})` (.+)$", changes, re.MULTILINE))
    name = golden.digest()
    assert name in reasons, (
        f"{golden.EPISODES_FILE.name} changed: say why on a line of {golden.CHANGES_FILE}, - `{name}` ..."
    )
    assert all(len(reason.split()) >= 5 for reason in reasons.values())


def test_a_changed_number_is_named_with_task_seed_step_and_field(monkeypatch: pytest.MonkeyPatch) -> None:
    episode = EPISODES[0]
    rows, grades = golden.play(episode)
    rows[3]["fleet.tpot_ms"] *= 1.0 + 2e-6
    monkeypatch.setattr(golden, "play", lambda _: (rows, grades))
    (difference,) = golden.differences(episode)
    assert re.fullmatch(r"serving task 1, seed 7, step 3, fleet\.tpot_ms: expected \d[\d.]+, got \d[\d.]+", difference)


def test_a_packed_episode_is_the_episode() -> None:
    rows = [{"a": 1.5, "b": 1.5, "c": True}, {"a": 1.5, "b": 1.5, "c": True}, {"a": 1.5, "b": 1.5}, {"a": 2, "b": 2}]
    packed = golden.pack(rows)
    assert packed == {"a": [[3, 1.5], 2], "b": "= a", "c": [True, True, None, None]}
    assert golden.unpack(packed) == rows


def test_writing_keeps_what_is_the_same_within_the_tolerance_and_counts_what_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    episode = next(one for one in EPISODES if one["family"] == "traffic")
    rows, grades = golden.play(episode)
    rows, grades = [golden.rounded_row(row) for row in rows], {n: golden.rounded_row(g) for n, g in grades.items()}
    column = next(name for name, value in rows[1].items() if isinstance(value, float) and value > 1.0)
    monkeypatch.setattr(golden, "planned", lambda: iter([{**episode}]))
    monkeypatch.setattr(golden, "play", lambda _: (rows, grades))
    path = tmp_path / "episodes.json"
    assert golden.write(path).endswith("1 episodes added, 0 episodes removed")
    recorded = path.read_bytes()
    rows = [{**row, **({column: row[column] * (1 + 1e-8)} if column in row else {})} for row in rows]
    assert golden.write(path).startswith("0 columns changed, 0 columns added, 0 columns removed, 0 episodes added")
    assert path.read_bytes() == recorded
    rows = [{**row, "new": 1.0, **({column: row[column] * 1.01} if column in row else {})} for row in rows]
    assert golden.write(path).startswith("1 columns changed, 1 columns added, 0 columns removed, 0 episodes added")
