"""A user's mistake at the command line gives one line and status 2, before any work is done."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest

from agents.integrations.ray_workers import Job
from cli.main import main
from inferencegym.errors import DataFormatError
from inferencegym.files import atomic_write, make_folder, require_writable, write_text
from ops import bench_fit
from simulator.offline import table

LOG = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{0.5 * i},200,50\n" for i in range(20))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The last line of a command's output."""
    try:
        status = main([str(a) for a in arguments])
    except SystemExit as parsing:  # an option that argparse checks
        status = int(str(parsing.code))
    told = capsys.readouterr()
    assert (status, told.out) == (2, "")
    (line,) = told.err.strip().splitlines()
    assert line.startswith(f"inferencegym {arguments[0]}")
    return line


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--burst-s", ("nan", "inf", "-inf", "0", "-1", "1e308")),
        ("--qps", ("nan", "-inf", "0", "1e-320")),
        ("--prompt-tokens", ("nan", "inf", "0", "1e308")),
        ("--output-tokens", ("nan", "inf", "0", "1e308")),
        ("--prompt-cv", ("nan", "inf", "-1", "1e308")),
        ("--output-cv", ("nan", "inf", "-1", "1e308")),
        ("--kv-budget", ("nan", "inf", "0")),
        ("--gpus", ("0", "1" + "0" * 400)),
        ("--closed", ("-1", "1" + "0" * 400)),
        ("--requests", ("0", "1" + "0" * 30, "1" + "0" * 400)),
        ("--seed", ("-1", "1" + "0" * 400)),
    ],
)
def test_numbers_that_no_load_has_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, values: tuple[str, ...]
) -> None:
    for value in values:
        assert "not allowed" in (line := refusal(capsys, "simulate", f"{option}={value}")) or "finite" in line


def test_more_requests_than_may_be_simulated_are_refused_before_they_are_drawn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for qps in ("1e12", "inf"):
        assert "at most 2,000,000" in refusal(capsys, "simulate", f"--qps={qps}", "--burst-s=1")


@pytest.mark.parametrize("name", ["missing/file", "folder"])
def test_a_path_for_results_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def no_work(*_: object, **__: object) -> list[Job]:
        raise AssertionError("work was done for a file that cannot be written")

    monkeypatch.setattr("cli.sweep.evaluate_jobs", no_work)
    monkeypatch.setattr("agents.episodes.run_episodes", no_work)
    monkeypatch.setattr("ops.shadow.shadow", no_work)
    (tmp_path / "folder").mkdir()
    (tmp_path / "log.csv").write_text(LOG)
    place = tmp_path / name
    for command in (
        ("sweep", "--task", "1", "--agent", "naive", "--seeds", "2", "--out", place),
        ("leaderboard", "add", place, "--play", "naive", "--task", "1", "--seeds", "2"),
        ("shadow", "--trace", tmp_path / "log.csv", "--export", "vllm", "--export-file", place),
    ):
        assert f"{place}: cannot be written" in refusal(capsys, *command)
    pytest.importorskip("matplotlib")
    assert "cannot be written" in refusal(capsys, "shadow", "--trace", tmp_path / "log.csv", "--html", place)


def test_a_folder_for_results_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_work(*_: object, **__: object) -> None:
        raise AssertionError("work was done for a file that cannot be written")

    monkeypatch.setattr(table, "Slice", no_work)
    monkeypatch.setattr(bench_fit, "fit_engine", no_work)
    (tmp_path / "log.csv").write_text(LOG)
    below_a_file = tmp_path / "log.csv" / "folder"
    for command in (
        ("build-table", "--out", below_a_file / "table.parquet"),
        ("build-table", "--out", tmp_path),
        ("import-bench", tmp_path / "log.csv", "--out", below_a_file / "table.parquet"),
        ("import-trace", tmp_path / "log.csv", "--id", "mine", "--calibrate", "no", "--out", below_a_file),
    ):
        assert "cannot be written" in refusal(capsys, *command)
    pytest.importorskip("stable_baselines3")
    assert "cannot be written" in refusal(capsys, "train", "--out", below_a_file)


def test_a_shadow_report_without_matplotlib_is_refused_before_the_log_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refusal(capsys, "shadow", "--trace", tmp_path / "nowhere.csv", "--html", tmp_path / "out.html")
    assert "pip install -e '.[report]'" in line


def test_a_number_of_seeds_is_whole_and_within_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seeds in ("0", "-1", "1.5", "1" + "0" * 30):
        for command in (("sweep",), ("evaluate",), ("leaderboard", "check", tmp_path / "board.jsonl")):
            assert "a whole number from" in refusal(capsys, *command, f"--seeds={seeds}")


