"""Golden episodes, the recorded numbers of every task for regression tests: ``python -m scripts.golden_episodes``.

An episode holds each of its random actions for some seconds, so that fleets restart, queues overflow and memory runs
out. ``tests/golden/episodes.json`` keeps its actions and the numbers of every step: metrics, reward and its terms,
observation, workload, state, and grades of the log so far. ``tests/env/test_golden_episodes.py`` replays the actions.
Without ``--write`` the command prints the differences; with it these values are recorded anew, and the file's new
digest needs a line with the reason in ``tests/golden/CHANGES.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, product, zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np

from env.batch import ServingBatch
from env.inference_env import InferenceEnv
from env.traffic.env import TrafficBatch, TrafficEnv
from env.traffic.grader import grade_traffic
from env.traffic.tasks import get_traffic_task, list_traffic_tasks
from grader.grader import GraderModule
from inferencegym.models import SPEC_LENGTHS
from inferencegym.spaces.observations import normalise
from inferencegym.tasks import TASKS_ENV, TaskId, list_tasks
from inferencegym.traffic import ACTION_NAMES

FOLDER: Final = Path(__file__).resolve().parent.parent / "tests" / "golden"
EPISODES_FILE: Final = FOLDER / "episodes.json"
CHANGES_FILE: Final = FOLDER / "CHANGES.md"
EXTREME_TASKS_FILE: Final = FOLDER / "extreme_tasks.json"
"""Tasks with extremes that no registered task has: prompts longer than a KV pool, thousands of requests per second."""

SEEDS: Final = (7, 3_000_000_000_250)
"""A seed of one 32-bit word, and a seed of two words, which has clipped noise and its own configuration."""
TRAFFIC_SEEDS: Final = (*SEEDS, 8, 9)
"""Traffic tasks have no randomness; the seed only determines the actions."""
SERVING_CONFIG: Final = {"alpha": 0.35, "beta": 0.3, "gamma": 0.2, "delta": 0.15, "episode_length": 120}
TRAFFIC_CONFIG: Final = {
    "server_capacity": 110.0,
    "base_latency": 320.0,
    "crash_load_ratio": 240.0 / 110.0,
    "max_queue": 100,
    "traffic_scale": 1.2,
}
"""Load and queue exactly at their allowed limits, with rates whose products are not exact in binary."""
RELATIVE_TOLERANCE: Final = 1e-6
ABSOLUTE_TOLERANCE: Final = 1e-9
"""Processors differ in the last bit of exp and log, and later steps amplify this when little is in flight: differences
of 1e-8 in a latency and 1e-10 in an occupancy were seen."""
SIGNIFICANT_DIGITS: Final = 12
NORMALISED_EVERY_STEPS: Final = 20
"""Scaled observations depend only on the observations, so recording some of them is enough."""

Row = dict[str, Any]
Episode = dict[str, Any]
_NO_ROW: Final[Row] = {}


# ---------------------------------------------------------------- playing


def play(episode: Mapping[str, Any]) -> tuple[list[Row], dict[str, Row]]:
    """Play the episode's actions.

    Returns a flat row for every step (step 0 is the reset), and the grade of the log after some of the steps.
    """
    actions = [action for n_steps, action in episode["actions"] for _ in range(n_steps)]
    playing = _play_serving if episode["family"] == "serving" else _play_traffic
    with _extreme_tasks():
        return playing(episode["task_id"], episode["seed"], episode["config"], actions)


@contextmanager
def _extreme_tasks() -> Iterator[None]:
    """Context manager in which the extreme tasks are registered."""
    before = os.environ.get(TASKS_ENV)
    os.environ[TASKS_ENV] = str(EXTREME_TASKS_FILE)
    try:
        yield
    finally:
        del os.environ[TASKS_ENV]
        if before is not None:
            os.environ[TASKS_ENV] = before


def _play_serving(
    task_id: TaskId, seed: int, config: Mapping[str, Any], actions: Sequence[Mapping[str, Any]]
) -> tuple[list[Row], dict[str, Row]]:
    env = InferenceEnv(task_id=task_id)
    env.reset(seed=seed, config=config)
    # A batch with one row has metrics that the scalar environment does not return.
    batch = ServingBatch(env.task, 1, env.config)
    batch.reset([seed])
    rows = [_serving_row(env, batch)]
    for action in actions[: env.config.episode_length]:
        _, reward, done, info = env.step(action)
        applied = info["action_applied"]
        knobs = ("kv_budget", "spec_length", "batch_size", "prefill_disagg", "quant_tier")
        batch.step(np.array([[applied[name] for name in knobs]], dtype=np.float64))
        rows.append({"reward": reward, "done": done, **flat("info", _pinned(info)), **_serving_row(env, batch)})
    log = env.episode_log
    grades = {str(n): _grade(GraderModule().score(task_id, log[:n])) for n in _grade_steps(len(log))}
    return rows, grades


def _pinned(info: Mapping[str, Any]) -> Row:
    """Info without values that depend only on the actions or on recorded ones: the grade and parts of ``fleet``."""
    left_out = ("score", "breakdown", "feedback", "fleet", "seconds", "grade_so_far", "by_class")
    return {name: value for name, value in info.items() if name not in left_out}


def _serving_row(env: InferenceEnv, batch: ServingBatch) -> Row:
    state = {name: value for name, value in env.state().items() if name not in ("session_id", "config")}
    row = flat("fleet", {name: float(values[0]) for name, values in batch.metric.items()})
    row |= flat("observation", env.observation_dict()) | flat("state", state) | flat("workload", vars(env.workload()))
    if state["step_count"] % NORMALISED_EVERY_STEPS == 0:
        scaled = normalise(batch.observation[0], env.config.episode_length, env.task.cost_budget)
        row |= flat("normalised", scaled.tolist())
    return row


def _play_traffic(
    task_id: str, seed: int, config: Mapping[str, Any], actions: Sequence[Mapping[str, Any]]
) -> tuple[list[Row], dict[str, Row]]:
    env = TrafficEnv()
    env.reset(seed=seed, task_id=task_id, config=config)
    batch = TrafficBatch(env.task, 1, env.config)
    rows = [_traffic_row(env, batch)]
    for action in actions:
        if env.done:  # a crash ends the episode before all actions are played
            break
        _, reward, done, info = env.step(action)
        batch.step(np.array([ACTION_NAMES.index(action["action"])]))
        entry = flat("metrics", env.episode_log[-1]["metrics"])
        told = flat("info", _pinned(info))
        rows.append({"reward": reward, "done": done, **told, **entry, **_traffic_row(env, batch)})
    log = env.episode_log
    grades = {str(n): _grade(grade_traffic(task_id, log[:n])) for n in _grade_steps(len(log))}
    return rows, grades


def _traffic_row(env: TrafficEnv, batch: TrafficBatch) -> Row:
    state = {name: value for name, value in env.state().items() if name != "session_id"}
    return {**flat("state", state), **flat("observation", batch.observation()[0].tolist()), "score": env.final_score()}


def _grade_steps(n_steps: int) -> list[int]:
    """Step numbers after which the log is graded; some are early, where no part of the grade has reached its bound."""
    return sorted({max(1, n_steps // part) for part in (32, 16, 8, 4, 2, 1)})


def _grade(grade: Mapping[str, Any]) -> Row:
    return flat("grade", {name: value for name, value in grade.items() if name != "feedback"})


def flat(name: str, value: Any) -> Row:
    """Nested dictionaries and lists as one row: ``{"info.metrics.tpot_ms": 21.4, ...}``."""
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        return {name: value}
    return {key: leaf for part, inner in parts for key, leaf in flat(f"{name}.{part}", inner).items()}


# ---------------------------------------------------------------- comparing


def differences(episode: Mapping[str, Any]) -> Iterator[str]:
    """Differences of a replay from the recording, as text: task, seed, step, field, expected and actual value."""
    who = f"{episode['family']} task {episode['task_id']!r}, seed {episode['seed']}"
    rows, grades = play(episode)
    expected_rows = [episode["reset"], *unpack(episode["columns"])]
    if len(rows) != len(expected_rows):
        yield f"{who}: {len(rows) - 1} steps were played, expected {len(expected_rows) - 1}"
    for step, (expected, got) in enumerate(zip(expected_rows, rows, strict=False)):
        yield from row_differences(f"{who}, step {step}", expected, got)
    for n in sorted({*grades, *episode["grades"]}, key=int):
        where = f"{who}, log of {n} steps"
        yield from row_differences(where, episode["grades"].get(n, {}), grades.get(n, {}))


def row_differences(where: str, expected: Row, got: Row) -> Iterator[str]:
    """Differences of two rows, as text that starts with ``where``."""
    for field in {**expected, **got}:
        if field not in got:
            yield f"{where}, {field}: expected {expected[field]!r}, got nothing"
        elif field not in expected:
            yield f"{where}, {field}: expected nothing, got {got[field]!r}"
        elif not _same(expected[field], got[field]):
            yield f"{where}, {field}: expected {expected[field]!r}, got {got[field]!r}"


def _same(expected: Any, got: Any) -> bool:
    if type(expected) is float and type(got) is float:
        return math.isclose(expected, got, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return type(expected) is type(got) and bool(expected == got)


# ---------------------------------------------------------------- the recorded file


def load(path: Path = EPISODES_FILE) -> list[Episode]:
    """The recorded episodes."""
    return list(json.loads(path.read_text(encoding="utf-8"))["episodes"])


def digest(path: Path = EPISODES_FILE) -> str:
    """Digest that identifies this version of the file: the first 16 digits of its SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def pack(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as columns; each column is the list of its values (null: the row has no such field).

    In a list, ``[n, value]`` stands for n times the same value; the text ``"= other"`` stands for a column equal to an
    earlier one.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, Any] = {}
    first_with: dict[str, str] = {}
    for name in names:
        values = [_rounded(row.get(name)) for row in rows]
        same = first_with.setdefault(json.dumps(values), name)
        runs = [(value, len(list(run))) for value, run in groupby(values, key=json.dumps)]
        listed = [
            item for value, n in runs for item in ([[n, json.loads(value)]] if n > 2 else [json.loads(value)] * n)
        ]
        columns[name] = listed if same == name else f"= {same}"
    return columns


