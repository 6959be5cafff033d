"""Result tables that commands write: a row per result, with the printed numbers, in the format of the file's suffix."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from cli.main import main


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json"])
def test_scores_are_written_as_a_row_per_task_and_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    path = tmp_path / f"scores{suffix}"
    options = ["--task", "1", "--task", "2", "--agent", "naive", "--agent", "heuristic", "--seeds", "2"]
    assert main(["evaluate", *options, "--json", "--out", str(path)]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    frame = {".csv": pd.read_csv, ".parquet": pd.read_parquet, ".json": pd.read_json}[suffix](path)
    told = [(str(r["task"]), a["agent"], a["score"]["mean"]) for r in results for a in r["agents"]]
    rows = frame[["task", "agent", "score.mean"]].astype({"task": str}).itertuples(index=False, name=None)
    assert [(task, agent, pytest.approx(score)) for task, agent, score in rows] == told


def test_a_table_of_another_form_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--task", "1", "--agent", "naive", "--seeds", "2", "--out", str(tmp_path / "x.xls")]) == 2
    assert ".parquet" in capsys.readouterr().err
