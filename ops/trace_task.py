"""Make a task from a request log: pack the log, size the fleet, calibrate, and write all files or none."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from agents.search.calibration import Solved, calibrate
from agents.search.solver import QUICK, Budget, Progress, silent
from inferencegym.errors import InvalidConfigError
from inferencegym.files import make_folder
from inferencegym.models import PRIORITY_CLASSES
from inferencegym.tasks import list_tasks, parse_task
from ops.capacity import DEFAULT_SLO_MS, fleet_for, on_replicas
from ops.log.reader import Imported
from simulator.load.recorded import save_trace
from simulator.load.requests import RequestLog

_ID: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True, eq=False)
class TraceTask:
    """A task made from a log: its files, its JSON entry, and the result of calibration (None if left out)."""

    task_file: Path
    trace_file: Path
    entry: Mapping[str, Any]
    solved: Solved | None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"task_file": str(self.task_file), "trace_file": str(self.trace_file), "entry": dict(self.entry)}


def write_trace_task(
    imported: Imported,
    task_id: str,
    out: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    origin: str = "",
    budget: Budget | None = QUICK,
    force: bool = False,
    progress: Progress = silent,
) -> TraceTask:
    """Write ``OUT/ID.npz`` (the packed log) and ``OUT/ID.json`` (a task file with its measured constants).

    ``settings`` are further keys of the task's entry (``n_replicas``, ``slo_target_ms``, ...); without ``n_replicas``
    the fleet is sized to the log. ``budget`` is the search effort of the calibration; None leaves it to
    ``inferencegym calibrate``. Both files appear only once everything is done. Raises :class:`InvalidConfigError`.
    """
    check_id(task_id)
    targets = [out / f"{task_id}.npz", out / f"{task_id}.json"]
    taken = [t for t in targets if t.exists()]
    if taken and not force:
        raise InvalidConfigError(
            f"{taken[0]} exists already; choose another --id or --out, or overwrite it with --force"
        )
    entry = _entry(imported.log, task_id, origin, settings or {})
    make_folder(out)
    staging = Path(tempfile.mkdtemp(dir=out, prefix=f".{task_id}-"))
    try:
        save_trace(staging / targets[0].name, imported.log, {"source": origin, **imported.describe()})
        task = parse_task(task_id, entry, base=staging)
        if "n_replicas" not in entry:
            task = on_replicas(task, fleet_for(task))
            entry["n_replicas"] = task.fleet.n_replicas
        solved = None if budget is None else calibrate(task, budget, progress)
        if solved is not None:
            entry["calibration"] = solved.entry()
        text = json.dumps({"tasks": {task_id: entry}}, indent=2) + "\n"
        (staging / targets[1].name).write_text(text, encoding="utf-8")
        # Write the task file last, so that its trace always exists.
        for target in targets:
            (staging / target.name).replace(target)
    finally:
        shutil.rmtree(staging)
    return TraceTask(targets[1], targets[0], entry, solved)


def check_id(task_id: str) -> None:
    """Raise :class:`InvalidConfigError` unless a new task may have this id."""
    if not _ID.fullmatch(task_id):
        raise InvalidConfigError(
            f"id {task_id!r} is not allowed: lower-case words joined by '-', as in 'my-trace'", "id"
        )
    if task_id in {str(t.task_id) for t in list_tasks(include_recorded=True)}:
        raise InvalidConfigError(f"id {task_id!r} is taken by another task; choose another", "id")


def _entry(log: RequestLog, task_id: str, origin: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Entry of the task file; it states rate and class shares, which follow from the log, for readers and planners."""
    shares = [float((log.class_index == i).mean()) for i in range(len(PRIORITY_CLASSES))]
    span_s = max(1.0, float(log.arrival_s[-1]))
    return {
        "name": " ".join(word.capitalize() for word in task_id.split("-")),
        "description": f"Requests recorded in {origin}, replayed second by second." if origin else "Recorded requests.",
        "trace": f"{task_id}.npz",
        "slo_target_ms": DEFAULT_SLO_MS,
        "arrival_rate_rps": min(2000.0, max(0.01, round(len(log.arrival_s) / span_s, 4))),
        "priority_mix": _rounded_shares(shares),
        **settings,
    }


def _rounded_shares(shares: list[float]) -> list[float]:
    rounded = [round(s, 6) for s in shares]
    rounded[int(np.argmax(shares))] += 1.0 - sum(rounded)
    return [round(s, 6) for s in rounded]