def unpack(columns: Mapping[str, Any]) -> list[Row]:
    """Undo :func:`pack`."""
    values: dict[str, list[Any]] = {}
    for name, listed in columns.items():
        if isinstance(listed, str):
            values[name] = values[listed.removeprefix("= ")]
        else:
            values[name] = [v for item in listed for v in ([item[1]] * item[0] if isinstance(item, list) else [item])]
    n_rows = len(next(iter(values.values())))
    return [{name: column[i] for name, column in values.items() if column[i] is not None} for i in range(n_rows)]


def rounded_row(row: Row) -> Row:
    """A row as recorded, with floats rounded to a fixed number of significant digits."""
    return {name: _rounded(value) for name, value in row.items()}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value


def write(path: Path = EPISODES_FILE) -> str:
    """Draw the actions, play them, and write the file, one line per column; returns a summary of what changed.

    A value that is the same within the tolerances stays as it was recorded, so that a diff shows changes alone,
    whatever processor plays.
    """
    recorded = {_name(episode): episode for episode in load(path)} if path.exists() else {}
    texts = []
    changes: Counter[str] = Counter()
    for episode in planned():
        rows, grades = play(episode)
        before = recorded.pop(_name(episode), {})
        old_rows = [before["reset"], *unpack(before["columns"])] if before else []
        old_grades = before.get("grades", {})
        rows = [_kept(old, row) for old, row in zip_longest(old_rows[: len(rows)], rows, fillvalue=_NO_ROW)]
        grades = {n: _kept(old_grades.get(n, {}), grade) for n, grade in grades.items()}
        if before:
            changes += _column_changes([*old_rows, *old_grades.values()], [*rows, *grades.values()])
        changes["episodes added"] += not before
        texts.append(_text({**episode, "grades": grades, "reset": rows[0], "columns": pack(rows[1:])}))
    changes["episodes removed"] += len(recorded)
    path.write_text('{"episodes": [\n' + ",\n".join(texts) + "\n]}\n", encoding="utf-8")
    kinds = [f"{what} {how}" for what in ("columns", "episodes") for how in ("added", "removed")]
    return ", ".join(f"{changes[kind]} {kind}" for kind in ("columns changed", *kinds))


