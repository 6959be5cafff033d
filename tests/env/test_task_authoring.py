"""The guide to writing tasks, followed literally."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

from inferencegym.task_files import TaskEntry

ROOT = Path(__file__).resolve().parents[2]


def guide_blocks(section: str) -> list[tuple[str, str]]:
    """The fenced blocks of a section, language and text, in order."""
    text = (ROOT / "TASK_AUTHORING.md").read_text(encoding="utf-8")
    part = re.split(r"^## ", text.split(f"## {section}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", part, flags=re.MULTILINE | re.DOTALL)
    return [(language, textwrap.dedent(block)) for language, block in blocks]


def follow(folder: Path, commands: list[str]) -> str:
    """Run the guide's commands in one shell and return what they print."""
    shim = folder / "bin"
    shim.mkdir()
    (shim / "inferencegym").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m inferencegym \"$@\"\n")
    (shim / "inferencegym").chmod(0o755)
    done = subprocess.run(
        ["bash", "-ec", "\n".join(commands)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{shim}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_following_the_guide_gives_a_serving_task_whose_scores_mean_something(tmp_path: Path) -> None:
    blocks = guide_blocks("A new serving task")
    assert [language for language, _ in blocks] == ["json", "bash", "bash", "text"]
    (tmp_path / "my_tasks.json").write_text(blocks[0][1], encoding="utf-8")
    commands = [blocks[1][1].rstrip() + " 2> progress.txt", blocks[2][1].rstrip() + " --json > scores.json"]
    said = follow(tmp_path, commands)
    assert "wrote my_tasks.calibration.json and policies to my_tasks.policies" in said
    measured = json.loads((tmp_path / "my_tasks.calibration.json").read_text())["tasks"]["lunch-desk"]
    assert 0 < measured["floor_tps"] < measured["optimal_tps"] <= measured["max_throughput_tps"]
    (result,) = json.loads((tmp_path / "scores.json").read_text())["results"]
    score = {agent["agent"]: agent["score"]["mean"] for agent in result["agents"]}
    # The search may choose other parameters on a processor that rounds exp and log otherwise.
    shown = re.findall(r"^(\w+) +(\d\.\d{3}) \[", blocks[3][1], flags=re.MULTILINE)
    assert {name: float(mean) for name, mean in shown} == pytest.approx(score, abs=0.02)
    assert score["best_adaptive"] - score["best_static"] > 0.03
    assert min(score["hpa"], score["planner"]) > score["best_static"] > score["naive"]
    # Not on a terminal: a line for every tenth of the work, each with the best value so far.
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    shares = [int(re.match(r"task lunch-desk, (\d+)% done: ", line)[1]) for line in lines]  # type: ignore[index]
    assert len(shares) > 5
    assert all(after - share >= 9 for share, after in pairwise(shares))
    best = [float(value) for value in re.findall(r"best (\S+) in training", "\n".join(lines))]
    assert len(best) > 5
    assert best == sorted(best)


def test_the_serving_task_of_the_guide_is_ten_lines_of_data() -> None:
    (language, text), *_ = guide_blocks("A new serving task")
    assert language == "json"
    # The object of the tasks and its braces aside.
    assert len([line for line in text.splitlines() if line.strip(" {}")]) <= 10
    assert set(json.loads(text)["tasks"]) == {"lunch-desk"}


def test_the_guide_explains_every_key_of_a_task() -> None:
    text = (ROOT / "TASK_AUTHORING.md").read_text(encoding="utf-8")
    explained = text.split("\n## Keys\n", 1)[1].split("\n### Defaults and bounds\n", 1)[0]
    unexplained = set(TaskEntry.model_fields) - set(re.findall(r"`(\w+)`", explained))
    assert unexplained == {"name"}


def test_following_the_guide_imports_a_log_and_shadows_it(tmp_path: Path) -> None:
    blocks = guide_blocks("Your own trace")
    assert [language for language, _ in blocks] == ["csv", "bash", "bash"]
    (tmp_path / "my_log.csv").write_text(blocks[0][1], encoding="utf-8")
    said = follow(tmp_path, [block for _, block in blocks[1:]])
    assert "5 requests in 3 s" in said
    assert said.index("inferencegym calibrate --task my-trace") < said.index("inferencegym evaluate --task my-trace")
    assert {"my-trace.npz", "my-trace.json", "shadow-vllm.yaml"} <= {p.name for p in tmp_path.iterdir()}
    task = json.loads((tmp_path / "my-trace.json").read_text())["tasks"]["my-trace"]
    assert (task["slo_target_ms"], task["episode_length"], task["trace"]) == (500.0, 60, "my-trace.npz")
    assert "max-num-seqs:" in (tmp_path / "shadow-vllm.yaml").read_text()
