"""The leaderboard: submissions are replayed, forged ones refused, and agents ranked by their mean over seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from env.episode_files import constants_sha256
from env.families import FAMILIES
from env.inference_env import InferenceEnv
from env.leaderboard import MAX_NAME, Simulator, Submission, checked_name, rank
from inferencegym import __version__
from inferencegym.errors import DataFormatError
from simulator.hardware.tables import load_tables
from tests.desk import Desk


def submission(agent: str, seed: int, score: float) -> Submission:
    return Submission("serving", 1, agent, seed, score, Simulator("1", None), [])


def test_agents_are_ranked_by_their_mean_over_the_seeds_that_count() -> None:
    entries = [
        submission("steady", 1, 0.5),
        submission("steady", 2, 0.5),
        submission("lucky", 1, 0.9),
        submission("lucky", 2, 0.3),
        submission("lucky", 99, 0.0),  # not one of the seeds
        submission("half", 1, 1.0),
    ]
    standings = rank(entries, [1, 2])
    assert [(s.rank, s.agent, s.mean, s.missing) for s in standings] == [
        (1, "lucky", pytest.approx(0.6), 0),
        (2, "steady", 0.5, 0),
        (None, "half", 1.0, 1),
    ]
    assert [s.scores for s in standings] == [(0.9, 0.3), (0.5, 0.5), (1.0,)]


def test_equal_means_share_a_rank_whatever_their_order_in_the_file() -> None:
    entries = [submission(agent, 1, score) for agent, score in (("b", 0.5), ("a", 0.5), ("c", 0.4))]
    assert [(s.rank, s.agent) for s in rank(entries, [1])] == [(1, "a"), (1, "b"), (3, "c")]
    assert rank(entries[::-1], [1]) == rank(entries, [1])


# ---------------------------------------------------------------- the file


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    board = tmp_path_factory.mktemp("board") / "board.jsonl"
    agents = ["--play", "naive", "--play", "heuristic"]
    assert main(["leaderboard", "add", str(board), *agents, "--task", "1", "--seeds", "2"]) == 0
    return [json.loads(line) for line in board.read_text(encoding="utf-8").splitlines()]


def test_a_played_agent_is_listed_under_the_name_that_it_is_given(
    made: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = write(tmp_path / "board.jsonl", made)
    again = ["leaderboard", "add", board, "--play", "naive", "--task", "1", "--seeds", "2"]
    assert main(again) == 2
    assert "give the agent another name with --agent" in capsys.readouterr().err
    assert main([*again, "--agent", "naive, again"]) == 0
    _, report = checked(board, capsys)
    assert [one["agent"] for one in report["tasks"][0]["standings"]] == ["heuristic", "naive", "naive, again"]


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def checked(path: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["leaderboard", "check", path, "--json", "--seeds", "2", *options])
    return status, json.loads(capsys.readouterr().out)


def test_a_line_names_seed_actions_score_and_simulator(made: list[dict[str, Any]]) -> None:
    for line in made:
        assert set(line) == {
            "format",
            "family",
            "task",
            "agent",
            "seed",
            "score",
            "release",
            "table_sha256",
            "constants_sha256",
            "actions",
        }
        assert (line["release"], line["table_sha256"]) == (__version__, load_tables().sha256)
        assert line["constants_sha256"] == constants_sha256(FAMILIES["serving"], 1)
        assert len(line["actions"]) == 200
        assert 0 <= line["score"] <= 1


def test_an_honest_board_is_ranked(
    tmp_path: Path, made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "board.jsonl", made)
    status, report = checked(path, capsys)
    assert (status, report["refused"]) == (0, [])
    [task] = report["tasks"]
    assert [(s["rank"], s["agent"], len(s["scores"])) for s in task["standings"]] == [
        (1, "heuristic", 2),
        (2, "naive", 2),
    ]
    own, other = ([line["score"] for line in made if line["agent"] == agent] for agent in ("heuristic", "naive"))
    assert task["standings"][0]["mean"] == task["standings"][0]["score"]["mean"] == pytest.approx(sum(own) / 2)
    assert task["standings"][0]["difference"] is None
    assert task["standings"][1]["difference"]["mean"] == pytest.approx((sum(other) - sum(own)) / 2)
    assert main(["leaderboard", "check", path, "--seeds", "3"]) == 0
    assert "1 seeds missing" in capsys.readouterr().out


def test_a_copy_whose_score_is_a_digit_higher_is_ranked_by_its_replay(
    tmp_path: Path, made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    own = [line for line in made if line["agent"] == "naive"]
    copies = [{**line, "agent": "copier", "score": line["score"] * (1 + 9e-10)} for line in own]
    assert copies[0]["score"] > own[0]["score"]
    status, report = checked(write(tmp_path / "board.jsonl", [*own, *copies]), capsys)
    assert (status, report["refused"]) == (0, [])
    [task] = report["tasks"]
    mean = sum(line["score"] for line in own) / 2
    assert [(one["rank"], one["agent"], one["mean"]) for one in task["standings"]] == [
        (1, "copier", mean),
        (1, "naive", mean),
    ]
    board = tmp_path / "new.jsonl"
    assert main(["leaderboard", "add", str(board), write(tmp_path / "theirs.jsonl", copies)]) == 0
    entered = [json.loads(line)["score"] for line in board.read_text(encoding="utf-8").splitlines()]
    assert entered == [line["score"] for line in own], "a board is given the score of the replay"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("score", 0.999, "score is 0.999 in the file"),
        ("seed", 10_029, "score is"),
        ("task", 3, "played on other constants of the task: on"),
        ("actions", [{"batch_size": 256}] * 199, "end at step 199 of 200"),
        ("actions", [{"batch_size": 256}] * 201, "more steps than the episode has"),
        ("actions", [{"batch_size": 9999}] * 200, "batch_size=9999"),
        ("release", "0.0.1", "played on another release: on release 0.0.1"),
        ("table_sha256", "0" * 64, "with table 000000000000"),
        ("constants_sha256", "0" * 64, "constants 000000000000; this is"),
        ("task", 77, "valid ids are"),
        ("family", "chess", "family='chess'"),
    ],
)
def test_a_forged_line_is_refused_and_the_others_still_rank(
    tmp_path: Path, made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], key: str, value: Any, reason: str
) -> None:
    lines = [dict(line) for line in made]
    lines[1][key] = value
    status, report = checked(write(tmp_path / "board.jsonl", lines), capsys)
    assert status == 1
    [refused] = report["refused"]
    assert refused["line"].endswith("board.jsonl:2")
    assert reason in refused["reason"]
    assert report["tasks"][0]["standings"][0]["agent"] == "heuristic"


def test_a_line_that_is_there_twice_counts_once(
    tmp_path: Path, made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = checked(write(tmp_path / "board.jsonl", [*made, made[0]]), capsys)
    assert status == 1
    [refused] = report["refused"]
    assert refused["line"].endswith(f":{len(made) + 1}")
    assert refused["code"] == "data_format"


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 2},
        {"score": 1.5},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": True},
        {"task": True},
        {"task": 1.5},
        {"agent": " x"},
        {"agent": ""},
        {"actions": [1]},
        {"actions": [{}, 1]},
        {"more": 1},
        {"table_sha256": 1},
        {"constants_sha256": 1},
    ],
)
def test_a_line_in_another_form_is_named_with_status_2(
    tmp_path: Path, made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], damage: dict[str, Any]
) -> None:
    path = write(tmp_path / "board.jsonl", [made[0], {**made[1], **damage}])
    assert main(["leaderboard", "check", path]) == 2
    assert f"board.jsonl:2: {next(iter(damage))}" in capsys.readouterr().err


def test_of_several_wrong_keys_the_first_by_name_is_told(made: list[dict[str, Any]]) -> None:
    with pytest.raises(DataFormatError, match="actions is missing"):
        Submission.from_dict({})
    with pytest.raises(DataFormatError, match="able is not a key of a submission"):
        Submission.from_dict({**made[0], **dict.fromkeys(("zeal", "more", "able", "seal", "task_id"), 1)})


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_smallest_and_the_largest_seed_are_seeds(made: list[dict[str, Any]], seed: int) -> None:
    assert Submission.from_dict({**made[0], "seed": seed}).seed == seed


def test_the_longest_name_of_an_agent_is_a_name_and_a_longer_one_is_none() -> None:
    assert checked_name("a" * MAX_NAME) == "a" * MAX_NAME
    for name in ("a" * (MAX_NAME + 1), "", " a", "a\n", "a\u200b"):
        with pytest.raises(DataFormatError, match=f"1 to {MAX_NAME} printable characters"):
            checked_name(name)


def test_a_single_score_has_no_spread() -> None:
    [standing] = rank([submission("once", 1, 0.5)], [1])
    assert (standing.mean, standing.scores) == (0.5, (0.5,))


def test_a_line_of_old_that_names_no_constants_counts_while_its_score_is_replayed(
    tmp_path: Path, made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    old = [{key: value for key, value in line.items() if key != "constants_sha256"} for line in made]
    status, report = checked(write(tmp_path / "board.jsonl", old), capsys)
    assert (status, report["refused"]) == (0, [])
    status, report = checked(write(tmp_path / "board.jsonl", [{**old[0], "score": 0.9}, *old[1:]]), capsys)
    assert status == 1
    assert "forged, or was played on other constants" in report["refused"][0]["reason"]


def test_a_line_of_another_calibration_is_called_that_and_not_forged(
    tmp_path: Path, desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    board, log = tmp_path / "board.jsonl", write(tmp_path / "log.json", [desk.log])
    assert main(["leaderboard", "add", str(board), log, "--agent", "me"]) == 0
    assert checked(str(board), capsys)[0] == 0
    desk.calibrate("desk", optimal_tps=900.0)
    status, report = checked(str(board), capsys)
    assert (status, report["refused"][0]["code"]) == (1, "data_format")
    assert report["refused"][0]["reason"].startswith("played on other constants of the task: on release")
    assert main(["leaderboard", "add", str(tmp_path / "new.jsonl"), log, "--agent", "me"]) == 2
    assert main(["leaderboard", "add", str(tmp_path / "new.jsonl"), str(board)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [": played on other constants of the task: on release" in line for line in said] == [True, True]


# ---------------------------------------------------------------- adding


def played_log(seed: int, batch_size: int) -> dict[str, Any]:
    env = InferenceEnv(task_id=2, seed=seed)
    env.reset()
    while not env.done:
        env.step({"batch_size": batch_size})
    return dict(json.loads(json.dumps({"task": 2, "seed": seed, "steps": env.episode_log})))


def test_logs_are_added_under_a_name_and_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = tmp_path / "board.jsonl"
    logs = [write(tmp_path / f"{seed}.json", [played_log(seed, 256)]) for seed in (10_000, 10_001)]
    assert main(["leaderboard", "add", str(board), *logs, "--agent", "256 at once"]) == 0
    status, report = checked(str(board), capsys)
    assert status == 0
    assert report["tasks"][0]["standings"][0]["agent"] == "256 at once"
    # The same again would be the same agent's second try.
    assert main(["leaderboard", "add", str(board), logs[0], "--agent", "256 at once"]) == 2
    assert "give the agent another name" in capsys.readouterr().err


def test_one_forged_submission_and_nothing_is_added(
    tmp_path: Path, made: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    board = tmp_path / "board.jsonl"
    before = write(board, made[:1])
    text = board.read_bytes()
    forged = played_log(10_001, 256)
    forged["steps"][3]["reward"] = 1.0
    logs = [
        write(tmp_path / "good.json", [played_log(10_000, 256)]),
        write(tmp_path / "bad.json", [forged]),
    ]
    assert main(["leaderboard", "add", before, *logs, "--agent", "me"]) == 1
    out = capsys.readouterr().out
    assert "nothing was added" in out
    assert "step 3: reward" in out
    assert board.read_bytes() == text
    lines = write(tmp_path / "theirs.jsonl", [made[2], {**made[3], "score": 0.9}])
    assert main(["leaderboard", "add", before, lines]) == 1
    assert board.read_bytes() == text


def test_lines_of_another_board_are_added(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    board = write(tmp_path / "board.jsonl", made[:2])
    assert main(["leaderboard", "add", board, write(tmp_path / "theirs.jsonl", made[2:])]) == 0
    assert [json.loads(line) for line in Path(board).read_text(encoding="utf-8").splitlines()] == made


def test_a_log_with_other_settings_does_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = {**played_log(10_000, 32), "config": {"episode_length": 10}}
    path = write(tmp_path / "log.json", [log])
    assert main(["leaderboard", "add", str(tmp_path / "board.jsonl"), path, "--agent", "short"]) == 2
    assert "not the task's own" in capsys.readouterr().err
    assert main(["leaderboard", "add", str(tmp_path / "board.jsonl"), path]) == 2
    assert "--agent" in capsys.readouterr().err
    assert main(["leaderboard", "add", str(tmp_path / "board.jsonl")]) == 2
