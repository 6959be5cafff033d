"""``inferencegym simulate``: sweeps over rates, objectives, a row for every request, readable numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cli.main import main
from cli.simulate import sweep_rates
from inferencegym.errors import InvalidConfigError
from ops.objectives import margin, parse_objective
from ops.report import plain

Capture = pytest.CaptureFixture[str]


def said(capsys: Capture, *options: str) -> str:
    assert main(["simulate", *options]) == 0
    return capsys.readouterr().out


def test_latency_rises_with_throughput_until_the_fleet_is_full(tmp_path: Path, capsys: Capture) -> None:
    out, png = tmp_path / "curve.parquet", tmp_path / "curve.png"
    options = ["--sweep", "qps=1:40:5", "--output-cv", "0", "--objective", "ttft_p99=500", "--json"]
    answer = json.loads(said(capsys, *options, "--out", str(out), "--png", str(png)))
    rows = answer["sweep"]
    assert [row["qps"] for row in rows] == pytest.approx([1, 2.5149, 6.3246, 15.9054, 40], abs=1e-4)
    for name in ("output_tokens_per_s", "ttft_p99_ms", "tpot_p50_ms"):
        assert (np.diff([row[name] for row in rows]) > 0).all(), name
    met = [row["qps"] for row in rows if row["ttft_p99_ms"] <= 500]
    assert answer["highest_qps_within_objectives"] == max(met)
    assert len(met) < len(rows)
    assert pd.read_parquet(out)["ttft_p99_ms"].tolist() == [row["ttft_p99_ms"] for row in rows]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_point_of_a_sweep_is_the_same_load_simulated_alone(capsys: Capture) -> None:
    rows = json.loads(said(capsys, "--sweep", "qps=2:8:2", "--requests", "100", "--json"))["sweep"]
    alone = json.loads(said(capsys, "--qps", "8", "--requests", "100", "--json"))
    assert {name: rows[1][name] for name in alone} == alone


def test_a_log_is_played_faster_in_a_sweep(tmp_path: Path, capsys: Capture) -> None:
    rows = "".join(f"{i},200,50\n" for i in range(61))
    (tmp_path / "log.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    slow, fast = json.loads(said(capsys, "--trace", str(tmp_path / "log.csv"), "--sweep", "qps=1:4:2", "--json"))[
        "sweep"
    ]
    # 61 requests in 60 s are 1.017 a second: at 1 a second they last 61 s, at four 15.25 s, and then the last answer.
    last = slow["makespan_s"] - 61.0
    assert 0 < last < 2
    assert fast["makespan_s"] == pytest.approx(15.25 + last, abs=0.5)


@pytest.mark.parametrize(("qps", "statistics"), [("6", {"p50": 0.5}), ("60", {"p50": 0.5, "p90": 0.9, "p99": 0.99})])
def test_every_request_is_written_and_adds_up_to_the_report(
    tmp_path: Path, capsys: Capture, qps: str, statistics: dict[str, float]
) -> None:
    path = tmp_path / "requests.csv"
    report = json.loads(
        said(capsys, "--batch-size", "32", "--qps", qps, "--requests", "200", "--per-request", str(path), "--json")
    )
    rows = pd.read_csv(path)
    assert len(rows) == 200
    # The fluid's completions follow whole steps of a quarter of a second.
    assert (rows["arrival_s"] + rows["latency_s"]).max() == pytest.approx(report["makespan_s"], abs=0.5)
    assert rows["tpot_ms"].median() == pytest.approx(report["tpot_p50_ms"])
    for (
        name,
        q,
    ) in statistics.items():  # if requests hardly wait, the tail is the variation of prefill, which the rows leave out
        assert rows["ttft_ms"].quantile(q) == pytest.approx(report[f"ttft_{name}_ms"], rel=0.1)
    decode_s = rows["tpot_ms"] * (rows["output_tokens"] - 1) / 1000
    assert (rows["ttft_ms"] / 1000 + decode_s).tolist() == pytest.approx(rows["latency_s"].tolist())


def test_objectives_are_judged(capsys: Capture) -> None:
    options = ["--qps", "4", "--requests", "100", "--objective", "ttft_p99=500", "--objective", "tpot_mean=1", "--json"]
    assert json.loads(said(capsys, *options))["objectives"] == {"ttft_p99=500": True, "tpot_mean=1": False}


def test_an_objective_is_a_statistic_and_a_limit() -> None:
    objective = parse_objective("ttft_p99=500")
    assert (objective.figure, objective.share, objective.limit_ms) == ("ttft_p99_ms", 0.99, 500.0)
    assert parse_objective("tpot_mean_ms=40").figure == "tpot_mean_ms"
    assert margin(
        [objective, parse_objective("tpot_p50=50")], {"ttft_p99_ms": 250, "tpot_p50_ms": 60}
    ) == pytest.approx(-0.2)
    for wrong in ("ttft=500", "ttft_p98=500", "e2e_p99=500", "ttft_p99=0", "ttft_p99=nan", "ttft_p99=1e99", "x"):
        with pytest.raises(InvalidConfigError) as refused:
            parse_objective(wrong)
        assert refused.value.field == "objective"


def test_a_sweep_that_is_none_is_refused() -> None:
    for wrong in ("qps=1", "qps=5:1", "qps=0:5", "rate=1:5", "qps=1:5:1", "qps=1:5:9:9", "qps=1:x", "qps=1:inf"):
        with pytest.raises(InvalidConfigError):
            sweep_rates(wrong)


def test_options_that_contradict_each_other_are_refused(tmp_path: Path, capsys: Capture) -> None:
    for options in (
        ["--out", str(tmp_path / "x.csv")],
        ["--sweep", "qps=1:2", "--per-request", str(tmp_path / "x.csv")],
        ["--sweep", "qps=1:2", "--out", str(tmp_path / "x.xlsx")],
    ):
        assert main(["simulate", *options]) == 2
        assert capsys.readouterr().err.startswith("inferencegym simulate: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(13740.0, "13,740"), (0.01234, "0.0123"), (3.14159, "3.14"), (25.04, "25.0"), (7, "7"), (float("nan"), "-")],
)
def test_numbers_are_written_without_exponents(value: float, text: str) -> None:
    assert plain(value) == text