def _name(episode: Episode) -> str:
    return json.dumps([episode[key] for key in ("family", "task_id", "seed", "config")])


def _kept(recorded: Row, row: Row) -> Row:
    """The recorded values where the row's are the same, in recorded order; elsewhere the row's own, rounded."""
    new = rounded_row(row)
    in_order = [*(name for name in recorded if name in new), *(name for name in new if name not in recorded)]
    return {
        name: recorded[name] if name in recorded and _same(recorded[name], new[name]) else new[name]
        for name in in_order
    }


def _column_changes(before: Sequence[Row], after: Sequence[Row]) -> Counter[str]:
    """Number of columns of an episode that were added, removed, and changed in any step."""
    old, new = ({name for row in rows for name in row} for rows in (before, after))
    changed = {
        name
        for was, row in zip_longest(before, after, fillvalue=_NO_ROW)
        for name in {*was, *row}
        if was.get(name) != row.get(name)
    }
    return Counter(
        {
            "columns added": len(new - old),
            "columns removed": len(old - new),
            "columns changed": len(changed & old & new),
        }
    )


def _text(episode: Episode) -> str:
    lines = []
    for key, value in episode.items():
        text = json.dumps(value)
        if key == "columns":
            text = "{\n" + ",\n".join(f"{json.dumps(n)}: {_compact(c)}" for n, c in value.items()) + "}"
        lines.append(f"{json.dumps(key)}: {text}")
    return "{" + ",\n".join(lines) + "}"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


