"""``inferencegym evaluate``: score agents on held-out seeds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import seed_count

if TYPE_CHECKING:
    import pandas as pd

    from agents.integrations.ray_workers import Workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--task", action="append", help="task id; may be given several times (default: tasks 1 to 3)")
    parser.add_argument(
        "--agent",
        action="append",
        help="a policy's name (a wrong one lists them), some with an argument: random[:SEED], ppo[:FILE], "
        "best_static[:FOLDER], best_adaptive[:FOLDER], constant:'{\"batch_size\": 256}' (other knobs as fixed-32); "
        "one of your own, package.module:Class; or all; may be given several times (default: all)",
    )
    parser.add_argument("--against", metavar="AGENT", help="print differences to this policy, paired by seed")
    parser.add_argument("--seeds", type=seed_count(2), default=30, help="number of held-out seeds (default: 30)")
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run policies in parallel on this Ray cluster; 'local' starts one (not with --reference)",
    )
    parser.add_argument("--workers", type=int, default=2, help="workers of --ray local (default: 2)")
    parser.add_argument(
        "--reference",
        action="store_true",
        help="play in the discrete-event reference, request by request: tenths of a second per episode",
    )
    parser.add_argument(
        "--rolling-restart",
        choices=("recompute", "drain"),
        default="recompute",
        help="of --reference: replicas restart at once and others recompute their requests, as in the environment, or "
        "they empty first (default: recompute)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON with per-seed scores")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the table, a row per task and policy (.csv, .parquet, .json)"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate the agents on the tasks and print their scores."""
    from agents.registry import load_own_agents
    from cli.figures import check_table, write_table
    from inferencegym.files import require_writable
    from inferencegym.tasks import list_tasks

    if args.out:
        check_table(args.out)
        require_writable(args.out)
    against = [args.against] if args.against else []
    load_own_agents([*(args.agent or []), *against])
    ids = args.task or [task.task_id for task in list_tasks()]
    names = [*(args.agent or ["all"]), *against]
    if args.reference:
        results = [_compare_in_reference(task_id, names, args) for task_id in ids]
    else:
        with _ray_workers(args) as workers:
            results = [_compare(task_id, names, args.seeds, workers) for task_id in ids]
    for result in results if args.against else ():
        _add_differences(result, args.against)
    if args.json:
        print(json.dumps({"results": results}, indent=2))
    else:
        print("\n\n".join(_table(result) for result in results))
    if args.out:
        write_table(score_frame(results), args.out)
    return 0