def test_an_answer_holds_for_a_second_at_least_and_has_a_token_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("every", "max-tokens"):
        assert f"{name.replace('-', '_')}=0 is not allowed" in refusal(capsys, "llm", f"--{name}=0")


def test_a_misspelt_command_or_option_ends_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serv", "--port", "8000"])
    assert "no command 'serv': did you mean serve?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--trace", "log.csv", "--objectve", "ttft_p99=500"])
    told = capsys.readouterr().err
    assert told.startswith("inferencegym plan: ")
    assert told.count("\n") == 1
    assert "did you mean --objective?" in told
    with pytest.raises(SystemExit):
        main(["plan", "--trace", "log.csv", "--router", "roundrobin"])
    assert "invalid choice: 'roundrobin'; did you mean round-robin? Choose from shared, " in capsys.readouterr().err
    for option, kind in (("--qps", "number"), ("--gpus", "whole number")):
        with pytest.raises(SystemExit):
            main(["simulate", option, "foo"])
        assert f"{option}='foo' is not allowed: it must be a {kind}; see inferencegym" in capsys.readouterr().err


def test_options_are_refused_before_a_log_is_read_or_an_engine_asked(capsys: pytest.CaptureFixture[str]) -> None:
    shadow = "shadow", "--trace", "none.csv", "--hardware", "h100-qwen3-32b"
    assert "precision 'INT4' is not one of " in refusal(capsys, *shadow, "--baseline", '{"quant_tier": "INT4"}')
    assert "did you mean batch_size?" in refusal(capsys, *shadow, "--baseline", '{"max_num_seqs": 64}')
    assert "one of fixed, best_constant, best_own_precision, heuristic" in refusal(
        capsys, *shadow, "--export", "vllm", "--export-policy", "foo"
    )
    assert "give --export vllm" in refusal(capsys, *shadow, "--export-policy", "fixed")
    assert "has no table on this hardware" in refusal(
        capsys, "simulate", "--trace", "none.csv", "--hardware", "h100", "--model", "qwen3-8b"
    )
    assert "engine='localhost:8000' is not allowed" in refusal(capsys, "measure", "--engine", "localhost:8000")
    control = "live", "control", "--engine", "http://127.0.0.1:9"
    assert "a range of one of kv_budget" in refusal(capsys, *control, "--bound", "batch=16:256")
    assert "sets only the knobs that you name" in refusal(capsys, *control)


def test_a_plan_takes_the_logs_model_and_says_which_option_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    rows = ["0,500,10,Llama-3.1-8B", "1,n/a,10,Llama-3.1-8B", "2,50,10,Llama-3.1-8B"]
    log.write_text("\n".join(("arrival_s,prompt_tokens,output_tokens,model", *rows)) + "\n")
    command = "plan", "--trace", log, "--objective", "ttft_p99=500"
    assert "--skip-bad N leaves out" in refusal(capsys, *command, "--model", "llama-3.1-8b")
    assert "--skip-bad N leaves out" in refusal(capsys, *command)
    command = *map(str, command), "--skip-bad", "1"
    assert "has no table on this hardware" in refusal(capsys, *command, "--hardware", "b200-qwen3-32b,h100-gpt-oss-20b")
    main([*command, "--hardware", "l40s", "--json"])
    assert json.loads(capsys.readouterr().out)["model"] == "llama-3.1-8b"


def test_a_share_held_out_is_a_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.log.bench.read_runs", lambda _: [])
    for share in ("nan", "inf", "-0.1", "0.6", "1e-320"):
        line = refusal(capsys, "import-bench", tmp_path / "run.json", "--fit-only", f"--hold-out={share}")
        assert "hold_out=" in line


def test_a_disk_that_is_full_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(DataFormatError, match=r"result\.json.*No space left"), atomic_write(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    require_writable(path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("result.json", "old")]


def test_a_file_that_is_written_can_be_read_by_everybody(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "result.json") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "result.json").stat().st_mode & 0o777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_a_folder_is_writable_whatever_lies_in_it(tmp_path: Path) -> None:
    for name in ("file", "folder"):
        (tmp_path / name / "file").mkdir(parents=True)
        assert make_folder(tmp_path / name) == tmp_path / name
        assert [path.name for path in (tmp_path / name).iterdir()] == ["file"]


def test_files_that_are_written_leave_no_handle_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        write_text(tmp_path / "notes.txt", str(number))
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "19"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