# ---------------------------------------------------------------- drawing actions


def planned() -> Iterator[Episode]:
    """Episodes of every registered task and of the extreme ones, with their actions."""
    with _extreme_tasks():
        serving_tasks = list_tasks(include_recorded=True)
    for serving in serving_tasks:
        for seed, config in zip(SEEDS, ({}, SERVING_CONFIG), strict=True):
            n_steps = serving.config(config).episode_length
            actions = _serving_actions(_generator(serving.task_id, seed), n_steps, serving.fleet.max_replicas)
            yield _episode("serving", serving.task_id, seed, config, actions)
    for traffic in list_traffic_tasks():
        n_steps = get_traffic_task(traffic.task_id).episode_length
        for seed, config in product(TRAFFIC_SEEDS, ({}, TRAFFIC_CONFIG)):
            actions = _traffic_actions(_generator(f"{traffic.task_id} {len(config)}", seed), n_steps)
            yield _episode("traffic", traffic.task_id, seed, config, actions)


def _generator(task_id: TaskId, seed: int) -> np.random.Generator:
    """Generator of actions, seeded by task and seed."""
    return np.random.default_rng([seed, *str(task_id).encode()])


def _episode(family: str, task_id: TaskId, seed: int, config: Mapping[str, Any], actions: list[Any]) -> Episode:
    return {"family": family, "task_id": task_id, "seed": seed, "config": dict(config), "actions": actions}


def _serving_actions(rng: np.random.Generator, n_steps: int, max_replicas: int | None) -> list[Any]:
    """Knobs from the whole action space, held for 2 to 14 seconds each.

    Half of the time precision and prefill placement stay the same; otherwise a fleet would restart all the time.
    """
    held: list[Any] = []
    disagg, tier = False, 0
    left = n_steps
    while left > 0:
        n = min(left, int(rng.integers(2, 15)))
        if rng.random() < 0.5:
            disagg, tier = bool(rng.random() < 0.35), int(rng.integers(3))
        knobs = {
            "kv_budget": 1.0 if rng.random() < 0.3 else round(float(rng.uniform(0.1, 1.0)), 3),
            "spec_length": int(rng.choice(SPEC_LENGTHS)),
            "batch_size": round(math.exp(rng.uniform(0.0, math.log(512.0)))),
            "prefill_disagg": disagg,
            "quant_tier": tier,
        }
        if max_replicas is not None:
            knobs["replicas"] = int(rng.integers(1, max_replicas + 1))
        held.append([n, knobs])
        left -= n
    return held


def _traffic_actions(rng: np.random.Generator, n_steps: int) -> list[Any]:
    """Actions held for 1 to 4 seconds each."""
    held: list[Any] = []
    left = n_steps
    while left > 0:
        n = min(left, int(rng.integers(1, 5)))
        held.append([n, {"action": str(rng.choice(ACTION_NAMES))}])
        left -= n
    return held


def main() -> int:
    """Compare with the recorded file, or write it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file anew")
    if parser.parse_args().write:
        print(write())
        name = digest()
        listed = CHANGES_FILE.exists() and name in CHANGES_FILE.read_text(encoding="utf-8")
        print(f"{EPISODES_FILE.name} is now {name}" + ("" if listed else f": give the reason in {CHANGES_FILE}"))
        return 0
    found = [line for episode in load() for line in differences(episode)]
    print("\n".join(found) or "all episodes give their golden numbers")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
