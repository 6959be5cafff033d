"""Predictions of any simulator, scored on measured runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.main import main
from inferencegym.errors import InvalidConfigError
from ops.fidelity import Errors, errors, measured, ours, published_runs, read_predictions, text

ROOT = Path(__file__).resolve().parents[2]
RUN = "gpustack-h100-sxm-qwen3-8b-4-clients"


def written(folder: Path, *rows: str, header: str = "run,quantity,value") -> Path:
    path = folder / "mine.csv"
    path.write_text("\n".join((header, *rows)) + "\n")
    return path


def test_errors_are_relative_to_the_measured_figures(tmp_path: Path) -> None:
    # GPUStack states a TTFT p50 of 60.26 ms and 496.88 tokens/s: a fifth more, and half as many.
    path = written(tmp_path, f"{RUN},TTFT p50,{1.2 * 60.26}", f"{RUN},tokens/s,248.44")
    (found,) = errors({"mine": read_predictions(path)}, ("card", "model"))
    assert (found.simulator, found.group) == ("mine", ("h100_sxm", "qwen3-8b"))
    assert found.by_quantity["TTFT p50"] == pytest.approx((0.2, 0.2))
    assert found.by_quantity["tokens/s"] == pytest.approx((0.5, -0.5))
    # Four runs of this model on this card state six figures each.
    assert (found.predicted, found.stated) == (2, 24)


def test_with_common_only_the_figures_of_all_simulators_count(tmp_path: Path) -> None:
    mine = read_predictions(written(tmp_path, f"{RUN},TPOT p50,{measured()[RUN, 'TPOT p50']}"))
    first, second = errors({"ours": ours(), "mine": mine}, ("split",), common=True)
    assert first.by_quantity.keys() == second.by_quantity.keys() == {"TPOT p50"}
    assert (first.stated, second.by_quantity["TPOT p50"]) == (1, (0.0, 0.0))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("no-such-run,TTFT p50,1", "was measured for run"),
        (f"{RUN},E2E p50,1", "no 'E2E p50' was measured"),
        (f"{RUN},TTFT p50,-1", "not a number above 0"),
        (f"{RUN},TTFT p50,fast", "not a number above 0"),
        (f"{RUN},TTFT p50", "not a number above 0"),
        (f"{RUN},TTFT p50,1\n{RUN},TTFT p50,2", "line 3.*twice"),
        ("", "no predictions"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        read_predictions(written(tmp_path, row))


def test_a_missing_column_and_an_unknown_group_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="lacks the columns value"):
        read_predictions(written(tmp_path, header="run,quantity"))
    with pytest.raises(InvalidConfigError, match="cannot group by moon"):
        errors({"ours": ours()}, ("moon",))


def test_every_figure_belongs_to_a_run_with_inputs() -> None:
    runs = published_runs()
    assert {run for run, _ in measured()} == runs.keys()
    assert all(row["card"] and row["engine"] and int(row["requests"]) > 1 for row in runs.values())
    refused = {name for name, row in runs.items() if row["band"] == "refused"}
    assert {run for run, _ in measured().keys() - ours().keys()} == refused


def test_our_exported_predictions_score_as_our_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fidelity", "ours"]) == 0
    path = tmp_path / "again.csv"
    path.write_text(capsys.readouterr().out)
    assert main(["fidelity", "score", str(path), "--by", "split"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[::2] == [line.replace(" again ", " inferencegym ") for line in lines[1::2]]
    assert len(lines) == 8
    assert main(["fidelity", "ours", str(path)]) == 2
    assert main(["fidelity", "score", str(tmp_path / "none.csv")]) == 2


def test_the_document_shows_what_the_commands_print() -> None:
    document = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    theirs = read_predictions(ROOT / "benchmarks" / "results" / "aiconfigurator.csv")
    by = ("split", "card", "band")
    assert text(errors({"inferencegym": ours(), "aiconfigurator": theirs}, by, common=True), by) in document
    beside_the_data = (ROOT / "benchmarks" / "fidelity" / "README.md").read_text(encoding="utf-8")
    found: list[Errors] = errors({"inferencegym": ours()}, ("card", "model"))
    for card, model in (("h100_sxm", "qwen3-32b"), ("h100_sxm", "qwen3-8b"), ("a100_sxm", "qwen3-32b")):
        (row,) = [each for each in found if each.group == (card, model)]
        medians = [row.by_quantity[q][0] for q in ("TTFT p50", "TTFT p99", "TPOT p50", "tokens/s")]
        assert " / ".join(f"{100 * each:.0f}" for each in medians) + "%" in beside_the_data
