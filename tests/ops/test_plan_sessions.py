"""Plans for agent sessions: reading logs, caps played in the simulator, errors that name the row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli.main import main
from inferencegym.errors import DataFormatError
from ops.sessions import plan_sessions, read_sessions, recommended, sessions_table
from simulator.hardware.tables import tables_of

HEAD = "session,turn,prompt_tokens,output_tokens,tool_s\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """24 sessions of 8 turns that each add 1,000 tokens."""
    rows = [f"s{s},{t},{1_000 * (t + 1) + 50 * t},50,0.5" for t in range(8) for s in range(24)]
    return written(tmp_path / "log.csv", HEAD + "\n".join(rows))


def test_turns_of_many_sessions_may_be_mixed_and_the_cliff_is_named(log: Path) -> None:
    sessions, notes = read_sessions(log)
    assert (len(sessions), notes) == (24, [])
    assert sessions.turns.prompt_tokens[:8].tolist() == [1_000 * (t + 1) + 50 * t for t in range(8)]
    assert sessions.tool_s.tolist() == [0.5] * 192
    plans = plan_sessions(sessions, tables_of("a100-80gb"), kv_pool_tokens=60_000)
    by_cap = {plan.cap: plan for plan in plans}
    # 24 sessions of 8,350 prompt tokens at the end; what is computed is at least what is new.
    assert by_cap["1"].computed_tokens >= 24 * 8_000
    assert by_cap["24"].computed_tokens > 2 * by_cap["5"].computed_tokens
    assert 4 <= int(recommended(plans).cap) <= 12
    text = sessions_table(plans)
    assert "evict each other" in text
    assert "<- this" in text


def test_json_lines_and_the_gap_between_turns(tmp_path: Path) -> None:
    rows = [
        {"session": 7, "turn": 1, "prompt_tokens": 100, "output_tokens": 5, "time_s": 10.0, "duration_s": 2.0},
        {"session": 7, "turn": 2, "prompt_tokens": 200, "output_tokens": 5, "time_s": 15.5, "duration_s": 1.0},
        {"session": 9, "turn": 1, "prompt_tokens": 100, "output_tokens": 5, "time_s": 11.0, "duration_s": 2.0},
    ]
    sessions, notes = read_sessions(written(tmp_path / "log.jsonl", "\n".join(map(json.dumps, rows))))
    assert sessions.tool_s.tolist() == [3.5, 0.0, 0.0]
    assert np.diff(sessions.first_turn).tolist() == [2, 1]
    assert "gaps" in notes[0]


def test_a_log_without_times_says_that_tools_take_none(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", "session,turn,prompt_tokens,output_tokens\na,1,10,5\n")
    assert "no time" in read_sessions(path)[1][0]


@pytest.mark.parametrize(
    ("text", "field", "line"),
    [
        ("session,turn,prompt_tokens\na,1,10\n", "output_tokens", None),
        (HEAD + "a,1,10,5,0\na,1,20,5,0\n", "turn", 3),
        (HEAD + "a,2,10,5,0\na,1,20,5,0\n", "turn", 3),
        (HEAD + "a,1,none,5,0\n", "prompt_tokens", 2),
        (HEAD + "a,1,10,0,0\n", "output_tokens", 2),
        (HEAD + "a,1,10,5,-1\n", "tool_s", 2),
        (HEAD, None, None),
    ],
)
def test_a_log_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, field: str | None, line: int | None) -> None:
    with pytest.raises(DataFormatError) as refused:
        read_sessions(written(tmp_path / "log.csv", text))
    assert (refused.value.field, refused.value.line) == (field, line)


def test_sessions_longer_than_the_pool_are_refused_and_counted(log: Path) -> None:
    sessions, _ = read_sessions(log)
    plans = plan_sessions(sessions, tables_of("a100-80gb"), kv_pool_tokens=5_000)
    assert all(plan.refused_sessions == 24 for plan in plans)
    assert "24 sessions have a turn that is longer" in sessions_table(plans)


def test_the_command_plans_for_each_table(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--sessions", str(log), "--hardware", "a100-80gb", "--kv-pool-tokens", "60000"]
    assert main(asked) == 0
    assert "24 sessions of 192 turns" in capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["a100-80gb"]
    assert found["max_sessions"] == int(found["max_sessions"]) > 1
    assert main(["plan", "--trace", str(log)]) == 2
    assert "--objective is missing" in capsys.readouterr().err