def score_frame(results: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Scores with their intervals as a table, a row per task and agent; lists over seeds stay in the JSON."""
    import pandas as pd

    rows = [{"task": str(result["task"]), **agent} for result in results for agent in result["agents"]]
    frame = pd.json_normalize(rows)
    return frame.loc[:, [not frame[name].map(lambda cell: isinstance(cell, list)).any() for name in frame]]


def _ray_workers(args: argparse.Namespace) -> AbstractContextManager[Workers | None]:
    """Context of Ray workers if --ray is given, of None otherwise."""
    if args.ray is None:
        return nullcontext()
    from agents.integrations.ray_workers import Workers

    return Workers(args.workers, None if args.ray == "local" else args.ray)


def _compare(task_id: Any, names: list[str], n_seeds: int, workers: Workers | None) -> dict[str, Any]:
    """Scores of agents on a task of any family."""
    from agents.families import compare_policies, players_of
    from agents.seeds import held_out_seeds
    from env.families import family_of

    family, seeds = family_of(task_id), held_out_seeds(n_seeds)
    if workers is not None:
        return _compare_on_workers(task_id, names, seeds, workers)
    players = players_of(family)
    if players.compare is None:
        return compare_policies(family, task_id, names, seeds)
    return players.compare(task_id, names, seeds)


def _compare_on_workers(task_id: Any, names: list[str], seeds: Sequence[int], workers: Workers) -> dict[str, Any]:
    """Scores of agents on a serving task, each played by a Ray worker."""
    from agents.evaluate import compare
    from agents.integrations.ray_workers import Job
    from env.families import serving_task

    task = serving_task(task_id)
    return compare(
        task, names, seeds, lambda agents: workers.evaluate([Job(task.task_id, a, tuple(seeds)) for a in agents])
    )


def _compare_in_reference(task_id: Any, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Scores of agents on a serving task in the discrete-event reference."""
    from rich.console import Console
    from rich.progress import Progress

    from agents.evaluate import Evaluation, compare, evaluate
    from agents.seeds import held_out_seeds
    from env.families import serving_task
    from env.reference import ReferenceFleet

    task, seeds = serving_task(task_id), held_out_seeds(args.seeds)
    play = partial(ReferenceFleet, rolling_restart=args.rolling_restart)

    def evaluate_all(agents: Sequence[str]) -> list[Evaluation]:
        found = []
        with Progress(console=Console(stderr=True)) as bar:
            for name in agents:
                shown = bar.add_task(f"task {task.task_id}, {name}", total=task.episode_length)
                found.append(evaluate(name, task, seeds, dynamics=play, after_step=partial(bar.advance, shown)))
        return found

    return compare(task, names, seeds, evaluate_all)


def _add_differences(result: Mapping[str, Any], against: str) -> None:
    """Add to each agent's entry ``minus_against``, its paired difference to one of the agents."""
    from agents.evaluate import paired
    from inferencegym.errors import InvalidConfigError

    scores = {entry["agent"]: entry.get("scores") for entry in result["agents"]}
    if scores[against] is None:
        raise InvalidConfigError(f"--against needs scores by seed, and task {result['task']} draws nothing by seed")
    for entry in result["agents"]:
        entry["minus_against"] = {"agent": against, **paired(entry["scores"], scores[against]).to_dict()}


def _table(result: dict[str, Any]) -> str:
    if "optimum" in result:  # of traffic tasks, where the planner computes it exactly
        from env.traffic.report import traffic_table

        return traffic_table(result)
    seeds, columns = result["seeds"], {"score": 24, "over_naive": 28, "minus_against": 28, "regret": 28}
    shown = {name: width for name, width in columns.items() if name in result["agents"][0]}
    if "minus_against" in shown:
        shown.pop("over_naive", None)
    heads = "".join(f"{name.replace('minus_', '').replace('_', ' '):>{width}}" for name, width in shown.items())
    lines = [f"task {result['task']}, seeds {seeds[0]} to {seeds[-1]}, mean [95% CI]", f"{'agent':<16}{heads}"]
    for entry in sorted(result["agents"], key=lambda e: -float(e["score"]["mean"])):
        label = entry["agent"] if len(entry["agent"]) < 16 else entry["agent"] + "\n" + " " * 16
        lines.append(
            f"{label:<16}" + "".join(f"{_cell(entry, name):>{width}}" for name, width in shown.items()).rstrip()
        )
    if "minus_against" in shown:
        lines.append(f"against: score minus that of {result['agents'][0]['minus_against']['agent']}")
    if "best_known" in result:
        best = result["best_known"]["agent"]
        lines.append(f"regret: score of {best} minus the agent's; {best} is the best known on these seeds")
    if len(shown) > 1:
        lines.append("Differences are paired by seed; ~ marks ties (the interval contains 0).")
    lines += [f"{entry['agent']}: {said}" for entry in result["agents"] for said in entry.get("clamped", ())]
    return "\n".join(lines)


def _cell(entry: Mapping[str, Any], name: str) -> str:
    """Mean and interval of a column; no score is below 0 or above 1, so neither is its interval."""
    from agents.evaluate import Interval

    x = entry[name]
    i = Interval(x["mean"], x["ci95_low"], x["ci95_high"]).within(0.0 if name == "score" else -1.0, 1.0)
    tie = "" if name == "score" else " ~" if i.low <= 0.0 <= i.high and i.low < i.high else "  "
    return f"{i.mean:.3f} [{i.low:.3f}, {i.high:.3f}]{tie}"
