"""Traffic tasks as data: the registry, what a task file may say, and the guide to writing one, followed literally."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from env.traffic.model import incoming_rates
from env.traffic.tasks import TASKS_ENV, get_traffic_task, list_traffic_tasks, load_traffic_tasks, parse_traffic_task
from inferencegym.errors import InvalidConfigError

ROOT = Path(__file__).resolve().parents[2]


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "name": "Mine",
        "episode_length": 10,
        "pattern": {"base_rps": 10, "segments": [{"start_step": 2, "end_step": 4, "rps": 50}]},
        "grade": {"kind": "mean_latency_limit", "limit_ms": 100, "score_above_limit": 0.5},
        **changes,
    }


def pattern(*segments: dict[str, Any], base_rps: Any = 10) -> dict[str, Any]:
    return {"pattern": {"base_rps": base_rps, "segments": list(segments)}}


def test_the_published_tasks_come_first_and_in_order() -> None:
    assert [(t.task_id, t.episode_length, t.difficulty) for t in list_traffic_tasks()][:3] == [
        ("task_easy", 30, "easy"),
        ("task_medium", 40, "medium"),
        ("task_hard", 50, "hard"),
    ]


def test_a_task_is_summed_up_with_the_four_published_keys() -> None:
    assert set(get_traffic_task("task_easy").summary()) == {"id", "description", "episode_length", "difficulty"}


def test_a_ramp_starts_at_its_rate_and_would_reach_its_end_rate_where_it_ends() -> None:
    task = parse_traffic_task("mine", entry(**pattern({"start_step": 2, "end_step": 6, "rps": 20, "end_rps": 60})))
    assert incoming_rates(task.pattern, 8, 1.0).tolist() == [10, 10, 20, 30, 40, 50, 10, 10, 10]
    assert [task.pattern.phase(step) for step in (1, 2, 6)] == ["steady", "ramp", "steady"]


def test_a_task_without_a_gym_id_gets_one_from_its_own_id() -> None:
    assert parse_traffic_task("lunch_rush-2", entry()).gym_id == "LunchRush2"


def test_a_task_may_bring_its_own_server() -> None:
    assert parse_traffic_task("mine", entry(config={"server_capacity": 80})).config.server_capacity == 80.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"colour": "red"}, "colour"),
        ({"episode_length": 0}, "episode_length"),
        ({"episode_length": 2.5}, "episode_length"),
        ({"episode_length": True}, "episode_length"),
        ({"name": 3}, "name"),
        ({"pattern": []}, "pattern"),
        ({"pattern": {}}, "pattern.base_rps"),
        ({"pattern": {"base_rps": 10, "segments": 3}}, "pattern.segments"),
        (pattern(base_rps=0), "pattern.base_rps"),
        (pattern(base_rps=float("nan")), "pattern.base_rps"),
        (pattern({"start_step": 4, "end_step": 4, "rps": 5}), "pattern.segments[0].start_step"),
        (pattern({"start_step": 4, "end_step": 9}), "pattern.segments[0].rps"),
        (pattern({"start_step": 4, "end_step": 9, "rps": 5, "end_rps": -1}), "pattern.segments[0].end_rps"),
        (
            pattern({"start_step": 5, "end_step": 9, "rps": 5}, {"start_step": 1, "end_step": 6, "rps": 5}),
            "pattern.segments[0].start_step",
        ),
        (pattern({"start_step": 4, "end_step": 9, "rps": [5]}), "pattern.segments[0].rps"),
        ({"pattern": {"base_rps": 10, "segments": [7]}}, "pattern.segments[0]"),
        ({"grade": {"kind": ["a"]}}, "grade.kind"),
        ({"grade": {"kind": None}}, "grade.kind"),
        ({"grade": {}}, "grade"),
        ({"grade": "mean_latency_limit"}, "grade"),
        ({"gym_id": "My Own"}, "gym_id"),
        ({"gym_id": 3}, "gym_id"),
        ({"config": []}, "config"),
        ({"grade": {"kind": "luck"}}, "grade.kind"),
        ({"grade": {"kind": "mean_latency_limit", "limit_ms": 100}}, "grade.score_above_limit"),
        (
            {"grade": {"kind": "survival_latency", "full_score_ms": 300, "floor_ms": 300, "floor_factor": 0.5}},
            "grade.full_score_ms",
        ),
        ({"config": {"max_queue": 0}}, "config.max_queue"),
    ],
)
def test_a_mistake_in_a_task_is_refused_with_the_key_at_fault(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        parse_traffic_task("mine", entry(**changes))
    assert refused.value.field == field


@pytest.mark.parametrize("missing", ["name", "episode_length", "pattern", "grade"])
def test_a_task_without_a_required_key_is_refused(missing: str) -> None:
    raw = entry()
    del raw[missing]
    with pytest.raises(InvalidConfigError) as refused:
        parse_traffic_task("mine", raw)
    assert refused.value.field == missing


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tasks": 3}'])
def test_what_is_not_a_task_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidConfigError, match=re.escape(str(path))):
        load_traffic_tasks(path)


def test_a_mistake_in_a_file_is_reported_with_file_and_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"tasks": {"odd_task": entry(episode_length=-1)}}), encoding="utf-8")
    with pytest.raises(InvalidConfigError, match=r"mine\.json: task 'odd_task'") as refused:
        load_traffic_tasks(path)
    assert refused.value.field == "episode_length"


def test_tasks_of_a_users_file_join_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"tasks": {"task_mine": entry()}}), encoding="utf-8")
    monkeypatch.setenv(TASKS_ENV, str(path))
    assert [t.task_id for t in list_traffic_tasks()] == ["task_easy", "task_medium", "task_hard", "task_mine"]


def test_a_users_file_cannot_replace_a_published_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"tasks": {"task_easy": entry()}}), encoding="utf-8")
    monkeypatch.setenv(TASKS_ENV, str(path))
    with pytest.raises(InvalidConfigError, match="'task_easy'"):
        list_traffic_tasks()


# ---------------------------------------------------------------- the guide


def guide_blocks() -> dict[str, str]:
    """The fenced blocks of the guide's section, by language."""
    text = (ROOT / "TASK_AUTHORING.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text.split("## A new traffic task\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", section, flags=re.MULTILINE | re.DOTALL)
    return {language: textwrap.dedent(block) for language, block in blocks}


def test_following_the_guide_gives_the_task_and_the_numbers_it_shows(tmp_path: Path) -> None:
    blocks = guide_blocks()
    (tmp_path / "my_traffic_tasks.json").write_text(blocks["json"], encoding="utf-8")
    (tmp_path / "look.py").write_text(blocks["python"], encoding="utf-8")
    played = subprocess.run(
        ["bash", "-ec", f"{blocks['bash']}\n'{sys.executable}' look.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert played.stdout.splitlines() == blocks["text"].splitlines()
