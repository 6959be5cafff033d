"""``inferencegym leaderboard``: a file of submissions that anybody can check by replaying them."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import seed_count

if TYPE_CHECKING:
    from env.leaderboard import Standing, Submission

EPILOG = """BOARD is JSON Lines, one episode per line: format, family, task, agent, seed, score, release, table_sha256,
constants_sha256 (the task's definition and calibration) and the actions. A submission is a log (see `inferencegym
verify`) or lines of another board. Every submission is replayed; if one is forged, nothing is added. Exit status: 0 if
all scores are verified, 1 if one is refused, 2 if a file cannot be read or (add) a submission names another release,
table or calibration than this one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.epilog = EPILOG
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="replay submissions and add them", epilog=EPILOG)
    add.add_argument("board", metavar="BOARD", type=Path, help="leaderboard file; created if it does not exist")
    add.add_argument("submissions", metavar="SUBMISSION", nargs="*", type=Path, help="logs, or lines of another board")
    add.add_argument("--agent", help="policy's name on the board: needed for logs; with --play, the policy as given")
    add.add_argument(
        "--play",
        metavar="AGENT",
        action="append",
        default=[],
        help="play a policy (see `inferencegym evaluate`) and add it; may be given several times",
    )
    add.add_argument("--task", action="append", help="task for --play; may be given several times (default: 1 to 3)")
    add.add_argument("--seeds", type=seed_count(1), default=30, help="number of held-out seeds for --play (default 30)")
    check = actions.add_parser("check", help="replay every line and print the ranking", epilog=EPILOG)
    check.add_argument("board", metavar="BOARD", type=Path)
    check.add_argument(
        "--seeds", type=seed_count(1), default=30, help="number of held-out seeds needed for a rank (default 30)"
    )
    check.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Add submissions to a leaderboard, or check one."""
    return _add(args) if args.action == "add" else _check(args)


# ---------------------------------------------------------------- add


def _add(args: argparse.Namespace) -> int:
    from inferencegym.errors import DataFormatError, ForgedLogError
    from inferencegym.files import require_writable

    require_writable(args.board)
    known = {one.key for _, one in _read_board(args.board)} if args.board.exists() else set()
    new: list[Submission] = []
    try:
        for place, submission in _submitted(args):
            if submission.key in known:
                family, task, agent, seed = submission.key
                raise DataFormatError(
                    f"{place}: {agent!r} already has {family} task {task}, seed {seed}: give the agent another name "
                    "with --agent"
                )
            known.add(submission.key)
            new.append(submission)
    except ForgedLogError as error:
        print(f"{args.board}: nothing was added: {error}")
        return 1
    if not new:
        raise DataFormatError("nothing to add: name a SUBMISSION, or an agent with --play")
    _append(args.board, new)
    print(f"{args.board}: {len(new)} episodes added")
    return 0


def _submitted(args: argparse.Namespace) -> Iterator[tuple[str, Submission]]:
    """Every submission, checked by replay."""
    from inferencegym.errors import DataFormatError, ForgedLogError

    for path in args.submissions:
        for place, submission in _read_board(path) if _is_board(path) else _from_logs(path, args.agent):
            try:
                checked = _replayed(submission)
            except ForgedLogError as error:
                raise ForgedLogError(f"{place}: {error}", error.step, error.field) from error
            except DataFormatError as error:
                raise DataFormatError(f"{place}: {error}") from error
            yield place, checked
    for agent in args.play:
        for submission in _played(agent, args.agent or agent, args.task or ["1", "2", "3"], args.seeds):
            yield agent, submission


def _from_logs(path: Path, agent: str | None) -> Iterator[tuple[str, Submission]]:
    from env.episode_files import read_episodes, simulator, verify_episode
    from env.leaderboard import Submission, checked_name
    from inferencegym.errors import DataFormatError, ForgedLogError

    if agent is None:
        raise DataFormatError(f"{path} is a log: name its agent with --agent")
    for log in read_episodes(path):
        if not log.own_config:
            raise DataFormatError(
                f"{log.place}: config={dict(log.config or {})} is not the task's own, so its score cannot be "
                "compared: play the task without config"
            )
        try:
            grade = verify_episode(log)
        except ForgedLogError as error:
            raise ForgedLogError(f"{log.place}: {error}", error.step, error.field) from error
        actions = [entry["action"] for entry in log.entries()]
        here = simulator(log.family, log.task_id)
        yield (
            log.place,
            Submission(log.family.name, log.task_id, checked_name(agent), log.seed, grade["score"], here, actions),
        )


def _played(agent_name: str, listed: str, task_ids: Sequence[str], n_seeds: int) -> Iterator[Submission]:
    """Episodes of a built-in agent or of one of the user's own, scored by replay, under the name ``listed``."""
    from agents.families import run_policy
    from agents.registry import load_own_agents
    from agents.seeds import held_out_seeds
    from env.episode_files import simulator
    from env.families import family_of
    from env.leaderboard import Submission, checked_name
    from env.verify import replayed_score

    load_own_agents([agent_name])
    for task_id in task_ids:
        family = family_of(task_id)
        for seed in held_out_seeds(n_seeds):
            env = run_policy(family, agent_name, task_id, seed)[0]
            score = replayed_score(family, env.task_id, seed, env.actions)
            here = simulator(family, env.task_id)
            yield Submission(family.name, env.task_id, checked_name(listed), seed, score, here, env.actions)


def _append(board: Path, new: Sequence[Submission]) -> None:
    """Append to the board atomically: write a new file and rename it, so that a crash leaves the old or the new one."""
    old = board.read_text(encoding="utf-8") if board.exists() else ""
    if old and not old.endswith("\n"):
        old += "\n"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=board.parent, delete=False) as file:
        file.write(old + "".join(one.to_json() + "\n" for one in new))
        file.flush()
        os.fsync(file.fileno())
    aside = Path(file.name)
    aside.chmod(board.stat().st_mode if board.exists() else 0o644)
    aside.replace(board)


# ---------------------------------------------------------------- check


def _check(args: argparse.Namespace) -> int:
    from agents.seeds import held_out_seeds
    from env.leaderboard import rank
    from inferencegym.errors import DataFormatError, InferenceGymError

    refused: list[dict[str, str]] = []
    tasks: dict[tuple[str, str], list[Submission]] = {}
    seen: set[tuple[str, str, str, int]] = set()
    for place, submission in _read_board(args.board):
        try:
            if submission.key in seen:
                raise DataFormatError("an earlier line has the same task, agent and seed: remove one of them")
            checked = _replayed(submission)
        except InferenceGymError as error:
            refused.append({"line": place, "agent": submission.agent, "reason": str(error), "code": error.code})
            continue
        seen.add(submission.key)
        tasks.setdefault(submission.key[:2], []).append(checked)
    seeds = held_out_seeds(args.seeds)
    standings = {key: rank(entries, seeds) for key, entries in sorted(tasks.items())}
    if args.json:
        _print_json(standings, refused)
    else:
        _print_text(standings, refused, args.seeds)
    return 1 if refused else 0


def _print_json(standings: dict[tuple[str, str], list[Standing]], refused: list[dict[str, str]]) -> None:
    tasks = [
        {"family": family, "task": task, "standings": [_standing(one, found[0]) for one in found]}
        for (family, task), found in standings.items()
    ]
    print(json.dumps({"tasks": tasks, "refused": refused}, indent=2))


def _print_text(standings: dict[tuple[str, str], list[Standing]], refused: list[dict[str, str]], n_seeds: int) -> None:
    from agents.evaluate import bracketed, bracketed_score

    for (family, task), found in standings.items():
        print(f"{family}, task {task}: mean score over {n_seeds} held-out seeds; difference from the first, by seed")
        for one in found:
            row = _standing(one, found[0])
            place = "  -" if one.rank is None else f"{one.rank:3d}"
            score = bracketed_score(row["score"]) if row["score"] else f"{one.mean:.3f}"
            missing = f", {one.missing} seeds missing" if one.missing else ""
            behind = ""
            if row["difference"]:
                tie = ", a tie" if row["difference"]["ci95_high"] >= 0 else ""
                behind = f": {bracketed(row['difference'], '+')}{tie}"
            print(f"{place}  {score}  {one.agent}{behind}{missing}")
    for line in refused:
        print(f"REFUSED {line['line']} ({line['agent']}): {line['reason']}")


def _standing(one: Standing, first: Standing) -> dict[str, Any]:
    """A standing with 95% intervals of its score and of the difference from the first; None where one cannot be had."""
    from dataclasses import asdict

    import numpy as np

    from agents.evaluate import interval, paired

    own, best = np.array(one.scores), np.array(first.scores)
    score = interval(own).to_dict() if len(own) > 1 else None
    difference = None if one is first or one.missing or len(own) < 2 else paired(own, best).to_dict()
    return {**asdict(one), "score": score, "difference": difference}


# ---------------------------------------------------------------- both


def _read_board(path: Path) -> Iterator[tuple[str, Submission]]:
    from env.episode_files import read_json
    from env.leaderboard import Submission
    from inferencegym.errors import DataFormatError

    for place, value in read_json(path):
        if not isinstance(value, dict):
            raise DataFormatError(f"{place}: a submission must be a JSON object")
        try:
            yield place, Submission.from_dict(value)
        except DataFormatError as error:
            raise DataFormatError(f"{place}: {error}") from error


def _is_board(path: Path) -> bool:
    from env.episode_files import read_json

    first = next(iter(read_json(path)), ("", None))[1]
    return isinstance(first, dict) and "format" in first and "actions" in first


def _replayed(submission: Submission) -> Submission:
    """Replay a submission and return it with the replayed score; ForgedLogError or DataFormatError if it is refused."""
    from env.episode_files import simulator
    from env.families import family_of
    from env.leaderboard import replay_submission

    family = family_of(submission.task_id, submission.family)
    return replay_submission(submission, simulator(family, submission.task_id), family)
